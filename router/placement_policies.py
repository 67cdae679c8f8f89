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

TOKENS_PER_SEQUENCE = 64
"""What a sequence on a rank weighs beside its waiting prompt tokens: it takes a token of each step while it runs."""

LOADED_TOKENS_PER_COMPUTED = 16
"""So many tokens of KV are loaded from another rank in about the time that one is computed."""


class PlacementPolicy(Protocol):
    """Called from one event loop, never with no candidates."""

    def choose(self, wanted: Wanted, candidates: Candidates) -> int | None:
        """Index of the candidate that is to take it.

        None: none of these, let it wait; it is asked again when ranks have more room, or others have it.
        """
        ...


class _Turns:
    """Among equals, one after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def least(self, scores: NDArray[np.float64]) -> int:
        equals = np.flatnonzero(scores == scores.min())
        self._turn += 1
        return int(equals[self._turn % len(equals)])


class RoundRobin:
    """`round_robin`; each leg has turns of its own."""

    def __init__(self) -> None:
        self._last_rows = dict.fromkeys(Leg, -1)

    def choose(self, wanted: Wanted, candidates: Candidates) -> int:
        # Whoever comes next after the last one, however the candidates change.
        index = int(np.searchsorted(candidates.rows, self._last_rows[wanted.leg], side="right")) % len(candidates)
        self._last_rows[wanted.leg] = int(candidates.rows[index])
        return index


class LeastLoaded:
    """`least_loaded`."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, wanted: Wanted, candidates: Candidates) -> int:
        table, rows = candidates.table, candidates.rows
        return self._turns.least(table.num_queued_tokens[rows] + TOKENS_PER_SEQUENCE * table.num_sequences[rows])


class Prefix:
    """`prefix`. The score is what is computed before the first token, in tokens."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def choose(self, wanted: Wanted, candidates: Candidates) -> int:
        table, rows = candidates.table, candidates.rows
        own = wanted.num_tokens - np.minimum(wanted.cached.by_row(table.capacity)[rows], wanted.num_tokens - 1)
        if wanted.leg is Leg.DECODE:
            own /= LOADED_TOKENS_PER_COMPUTED
        return self._turns.least(own + table.num_queued_tokens[rows] + TOKENS_PER_SEQUENCE * table.num_sequences[rows])


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
