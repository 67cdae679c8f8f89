"""KV blocks of one rank: reference counts, the free list in eviction order, and the prefix cache's map.

Block 0 is the null block: a placeholder in block tables, never allocated, freed or cached. A block with no
holder lies in the free list; if it carries a hash it still answers prefix lookups until it is handed out again.
Blocks without a hash are handed out first, then hashed ones, least recently freed first. Layer groups share the
pool; a block belongs to a group only while it carries a hash.

`make_block_pool` makes one in C (`_block_pool.c`) where that was built, else one of the class here: both have the
same methods, decide alike and raise alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import index

import numpy as np

from kv_transfer.extension import ExtensionMissingError, load
from rank_scheduler.kv_events import AllBlocksCleared, BlockRemoved, KvEvent
from rank_scheduler.plan import Int32Array
from rank_scheduler.prefix_chain import HASH_BYTES

NULL_BLOCK = 0


class BlockPool:
    """Owner of every block's reference count and hash. All operations are O(blocks touched).

    Blocks are given as numbers, or as a row of them (int32). All methods raise ValueError for numbers that no block
    has, before anything is changed.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        *,
        events: list[KvEvent] | None = None,
        records_changes: bool = False,
        watched_group: int = 0,
    ) -> None:
        """`events` takes in what is removed from the cache; None: nobody wants to know.

        `records_changes`: of `watched_group`, for `take_changes`, which somebody must call now and then.
        """
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}: a pool needs the null block and at least one more")
        if num_groups < 1:
            raise ValueError(f"num_groups is {num_groups}: there must be one at least")
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._groups = [0] * num_blocks
        self._block_of_hash: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        # First to last is the order in which blocks are handed out.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._events = events
        self._changes: dict[bytes, bool] | None = {} if records_changes else None
        self._watched_group = watched_group
        self._known_in(watched_group)
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
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        self.version += 1
        blocks = []
        for _ in range(count):
            block = next(iter(self._free))
            self.forget(block)
            del self._free[block]
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def take(self, held: Sequence[int] | Int32Array, row: Int32Array) -> None:
        """Touch `held`, allocate as many more as `row` has room for, and write them all there.

        Raises ValueError, with nothing changed, if not so many are free.
        """
        held = self._numbers(held)
        num_new, num_left = len(row) - len(held), len(self._free) - self.num_unheld(held)
        if NULL_BLOCK not in held and not 0 <= num_new <= num_left:
            raise ValueError(f"{num_new} blocks asked for, {num_left} are free")
        self.touch(held)
        row[: len(held)] = held
        row[len(held) :] = self.allocate(num_new)

    def touch(self, blocks: Iterable[int] | Int32Array) -> None:
        """Add a reference to each block of a prefix hit, taking unheld ones out of the free list."""
        blocks = self._numbers(blocks)
        if NULL_BLOCK in blocks:
            raise ValueError("the null block cannot be held")
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int] | Int32Array) -> None:
        """Drop one reference of each; null blocks are passed over.

        Given in sequence order: the tail of a sequence is evicted before its head. Raises ValueError at a block that
        nobody holds; those behind it have been released by then.
        """
        ref_counts, free = self._ref_counts, self._free
        for block in reversed(self._numbers(blocks)):
            if block == NULL_BLOCK:
                continue
            if not ref_counts[block]:
                raise ValueError(f"block {block} is released, and nobody holds it")
            ref_counts[block] -= 1
            if not ref_counts[block]:
                free[block] = None
                if self._hashes[block] is None:
                    free.move_to_end(block, last=False)

    def cache(self, block: int, block_hash: bytes, group: int = 0) -> bool:
        """Let prefix lookups find `block` under `block_hash`. False if another block already answers for it.

        Raises ValueError for the null block, and for one that is cached already.
        """
        self._check(block)
        known = self._known_in(group)
        if block == NULL_BLOCK or self._hashes[block] is not None:
            raise ValueError(f"block {block} is the null block, or cached already")
        if known.setdefault(block_hash, block) != block:
            return False
        self._hashes[block] = block_hash
        self._groups[block] = group
        self.version += 1
        self._note(block_hash, group, True)
        return True

    def cache_all(self, blocks: Sequence[int] | Int32Array, hashes: Sequence[bytes], group: int = 0, /) -> list[int]:
        """`cache` for each pair; returns the blocks that answer now."""
        blocks = self._numbers(blocks)
        if len(blocks) != len(hashes):
            raise ValueError(f"{len(blocks)} blocks for {len(hashes)} hashes")
        return [block for block, one in zip(blocks, hashes, strict=True) if self.cache(block, one, group)]

    def is_cached(self, block: int) -> bool:
        self._check(block)
        return self._hashes[block] is not None

    def forget(self, block: int) -> None:
        """Remove the block from the prefix cache, if it is there."""
        self._check(block)
        block_hash = self._hashes[block]
        if block_hash is not None:
            group = self._groups[block]
            del self._block_of_hash[group][block_hash]
            self._hashes[block] = None
            self._groups[block] = 0
            self.version += 1
            self._note(block_hash, group, False)
            if self._events is not None:
                self._events.append(BlockRemoved(block_hash, group))

    def clear(self) -> bool:
        """Forget all content; False, with nothing changed, while anybody holds a block."""
        if len(self._free) != self.num_usable_blocks:
            return False
        for block_hash in self.findable():
            self._note(block_hash, self._watched_group, False)
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
        return self._known_in(group).get(block_hash)

    def lookup(self, hashes: Sequence[bytes], group: int = 0, /) -> list[int]:
        """Blocks of the longest cached run from the first hash on. No side effects."""
        known = self._known_in(group)
        blocks = []
        for block_hash in hashes:
            block = known.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take_changes(self) -> tuple[bytes, bytes]:
        """Which hashes have become findable since the last call, and which have ceased to be, in no order.

        The latest word on each, both as `prefix_chain.pack` writes them. Empty unless changes are recorded.
        """
        changes = self._changes or {}
        stored = b"".join(key for key, is_findable in changes.items() if is_findable)
        removed = b"".join(key for key, is_findable in changes.items() if not is_findable)
        changes.clear()
        return stored, removed

    def findable(self) -> list[bytes]:
        """All hashes of the watched group that a lookup finds, in no order. O(blocks)."""
        return list(self._block_of_hash[self._watched_group])

    def num_unheld(self, blocks: Iterable[int] | Int32Array) -> int:
        """How many of `blocks` lie in the free list (and would leave it when touched)."""
        return [self._ref_counts[block] for block in self._numbers(blocks) if block != NULL_BLOCK].count(0)

    def num_references(self, block: int) -> int:
        self._check(block)
        return self._ref_counts[block]

    def num_sole_references(self, blocks: Iterable[int] | Int32Array) -> int:
        """How many of `blocks` would become free if one holder let go of them."""
        return [self._ref_counts[block] for block in self._numbers(blocks) if block != NULL_BLOCK].count(1)

    def free_blocks(self) -> list[int]:
        """In the order in which they are handed out. O(free blocks): for tests."""
        return list(self._free)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that the references are exactly those in `held` (one entry per reference, null blocks aside)."""
        expected = [0] * len(self._ref_counts)
        for block in self._numbers(held):
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

    def _note(self, block_hash: bytes, group: int, is_findable: bool) -> None:
        if self._changes is not None and group == self._watched_group:
            self._changes[block_hash[:HASH_BYTES].ljust(HASH_BYTES, b"\0")] = is_findable

    def _check(self, block: int) -> None:
        if not 0 <= block < len(self._ref_counts):
            raise ValueError(f"there is no block {block}: they count from 0 to {len(self._ref_counts) - 1}")

    def _numbers(self, blocks: Iterable[int] | Int32Array) -> list[int]:
        numbers: list[int] = blocks.tolist() if isinstance(blocks, np.ndarray) else list(map(index, blocks))
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(self._ref_counts):
            for number in numbers:
                self._check(number)
        return numbers

    def _known_in(self, group: int) -> dict[bytes, int]:
        if not 0 <= group < len(self._block_of_hash):
            raise ValueError(f"there is no group {group}: they count from 0 to {len(self._block_of_hash) - 1}")
        return self._block_of_hash[group]


make_block_pool: type[BlockPool] = BlockPool
with suppress(ExtensionMissingError):
    make_block_pool = load("rank_scheduler._block_pool").BlockPool
