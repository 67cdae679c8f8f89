"""Which blocks a sequence needs, gets and shares, over all layer groups.

Every group has a block table of the same number of columns, `block_size` positions per column; a column takes one
block per group, all from one pool. In a sliding-window group, columns that no position sees any more hold the null
block. The same arithmetic predicts a need and fulfils it, so what was found to fit does fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rank_scheduler.block_pool import NULL_BLOCK, make_block_pool
from rank_scheduler.interface import KvGroup
from rank_scheduler.kv_events import BlockStored, KvEvent
from rank_scheduler.plan import Int32Array


@dataclass(slots=True)
class PrefixHit:
    """Cached columns from a sequence's start on. A probe: nothing is held yet."""

    num_columns: int
    blocks: list[list[int]]
    """Per group, `num_columns` each."""

    def drop_last(self) -> list[int]:
        """Shorten by one column; returns its blocks, one per group."""
        self.num_columns -= 1
        return [blocks.pop() for blocks in self.blocks]


class KvCacheManager:
    """Owner of the block pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[KvGroup, ...],
        *,
        emit_events: bool = False,
        records_changes: bool = False,
    ) -> None:
        """`emit_events`: keep whole events, with tokens; `records_changes`: only what is findable, which costs less."""
        self.block_size = block_size
        self.groups = groups
        self.num_groups = len(groups)
        self.events: list[KvEvent] = []
        self._emit_events = emit_events
        # A window group gives up what a sequence has passed: what all of a prompt needs, a full one tells best.
        watched = next((index for index, group in enumerate(groups) if group.sliding_window is None), 0)
        self.pool = make_block_pool(
            num_blocks,
            self.num_groups,
            events=self.events if emit_events else None,
            records_changes=records_changes,
            watched_group=watched,
        )
        self._windows = [(index, group.sliding_window) for index, group in enumerate(groups) if group.sliding_window]

    @property
    def has_windows(self) -> bool:
        return bool(self._windows)

    def num_columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def probe(self, hashes: list[bytes]) -> PrefixHit:
        """The longest usable cached prefix. No side effects.

        A full-attention group needs every column; a window group only those that the next position sees. Groups
        shorten each other until all agree.
        """
        if self.num_groups == 1 and not self._windows:
            found = self.pool.lookup(hashes)
            return PrefixHit(len(found), [found])
        num_columns = len(hashes)
        for index, group in enumerate(self.groups):
            if group.sliding_window is None:
                num_columns = min(num_columns, len(self.pool.lookup(hashes[:num_columns], index)))
        agreed = False
        while not agreed:
            agreed = True
            for index, window in self._windows:
                shorter = self._window_hit(hashes, num_columns, index, window)
                agreed &= shorter == num_columns
                num_columns = shorter
        blocks = []
        for index, group in enumerate(self.groups):
            first = self._first_visible_column(num_columns * self.block_size, group.sliding_window)
            row = [NULL_BLOCK] * min(first, num_columns)
            for block_hash in hashes[len(row) : num_columns]:
                block = self.pool.find(block_hash, index)
                assert block is not None
                row.append(block)
            blocks.append(row)
        return PrefixHit(num_columns, blocks)

    def num_needed(self, hit: PrefixHit, num_columns: int) -> int:
        """How many blocks `take` would take out of the free list."""
        return self.num_groups * (num_columns - hit.num_columns) + sum(map(self.pool.num_unheld, hit.blocks))

    def take(self, hit: PrefixHit, num_columns: int) -> Int32Array:
        """Hold the hit and new blocks up to `num_columns`; shape [num_groups, num_columns].

        The caller has seen that `num_needed` blocks are free.
        """
        table = np.empty((self.num_groups, num_columns), np.int32)
        if self.num_groups == 1 and not self._windows:
            self.pool.take(hit.blocks[0], table[0])
            return table
        for row, blocks in zip(table, hit.blocks, strict=True):
            self.pool.touch(block for block in blocks if block != NULL_BLOCK)
            row[: hit.num_columns] = blocks
        num_new = num_columns - hit.num_columns
        if num_new:
            new = np.empty(num_new * self.num_groups, np.int32)
            self.pool.take((), new)
            table[:, hit.num_columns :] = new.reshape(self.num_groups, num_new)
        return table

    def take_columns(self, count: int) -> Int32Array:
        """New blocks for `count` columns, shape [count, num_groups]; so many must be free."""
        blocks = np.empty(count * self.num_groups, np.int32)
        self.pool.take((), blocks)
        return blocks.reshape(count, self.num_groups)

    def release(self, table: Int32Array) -> None:
        """Let go of a sequence's blocks, shape [num_groups, columns]."""
        for row in table:
            self.pool.release(row)

    def num_freed_by(self, table: Int32Array) -> int:
        """How many blocks `release` would free."""
        return sum(self.pool.num_sole_references(row) for row in table)

    def slide(self, table: Int32Array, num_settled: int) -> None:
        """Give up blocks that no position from `num_settled` on sees; `table` [num_groups, columns] gets null blocks.

        `num_settled` counts positions whose steps have been processed: a step in flight may still read before it.
        """
        for index, window in self._windows:
            row = table[index]
            first = min(self._first_visible_column(num_settled, window), len(row))
            # Columns slide out one by one: the first null block from the right ends what is new.
            gone = []
            for column in range(first - 1, -1, -1):
                if row[column] == NULL_BLOCK:
                    break
                gone.append(int(row[column]))
                row[column] = NULL_BLOCK
            self.pool.release(gone[::-1])

    def cache(
        self, table: Int32Array, hashes: list[bytes], first_column: int, num_full: int, token_ids: Int32Array
    ) -> list[int]:
        """Make the columns from `first_column` to `num_full` findable; returns the blocks that were not before.

        `hashes` and `token_ids` cover at least these columns. Columns are cached in order, so from the right
        the first one that is cached ends the search.
        """
        added: list[int] = []
        is_cached = self.pool.is_cached
        for group, row in enumerate(table[:, first_column:num_full].tolist()):
            first = len(row)
            while first and row[first - 1] != NULL_BLOCK and not is_cached(row[first - 1]):
                first -= 1
            fresh, column = row[first:], first_column + first
            cached = self.pool.cache_all(fresh, hashes[column:num_full], group)
            added += cached
            if self._emit_events and cached:
                self._stored(hashes, column + fresh.index(cached[0]), num_full, token_ids, group)
        return added

    def cache_next(self, blocks: Int32Array, hashes: list[bytes]) -> list[int]:
        """`cache` for columns that are not cached yet, of any sequences: with one group, where nobody wants events."""
        return self.pool.cache_all(blocks, hashes)

    @property
    def caches_in_bulk(self) -> bool:
        """Whether `cache_next` may be used."""
        return self.num_groups == 1 and not self._emit_events

    def take_events(self) -> list[KvEvent]:
        events = self.events[:]
        self.events.clear()
        return events

    def take_changes(self) -> tuple[bytes, bytes]:
        """`BlockPool.take_changes` of the first group without a window, or the first at all.

        With several groups a hit is never longer than what this one has, and may be shorter.
        """
        return self.pool.take_changes()

    def _stored(self, hashes: list[bytes], first: int, last: int, token_ids: Int32Array, group: int) -> None:
        tokens = token_ids[first * self.block_size : last * self.block_size].tolist()
        parent = hashes[first - 1] if first else None
        self.events.append(BlockStored(tuple(hashes[first:last]), parent, tuple(tokens), group))

    def _first_visible_column(self, position: int, window: int | None) -> int:
        """The first column that a query at `position`, or any later one, may read."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def _window_hit(self, hashes: list[bytes], num_columns: int, group: int, window: int) -> int:
        """The largest n <= num_columns for which all columns visible after n columns are cached in `group`."""
        while num_columns:
            first = self._first_visible_column(num_columns * self.block_size, window)
            missing = next(
                (
                    column
                    for column in range(num_columns - 1, min(first, num_columns) - 1, -1)
                    if self.pool.find(hashes[column], group) is None
                ),
                None,
            )
            if missing is None:
                return num_columns
            num_columns = missing
        return 0
