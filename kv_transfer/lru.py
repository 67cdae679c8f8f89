"""Which block lies in which place of a memory tier, and which goes when there is no room; pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placed:
    place: int
    evicted: bytes | None = None
    """The block that had been there."""


class LruPlaces:
    """`num_places` places, given to blocks by hash; the one that was used longest ago goes first, unless it is pinned.

    A block is found between `publish` and its eviction; between `reserve` and `publish` its place is being filled.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))
        self._places: OrderedDict[bytes, int] = OrderedDict()
        """Oldest use first."""
        self._reserved: dict[bytes, int] = {}
        self._pins: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._places

    def touch(self, block_hash: bytes) -> bool:
        """It is used now; False if it is not there."""
        if block_hash not in self._places:
            return False
        self._places.move_to_end(block_hash)
        return True

    def pin(self, block_hash: bytes) -> int | None:
        """Its place, which it keeps until `unpin`; None: it is not there. It is used now."""
        if not self.touch(block_hash):
            return None
        self._pins[block_hash] += 1
        return self._places[block_hash]

    def unpin(self, block_hash: bytes) -> None:
        self._pins[block_hash] -= 1
        if not self._pins[block_hash]:
            del self._pins[block_hash]

    def reserve(self, block_hash: bytes) -> Placed | None:
        """A place for a block that has none; None: it has one, or all are pinned or being filled."""
        if block_hash in self._places or block_hash in self._reserved:
            return None
        if self._free:
            placed = Placed(self._free.pop())
        else:
            evicted = next((known for known in self._places if known not in self._pins), None)
            if evicted is None:
                return None
            placed = Placed(self._places.pop(evicted), evicted)
        self._reserved[block_hash] = placed.place
        return placed

    def publish(self, block_hash: bytes) -> None:
        """Its place is filled; it is used now."""
        self._places[block_hash] = self._reserved.pop(block_hash)

    def check_integrity(self) -> None:
        taken = [*self._free, *self._places.values(), *self._reserved.values()]
        assert sorted(taken) == list(range(self.num_places)), "a place is lost, or given twice"
        assert not self._places.keys() & self._reserved.keys(), "a block has two places"
        assert all(count > 0 and block_hash in self._places for block_hash, count in self._pins.items())
