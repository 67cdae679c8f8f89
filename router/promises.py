"""When a refused request is to come back: each promise is a slot in time of its own, and a token; pure.

The slot is when the measured drain (`router.drain_rate`) will have made room for all that were promised before and for
this one. It is booked (`router.bookings`); the ledger sees to it that who comes on time goes before others.
"""

from __future__ import annotations

from router.amounts import Amounts, Limits
from router.bookings import Booking, Bookings
from router.drain_rate import DrainRate

MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 60.0
"""Nothing is promised beyond; clients do not wait for longer either."""
MAX_STRETCH = 1.1
"""So much later than need be a slot may be, for slots to be some way apart."""


class Promises:
    """Of one ledger. Mutable state: `bookings`, the measured drain, and the latest slot."""

    def __init__(self, limits: Limits, secret: bytes) -> None:
        """`secret`: what tokens are made of."""
        self.bookings = Bookings(secret)
        self._drains = [DrainRate(limit or 0) for limit in limits]
        """Of requests and of tokens."""
        self._last_slot_at = 0.0

    def lent(self, lent: Amounts, now: float) -> None:
        """There is so much to drain."""
        for drain, amount in zip(self._drains, lent, strict=True):
            if amount:
                drain.start(now)

    def drained(self, amounts: Amounts, now: float) -> None:
        """So much has left the queue since the last time."""
        for drain, amount in zip(self._drains, amounts, strict=True):
            if amount:
                drain.add(amount, amounts.requests, now)

    def first(self, needed: Amounts, free: Amounts, waiting: Amounts, alias: str, now: float) -> tuple[float, str]:
        """Seconds until there will be room for a newcomer, and its token. `waiting`: what those before it wait for."""
        bookings = self.bookings
        wait_s, spacing_s = self._wait_s(waiting.plus(bookings.outstanding), needed, free, now)
        # Not all at once, though they were refused at once.
        wait_s = min(max(wait_s, self._last_slot_at + spacing_s - now), wait_s * MAX_STRETCH)
        if wait_s > MAX_RETRY_AFTER_S:
            return MAX_RETRY_AFTER_S, ""
        self._last_slot_at = now + wait_s
        return wait_s, bookings.book(needed, now + wait_s, alias)

    def again(
        self, booking: Booking, needed: Amounts, free: Amounts, waiting: Amounts, now: float
    ) -> tuple[float, str]:
        """The same for one that came on time and found no place: before all but those who have waited as long."""
        bookings, needed = self.bookings, needed.plus(booking.amounts)
        before = waiting.plus(bookings.due).plus(bookings.postponed)
        wait_s, _ = self._wait_s(before, needed, free, now)
        if wait_s > MAX_RETRY_AFTER_S:
            bookings.drop(booking)
            return MAX_RETRY_AFTER_S, ""
        bookings.postpone(booking, needed, now + wait_s)
        return wait_s, booking.token

    def _wait_s(self, before: Amounts, needed: Amounts, free: Amounts, now: float) -> tuple[float, float]:
        """Seconds until there is room for it beside those before it, and between two like it."""
        missing = before.plus(needed).minus(free)
        wait_s, spacing_s = MIN_RETRY_AFTER_S, 0.0
        for drain, amount, wanted in zip(self._drains, missing, needed, strict=True):
            if wanted and amount > 0 and (of_this_s := drain.wait_s(amount, now)) > wait_s:
                wait_s, spacing_s = of_this_s, drain.spacing_s(wanted, now)
        return wait_s, spacing_s
