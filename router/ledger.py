"""The cluster's queue limits, kept by one writer: how much of them is lent to which router; pure.

The control actor owns the only `Ledger`, feeds it what routers say (`router.control_messages`), sends what it answers,
and calls `tick` about once a second. Routers admit requests out of what they were lent (`router.lease`).

**Never too much**: all that is lent is within the limits. Only `resume` may bring it above them: it states what a
router has already. **Never refused while there is room**: whoever asks for more than is left is refused only when the
queue is *tight*, which every router has confirmed: then none of them keeps anything idle, and what is not lent is all
there is. While there is much room the queue is *loose*, and routers are lent more than they ask for.

**A refusal is a promise**: it books a slot in time (`router.promises`). Who comes back on time goes before others, for
whom a place that is booked is not there. But whoever finds a place free is not refused: they wait, for `PATIENCE_S` at
most, until it is taken or the booking has lapsed.

**A new ledger** knows nothing of what an earlier one has lent or promised. Until all expected routers have resumed, or
what others had idle is no longer valid (`recovery_s`), it lends nothing, and lets those who ask wait.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from router.amounts import NOTHING, Amounts, Limits
from router.bookings import Booking, BookingState
from router.control_messages import Ask, ControlToRouter, Granted, QueueCounts, Refused, Tighten
from router.promises import MAX_RETRY_AFTER_S, Promises

PATIENCE_S = 0.5
"""So long somebody waits for a place that is free but booked."""
CLAIM_PATIENCE_S = 1.5
"""So long somebody on time waits for a place that is not free yet: less than routers wait for an answer."""
TIGHTEN_TIMEOUT_S = 0.5
"""A router that does not confirm for so long is not waited for: it is hung, and what it has is not to be had."""
# The queue is loosened when so much is not lent, and routers are lent shares of that.
_LOOSE_FROM = 1 / 4
_SHARE = 1 / 4

To = tuple[str, ControlToRouter]
"""A message, and the router that gets it."""


@dataclass(slots=True)
class _Router:
    lent: Amounts = NOTHING
    taken: Amounts = NOTHING
    """As last reported."""
    is_connected: bool = True
    drop_at: float | None = None
    """When a router whose connection was lost forfeits what it was lent; None while it is connected."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Who asks, and has no answer yet."""

    router: str
    key: int
    needed: Amounts
    """What limits bound of it."""
    alias: str
    until: float
    """So long it waits for what is booked for others, or, on time, for what is booked for itself."""
    booking: Booking | None
    is_on_time: bool = False
    """Else it has no booking, or is early."""


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
        secret: bytes = b"",
    ) -> None:
        """`recovery_s`: longer than idle amounts of an earlier ledger are valid; less, once `num_routers` have resumed.

        It counts from `now` on. `secret`: what tokens are made of, a new one for each ledger.
        """
        self.limits = Limits(max_num_queued_reqs, max_num_queued_tokens)
        self._holder_grace_s = holder_grace_s
        self._num_routers = num_routers
        self._recovers_until: float | None = now + recovery_s if recovery_s > 0 else None
        self._routers: dict[str, _Router] = {}
        self._lent = NOTHING
        self._on_time: list[_Waiting] = []
        """By their slots."""
        self._others: list[_Waiting] = []
        """By their arrival."""
        self._wakes_at: float | None = None
        self._promises = Promises(self.limits, secret)
        self._bookings = self._promises.bookings
        self._is_tight = True
        self._serial = 0
        """Of the latest demand to tighten."""
        self._unconfirmed: dict[str, int] = {}
        """Routers that may still keep something idle, though the queue is tight: the demand they are to confirm."""
        self._give_up_at = 0.0
        """When they are not waited for any more."""
        self._num_refused_requests = 0
        self._num_refused_tokens = 0
        self.num_ignored = 0
        """Messages, or parts of them, that made no sense: unknown, late, doubled or negative."""

    # ---- routers come and go ----

    def resume(self, router: str, lent: Amounts, now: float) -> list[To]:
        """`router` has (re)connected and has been lent exactly this, here or by an earlier ledger."""
        self._forget_asks(router)
        self._drop(router)
        if not lent.covers(NOTHING):
            self.num_ignored += 1
            lent = Amounts(max(0, lent.requests), max(0, lent.tokens))
        lent = self.limits.bounded(lent)
        self._routers[router] = _Router(lent)
        self._lent = self._lent.plus(lent)
        self._promises.lent(self._lent, now)
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
        self._forget_asks(router)
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
        return self._wakes_at

    def wake(self, now: float) -> list[To]:
        """Decide what can be decided by now."""
        if self._recovers_until is not None and now >= self._recovers_until:
            self._recovers_until = None
        return self._decide(now)

    # ---- what routers say ----

    def ask(self, router: str, ask: Ask, now: float) -> list[To]:
        """`router` wants to hold this, all of it or nothing, and has it not idle."""
        if router not in self._routers:
            self.num_ignored += 1
            return []
        amounts = ask.amounts
        if not amounts.covers(NOTHING):
            self.num_ignored += 1
            amounts = Amounts(max(0, amounts.requests), max(0, amounts.tokens))
        booking = self._bookings.find(ask.token, (router, ask.key)) if ask.token else None
        needed = self.limits.bounded(amounts)
        self._others.append(_Waiting(router, ask.key, needed, ask.alias, now + PATIENCE_S, booking))
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
        self._promises.drained(drained, now)

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
        assert all(ask.router in self._routers for ask in self._on_time + self._others)
        self._bookings.check_integrity()

    # ---- inside ----

    @property
    def _num_connected(self) -> int:
        return sum(found.is_connected for found in self._routers.values())

    def _drop(self, router: str) -> None:
        found = self._routers.pop(router, None)
        if found is not None:
            self._lent = self._lent.minus(found.lent)
            self._unconfirmed.pop(router, None)

    def _forget_asks(self, router: str) -> None:
        self._on_time = [ask for ask in self._on_time if ask.router != router]
        self._others = [ask for ask in self._others if ask.router != router]

    def _decide(self, now: float) -> list[To]:
        """Answer those who ask, as far as that is possible by now."""
        if self._recovers_until is not None:
            self._wakes_at = self._recovers_until if self._on_time or self._others else None
            return []
        self._bookings.advance(now)
        self._let_forward(now)
        messages: list[To] = []
        # What is not to be had: for those on time, what those before them wait for; for others, what is due as well.
        taken, self._on_time = self._decide_in_order(self._on_time, NOTHING, messages, now)
        _, self._others = self._decide_in_order(self._others, taken.plus(self._bookings.due), messages, now)
        is_waited_for = bool(self._on_time or self._others)
        if is_waited_for and not self._is_tight:
            self._is_tight = True
            lenders = [name for name, found in self._routers.items() if found.is_connected and found.lent != NOTHING]
            messages += self._tighten(lenders, now)
            if not lenders:
                messages += self._decide(now)
        elif not is_waited_for and self._is_tight and self._share() != NOTHING:
            self._is_tight = False
            self._unconfirmed.clear()
        self._wakes_at = self._next_decision_at(now)
        return messages

    def _let_forward(self, now: float) -> None:
        """Whose time has come goes before others."""
        others = []
        for ask in self._others:
            booking = ask.booking
            if booking is None or booking.state is BookingState.UPCOMING:
                others.append(ask)
            elif booking.state is BookingState.GONE or booking.claimant not in (None, (ask.router, ask.key)):
                # It is too late, or was sent twice.
                others.append(replace(ask, booking=None))
            else:
                self._bookings.claim(booking, ask.needed, (ask.router, ask.key), now)
                insort(self._on_time, replace(ask, until=now + CLAIM_PATIENCE_S, is_on_time=True), key=_slot_at)
        self._others = others

    def _decide_in_order(
        self, asks: Iterable[_Waiting], booked: Amounts, messages: list[To], now: float
    ) -> tuple[Amounts, list[_Waiting]]:
        """Those of `asks` that have to wait, and `booked` with what they need."""
        waiting = []
        for ask in asks:
            verdict = self._verdict(ask, booked, now)
            if verdict is not None:
                messages.append((ask.router, verdict))
            else:
                waiting.append(ask)
                if ask.is_on_time:
                    booked = booked.plus(ask.needed)
        return booked, waiting

    def _next_decision_at(self, now: float) -> float | None:
        asks = self._on_time + self._others
        if not asks:
            return None
        free = self._free()
        times = [ask.until for ask in asks if ask.is_on_time or free.covers(ask.needed)]
        if self._unconfirmed:
            times.append(self._give_up_at)
        if self._others and (change_at := self._bookings.next_change_at) is not None:
            times.append(change_at)
        return min((at for at in times if at > now), default=None)

    def _verdict(self, ask: _Waiting, booked: Amounts, now: float) -> Granted | Refused | None:
        """None: it must wait, for what is idle, or for what others have booked, or for its own place."""
        free, needed = self._free(), ask.needed
        if ask.booking is not None and not ask.is_on_time:
            # It was refused as a whole; a part of it is of no use.
            needed = needed.at_least(ask.booking.amounts)
        is_patient = now < ask.until
        if free.covers(needed):
            return None if is_patient and not free.covers_beside(booked, needed) else self._grant(ask, now)
        if not Amounts(*(limit or 0 for limit in self.limits)).covers(needed):
            return self._refuse(ask, needed, free, NOTHING, now)
        is_all_back = self._is_tight and (not self._unconfirmed or now >= self._give_up_at)
        if not is_all_back or (ask.is_on_time and is_patient):
            return None
        return self._refuse(ask, needed, free, booked, now)

    def _grant(self, ask: _Waiting, now: float) -> Granted:
        if ask.booking is not None and not ask.is_on_time:
            self._bookings.drop(ask.booking)
        kept = NOTHING if self._is_tight else self._share(ask.needed)
        lent = ask.needed.plus(kept)
        found = self._routers[ask.router]
        found.lent = found.lent.plus(lent)
        self._lent = self._lent.plus(lent)
        self._promises.lent(self._lent, now)
        return Granted(ask.key, lent, kept)

    def _refuse(self, ask: _Waiting, needed: Amounts, free: Amounts, booked: Amounts, now: float) -> Refused:
        if needed.requests > free.requests:
            self._num_refused_requests += 1
            name, which = "max_num_queued_reqs", 0
        else:
            self._num_refused_tokens += 1
            name, which = "max_num_queued_tokens", 1
        limit = self.limits[which]
        assert limit is not None
        if needed[which] > limit:
            wait_s, token = MAX_RETRY_AFTER_S, ""
        else:
            wait_s, token = self._promise(ask, needed, free, booked, now)
        return Refused(ask.key, name, limit, self._lent[which], needed[which], wait_s, token)

    def _promise(self, ask: _Waiting, needed: Amounts, free: Amounts, booked: Amounts, now: float) -> tuple[float, str]:
        """Seconds until there is room for it, and its token."""
        booking = ask.booking
        if booking is None or booking.state is BookingState.GONE:
            waiting = booked if ask.is_on_time else booked.minus(self._bookings.due)
            return self._promises.first(needed, free, waiting, ask.alias, now)
        if ask.is_on_time:
            return self._promises.again(booking, needed, free, booked, now)
        return booking.slot_at - now, booking.token

    def _free(self) -> Amounts:
        """What is not lent; nothing where it is more than the limits."""
        requests, tokens = self.limits
        return Amounts(
            0 if requests is None else max(0, requests - self._lent.requests),
            0 if tokens is None else max(0, tokens - self._lent.tokens),
        )

    def _share(self, needed: Amounts = NOTHING) -> Amounts:
        """What a router may keep idle, after `needed` has been lent; nothing if there is little room."""
        free = self._free().minus(needed).minus(self._bookings.due)
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


def _slot_at(ask: _Waiting) -> float:
    return 0.0 if ask.booking is None else ask.booking.slot_at
