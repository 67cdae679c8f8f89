"""A router's share of the cluster's queue limits: what it may admit without asking, and what it has admitted; pure.

The ledger lends amounts to routers, never more than the limits in all. A router takes from what it was lent as requests
come, and puts back as they leave. What is lent and not taken is **idle**. In a *loose* queue some idle is kept, so that
most requests are admitted without a message. In a *tight* one, near a limit, none is: what is put back goes back to the
ledger at once, which then alone decides who gets the last places.

The ledger forgets what it lent to a router that it has not heard of for long. So idle amounts are good for `valid_s`
after the ledger was last heard, which is shorter.
"""

from __future__ import annotations

from router.amounts import NOTHING, Amounts, Limits


class Lease:
    """Of one router, over all its connections to the ledger."""

    def __init__(self, valid_s: float) -> None:
        self._valid_s = valid_s
        self._limits: Limits | None = None
        """Not known before the first connection."""
        self._lent = NOTHING
        self._taken = NOTHING
        self._held: dict[int, Amounts] = {}
        self._kept = NOTHING
        """Idle amounts that may be kept."""
        self._valid_until = 0.0

    @property
    def lent(self) -> Amounts:
        return self._lent

    @property
    def taken(self) -> Amounts:
        """The sum of what is held; also of what no limit bounds."""
        return self._taken

    @property
    def idle(self) -> Amounts:
        return self._lent.minus(self._bounded(self._taken))

    @property
    def num_holdings(self) -> int:
        return len(self._held)

    # ---- requests ----

    def take(self, key: int, amounts: Amounts, now: float) -> bool:
        """Hold this too under `key`, if it can be had without asking."""
        if self._limits is None:
            return False
        needed = self._limits.bounded(amounts)
        if needed != NOTHING and (now >= self._valid_until or not self.idle.covers(needed)):
            return False
        self._hold(key, amounts)
        return True

    def put_back(self, key: int, num_tokens: int | None = None) -> Amounts:
        """`key` holds that many tokens less, or (None) nothing any more; returns by how much that is less."""
        held = self._held.get(key)
        if held is None:
            return NOTHING
        if num_tokens is None:
            del self._held[key]
            less = held
        else:
            less = Amounts(0, min(num_tokens, held.tokens))
            self._held[key] = held.minus(less)
        self._taken = self._taken.minus(less)
        return less

    def surplus(self) -> Amounts:
        """Idle amounts that are to be returned, and are by this: all beyond twice what may be kept."""
        idle, kept = self.idle, self._kept
        surplus = Amounts(
            idle.requests - kept.requests if idle.requests > 2 * kept.requests else 0,
            idle.tokens - kept.tokens if idle.tokens > 2 * kept.tokens else 0,
        )
        self._lent = self._lent.minus(surplus)
        return surplus

    # ---- the ledger's words ----

    def heard(self, now: float) -> None:
        """Anything at all."""
        self._valid_until = now + self._valid_s

    def bounded_by(self, limits: Limits) -> None:
        """What the ledger's limits are, said on each connection before anything else."""
        self._limits = limits

    def granted(self, key: int | None, wanted: Amounts, lent: Amounts, kept: Amounts) -> None:
        """The ledger lends `lent`, of which `key` takes `wanted`; None: nobody wants it any more."""
        self._lent = self._lent.plus(lent)
        self._kept = kept
        if key is not None:
            self._hold(key, wanted)

    def tighten(self) -> Amounts:
        """Keep nothing idle from now on; returns what was, and is returned by this."""
        self._kept = NOTHING
        return self.surplus()

    def lost(self, now: float) -> None:
        """The connection has ended, or has not come back yet: what is no longer valid is given up."""
        if now >= self._valid_until:
            self._lent = self._bounded(self._taken)

    # ---- inside ----

    def _bounded(self, amounts: Amounts) -> Amounts:
        return amounts if self._limits is None else self._limits.bounded(amounts)

    def _hold(self, key: int, amounts: Amounts) -> None:
        self._held[key] = self._held.get(key, NOTHING).plus(amounts)
        self._taken = self._taken.plus(amounts)

    def check_integrity(self) -> None:
        """Raises AssertionError unless what is held is what was taken, and was lent."""
        total = NOTHING
        for held in self._held.values():
            assert held.covers(NOTHING), "negative holding"
            total = total.plus(held)
        assert total == self._taken, f"{total} held, {self._taken} taken"
        assert self.idle.covers(NOTHING), f"{self._taken} taken of {self._lent} lent"
