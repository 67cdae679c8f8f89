"""A tier of host memory for KV blocks: a `BlockStore` whose calls are copies."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kv_transfer.block_store import BlockArray, StoreFailure, StoreOutcome, StoreReason
from kv_transfer.geometry import Geometry
from kv_transfer.known_blocks import KnownBlocks
from kv_transfer.lru import LruPlaces

_BYTES_PER_CALL = 4 << 20


class HostTier:
    """The lock is held for bookkeeping, not for copies: what is being read is pinned, what is written not found yet."""

    is_local = True

    def __init__(self, geometry: Geometry, size_bytes: int, index: KnownBlocks) -> None:
        """Raises ValueError if not a single block fits."""
        block_size_bytes = geometry.block_size_bytes
        num_places = size_bytes // block_size_bytes
        if not num_places:
            raise ValueError(
                f"cpu_bytes_to_use is {size_bytes}, and a block has {block_size_bytes} bytes: set it to a multiple"
            )
        self.num_blocks_per_call = max(1, _BYTES_PER_CALL // block_size_bytes)
        self._index = index
        self._lock = threading.Lock()
        self._places = LruPlaces(num_places)
        # Pages become real when they are first written.
        self._memory: BlockArray | None = np.empty((num_places, block_size_bytes), np.uint8)
        self._num_evicted = 0

    def start(self) -> None:
        """Nothing to begin."""

    @property
    def accepts(self) -> bool:
        return self._memory is not None

    def contains(self, hashes: Sequence[bytes]) -> StoreOutcome:
        with self._lock:
            for count, block_hash in enumerate(hashes):
                if block_hash not in self._places:
                    return StoreOutcome(count)
        return StoreOutcome(len(hashes))

    def get(self, hashes: Sequence[bytes], into: BlockArray) -> StoreOutcome:
        memory, places = self._memory, []
        with self._lock:
            for block_hash in hashes:
                place = self._places.pin(block_hash) if memory is not None else None
                if place is None:
                    break
                places.append(place)
            # The beginning of a prefix is what all the rest needs: it goes last.
            for block_hash in reversed(hashes[: len(places)]):
                self._places.touch(block_hash)
        if memory is not None and places:
            into[: len(places)] = memory[places]
        with self._lock:
            for block_hash in hashes[: len(places)]:
                self._places.unpin(block_hash)
        if len(places) < len(hashes):
            return StoreOutcome(len(places), StoreFailure(StoreReason.MISSING, "a block has been evicted meanwhile"))
        return StoreOutcome(len(places))

    def put(self, hashes: Sequence[bytes], blocks: BlockArray) -> StoreOutcome:
        memory, num_stored, num_full = self._memory, 0, 0
        if memory is None:
            return StoreOutcome(0)
        for block_hash, block in zip(reversed(hashes), blocks[::-1], strict=True):
            with self._lock:
                if self._places.touch(block_hash):
                    continue
                placed = self._places.reserve(block_hash)
                if placed is not None and placed.evicted is not None:
                    self._index.discard(placed.evicted)
                    self._num_evicted += 1
            if placed is None:
                num_full += 1
                continue
            memory[placed.place] = block
            with self._lock:
                self._places.publish(block_hash)
                self._index.add(block_hash)
            num_stored += 1
        if num_full:
            return StoreOutcome(num_stored, StoreFailure(StoreReason.FULL, "all of its blocks are being read"))
        return StoreOutcome(num_stored)

    def maintain(self) -> None:
        """Nothing to do."""

    def num_evicted(self) -> int:
        return self._num_evicted

    def close(self) -> None:
        self._memory = None
        self._index.replace(())

    def check_integrity(self) -> None:
        with self._lock:
            self._places.check_integrity()
            assert len(self._index) == len(self._places), "the index and the tier differ"
