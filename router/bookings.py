"""What refused requests were promised: a slot in time each, found again by its token; pure.

A booking's place is **due** from a moment before its slot: it is then held free for the booking, for `HOLD_S` after the
slot. After that it has lapsed, and others may have the place; whoever comes within `CLAIM_S` still goes before others.

A token cannot be guessed. A client that does not send it back is found by an alias: a digest of who asks for what. Who
asks for the same under one alias gets the earliest of these bookings.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from router.amounts import NOTHING, Amounts

LEAD_S = 0.3
"""So long before its slot a place is held, if there is one by then; a retry may be early by so much."""
HOLD_S = 0.25
CLAIM_S = 1.5
"""Longer than a second: who reads `Retry-After` waits for whole ones."""
MAX_NUM_BOOKINGS = 10_000

KEEP_S = 5.0
"""So long it is known who claimed it: while that waits for its place, and asks for more."""

Claimant = tuple[str, int]
"""A router, and its key for the request."""


class BookingState(Enum):
    UPCOMING = auto()
    DUE = auto()
    LAPSED = auto()
    CLAIMED = auto()
    """It has come; what it asks for further goes before others as well."""
    GONE = auto()


@dataclass(slots=True, eq=False)
class Booking:
    token: str
    alias: str
    amounts: Amounts
    """What is booked, less what it has asked for since it came."""
    slot_at: float
    state: BookingState = BookingState.UPCOMING
    changes_at: float = 0.0
    is_postponed: bool = False
    """It came on time and there was no place; it goes before all that are not."""
    claimant: Claimant | None = None


class Bookings:
    """Call `advance` before anything else whenever time has passed."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: nobody else knows it, and no earlier ledger had it."""
        self.outstanding = NOTHING
        """Of all whose slot is still to come, or is due."""
        self.due = NOTHING
        self.postponed = NOTHING
        """The part of `outstanding` that is postponed."""
        self._secret = secret
        self._serial = 0
        self._by_token: dict[str, Booking] = {}
        self._by_alias: dict[str, dict[Booking, None]] = {}
        """In the order in which they were booked."""
        self._changes: list[tuple[float, int, Booking]] = []
        """Heap by time; an entry that is not of its booking's `changes_at` is of the past."""

    def __len__(self) -> int:
        return len(self._by_token)

    @property
    def next_change_at(self) -> float | None:
        while self._changes and self._changes[0][0] != self._changes[0][2].changes_at:
            heapq.heappop(self._changes)
        return self._changes[0][0] if self._changes else None

    def advance(self, now: float) -> None:
        while (at := self.next_change_at) is not None and at <= now:
            _, _, booking = heapq.heappop(self._changes)
            match booking.state:
                case BookingState.UPCOMING:
                    self._move(booking, BookingState.DUE, booking.slot_at + HOLD_S)
                case BookingState.DUE if booking.claimant is not None:
                    self._move(booking, BookingState.CLAIMED, booking.slot_at + KEEP_S)
                case BookingState.DUE:
                    self._move(booking, BookingState.LAPSED, booking.slot_at + CLAIM_S)
                case _:
                    self.drop(booking)

    def book(self, amounts: Amounts, slot_at: float, alias: str) -> str:
        """Returns the token; "" if there are too many."""
        if len(self._by_token) >= MAX_NUM_BOOKINGS:
            return ""
        self._serial += 1
        digest = hashlib.blake2b(self._serial.to_bytes(8, "little"), key=self._secret, digest_size=16)
        booking = Booking(digest.hexdigest(), alias, amounts, slot_at)
        self._by_token[booking.token] = booking
        if alias:
            self._by_alias.setdefault(alias, {})[booking] = None
        self.outstanding = self.outstanding.plus(amounts)
        self._change_at(booking, slot_at - LEAD_S)
        return booking.token

    def find(self, token: str, claimant: Claimant) -> Booking | None:
        """By its token or alias; a claimed one is found by its claimant only."""
        booking = self._by_token.get(token)
        candidates = self._by_alias.get(token, ()) if booking is None else (booking,)
        return next((found for found in candidates if found.claimant in (None, claimant)), None)

    def claim(self, booking: Booking, amounts: Amounts, claimant: Claimant, now: float) -> None:
        """It has come and asks for this part of it; the rest is held a while longer."""
        booking.claimant = claimant
        # Everything is taken out of the sums, and what is left put back in.
        self._move(booking, BookingState.CLAIMED, now + KEEP_S)
        booking.amounts = Amounts(*(max(0, a - b) for a, b in zip(booking.amounts, amounts, strict=True)))
        if booking.amounts != NOTHING:
            booking.slot_at = now
            self._move(booking, BookingState.DUE, now + HOLD_S)

    def postpone(self, booking: Booking, amounts: Amounts, slot_at: float) -> None:
        """It came on time and there was no place: it gets another slot, under the same token."""
        assert booking.state is not BookingState.GONE
        self._move(booking, BookingState.CLAIMED, booking.changes_at)
        booking.claimant = None
        booking.amounts, booking.slot_at, booking.is_postponed = amounts, slot_at, True
        self._move(booking, BookingState.UPCOMING, slot_at - LEAD_S)

    def drop(self, booking: Booking) -> None:
        """Nobody will ask for it any more."""
        if booking.state is BookingState.GONE:
            return
        self._count(booking, Amounts.minus)
        booking.state, booking.changes_at = BookingState.GONE, -1.0
        del self._by_token[booking.token]
        if booking.alias:
            same = self._by_alias[booking.alias]
            del same[booking]
            if not same:
                del self._by_alias[booking.alias]

    def check_integrity(self) -> None:
        """Raises AssertionError unless the sums are those of the bookings."""
        outstanding, due, postponed = NOTHING, NOTHING, NOTHING
        for booking in self._by_token.values():
            if booking.state in (BookingState.UPCOMING, BookingState.DUE):
                outstanding = outstanding.plus(booking.amounts)
                postponed = postponed.plus(booking.amounts if booking.is_postponed else NOTHING)
            if booking.state is BookingState.DUE:
                due = due.plus(booking.amounts)
        assert (outstanding, due, postponed) == (self.outstanding, self.due, self.postponed)
        assert sum(map(len, self._by_alias.values())) == sum(bool(b.alias) for b in self._by_token.values())

    def _move(self, booking: Booking, state: BookingState, changes_at: float) -> None:
        self._count(booking, Amounts.minus)
        booking.state = state
        self._count(booking, Amounts.plus)
        self._change_at(booking, changes_at)

    def _count(self, booking: Booking, change: Callable[[Amounts, Amounts], Amounts]) -> None:
        """Add it to the sums that it belongs to by now, or take it away from them."""
        if booking.state in (BookingState.UPCOMING, BookingState.DUE):
            self.outstanding = change(self.outstanding, booking.amounts)
            if booking.is_postponed:
                self.postponed = change(self.postponed, booking.amounts)
        if booking.state is BookingState.DUE:
            self.due = change(self.due, booking.amounts)

    def _change_at(self, booking: Booking, at: float) -> None:
        self._serial += 1
        booking.changes_at = at
        heapq.heappush(self._changes, (at, self._serial, booking))
