"""Which rank has how much of a prompt in its prefix cache, as the ranks tell; pure.

An estimate, never a promise: a rank may give up blocks before a request arrives, and hashes go by their first bytes
(`prefix_chain`). What is wrong here costs time, no tokens.

A rank's set is built from a snapshot and the numbered changes after it. While a number is missing the set stays as it
was, changes are passed over, and a new snapshot is asked for, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rank_scheduler.messages import PrefixEvents, PrefixSnapshot
from rank_scheduler.prefix_chain import ExtraKeys, chain, pack, unpack

_FEW_RANKS = 16
"""So many are taken bit by bit out of a number faster than all bits are unpacked."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """How much of one prompt each rank has."""

    depths: tuple[tuple[int, int], ...] = ()
    """(set of ranks, as bits of a number by row; how many of its tokens each of them has), no rank twice."""

    def num_tokens(self, row: int) -> int:
        """That the rank of this row has."""
        return next((num_tokens for ranks, num_tokens in self.depths if ranks >> row & 1), 0)

    @property
    def rows(self) -> list[tuple[NDArray[np.intp] | list[int], int]]:
        """The same, with the ranks' rows."""
        return [(_rows_of(ranks), num_tokens) for ranks, num_tokens in self.depths]


NOTHING_CACHED = CachedPrefix()


class PromptPrefix:
    """A prompt's chain of block hashes, made once and only if somebody asks, and where they were last found."""

    __slots__ = ("_chains", "_extra", "_token_ids", "found", "num_tokens")

    def __init__(self, token_ids: bytes, cache_salt: str, *, is_read: bool = True) -> None:
        """`token_ids` as little-endian int32; not `is_read`: nothing counts as cached for it."""
        self.num_tokens = len(token_ids) // 4
        self._token_ids = token_ids if is_read else b""
        self._extra = ExtraKeys(cache_salt) if cache_salt else None
        self._chains: dict[int, tuple[int, ...]] = {}
        self.found: tuple[PrefixIndex, int, CachedPrefix] | None = None
        """The index that looked for it, the version that it had then, and what it found."""

    def hashes(self, block_size: int) -> tuple[int, ...]:
        """One per full block. Takes about 10 ns per token, or 50 where the C module was not built."""
        found = self._chains.get(block_size)
        if found is None:
            found = self._chains[block_size] = unpack(pack(chain(self._token_ids, block_size, self._extra)))
        return found


@dataclass(slots=True)
class _Rank:
    block_size: int
    row: int
    bit: int
    """Stands for this rank in sets of ranks."""
    hashes: set[int] = field(default_factory=set)
    seq: int | None = None
    """Of the latest changes; None: a snapshot must come first."""


