"""What one router asks all others: who is asked, who has answered, when there is an answer; pure.

The first yes is the answer; a no once nobody is left who could say yes: each has said no, is gone, or was too slow.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from router.control_messages import Inquired, Inquiry, InquiryAnswer

ANSWER_TIMEOUT_S = 2.0
"""Whoever asks waits for less; this bounds what is remembered of silent routers."""


@dataclass(slots=True)
class _Open:
    asker: str
    query: int
    num_asked: int
    silent: set[str]
    """Routers that have not answered."""
    expires_at: float


class Inquiries:
    """Use from one thread. What it returns is (router, message) to send."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._next_number = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def ask(
        self, asker: str, inquiry: Inquiry, others: Collection[str], now: float
    ) -> list[tuple[str, Inquired | InquiryAnswer]]:
        """`others`: the routers besides the asker."""
        if not others:
            return [(asker, InquiryAnswer(inquiry.query, False, 0))]
        number = self._next_number
        self._next_number += 1
        self._open[number] = _Open(asker, inquiry.query, len(others), set(others), now + ANSWER_TIMEOUT_S)
        asked = Inquired(number, asker, inquiry.action, inquiry.subject, inquiry.account)
        return [(other, asked) for other in sorted(others)]

    def replied(self, router: str, number: int, is_yes: bool) -> list[tuple[str, InquiryAnswer]]:
        """Late, doubled and unknown replies are ignored."""
        inquiry = self._open.get(number)
        if inquiry is None or router not in inquiry.silent:
            return []
        inquiry.silent.discard(router)
        if not is_yes and inquiry.silent:
            return []
        del self._open[number]
        return [(inquiry.asker, InquiryAnswer(inquiry.query, is_yes, inquiry.num_asked))]

    def router_lost(self, router: str) -> list[tuple[str, InquiryAnswer]]:
        """It will not answer, and wants no answer."""
        answers = []
        for number, inquiry in list(self._open.items()):
            if inquiry.asker == router:
                del self._open[number]
            else:
                answers += self.replied(router, number, False)
        return answers

    def tick(self, now: float) -> None:
        """Forget those whose askers wait no more."""
        for number, inquiry in list(self._open.items()):
            if inquiry.expires_at <= now:
                del self._open[number]
