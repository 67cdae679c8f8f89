"""Which blocks a store holds, as far as this rank knows: written by the store, read by the scheduler half."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from kv_transfer.connector import RequestKey


class KnownBlocks:
    """A `BlockIndex`. May be used from any thread; its lock is held for dictionary look-ups only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[bytes] = set()
        self._storing: Counter[bytes] = Counter()
        """Blocks on their way into the store: whoever needs one does better to wait for it."""
        self._is_suspended = False

    # ---- BlockIndex ----

    def may_hold(self) -> bool:
        return bool(self._held or self._storing) and not self._is_suspended

    def num_leading(self, key: RequestKey, hashes: Sequence[bytes]) -> int | None:
        with self._lock:
            if self._is_suspended:
                return 0
            for count, block_hash in enumerate(hashes):
                if block_hash not in self._held:
                    return None if block_hash in self._storing else count
        return len(hashes)

    def holds(self, block_hash: bytes) -> bool:
        with self._lock:
            return block_hash in self._held or block_hash in self._storing

    def forget(self, key: RequestKey) -> None:
        """Nothing is kept by request."""

    def begin_storing(self, hashes: Sequence[bytes]) -> None:
        with self._lock:
            self._storing.update(hashes)

    def end_storing(self, hashes: Sequence[bytes]) -> None:
        with self._lock:
            for block_hash in hashes:
                if self._storing[block_hash] > 1:
                    self._storing[block_hash] -= 1
                else:
                    del self._storing[block_hash]

    # ---- the store ----

    def add(self, block_hash: bytes) -> None:
        with self._lock:
            self._held.add(block_hash)

    def discard(self, block_hash: bytes) -> None:
        with self._lock:
            self._held.discard(block_hash)

    def replace(self, hashes: Iterable[bytes]) -> None:
        held = set(hashes)
        with self._lock:
            self._held = held

    def suspend(self, is_suspended: bool) -> None:
        """While it is, nothing is to be loaded: the store does not answer."""
        self._is_suspended = is_suspended

    def __len__(self) -> int:
        return len(self._held)
