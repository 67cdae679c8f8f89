"""A rank's way out: what its routers have been told, and whether anybody still needs it; owned by the I/O thread.

Routers send nothing new once they have heard that a rank leaves. Connections keep order, so that behind a router's
`LeavingHeard` nothing of its is on the way; when all have said that and no request is left, there is nothing to cut.
"""

from __future__ import annotations

from collections.abc import Collection

from rank_scheduler.messages import Leaving


class Draining:
    """Between the decision to leave and the rank's end. `now` is of one clock that only grows."""

    def __init__(self) -> None:
        self._moves_at: float | None = None
        self._heard: set[int] = set()

    @property
    def is_leaving(self) -> bool:
        return self._moves_at is not None

    def begin(self, moves_at: float) -> None:
        """Leave, or have what runs moved at another time than was said; routers are to be told (again)."""
        self._moves_at = moves_at

    def message(self, now: float) -> Leaving | None:
        """What each router is to hear, also those that connect later; None: the rank stays."""
        return None if self._moves_at is None else Leaving(max(0.0, self._moves_at - now))

    def heard(self, owner: int) -> None:
        self._heard.add(owner)

    def lost(self, owner: int) -> None:
        self._heard.discard(owner)

    def is_heard_by(self, owners: Collection[int]) -> bool:
        return self._heard.issuperset(owners)
