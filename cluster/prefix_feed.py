"""What routers are told of a rank's prefix cache; pure.

A router that wants to know gets everything at once, in parts, and from then on the changes of each step within its
frames, numbered without a gap. Changes that came about before the snapshot may follow it: they say the same again.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rank_scheduler.messages import PrefixEvents, PrefixSnapshot, RankLoad, StepFrame
from rank_scheduler.prefix_chain import HASH_BYTES, pack

# A router takes some milliseconds for so many; in between it hears of other ranks.
MAX_HASHES_PER_FRAME = 1 << 15


class PrefixFeed:
    """Mutable state: who listens, and the number of the latest changes."""

    def __init__(self) -> None:
        self._watchers: set[int] = set()
        self._seq = 0

    def watch(self, owner: int, findable: list[bytes]) -> list[PrefixSnapshot]:
        """From now on this router hears of changes; the returned parts go to it first, in order."""
        self._watchers.add(owner)
        parts = [findable[at : at + MAX_HASHES_PER_FRAME] for at in range(0, len(findable), MAX_HASHES_PER_FRAME)]
        last = max(len(parts) - 1, 0)
        return [
            PrefixSnapshot(self._seq, pack(part), is_first=index == 0, is_last=index == last)
            for index, part in enumerate(parts or [[]])
        ]

    def drop(self, owner: int) -> None:
        """Ignored if it does not listen."""
        self._watchers.discard(owner)

    def add_to(
        self, frames: Mapping[int, StepFrame], changes: tuple[bytes, bytes], load: RankLoad
    ) -> Mapping[int, StepFrame]:
        """The frames with the changes in those of all who listen.

        `changes` are as the scheduler gives them; `load` is for frames that are new.
        """
        stored, removed = changes
        if not (stored or removed) or not self._watchers:
            return frames
        self._seq += 1
        if len(stored) + len(removed) > MAX_HASHES_PER_FRAME * HASH_BYTES:
            # Too much to be told: they will miss this number, and ask for a snapshot.
            self._seq += 1
            stored = removed = b""
        events = PrefixEvents(self._seq, stored, removed)
        result = dict(frames)
        for owner in self._watchers:
            frame = result.get(owner)
            if frame is None:
                result[owner] = StepFrame(load, prefixes=events)
            else:
                result[owner] = msgspec.structs.replace(frame, prefixes=events)
        return result
