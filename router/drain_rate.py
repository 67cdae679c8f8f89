"""How fast a queue drains: what has left it over the last seconds, and how long so much more will take; pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW_S = 10.0
_BUCKET_S = 0.5
_MIN_MEASURED_S = 1.0
_SPARE = 0.1
"""This part of the drain is promised to nobody: with all of it promised, each delay would add to the next."""
_CAUTION = 1.0
"""So many times the root of k departures are added to k of them: they vary by that."""


@dataclass(slots=True)
class _Bucket:
    index: int
    amount: int = 0
    num_departures: int = 0


class DrainRate:
    """Of one limit. Amounts are what the limit counts: requests, or tokens."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buckets: deque[_Bucket] = deque()
        self._amount = 0
        self._num_departures = 0
        self._since: float | None = None
        """Begin of the measurement: when there was first something to drain."""
        self._last_drained: float | None = None

    def start(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def add(self, amount: int, num_departures: int, now: float) -> None:
        """`num_departures` requests have left by now, and with them `amount`."""
        self.start(now)
        self._last_drained = now
        index = int(now / _BUCKET_S)
        if not self._buckets or self._buckets[-1].index != index:
            self._buckets.append(_Bucket(index))
        bucket = self._buckets[-1]
        bucket.amount += amount
        bucket.num_departures += num_departures
        self._amount += amount
        self._num_departures += num_departures
        self._expire(now)

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` will have left, at the measured rate, with some caution: it varies."""
        self._expire(now)
        since = now if self._since is None else self._since
        if not self._amount:
            # Nothing left within the window: expect to wait as long again as it has lasted, and for the whole queue to
            # take as long.
            idle_s = now - (since if self._last_drained is None else self._last_drained)
            return max(_MIN_MEASURED_S, idle_s) * (1 + max(0, amount - 1) / max(1, self._limit))
        each = self._amount / max(1, self._num_departures)
        return self.spacing_s(amount + _CAUTION * math.sqrt(max(0, amount) * each), now)

    def spacing_s(self, amount: float, now: float) -> float:
        """Seconds between promises of so much each."""
        if not self._amount:
            return 0.0
        since = self._buckets[0].index * _BUCKET_S
        if self._since is not None:
            since = max(since, self._since)
        amount_per_s = self._amount / max(now - since, _MIN_MEASURED_S)
        return amount * (1 + _SPARE) / amount_per_s

    def _expire(self, now: float) -> None:
        oldest = int((now - WINDOW_S) / _BUCKET_S)
        while self._buckets and self._buckets[0].index < oldest:
            bucket = self._buckets.popleft()
            self._amount -= bucket.amount
            self._num_departures -= bucket.num_departures
