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

    def covers_beside(self, others: Amounts, wanted: Amounts) -> bool:
        """Whether there is enough for both, in what is wanted of each."""
        return all(not want or other + want <= have for have, other, want in zip(self, others, wanted, strict=True))

    def at_least(self, other: Amounts) -> Amounts:
        """The larger of each."""
        return Amounts(max(self.requests, other.requests), max(self.tokens, other.tokens))


NOTHING = Amounts()


class Limits(NamedTuple):
    """The most that may be queued; None: any number."""

    requests: int | None
    tokens: int | None

    def bounded(self, amounts: Amounts) -> Amounts:
        """The part of it that a limit bounds."""
        return Amounts(0 if self.requests is None else amounts.requests, 0 if self.tokens is None else amounts.tokens)
