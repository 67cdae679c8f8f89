"""Which rank gets a request; pure.

A rank's figures are as old as its last frame. What the router has submitted since then is added to them here, so
that a burst does not pile up on the rank that looked empty when it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rank_scheduler.messages import RankLoad
from router.control_messages import PoolRole

TOKENS_PER_SEQUENCE = 64
"""What a sequence on a rank weighs beside its waiting prompt tokens: it takes a token of each step while it runs."""


class Leg(StrEnum):
    """What part of a request a rank is to compute."""

    WHOLE = "whole"
    PREFILL = "prefill"
    """Its prompt and its first token."""
    DECODE = "decode"
    """All but its first token, with KV that a prefill rank has."""


_ROLES: dict[Leg, tuple[frozenset[PoolRole], frozenset[PoolRole]]] = {
    Leg.WHOLE: (frozenset({PoolRole.MIXED, PoolRole.DECODE}), frozenset({PoolRole.PREFILL})),
    Leg.PREFILL: (frozenset({PoolRole.PREFILL}), frozenset({PoolRole.MIXED, PoolRole.DECODE})),
    Leg.DECODE: (frozenset({PoolRole.MIXED, PoolRole.DECODE}), frozenset({PoolRole.PREFILL})),
}
"""Roles that are made for a leg, and those that can take it if none of the others is there."""


def suitable(roles: Sequence[PoolRole], leg: Leg, *, falls_back: bool) -> list[int]:
    """Indices of the ranks that may take this leg; `falls_back`: any rank may, rather than none."""
    made_for_it, others = _ROLES[leg]
    found = [index for index, role in enumerate(roles) if role in made_for_it]
    if found or not falls_back:
        return found
    return [index for index, role in enumerate(roles) if role in others]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rank that could take the request."""

    load: RankLoad
    num_unseen_sequences: int = 0
    """This router's sequences that `load` does not contain yet."""
    num_unseen_tokens: int = 0
    """Their prompt tokens."""

    @property
    def score(self) -> int:
        """Work ahead of a new request, in tokens; lower is better."""
        load = self.load
        num_sequences = load.num_running + load.num_waiting + load.num_deferred + self.num_unseen_sequences
        return load.num_waiting_tokens + self.num_unseen_tokens + TOKENS_PER_SEQUENCE * num_sequences


def least_loaded(candidates: Sequence[Candidate], turn: int) -> int:
    """Index of the candidate with the least work ahead; `turn`, which the caller counts up, rotates among equals."""
    scores = [candidate.score for candidate in candidates]
    least = min(scores)
    best = [index for index, score in enumerate(scores) if score == least]
    return best[turn % len(best)]


def load_contains(num_steps_at_submit: int, load: RankLoad) -> bool:
    """Whether `load`, from a later frame, accounts for a sequence submitted when the rank stood at that step.

    A rank takes in new requests between steps. The step under way at the time of the submit may have begun
    without it, the one after it has not.
    """
    return load.num_steps >= num_steps_at_submit + 2
