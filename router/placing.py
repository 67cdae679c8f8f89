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
    """What those before will be charged."""
    num_suitable: int
    """Ranks that it may go to."""
    num_open: int
    """Those of them that have room for somebody."""

    def figures(self) -> dict[str, int]:
        return {
            "num_before": self.num_before,
            "num_tokens_before": self.num_tokens_before,
            "num_ranks_suitable": self.num_suitable,
            "num_ranks_suitable_with_room": self.num_open,
        }

    def __str__(self) -> str:
        """What it waits for."""
        placing = self.placing
        which = f"rank {placing.rank_id}" if placing.rank_id is not None else f"{self.num_suitable} ranks"
        part = f"of {which} for its {placing.leg} part"
        if not self.num_suitable:
            needs = f"any rank for its {placing.leg} part: there is none"
        elif self.num_open:
            needs = f"KV room for {placing.num_tokens} tokens on one {part}; {self.num_open} have room for others"
        else:
            needs = f"room on one {part}: all have as much to do as they are given at a time"
        turn = placing.turn
        whose = "as a move" if turn.is_move else f"of tenant {turn.tenant!r}, weight {turn.weight:g}"
        before = f"{self.num_before} before it, with {self.num_tokens_before} tokens"
        return f"waits for {needs}; {before}; it goes {whose}, with {turn.num_tokens} tokens"
