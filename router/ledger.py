"""The cluster's queue counts, kept by one writer: who holds how many requests and waiting prompt tokens; pure.

The control actor owns the only `Ledger`, feeds it what routers say (`router.control_messages`) and calls `tick`
about once a second. Mutable state: per router its holdings by key, the two totals, and the drain window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from router.control_messages import Granted, Holding, QueueCounts, Refused

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
DRAIN_WINDOW_S = 10.0


class _DrainRate:
    """How much left the queue per second, over the last DRAIN_WINDOW_S, in buckets of a tenth of that."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int]] = deque()
        self._total = 0
        self._since: float | None = None
        """Begin of the measurement: when there was first something to drain."""
        self._last_drained: float | None = None

    def start(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def add(self, amount: int, now: float) -> None:
        self.start(now)
        self._last_drained = now
        bucket = int(now / DRAIN_WINDOW_S * 10)
        self._total += amount
        if self._buckets and self._buckets[-1][0] == bucket:
            amount += self._buckets.pop()[1]
        self._buckets.append((bucket, amount))
        self._expire(now)

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` will have left, at the measured rate."""
        self._expire(now)
        since = now if self._since is None else self._since
        if self._total:
            return amount * min(DRAIN_WINDOW_S, max(now - since, 1.0)) / self._total
        # Nothing left within the window: expect to wait as long again as it has lasted.
        return now - (since if self._last_drained is None else self._last_drained)

    def _expire(self, now: float) -> None:
        oldest = int((now - DRAIN_WINDOW_S) / DRAIN_WINDOW_S * 10)
        while self._buckets and self._buckets[0][0] < oldest:
            self._total -= self._buckets.popleft()[1]


class _Held:
    __slots__ = ("num_requests", "num_tokens")

    def __init__(self, num_requests: int = 0, num_tokens: int = 0) -> None:
        self.num_requests = num_requests
        self.num_tokens = num_tokens


class _Holder:
    __slots__ = ("drop_at", "held")

    def __init__(self) -> None:
        self.held: dict[int, _Held] = {}
        self.drop_at: float | None = None
        """When a router whose connection was lost forfeits what it holds; None while it is connected."""


class Ledger:
    """Grants and counts. None as a limit: no limit; 0 refuses everything.

    Totals never exceed a limit through `acquire`, and `acquire` never refuses what fits. Only `resume` may bring
    totals above a limit: it states what already runs.
    """

    def __init__(
        self,
        max_num_queued_reqs: int | None,
        max_num_queued_tokens: int | None,
        *,
        holder_grace_s: float = 10.0,
    ) -> None:
        self._max_num_queued_reqs = max_num_queued_reqs
        self._max_num_queued_tokens = max_num_queued_tokens
        self._holder_grace_s = holder_grace_s
        self._holders: dict[str, _Holder] = {}
        self._num_requests = 0
        self._num_tokens = 0
        self._num_refused_requests = 0
        self._num_refused_tokens = 0
        self._request_drain = _DrainRate()
        self._token_drain = _DrainRate()
        self.num_ignored = 0
        """Messages, or parts of them, that made no sense: unknown, late, doubled or negative."""

    def resume(self, router: str, holdings: Iterable[Holding], now: float) -> None:
        """`router` has (re)connected and holds exactly this; replaces what was known of it."""
        self._drop(router)
        holder = self._holders[router] = _Holder()
        for holding in holdings:
            if holding.num_requests < 0 or holding.num_tokens < 0 or holding.key in holder.held:
                self.num_ignored += 1
                continue
            holder.held[holding.key] = _Held(holding.num_requests, holding.num_tokens)
            self._num_requests += holding.num_requests
            self._num_tokens += holding.num_tokens
        self._start_drain(now)

    def acquire(self, router: str, key: int, num_requests: int, num_tokens: int, now: float) -> Granted | Refused:
        """Add to what `key` holds: all of it, or nothing. The candidate counts against the limits."""
        if num_requests < 0 or num_tokens < 0:
            self.num_ignored += 1
            num_requests, num_tokens = max(0, num_requests), max(0, num_tokens)
        limit = self._max_num_queued_reqs
        if limit is not None and num_requests and self._num_requests + num_requests > limit:
            self._num_refused_requests += 1
            wait_s = self._request_drain.wait_s(self._num_requests + num_requests - limit, now)
            return self._refused(key, "max_num_queued_reqs", limit, self._num_requests, num_requests, wait_s)
        limit = self._max_num_queued_tokens
        if limit is not None and num_tokens and self._num_tokens + num_tokens > limit:
            self._num_refused_tokens += 1
            wait_s = self._token_drain.wait_s(self._num_tokens + num_tokens - limit, now)
            return self._refused(key, "max_num_queued_tokens", limit, self._num_tokens, num_tokens, wait_s)
        holder = self._holders.setdefault(router, _Holder())
        held = holder.held.setdefault(key, _Held())
        held.num_requests += num_requests
        held.num_tokens += num_tokens
        self._num_requests += num_requests
        self._num_tokens += num_tokens
        self._start_drain(now)
        return Granted(key)

    def prefill_done(self, router: str, key: int, num_tokens: int, now: float) -> None:
        """`num_tokens` of `key`'s prompt tokens no longer wait."""
        held = self._find(router, key)
        if held is None or not 0 <= num_tokens <= held.num_tokens:
            self.num_ignored += 1
            if held is None or num_tokens < 0:
                return
            num_tokens = held.num_tokens
        held.num_tokens -= num_tokens
        self._num_tokens -= num_tokens
        self._token_drain.add(num_tokens, now)

    def release(self, router: str, key: int, now: float) -> None:
        """`key` has ended: everything it holds is free."""
        holder = self._holders.get(router)
        held = holder.held.pop(key, None) if holder is not None else None
        if held is None:
            self.num_ignored += 1
            return
        self._num_requests -= held.num_requests
        self._num_tokens -= held.num_tokens
        self._request_drain.add(held.num_requests, now)
        if held.num_tokens:
            self._token_drain.add(held.num_tokens, now)

    def router_lost(self, router: str, now: float) -> None:
        """The newest connection of `router` was lost: what it holds is dropped after the grace, unless it resumes.

        A connection that the same router has already replaced by a newer one is none of the ledger's business.
        """
        holder = self._holders.get(router)
        if holder is None:
            self.num_ignored += 1
        elif not holder.held:
            del self._holders[router]
        elif holder.drop_at is None:
            holder.drop_at = now + self._holder_grace_s

    def tick(self, now: float) -> list[str]:
        """Drop what lost routers hold beyond their grace; returns these routers."""
        expired = [
            name for name, holder in self._holders.items() if holder.drop_at is not None and now >= holder.drop_at
        ]
        for name in expired:
            self._drop(name)
        return expired

    def counts(self) -> QueueCounts:
        return QueueCounts(
            num_requests=self._num_requests,
            num_tokens=self._num_tokens,
            num_refused_requests=self._num_refused_requests,
            num_refused_tokens=self._num_refused_tokens,
            num_ignored=self.num_ignored,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless the totals are the sums of what is held."""
        held = [held for holder in self._holders.values() for held in holder.held.values()]
        assert all(h.num_requests >= 0 and h.num_tokens >= 0 for h in held), "negative holding"
        num_requests, num_tokens = sum(h.num_requests for h in held), sum(h.num_tokens for h in held)
        assert self._num_requests == num_requests, f"{self._num_requests} requests counted, {num_requests} held"
        assert self._num_tokens == num_tokens, f"{self._num_tokens} tokens counted, {num_tokens} held"

    def _find(self, router: str, key: int) -> _Held | None:
        holder = self._holders.get(router)
        return None if holder is None else holder.held.get(key)

    def _drop(self, router: str) -> None:
        holder = self._holders.pop(router, None)
        if holder is not None:
            self._num_requests -= sum(held.num_requests for held in holder.held.values())
            self._num_tokens -= sum(held.num_tokens for held in holder.held.values())

    def _start_drain(self, now: float) -> None:
        if self._num_requests:
            self._request_drain.start(now)
        if self._num_tokens:
            self._token_drain.start(now)

    @staticmethod
    def _refused(key: int, field: str, limit: int, current: int, requested: int, wait_s: float) -> Refused:
        retry_after_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s))
        return Refused(key, field, limit, current, requested, retry_after_s)
