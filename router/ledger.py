"""The cluster's queue limits, kept by one writer: how much of them is lent to which router; pure.

The control actor owns the only `Ledger`, feeds it what routers say (`router.control_messages`), sends what it answers,
and calls `tick` about once a second. Routers admit requests out of what they were lent (`router.lease`).

**Never too much**: all that is lent is within the limits. Only `resume` may bring it above them: it states what a
router has already. **Never refused while there is room**: whoever asks for more than is left is refused only when the
queue is *tight*, which every router has confirmed: then none of them keeps anything idle, and what is not lent is all
there is. While there is much room the queue is *loose*, and routers are lent more than they ask for.

**A new ledger** knows nothing of what an earlier one has lent. Until all expected routers have resumed, or what others
had idle is no longer valid (`recovery_s`), it lends nothing, and lets those who ask wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from router.amounts import NOTHING, Amounts, Limits
from router.control_messages import ControlToRouter, Granted, QueueCounts, Refused, Tighten

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
DRAIN_WINDOW_S = 10.0
TIGHTEN_TIMEOUT_S = 0.5
"""A router that does not confirm for so long is not waited for: it is hung, and what it has is not to be had."""
# The queue is loosened when so much is not lent, and routers are lent shares of that.
_LOOSE_FROM = 1 / 4
_SHARE = 1 / 4

To = tuple[str, ControlToRouter]
"""A message, and the router that gets it."""


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


@dataclass(slots=True)
class _Router:
    lent: Amounts = NOTHING
    taken: Amounts = NOTHING
    """As last reported."""
    is_connected: bool = True
    drop_at: float | None = None
    """When a router whose connection was lost forfeits what it was lent; None while it is connected."""


@dataclass(frozen=True, slots=True)
class _Ask:
    router: str
    key: int
    amounts: Amounts


class Ledger:
    """Lends and counts. None as a limit: no limit; 0 refuses everything."""

    def __init__(
        self,
        max_num_queued_reqs: int | None,
        max_num_queued_tokens: int | None,
        *,
        now: float = 0.0,
        holder_grace_s: float = 10.0,
        recovery_s: float = 0.0,
        num_routers: int = 0,
    ) -> None:
        """`recovery_s`: longer than idle amounts of an earlier ledger are valid; less, once `num_routers` have resumed.

        It counts from `now` on.
        """
        self.limits = Limits(max_num_queued_reqs, max_num_queued_tokens)
        self._holder_grace_s = holder_grace_s
        self._num_routers = num_routers
        self._recovers_until: float | None = now + recovery_s if recovery_s > 0 else None
        self._routers: dict[str, _Router] = {}
        self._lent = NOTHING
        self._asks: deque[_Ask] = deque()
        self._is_tight = True
        self._serial = 0
        """Of the latest demand to tighten."""
        self._unconfirmed: dict[str, int] = {}
        """Routers that may still keep something idle, though the queue is tight: the demand they are to confirm."""
        self._give_up_at = 0.0
        """When they are not waited for any more."""
        self._num_refused_requests = 0
        self._num_refused_tokens = 0
        self._request_drain = _DrainRate()
        self._token_drain = _DrainRate()
        self.num_ignored = 0
        """Messages, or parts of them, that made no sense: unknown, late, doubled or negative."""

    # ---- routers come and go ----

    def resume(self, router: str, lent: Amounts, now: float) -> list[To]:
        """`router` has (re)connected and has been lent exactly this, here or by an earlier ledger."""
        self._asks = deque(ask for ask in self._asks if ask.router != router)
        self._drop(router)
        if not lent.covers(NOTHING):
            self.num_ignored += 1
            lent = Amounts(max(0, lent.requests), max(0, lent.tokens))
        lent = self.limits.bounded(lent)
        self._routers[router] = _Router(lent)
        self._lent = self._lent.plus(lent)
        self._start_drain(now)
        # What it has idle is of the time before.
        messages = self._tighten([router], now) if self._is_tight and lent != NOTHING else []
        if self._recovers_until is not None and self._num_routers and self._num_connected >= self._num_routers:
            self._recovers_until = None
        return messages + self._decide(now)

    def router_lost(self, router: str, now: float) -> list[To]:
        """The newest connection of `router` was lost: what it was lent is dropped after the grace, unless it resumes.

        A connection that the same router has already replaced by a newer one is none of the ledger's business.
        """
        found = self._routers.get(router)
        if found is None:
            self.num_ignored += 1
            return []
        self._asks = deque(ask for ask in self._asks if ask.router != router)
        self._unconfirmed.pop(router, None)
        found.is_connected = False
        if found.lent == NOTHING:
            del self._routers[router]
        elif found.drop_at is None:
            found.drop_at = now + self._holder_grace_s
        return self._decide(now)

    def tick(self, now: float) -> tuple[list[str], list[To]]:
        """Drop what lost routers were lent, beyond their grace; returns these routers, and what follows."""
        expired = [name for name, found in self._routers.items() if found.drop_at is not None and now >= found.drop_at]
        for name in expired:
            self._drop(name)
        return expired, self.wake(now)

    @property
    def wakes_at(self) -> float | None:
        """When somebody who asks has waited long enough: `wake` is to be called then."""
        if not self._asks:
            return None
        return self._recovers_until if self._recovers_until is not None else self._give_up_at

    def wake(self, now: float) -> list[To]:
        """Decide what can be decided by now."""
        if self._recovers_until is not None and now >= self._recovers_until:
            self._recovers_until = None
        return self._decide(now)

    # ---- what routers say ----

    def ask(self, router: str, key: int, amounts: Amounts, now: float) -> list[To]:
        """`router` wants to hold this under `key`, all of it or nothing, and has it not idle."""
        if router not in self._routers:
            self.num_ignored += 1
            return []
        if not amounts.covers(NOTHING):
            self.num_ignored += 1
            amounts = Amounts(max(0, amounts.requests), max(0, amounts.tokens))
        self._asks.append(_Ask(router, key, amounts))
        return self._decide(now)

    def returned(self, router: str, amounts: Amounts, now: float) -> list[To]:
        """`router` gives this back."""
        found = self._routers.get(router)
        amounts = self.limits.bounded(amounts)
        if found is None or not amounts.covers(NOTHING) or not found.lent.covers(amounts):
            self.num_ignored += 1
            return []
        found.lent = found.lent.minus(amounts)
        self._lent = self._lent.minus(amounts)
        return self._decide(now)

    def tightened(self, router: str, serial: int, now: float) -> list[To]:
        """`router` keeps nothing idle since that demand; what it had, it has returned before."""
        if self._unconfirmed.get(router) != serial:
            self.num_ignored += 1  # late: it has been given up, or the queue is loose again
            return []
        del self._unconfirmed[router]
        return self._decide(now)

    def reported(self, router: str, taken: Amounts, drained: Amounts, now: float) -> None:
        """`router` holds `taken` now, and `drained` has left its queue since its last report."""
        found = self._routers.get(router)
        if found is None or not taken.covers(NOTHING) or not drained.covers(NOTHING):
            self.num_ignored += 1
            return
        found.taken = taken
        if drained.requests:
            self._request_drain.add(drained.requests, now)
        if drained.tokens:
            self._token_drain.add(drained.tokens, now)

    # ---- figures ----

    def counts(self) -> QueueCounts:
        taken = [found.taken for found in self._routers.values()]
        return QueueCounts(
            num_requests=sum(amounts.requests for amounts in taken),
            num_tokens=sum(amounts.tokens for amounts in taken),
            num_refused_requests=self._num_refused_requests,
            num_refused_tokens=self._num_refused_tokens,
            num_ignored=self.num_ignored,
        )

    @property
    def lent(self) -> Amounts:
        """To all routers."""
        return self._lent

    def check_integrity(self) -> None:
        """Raises AssertionError unless the total is the sum of what was lent."""
        total = NOTHING
        for found in self._routers.values():
            assert found.lent.covers(NOTHING), "a negative loan"
            assert found.is_connected == (found.drop_at is None)
            total = total.plus(found.lent)
        assert total == self._lent, f"{self._lent} counted, {total} lent"
        assert self._unconfirmed.keys() <= {name for name, found in self._routers.items() if found.is_connected}
        assert all(ask.router in self._routers for ask in self._asks)

    # ---- inside ----

    @property
    def _num_connected(self) -> int:
        return sum(found.is_connected for found in self._routers.values())

    def _drop(self, router: str) -> None:
        found = self._routers.pop(router, None)
        if found is not None:
            self._lent = self._lent.minus(found.lent)
            self._unconfirmed.pop(router, None)

    def _decide(self, now: float) -> list[To]:
        """Answer those who ask, as far as that is possible by now."""
        if self._recovers_until is not None:
            return []
        messages: list[To] = []
        waiting: deque[_Ask] = deque()
        for ask in self._asks:
            verdict = self._verdict(ask, now)
            if verdict is None:
                waiting.append(ask)
            else:
                messages.append((ask.router, verdict))
        self._asks = waiting
        if waiting and not self._is_tight:
            self._is_tight = True
            lenders = [name for name, found in self._routers.items() if found.is_connected and found.lent != NOTHING]
            messages += self._tighten(lenders, now)
            if not lenders:
                messages += self._decide(now)
        elif not waiting and self._is_tight and self._share() != NOTHING:
            self._is_tight = False
            self._unconfirmed.clear()
        return messages

    def _verdict(self, ask: _Ask, now: float) -> Granted | Refused | None:
        """None: it must wait until all idle amounts are back."""
        needed = self.limits.bounded(ask.amounts)
        free = self._free()
        if free.covers(needed):
            kept = NOTHING if self._is_tight else self._share(needed)
            lent = needed.plus(kept)
            found = self._routers[ask.router]
            found.lent = found.lent.plus(lent)
            self._lent = self._lent.plus(lent)
            self._start_drain(now)
            return Granted(ask.key, lent, kept)
        is_alone_too_much = not Amounts(*(limit or 0 for limit in self.limits)).covers(needed)
        if is_alone_too_much or (self._is_tight and (not self._unconfirmed or now >= self._give_up_at)):
            return self._refuse(ask, free, now)
        return None

    def _free(self) -> Amounts:
        """What is not lent; nothing where it is more than the limits."""
        requests, tokens = self.limits
        return Amounts(
            0 if requests is None else max(0, requests - self._lent.requests),
            0 if tokens is None else max(0, tokens - self._lent.tokens),
        )

    def _share(self, needed: Amounts = NOTHING) -> Amounts:
        """What a router may keep idle, after `needed` has been lent; nothing if there is little room."""
        free = self._free().minus(needed)
        shares = []
        for limit, left in zip(self.limits, free, strict=True):
            if limit is None:
                shares.append(0)
            elif left < limit * _LOOSE_FROM:
                return NOTHING
            else:
                shares.append(int(left * _SHARE) // max(1, self._num_connected))
        return Amounts(*shares)

    def _tighten(self, routers: Sequence[str], now: float) -> list[To]:
        self._serial += 1
        self._give_up_at = now + TIGHTEN_TIMEOUT_S
        self._unconfirmed.update(dict.fromkeys(routers, self._serial))
        return [(router, Tighten(self._serial)) for router in routers]

    def _refuse(self, ask: _Ask, free: Amounts, now: float) -> Refused:
        needed = self.limits.bounded(ask.amounts)
        if needed.requests > free.requests:
            self._num_refused_requests += 1
            name, which, drain = "max_num_queued_reqs", 0, self._request_drain
        else:
            self._num_refused_tokens += 1
            name, which, drain = "max_num_queued_tokens", 1, self._token_drain
        limit = self.limits[which]
        assert limit is not None
        retry_after_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, drain.wait_s(needed[which] - free[which], now)))
        return Refused(ask.key, name, limit, self._lent[which], needed[which], retry_after_s)

    def _start_drain(self, now: float) -> None:
        if self._lent.requests:
            self._request_drain.start(now)
        if self._lent.tokens:
            self._token_drain.start(now)
