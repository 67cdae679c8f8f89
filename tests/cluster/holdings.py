"""Who held how much of a queue when, as the holders themselves wrote it down, and what follows: a judge of the ledger.

Each router appends to a file of its own when it asks, when it has an answer and when it gives back, each with the time
of the machine's one monotonic clock. What has been written outlives a kill.

**Overshoot**, never by mistake: a request holds its places for certain from when the router had the answer until just
before it gave them back, or until just before its router was killed. If these add up to more than the limit, it was
exceeded.

**A refusal in spite of room**, never by mistake either: a request may hold its places from when it asked until the
message that gives them back has arrived. It has for certain once its router was refused something that it asked for
later: messages do not overtake each other. Those of a killed router are the ledger's to give again only after a grace,
and so is what it kept idle, a quarter of the limit at most. If at every moment between asking and being refused all
these and the candidate would have been within the limit, there was room.
"""

from __future__ import annotations

import os
import struct
import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from pathlib import Path

_RECORD = struct.Struct("<dBIH")
GRACE_S = 15.0
"""By then a dead router's places are free, for certain."""


class Event(IntEnum):
    ASKED = 1
    ADMITTED = 2
    REFUSED = 3
    FAILED = 4
    """No answer in time; it may have been counted for a while."""
    RETURNING = 5


@dataclass(frozen=True, slots=True)
class Record:
    at: float
    event: Event
    key: int
    number: int


class Journal:
    """Written without a buffer, so that a kill loses nothing."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, event: Event, key: int, number: int) -> None:
        os.write(self._file, _RECORD.pack(time.monotonic(), event, key, number))

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> list[Record]:
    data = path.read_bytes()
    return [
        Record(at, Event(event), key, number)
        for at, event, key, number in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size])
    ]


@dataclass(slots=True)
class Verdict:
    num_attempts: int = 0
    num_admitted: int = 0
    num_refused: int = 0
    num_failed: int = 0
    most_held: int = 0
    overshoot: int = 0
    num_refused_in_spite_of_room: int = 0


@dataclass(slots=True)
class _Request:
    asked_at: float
    number: int
    answered_at: float = float("inf")
    answer: Event | None = None
    returning_at: float = float("inf")


def judge(journals: Iterable[tuple[list[Record], float | None]], limit: int) -> Verdict:
    """Of each router, what it wrote and when it was killed, if it was (the time just before)."""
    verdict = Verdict()
    held: list[tuple[float, int]] = []
    maybe: list[tuple[float, int]] = []
    refusals: list[tuple[float, float, int]] = []
    for records, killed_at in journals:
        end = float("inf") if killed_at is None else killed_at
        if killed_at is not None:
            maybe += [(0.0, limit // 4), (killed_at + GRACE_S, -(limit // 4))]
        requests = list(_requests(records))
        confirmed = _Confirmed(requests)
        for request in requests:
            verdict.num_attempts += 1
            until = request.returning_at
            if request.answer is Event.ADMITTED:
                verdict.num_admitted += 1
                held += [(request.answered_at, request.number), (min(until, end), -request.number)]
            elif request.answer is Event.REFUSED:
                verdict.num_refused += 1
                refusals.append((request.asked_at, request.answered_at, request.number))
                continue
            elif request.answer is Event.FAILED:
                verdict.num_failed += 1
                until = request.answered_at
            free_at = min(confirmed.after(until), end + GRACE_S)
            maybe += [(request.asked_at, request.number), (free_at, -request.number)]
    now = 0
    for _, change in sorted(held):  # what ends at a time ends before what begins then
        now += change
        verdict.most_held = max(verdict.most_held, now)
    verdict.overshoot = max(0, verdict.most_held - limit)
    verdict.num_refused_in_spite_of_room = _num_unjust(refusals, maybe, limit)
    return verdict


class _Confirmed:
    """When a router knew that what it had said had arrived."""

    def __init__(self, requests: list[_Request]) -> None:
        refused = sorted((r.asked_at, r.answered_at) for r in requests if r.answer is Event.REFUSED)
        self._asked_at = [asked_at for asked_at, _ in refused]
        self._answered_at = list(accumulate((answered_at for _, answered_at in reversed(refused)), min))[::-1]

    def after(self, at: float) -> float:
        """That what it said at that time had."""
        index = bisect_right(self._asked_at, at)
        return self._answered_at[index] if index < len(self._answered_at) else float("inf")


def _requests(records: list[Record]) -> Iterable[_Request]:
    requests: dict[int, _Request] = {}
    for record in records:
        match record.event:
            case Event.ASKED:
                requests[record.key] = _Request(record.at, record.number)
            case Event.RETURNING:
                requests[record.key].returning_at = record.at
            case answer:
                requests[record.key].answer = answer
                requests[record.key].answered_at = record.at
    return requests.values()


def _num_unjust(refusals: list[tuple[float, float, int]], maybe: list[tuple[float, int]], limit: int) -> int:
    """Refusals during which there was always room for certain."""
    # In time order; at equal times what begins comes first, which is the more cautious order.
    changes = [(at, -change, change, -1) for at, change in maybe]
    changes += [(asked_at, 1 << 30, 0, index) for index, (asked_at, _, _) in enumerate(refusals)]
    open_until: dict[int, float] = {}
    most: dict[int, int] = {}
    now = 0
    for at, _, change, index in sorted(changes):
        for other in [other for other, until in open_until.items() if until < at]:
            del open_until[other]
        now += change
        if index >= 0:
            open_until[index], most[index] = refusals[index][1], now
        elif change > 0:
            for other in open_until:
                most[other] = max(most[other], now)
    return sum(most[index] + number <= limit for index, (_, _, number) in enumerate(refusals))
