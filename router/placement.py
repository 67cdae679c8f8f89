"""Which rank gets a request; pure.

The score of a rank is what it would compute before this request's first token, in tokens, and the lowest wins:

    prompt tokens that wait there + those of this request not in its cache + TOKENS_PER_SEQUENCE for each sequence

So a request goes where its prefix is, until the load there outweighs what that saves. A rank's figures are as old as
its last frame. What the router has submitted since then is added to them here, so that a burst does not pile up on the
rank that looked empty when it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rank_scheduler.messages import RankLoad
from router.control_messages import PoolRole

TOKENS_PER_SEQUENCE = 64
"""What a sequence on a rank weighs beside its waiting prompt tokens: it takes a token of each step while it runs."""

LOADED_TOKENS_PER_COMPUTED = 16
"""So many tokens of KV are loaded from another rank in about the time that one is computed."""


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


def num_uncached_tokens(num_tokens: int, num_cached: int) -> int:
    """Of a prompt, on a rank that has so many in its cache: the last one is computed in any case."""
    return num_tokens - min(num_cached, num_tokens - 1)


def own_tokens(leg: Leg, num_uncached: int) -> int:
    """What this leg of a request weighs on a rank that lacks so many tokens of its prompt."""
    return num_uncached // LOADED_TOKENS_PER_COMPUTED if leg is Leg.DECODE else num_uncached


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rank that could take the request."""

    load: RankLoad
    num_unseen_sequences: int = 0
    """This router's sequences that `load` does not contain yet."""
    num_unseen_tokens: int = 0
    """Their prompt tokens, those aside that were expected in the rank's cache."""
    num_own_tokens: int = 0
    """What the request itself would bring, see `own_tokens`."""

    @property
    def score(self) -> int:
        """See the module's text."""
        load = self.load
        num_sequences = load.num_running + load.num_waiting + load.num_deferred + self.num_unseen_sequences
        num_tokens = load.num_waiting_tokens + self.num_unseen_tokens + self.num_own_tokens
        return num_tokens + TOKENS_PER_SEQUENCE * num_sequences


def least_loaded(candidates: Sequence[Candidate], turn: int) -> int:
    """Index of the candidate with the lowest score; `turn`, which the caller counts up, rotates among equals."""
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
