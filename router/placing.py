"""One prompt on its way to a rank, and where it stands while it waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from router.placement import Leg
from router.prefix_index import PromptPrefix
from router.rank_link import RankLink
from router.waiting_line import Turn, Waiter, WaitingLine


@dataclass(slots=True, eq=False)
class Placing:
    """One prompt that wants a rank."""

    leg: Leg
    prompt: PromptPrefix
    turn: Turn
    request_id: str
    num_sequences: int = 1
    """So many are submitted once there is a rank."""
    num_generated: int = 0
    """Tokens behind the prompt."""
    session_id: str | None = None
    rank_id: str | None = None
    preferred: RankLink | None = None
    """Where it goes if there is room: it was there before, or is expected there."""
    since: float = 0.0
    placed: asyncio.Future[RankLink] | None = field(default=None, repr=False)
    """While it waits."""
    waiter: Waiter[Placing] | None = field(default=None, repr=False)
    line: WaitingLine[Placing] | None = field(default=None, repr=False)
    num_held_tokens: int = 0
    """What it was given, until it is submitted."""
    expiry: asyncio.TimerHandle | None = field(default=None, repr=False)
    """While there is no rank that it could wait for."""

    @property
    def num_tokens(self) -> int:
        return self.prompt.num_tokens + self.num_generated


@dataclass(frozen=True, slots=True)
class Place:
    """Somebody's in a line."""

    placing: Placing
    num_before: int
    num_tokens_before: int
    num_suitable: int
    """Ranks that it may go to."""
    num_open: int
    """Those of them that have room for somebody."""
