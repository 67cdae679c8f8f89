"""The policies of placement, and how one's own takes their place; pure.

`prefix`        the rank with the shortest expected time to the first token
`least_loaded`  the one with the least work, whatever it has in its cache
`round_robin`   one after the other
`module:Class`  any other that has `choose` as `PlacementPolicy` says; it is made without arguments, once per router
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from router.placement import Leg, Wanted
from router.rank_table import Candidates

SHORTAGE_FACTOR = 4
"""To wait for a token's KV room takes so many times as long as to compute one: others have to end first."""

MAX_WAIT_S = 1.0
"""Nobody waits longer for the rank that has its prefix while others have room."""


class PlacementPolicy(Protocol):
    """Called from one event loop, never with no candidates."""

    def choose(self, wanted: Wanted, candidates: Candidates) -> int | None:
        """Index of the candidate that is to take it.

        None, only where `wanted.may_wait`: none of these, let it wait; it is asked again when ranks have more room,
        or others have it, and after a while.
        """
        ...


class _Turns:
    """Among equals, the next one after the last."""

    def __init__(self) -> None:
        self._last_row: int | None = None

    def next(self, candidates: Candidates) -> int:
        """Whose turn it is, however the candidates change."""
        rows = candidates.rows
        if self._last_row is None:
            index = candidates.table.first_turn % len(rows)
        else:
            index = int(rows.searchsorted(self._last_row, side="right")) % len(rows)
        self._last_row = int(rows[index])
        return index

    def least(self, scores: NDArray[np.float64], candidates: Candidates) -> int:
        """The first one of those with the lowest score."""
        at = self.next(candidates)
        index = at + int(scores[at:].argmin())
        if at:
            before = int(scores[:at].argmin())
            if scores[before] < scores[index]:
                index = before
        self._last_row = int(candidates.rows[index])
        return index


class RoundRobin:
    """`round_robin`; each leg has turns of its own."""

    def __init__(self) -> None:
        self._turns = {leg: _Turns() for leg in Leg}

    def choose(self, wanted: Wanted, candidates: Candidates) -> int:
        return self._turns[wanted.leg].next(candidates)


class LeastLoaded:
    """`least_loaded`: fewest prompt tokens to compute, and sequences, as its peers would take them."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, wanted: Wanted, candidates: Candidates) -> int:
        return self._turns.least(candidates.table.work[candidates.at], candidates)


class Prefix:
    """`prefix`. A rank's score is how long it would take to this request's first token, in seconds:

        prefill time of a token * (tokens queued there
                                   + TOKENS_PER_SEQUENCE * lag * (sequences there + 1)
                                   + SHORTAGE_FACTOR * tokens for which it lacks KV room)
        + time to compute the tokens that it has not cached; to load them, in the decode leg

    So a request goes where its prefix is, until the load there outweighs what that saves.
    """

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, wanted: Wanted, candidates: Candidates) -> int | None:
        table, at = candidates.table, candidates.at
        every_uncached = wanted.uncached_by_row(table.capacity)
        uncached = every_uncached[at]
        s_per_token = (table.load_s_per_token if wanted.leg is Leg.DECODE else table.prefill_s_per_token)[at]
        scores = s_per_token * uncached
        scores += table.wait_s[at]
        lacking = uncached - table.num_free_tokens[at]
        if lacking.max() > 0.0:
            scores += SHORTAGE_FACTOR * table.prefill_s_per_token[at] * np.maximum(lacking, 0.0)
        index = self._turns.least(scores, candidates)
        if wanted.may_wait and len(candidates.suitable) > len(candidates):
            num_saved = float(uncached[index] - every_uncached[candidates.suitable].min())
            if wanted.waited_s < worth_waiting_s(num_saved, float(s_per_token[index])):
                return None
        return index


def worth_waiting_s(num_saved_tokens: float, s_per_token: float) -> float:
    """How long a request may wait for the rank that has so much more of it cached than the one that could take it now.

    As long as computing that would take: so it loses at most as much again by waiting in vain.
    """
    return min(num_saved_tokens * s_per_token, MAX_WAIT_S)


POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "prefix": Prefix,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}


def load_policy(name: str) -> PlacementPolicy:
    """The policy of that name. Raises ValueError with the remedy if there is none."""
    if name in POLICIES:
        return POLICIES[name]()
    known = f"give one of {', '.join(POLICIES)}, or module:Class of a policy of your own"
    module, colon, class_name = name.partition(":")
    if not (colon and class_name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"{name!r} is no placement policy; {known}")
    try:
        found = getattr(importlib.import_module(module), class_name)
        policy: PlacementPolicy = found()
    except Exception as error:
        raise ValueError(
            f"{name!r} cannot be made: {type(error).__name__}: {error}; {known}, whose module can be imported and "
            "whose class takes no arguments"
        ) from error
    if not callable(getattr(policy, "choose", None)):
        raise ValueError(f"{name!r} has no method choose(wanted, candidates); {known}")
    return policy
