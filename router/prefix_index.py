"""Which rank has how much of a prompt in its prefix cache, as the ranks tell; pure.

An estimate, never a promise: a rank may give up blocks before a request arrives, and hashes go by their first bytes
(`prefix_chain`). What is wrong here costs time, no tokens.

A rank's set is built from a snapshot and the numbered changes after it. While a number is missing the set stays as it
was, changes are passed over, and a new snapshot is asked for, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rank_scheduler.messages import PrefixEvents, PrefixSnapshot
from rank_scheduler.prefix_chain import ExtraKeys, chain, pack, unpack


class PromptPrefix:
    """A prompt's chain of block hashes, made once and only if somebody asks."""

    __slots__ = ("_chains", "_extra", "_token_ids", "num_tokens")

    def __init__(self, token_ids: bytes, cache_salt: str, *, is_read: bool = True) -> None:
        """`token_ids` as little-endian int32; not `is_read`: nothing counts as cached for it."""
        self.num_tokens = len(token_ids) // 4
        self._token_ids = token_ids if is_read else b""
        self._extra = ExtraKeys(cache_salt) if cache_salt else None
        self._chains: dict[int, tuple[int, ...]] = {}

    def hashes(self, block_size: int) -> tuple[int, ...]:
        """One per full block. Takes about 10 ns per token, or 50 where the C module was not built."""
        found = self._chains.get(block_size)
        if found is None:
            found = self._chains[block_size] = unpack(pack(chain(self._token_ids, block_size, self._extra)))
        return found


@dataclass(slots=True)
class _Rank:
    block_size: int
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

    @property
    def block_sizes(self) -> set[int]:
        """Of ranks that have something."""
        return {rank.block_size for rank in self._ranks.values() if rank.hashes}

    def add(self, name: str, block_size: int) -> None:
        """A rank that nothing is known of yet; what was known under this name is forgotten."""
        self.forget(name)
        used = {rank.bit for rank in self._ranks.values()}
        self._ranks[name] = _Rank(block_size, next(bit for bit in _bits() if bit not in used))

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

    def num_cached_tokens(self, prompt: PromptPrefix) -> dict[str, int]:
        """Of each rank that has at least the prompt's first block, how many tokens of it, in whole blocks.

        Time goes with the longest hit and the number of ranks.
        """
        cached: dict[str, int] = {}
        for block_size in self.block_sizes:
            ranks = {name: rank.bit for name, rank in self._ranks.items() if rank.block_size == block_size}
            ahead = sum(ranks.values())
            num_blocks = 0
            for num_blocks, block_hash in enumerate(prompt.hashes(block_size)):
                holders = ahead & self._holders.get(block_hash, 0)
                if holders == ahead:
                    continue
                if num_blocks:
                    self._end(cached, ranks, ahead & ~holders, num_blocks * block_size)
                ahead = holders
                if not ahead:
                    break
            else:
                self._end(cached, ranks, ahead, len(prompt.hashes(block_size)) * block_size)
        return {name: count for name, count in cached.items() if count}

    def check_integrity(self) -> None:
        """Raises AssertionError unless both views agree."""
        holders: dict[int, int] = {}
        for rank in self._ranks.values():
            for block_hash in rank.hashes:
                holders[block_hash] = holders.get(block_hash, 0) | rank.bit
        assert holders == self._holders, "the sets of hashes by rank and of ranks by hash differ"

    @staticmethod
    def _end(cached: dict[str, int], ranks: dict[str, int], ended: int, num_tokens: int) -> None:
        cached.update((name, num_tokens) for name, bit in ranks.items() if bit & ended)

    def _store(self, rank: _Rank, hashes: tuple[int, ...]) -> None:
        rank.hashes.update(hashes)
        holders = self._holders
        for block_hash in hashes:
            holders[block_hash] = holders.get(block_hash, 0) | rank.bit

    def _drop(self, rank: _Rank, hashes: set[int]) -> None:
        """Of the rank's own; the set may be the rank's itself."""
        holders = self._holders
        for block_hash in hashes:
            left = holders[block_hash] & ~rank.bit
            if left:
                holders[block_hash] = left
            else:
                del holders[block_hash]
        if hashes is rank.hashes:
            rank.hashes = set()
        else:
            rank.hashes -= hashes


def _bits() -> Iterator[int]:
    bit = 1
    while True:
        yield bit
        bit <<= 1
