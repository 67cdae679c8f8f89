"""Requests of a session go to one rank, whatever the policy; pure.

A session's rank follows from its id and the ranks' incarnations alone (rendezvous hashing), so all routers agree on
it without a word, and when a rank comes or goes, only the sessions move that gain or lose it. While that rank has no
room, a request of the session may wait for it, as long as recomputing what it has cached there would take, a second at
most; then it goes to the next in the session's own order of ranks that has room. One that has nothing cached there
goes on at once.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from router.placement import Leg, Wanted
from router.placement_policies import PlacementPolicy, worth_waiting_s
from router.rank_table import Candidates


class SessionAffinity:
    """A policy before another one, which sees what belongs to no session."""

    def __init__(self, policy: PlacementPolicy) -> None:
        self._policy = policy

    def choose(self, wanted: Wanted, candidates: Candidates) -> int | None:
        if wanted.session_id is None:
            return self._policy.choose(wanted, candidates)
        ranks, rows = candidates.table, candidates.rows
        home = _first(wanted.session_id, ranks.seeds, candidates.suitable)
        row = _first(wanted.session_id, ranks.seeds, rows)
        if row != home and wanted.may_wait:
            s_per_token = ranks.load_s_per_token if wanted.leg is Leg.DECODE else ranks.prefill_s_per_token
            num_saved = wanted.num_uncached_tokens(row) - wanted.num_uncached_tokens(home)
            if wanted.waited_s < worth_waiting_s(num_saved, float(s_per_token[row])):
                return None
        return int(np.searchsorted(rows, row))


def _first(session_id: str, seeds: NDArray[np.uint64], rows: NDArray[np.intp]) -> int:
    """The row whose rank comes first in the session's order."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
    # The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    mixed = seeds[rows] ^ np.uint64(int.from_bytes(digest, "little"))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(rows[np.argmax(mixed ^ (mixed >> np.uint64(31)))])
