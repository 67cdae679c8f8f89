"""Encoder outputs that the runner keeps, and how far a chunk may reach with them.

Mutable state: `EncoderCache`'s dictionaries, changed by the scheduler's one thread. The runner holds exactly the
entries here, once it has executed all plans made so far; plans are executed in order, so an output that is evicted
while a plan that reads it is in flight is forgotten only after that plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rank_scheduler.messages import EncoderInput


@dataclass(slots=True)
class _Entry:
    length: int
    holders: set[Hashable] = field(default_factory=set)


class EncoderCache:
    """Ledger of encoder outputs by identifier, measured in embeddings; `key` names a request that holds some.

    What no request holds stays, least recently released first out, until its space is needed.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"the encoder cache's capacity is {capacity} embeddings: set it to 0 or more")
        self.capacity = capacity
        self._entries: dict[bytes, _Entry] = {}
        self._held_by: dict[Hashable, set[bytes]] = {}
        self._unheld: dict[bytes, None] = {}
        """In order of release."""
        self._freed: dict[bytes, None] = {}
        """Evicted, and the runner was not told yet."""
        self._size = 0
        self._held_size = 0

    @property
    def size(self) -> int:
        """Embeddings of all entries, held or not."""
        return self._size

    @property
    def held_size(self) -> int:
        return self._held_size

    def has(self, identifier: bytes) -> bool:
        """Whether it is computed, or will be by a plan that was made before."""
        return identifier in self._entries

    def can_hold(self, length: int, planned: int = 0) -> bool:
        """Whether `length` embeddings fit beside what is held and `planned` more that shall be."""
        return self._held_size + planned + length <= self.capacity

    def growth(self, item: EncoderInput) -> int:
        """By how much `held_size` grows when the item is acquired."""
        entry = self._entries.get(item.identifier)
        if entry is None:
            return item.length
        return 0 if entry.holders else entry.length

    def acquire(self, key: Hashable, item: EncoderInput) -> bool:
        """Let `key` hold the item, again or for the first time; True: it is new and the caller must have it computed.

        Evicts unheld entries if that needs space. Raises RuntimeError if even that does not suffice: ask `can_hold`
        (or `fit_chunk`) before.
        """
        entry = self._entries.get(item.identifier)
        is_new = entry is None
        if entry is None:
            entry = self._insert(item)
        elif not entry.holders:
            del self._unheld[item.identifier]
            self._held_size += entry.length
        entry.holders.add(key)
        self._held_by.setdefault(key, set()).add(item.identifier)
        return is_new

    def release(self, key: Hashable, identifier: bytes) -> None:
        """`key` needs it no more; nothing happens if it does not hold it."""
        held = self._held_by.get(key)
        if held is None or identifier not in held:
            return
        held.remove(identifier)
        if not held:
            del self._held_by[key]
        entry = self._entries[identifier]
        entry.holders.remove(key)
        if not entry.holders:
            self._unheld[identifier] = None
            self._held_size -= entry.length

    def release_executed(
        self, key: Hashable, items: Sequence[EncoderInput], num_executed: int, *, is_encoder_decoder: bool = False
    ) -> None:
        """Release what lies wholly within the first `num_executed` positions (executed, not only planned).

        `items`: all of the request's. An encoder-decoder model reads its one item with its first token only.
        """
        held = self._held_by.get(key)
        if not held or not num_executed:
            return
        needed = {item.identifier for item in items if not is_encoder_decoder and _end(item) > num_executed}
        for identifier in [item.identifier for item in items if item.identifier in held]:
            if identifier not in needed:
                self.release(key, identifier)

    def release_all(self, key: Hashable) -> None:
        """`key` is finished or preempted."""
        for identifier in sorted(self._held_by.get(key, ())):
            self.release(key, identifier)

    def discard(self, identifier: bytes) -> frozenset[Hashable]:
        """Drop an entry that is not computed after all: its plan was undone, or failed. Returns who held it.

        A holder that still runs must acquire it again, or end. The identifier counts as freed, though the runner may
        never have heard of it; so does one without an entry: the plan that should have told the runner has failed.
        """
        entry = self._entries.get(identifier)
        if entry is None:
            self._freed[identifier] = None
            return frozenset()
        holders = frozenset(entry.holders)
        for key in holders:
            self.release(key, identifier)
        self._evict(identifier)
        return holders

    def take_freed(self) -> list[bytes]:
        """Identifiers that the next plan must have forgotten: evicted since the last call and not cached again."""
        freed = list(self._freed)
        self._freed.clear()
        return freed

    def check_integrity(self) -> None:
        """Raise AssertionError if the ledger does not add up."""
        entries = self._entries
        assert self._size == sum(entry.length for entry in entries.values()) <= self.capacity
        assert self._held_size == sum(entry.length for entry in entries.values() if entry.holders)
        assert self._unheld.keys() == {identifier for identifier, entry in entries.items() if not entry.holders}
        assert all(self._held_by.values())
        by_key = {(key, identifier) for key, held in self._held_by.items() for identifier in held}
        assert by_key == {(key, identifier) for identifier, entry in entries.items() for key in entry.holders}
        assert not self._freed.keys() & entries.keys()

    def _insert(self, item: EncoderInput) -> _Entry:
        if not self.can_hold(item.length):
            raise RuntimeError(
                f"an encoder item of {item.length} embeddings does not fit: {self._held_size} of {self.capacity} "
                f"embeddings are held"
            )
        while self._size + item.length > self.capacity:
            self._evict(next(iter(self._unheld)))
        entry = self._entries[item.identifier] = _Entry(item.length)
        self._freed.pop(item.identifier, None)
        self._size += item.length
        self._held_size += item.length
        return entry

    def _evict(self, identifier: bytes) -> None:
        del self._unheld[identifier]
        self._size -= self._entries.pop(identifier).length
        self._freed[identifier] = None


