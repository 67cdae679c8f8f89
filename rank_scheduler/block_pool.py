"""KV blocks of one rank: reference counts, the free list in eviction order, and the prefix cache's map.

Block 0 is the null block: a placeholder in block tables, never allocated, freed or cached. A block with no
holder lies in the free list; if it carries a hash it still answers prefix lookups until it is handed out again.
Blocks without a hash are handed out first, then hashed ones, least recently freed first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Owner of every block's reference count and hash. All operations are O(blocks touched)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}: a pool needs the null block and at least one more")
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        # First to last is the order in which blocks are handed out.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

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
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self.forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block of a prefix hit, taking unheld ones out of the free list."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each. Given in sequence order: the tail of a sequence is evicted before its head."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def cache(self, block: int, block_hash: bytes) -> bool:
        """Let prefix lookups find `block` under `block_hash`. False if another block already answers for it."""
        if block_hash in self._block_of_hash:
            return False
        self._block_of_hash[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def is_cached(self, block: int) -> bool:
        return self._hashes[block] is not None

    def forget(self, block: int) -> None:
        """Remove the block from the prefix cache, if it is there."""
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_of_hash[block_hash]
            self._hashes[block] = None

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached run from the first hash on. No side effects."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` lie in the free list (and would leave it when touched)."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def num_sole_references(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would become free if one holder let go of them."""
        return sum(self._ref_counts[block] == 1 for block in blocks)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that the references are exactly those in `held` (one entry per reference)."""
        expected = [0] * len(self._ref_counts)
        for block in held:
            expected[block] += 1
        assert expected[NULL_BLOCK] == 0, "somebody holds the null block"
        assert expected == self._ref_counts, (
            "reference counts differ from holders at blocks "
            f"{[block for block, (a, b) in enumerate(zip(expected, self._ref_counts, strict=True)) if a != b]}"
        )
        unheld = {block for block, count in enumerate(self._ref_counts) if count == 0 and block != NULL_BLOCK}
        assert unheld == set(self._free), "free list differs from blocks without holder"
        carried = {block_hash: block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert carried == self._block_of_hash, "prefix map differs from the blocks' hashes"
