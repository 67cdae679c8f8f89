"""How many requests, and how many prompt tokens that wait: what queue limits bound, leases hold and requests take."""

from __future__ import annotations

from typing import NamedTuple


class Amounts(NamedTuple):
    """Both at once; a message carries them as a pair."""

    requests: int = 0
    tokens: int = 0

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(self.requests + other.requests, self.tokens + other.tokens)

    def minus(self, other: Amounts) -> Amounts:
        return Amounts(self.requests - other.requests, self.tokens - other.tokens)

    def covers(self, other: Amounts) -> bool:
        """Whether `other` is no more than this, in both."""
        return other.requests <= self.requests and other.tokens <= self.tokens


NOTHING = Amounts()


class Limits(NamedTuple):
    """The most that may be queued; None: any number."""

    requests: int | None
    tokens: int | None

    def bounded(self, amounts: Amounts) -> Amounts:
        """The part of it that a limit bounds."""
        return Amounts(0 if self.requests is None else amounts.requests, 0 if self.tokens is None else amounts.tokens)