class PrefixIndex:
    """Mutable state: `_ranks`, and `_holders`, which says the same by hash: the set of ranks as bits of a number."""

    def __init__(self) -> None:
        self._ranks: dict[str, _Rank] = {}
        self._holders: dict[int, int] = {}
        self._by_block_size: dict[int, int] = {}
        """The ranks that have something."""
        self._version = 0
        """Grows with every change."""

    @property
    def block_sizes(self) -> set[int]:
        """Of ranks that have something."""
        return set(self._by_block_size)

    def add(self, name: str, block_size: int) -> int:
        """A rank that nothing is known of yet; what was known under this name is forgotten.

        Returns its row: the lowest that no other rank has.
        """
        self.forget(name)
        used = {rank.row for rank in self._ranks.values()}
        row = next(row for row in range(len(used) + 1) if row not in used)
        self._ranks[name] = _Rank(block_size, row, 1 << row)
        return row

    def forget(self, name: str) -> None:
        """The rank is gone; ignored if it is not known."""
        rank = self._ranks.pop(name, None)
        if rank is not None:
            self._drop(rank, rank.hashes)

    def take_events(self, name: str, events: PrefixEvents) -> bool:
        """False: some were missed, and a snapshot must be asked for. Raises ValueError for what are no hashes."""
        rank = self._ranks[name]
        stored, removed = unpack(events.stored), unpack(events.removed)
        if rank.seq is None:
            return True
        if events.seq != rank.seq + 1:
            rank.seq = None
            return False
        rank.seq = events.seq
        self._store(rank, stored)
        self._drop(rank, rank.hashes.intersection(removed))
        return True

    def take_snapshot(self, name: str, part: PrefixSnapshot) -> None:
        """Raises ValueError for what are no hashes."""
        rank = self._ranks[name]
        hashes = unpack(part.hashes)
        if part.is_first:
            self._drop(rank, rank.hashes)
        self._store(rank, hashes)
        rank.seq = part.seq if part.is_last else None

    def num_hashes(self, name: str) -> int:
        """How many blocks this rank has, as far as is known; 0 for an unknown one."""
        rank = self._ranks.get(name)
        return 0 if rank is None else len(rank.hashes)

    def find(self, prompt: PromptPrefix) -> CachedPrefix:
        """Which rank has how many of the prompt's tokens, in whole blocks from its first on.

        Time goes with the longest hit; asking again while nothing has changed costs none.
        """
        if prompt.found is None or prompt.found[:2] != (self, self._version):
            prompt.found = self, self._version, CachedPrefix(tuple(self._depths(prompt)))
        return prompt.found[2]

    def num_cached_tokens(self, prompt: PromptPrefix) -> dict[str, int]:
        """As `find`, by name."""
        cached = self.find(prompt)
        counts = {name: cached.num_tokens(rank.row) for name, rank in self._ranks.items()}
        return {name: count for name, count in counts.items() if count}

    def check_integrity(self) -> None:
        """Raises AssertionError unless both views agree."""
        holders: dict[int, int] = {}
        for rank in self._ranks.values():
            for block_hash in rank.hashes:
                holders[block_hash] = holders.get(block_hash, 0) | rank.bit
        assert holders == self._holders, "the sets of hashes by rank and of ranks by hash differ"
        by_block_size: dict[int, int] = {}
        for rank in self._ranks.values():
            if rank.hashes:
                by_block_size[rank.block_size] = by_block_size.get(rank.block_size, 0) | rank.bit
        assert by_block_size == self._by_block_size, "the ranks that have something are others"

    def _depths(self, prompt: PromptPrefix) -> Iterator[tuple[int, int]]:
        for block_size, ahead in self._by_block_size.items():
            hashes = prompt.hashes(block_size)
            holders_of = self._holders.get
            num_blocks = 0
            for num_blocks, block_hash in enumerate(hashes):
                holders = ahead & holders_of(block_hash, 0)
                if holders == ahead:
                    continue
                if num_blocks:
                    yield ahead & ~holders, num_blocks * block_size
                ahead = holders
                if not ahead:
                    break
            if ahead and hashes:
                yield ahead, len(hashes) * block_size

    def _store(self, rank: _Rank, hashes: tuple[int, ...]) -> None:
        rank.hashes.update(hashes)
        holders, bit = self._holders, rank.bit
        # Most hashes are one rank's alone, and share its number.
        shared = {block_hash: holders[block_hash] | bit for block_hash in holders.keys() & hashes}
        holders.update(dict.fromkeys(hashes, bit))
        holders.update(shared)
        self._changed(rank)

    def _drop(self, rank: _Rank, hashes: set[int]) -> None:
        """Of the rank's own; the set may be the rank's itself."""
        holders, bit = self._holders, rank.bit
        for block_hash in hashes:
            left = holders.pop(block_hash)
            if left is not bit and left != bit:
                holders[block_hash] = left ^ bit
        if hashes is rank.hashes:
            rank.hashes = set()
        else:
            rank.hashes -= hashes
        self._changed(rank)

    def _changed(self, rank: _Rank) -> None:
        self._version += 1
        ranks = self._by_block_size.get(rank.block_size, 0)
        ranks = ranks | rank.bit if rank.hashes else ranks & ~rank.bit
        if ranks:
            self._by_block_size[rank.block_size] = ranks
        else:
            self._by_block_size.pop(rank.block_size, None)


def _rows_of(ranks: int) -> NDArray[np.intp] | list[int]:
    """Of a set of ranks."""
    if ranks.bit_count() > _FEW_RANKS:
        as_bytes = np.frombuffer(ranks.to_bytes((ranks.bit_length() + 7) // 8, "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(as_bytes, bitorder="little"))
    rows = []
    while ranks:
        rows.append(ranks.bit_length() - 1)
        ranks &= ~(1 << rows[-1])
    return rows
