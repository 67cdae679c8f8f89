"""KV blocks of one rank: reference counts, the free list in eviction order, and the prefix cache's map.

Block 0 is the null block: a placeholder in block tables, never allocated, freed or cached. A block with no
holder lies in the free list; if it carries a hash it still answers prefix lookups until it is handed out again.
Blocks without a hash are handed out first, then hashed ones, least recently freed first. Layer groups share the
pool; a block belongs to a group only while it carries a hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from rank_scheduler.kv_events import AllBlocksCleared, BlockRemoved, KvEvent

NULL_BLOCK = 0

_LOOKUP_STEP = 64


class BlockPool:
    """Owner of every block's reference count and hash. All operations are O(blocks touched)."""

    def __init__(self, num_blocks: int, num_groups: int = 1, *, events: list[KvEvent] | None = None) -> None:
        """`events` takes in what is removed from the cache; None: nobody wants to know."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}: a pool needs the null block and at least one more")
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._groups = [0] * num_blocks
        self._block_of_hash: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        # First to last is the order in which blocks are handed out.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._events = events
        self.version = 0
        """Changes whenever a lookup may give another answer."""

    @property
    def num_usable_blocks(self) -> int:
        """All but the null block."""
        return len(self._ref_counts) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference, evicting cached content as needed.

        Raises ValueError if there are not so many free blocks; callers ask `num_free_blocks` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        pop, hashes, ref_counts = self._free.popitem, self._hashes, self._ref_counts
        blocks = [pop(False)[0] for _ in range(count)]
        if len(self._block_of_hash) > 1 or self._events is not None:
            for block in blocks:
                self.forget(block)
                ref_counts[block] = 1
            return blocks
        (known,) = self._block_of_hash
        for block in blocks:
            ref_counts[block] = 1
            if (block_hash := hashes[block]) is not None:
                del known[block_hash]
                hashes[block] = None
        self.version += 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block of a prefix hit, taking unheld ones out of the free list."""
        ref_counts, free = self._ref_counts, self._free
        for block in blocks:
            if ref_counts[block] == 0:
                del free[block]
            ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each; null blocks are passed over.

        Given in sequence order: the tail of a sequence is evicted before its head.
        """
        ref_counts, free, hashes = self._ref_counts, self._free, self._hashes
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            count = ref_counts[block] = ref_counts[block] - 1
            if not count:
                free[block] = None
                if hashes[block] is None:
                    free.move_to_end(block, last=False)

    def cache(self, block: int, block_hash: bytes, group: int = 0) -> bool:
        """Let prefix lookups find `block` under `block_hash`. False if another block already answers for it."""
        known = self._block_of_hash[group]
        if block_hash in known:
            return False
        known[block_hash] = block
        self._hashes[block] = block_hash
        if group:
            self._groups[block] = group
        self.version += 1
        return True

    def cache_all(self, blocks: Sequence[int], hashes: Sequence[bytes], group: int = 0) -> Sequence[int]:
        """`cache` for each pair; returns the blocks that answer now. No block may be cached already."""
        known = self._block_of_hash[group]
        num_known = len(known)
        if not known.keys().isdisjoint(hashes):
            return [block for block, one in zip(blocks, hashes, strict=True) if self.cache(block, one, group)]
        known.update(zip(hashes, blocks, strict=True))
        if len(known) != num_known + len(hashes):
            # Sequences with the same content: one of their blocks answers.
            pairs = [(block, one) for block, one in zip(blocks, hashes, strict=True) if known[one] == block]
            blocks, hashes = [block for block, _ in pairs], [one for _, one in pairs]
        own_hashes = self._hashes
        for block, block_hash in zip(blocks, hashes, strict=True):
            own_hashes[block] = block_hash
        if group:
            for block in blocks:
                self._groups[block] = group
        self.version += 1
        return blocks

    def is_cached(self, block: int) -> bool:
        return self._hashes[block] is not None

    def forget(self, block: int) -> None:
        """Remove the block from the prefix cache, if it is there."""
        block_hash = self._hashes[block]
        if block_hash is not None:
            group = self._groups[block]
            del self._block_of_hash[group][block_hash]
            self._hashes[block] = None
            self._groups[block] = 0
            self.version += 1
            if self._events is not None:
                self._events.append(BlockRemoved(block_hash, group))

    def clear(self) -> bool:
        """Forget all content; False, with nothing changed, while anybody holds a block."""
        if len(self._free) != self.num_usable_blocks:
            return False
        self._hashes = [None] * len(self._hashes)
        self._groups = [0] * len(self._groups)
        for known in self._block_of_hash:
            known.clear()
        self.version += 1
        if self._events is not None:
            self._events.append(AllBlocksCleared())
        return True

    def find(self, block_hash: bytes, group: int = 0) -> int | None:
        """The block that answers for this hash. No side effects."""
        return self._block_of_hash[group].get(block_hash)

    def lookup(self, hashes: Sequence[bytes], group: int = 0) -> list[int]:
        """Blocks of the longest cached run from the first hash on. No side effects."""
        find = self._block_of_hash[group].get
        blocks: list[int] = []
        for start in range(0, len(hashes), _LOOKUP_STEP):
            found = list(map(find, hashes[start : start + _LOOKUP_STEP]))
            if None in found:
                blocks += found[: found.index(None)]  # type: ignore[arg-type]
                break
            blocks += found  # type: ignore[arg-type]
        return blocks

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` lie in the free list (and would leave it when touched)."""
        counts = [self._ref_counts[block] for block in blocks if block]
        return counts.count(0)

    def num_references(self, block: int) -> int:
        return self._ref_counts[block]

    def num_sole_references(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would become free if one holder let go of them."""
        counts = [self._ref_counts[block] for block in blocks]
        return counts.count(1)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that the references are exactly those in `held` (one entry per reference, null blocks aside)."""
        expected = [0] * len(self._ref_counts)
        for block in held:
            expected[block] += 1
        expected[NULL_BLOCK] = 0
        assert expected == self._ref_counts, (
            "reference counts differ from holders at blocks "
            f"{[block for block, (a, b) in enumerate(zip(expected, self._ref_counts, strict=True)) if a != b]}"
        )
        unheld = {block for block, count in enumerate(self._ref_counts) if count == 0 and block != NULL_BLOCK}
        assert unheld == set(self._free), "free list differs from blocks without holder"
        for group, known in enumerate(self._block_of_hash):
            carried = {
                block_hash: block
                for block, block_hash in enumerate(self._hashes)
                if block_hash is not None and self._groups[block] == group
            }
            assert carried == known, "prefix map differs from the blocks' hashes"
