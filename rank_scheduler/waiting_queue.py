"""Waiting sequences in the order in which they are to be admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from rank_scheduler.sequence import Sequence

_Key = tuple[int, bool, int]


class WaitingQueue:
    """By priority (where it counts), then preempted ones, then order of arrival.

    A preempted sequence so goes to the head of its class, and keeps its place among others that were preempted.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._entries: list[tuple[_Key, Sequence]] = []
        self.num_tokens = 0
        """Known tokens of all members."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In order. The queue must not change meanwhile."""
        return (sequence for _, sequence in self._entries)

    @property
    def first(self) -> Sequence:
        return self._entries[0][1]

    def push(self, sequence: Sequence) -> None:
        entry = (self._key(sequence), sequence)
        if not self._entries or self._entries[-1][0] < entry[0]:
            self._entries.append(entry)
        else:
            insort(self._entries, entry, key=_key_of)
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError if it is not here."""
        is_first = bool(self._entries) and self._entries[0][1] is sequence
        index = 0 if is_first else self.position(sequence)
        if index < 0:
            raise KeyError(sequence.key)
        del self._entries[index]
        self.num_tokens -= len(sequence.token_ids)

    def position(self, sequence: Sequence) -> int:
        """How many come before it; -1 if it is not here."""
        index = bisect_left(self._entries, self._key(sequence), key=_key_of)
        found = index < len(self._entries) and self._entries[index][1] is sequence
        return index if found else -1

    def _key(self, sequence: Sequence) -> _Key:
        return (sequence.priority if self._by_priority else 0, not sequence.is_preempted, sequence.order)


def _key_of(entry: tuple[_Key, Sequence]) -> _Key:
    return entry[0]
