"""What placement speaks of: parts of a request, what is wanted for one, and the ranks that could take it; pure.

`rank_table` keeps what is known of the ranks, `placement_policies` choose among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rank_scheduler.messages import RankLoad
from router.control_messages import PoolRole
from router.prefix_index import NOTHING_CACHED, CachedPrefix


class Leg(StrEnum):
    """What part of a request a rank is to compute."""

    WHOLE = "whole"
    PREFILL = "prefill"
    """Its prompt and its first token."""
    DECODE = "decode"
    """All but its first token, with KV that a prefill rank has."""


ROLES: dict[Leg, tuple[frozenset[PoolRole], frozenset[PoolRole]]] = {
    Leg.WHOLE: (frozenset({PoolRole.MIXED, PoolRole.DECODE}), frozenset({PoolRole.PREFILL})),
    Leg.PREFILL: (frozenset({PoolRole.PREFILL}), frozenset({PoolRole.MIXED, PoolRole.DECODE})),
    Leg.DECODE: (frozenset({PoolRole.MIXED, PoolRole.DECODE}), frozenset({PoolRole.PREFILL})),
}
"""Roles that are made for a leg, and those that can take it if none of the others is there."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be placed."""

    leg: Leg
    num_tokens: int
    """Of its prompt, and of what was generated behind it already."""
    cached: CachedPrefix = NOTHING_CACHED
    """Which ranks have how much of the prompt."""
    session_id: str | None = None
    """Requests with the same one are better off on the same rank."""
    rank_id: str | None = None
    """This rank or none."""
    may_wait: bool = False
    """It may be left waiting for a rank that suits it better: later ones may pass it, or nobody else wants the room."""
    waited_s: float = 0.0
    """Since it was first asked where this goes."""

    def num_uncached_tokens(self, row: int) -> int:
        """How many tokens the rank of that row would have to compute, or load, as far as is known."""
        return num_uncached_tokens(self.num_tokens, self.cached.num_tokens(row))

    def uncached_by_row(self, num_rows: int) -> NDArray[np.float64]:
        """The same of all ranks with a row below `num_rows`, shape [num_rows]."""
        result = np.full(num_rows, float(self.num_tokens))
        for rows, num_cached in self.cached.rows:
            result[rows] = num_uncached_tokens(self.num_tokens, num_cached)
        return result


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rank that could take the request: it has room."""

    row: int
    """Where it stands, in `Wanted` for instance."""
    rank_id: str
    role: PoolRole
    load: RankLoad
    """As its last frame said."""
    num_unseen_sequences: int
    """This router's sequences that `load` does not contain yet."""
    num_unseen_tokens: int
    """Their prompt tokens, those aside that were expected in the rank's cache."""
    prefill_s_per_token: float
    """What a prompt token takes to compute there, as measured; of its peers' while it has shown nothing."""
    lag: float
    """How much longer its steps take than its peers'; 1.0 while that is little."""


def num_uncached_tokens(num_tokens: int, num_cached: int) -> int:
    """Of a prompt, on a rank that has so many in its cache: the last one is computed in any case."""
    return num_tokens - min(num_cached, num_tokens - 1)


def load_contains(num_steps_at_submit: int, load: RankLoad) -> bool:
    """Whether `load`, from a later frame, accounts for a sequence submitted when the rank stood at that step.

    A rank takes in new requests between steps. The step under way at the time of the submit may have begun
    without it, the one after it has not.
    """
    return load.num_steps >= num_steps_at_submit + 2