class EncoderLimit(StrEnum):
    """What made a chunk shorter."""

    BUDGET = "budget"
    """The step's encoder budget is used up."""
    CACHE = "cache"
    """Other requests hold too much of the encoder cache."""
    WHOLE_ITEM = "whole_item"
    """An item does not end within the chunk, and items must not be cut."""


@dataclass(frozen=True, slots=True)
class ChunkFit:
    """How much of a chunk can be computed."""

    num_new: int
    """Positions, 0 to what was asked for."""
    budget_left: int
    items: tuple[EncoderInput, ...] = ()
    """What the request must acquire, in this order, before anybody else does: cached items stand first."""
    limit: EncoderLimit | None = None


def fit_chunk(
    items: Sequence[EncoderInput],
    num_computed: int,
    num_new: int,
    *,
    cache: EncoderCache,
    budget: int,
    disable_chunked_mm_input: bool = False,
    is_encoder_decoder: bool = False,
) -> ChunkFit:
    """Shorten the chunk [num_computed, num_computed + num_new) to what the encoder items allow. Changes nothing.

    `items`: in order of offset, not overlapping; `num_new` >= 1; `budget`: embeddings that may still be computed in
    this step.

    What is cached costs no budget, and what another request acquired in this step is cached. An item that cannot be
    there in time ends the chunk just before it: at no position, if the chunk starts within it. One longer than the
    whole budget or cache, or with `disable_chunked_mm_input` longer than the longest chunk, never can: refuse such a
    request when it is added. An encoder-decoder model's item stands before all positions: the first chunk needs it.
    """
    end = num_computed + num_new
    cached: dict[bytes, EncoderInput] = {}
    to_run: dict[bytes, EncoderInput] = {}
    to_hold = 0
    for item in items:
        if item.offset >= end:
            break
        if num_computed > 0 if is_encoder_decoder else _end(item) <= num_computed:
            continue
        is_cut = not is_encoder_decoder and _end(item) > end
        is_needed = item.identifier in cached or item.identifier in to_run
        is_cached = cache.has(item.identifier)
        growth = 0 if is_needed else cache.growth(item)
        if is_cut and disable_chunked_mm_input:
            limit = EncoderLimit.WHOLE_ITEM
        elif growth and not cache.can_hold(growth, to_hold):
            limit = EncoderLimit.CACHE
        elif not is_needed and not is_cached and item.length > budget:
            limit = EncoderLimit.BUDGET
        else:
            if not is_needed:
                (cached if is_cached else to_run)[item.identifier] = item
                to_hold += growth
                budget -= 0 if is_cached else item.length
            continue
        end = max(num_computed, item.offset)
        return ChunkFit(end - num_computed, budget, (*cached.values(), *to_run.values()), limit)
    return ChunkFit(num_new, budget, (*cached.values(), *to_run.values()))


def _end(item: EncoderInput) -> int:
    return item.offset + item.length
