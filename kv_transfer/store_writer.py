"""What is computed goes into the store: copied off the pool within the step's call, and written by a thread.

The copy is what lets the pool's blocks go at once: a plan that follows may give them to others, and writes into them
before it tells anybody. What is copied and not written yet is bounded; what does not fit is not stored. A store that is
in memory takes the blocks right away.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

from kv_transfer.block_store import BlockArray, BlockIndex, BlockStore, StoreFailure, StoreReason, finite_rows
from kv_transfer.connector import ConnectorStats
from kv_transfer.geometry import Geometry
from kv_transfer.memory import KvMemory
from kv_transfer.transport import BlockIds

_log = logging.getLogger(__name__)

MAINTENANCE_INTERVAL_S = 1.0


class StoreWriter:
    def __init__(
        self,
        geometry: Geometry,
        store: BlockStore,
        index: BlockIndex,
        max_staged_bytes: int,
        maintenance_interval_s: float = MAINTENANCE_INTERVAL_S,
    ) -> None:
        self._geometry = geometry
        self._store = store
        self._index = index
        self._max_num_staged = max_staged_bytes // geometry.block_size_bytes
        self._interval_s = maintenance_interval_s
        self._lock = threading.Lock()
        """Over the counts."""
        self._num_staged = 0
        self._num_stored = 0
        self._failures: dict[str, int] = {}
        self._is_closed = False
        self._queue: queue.SimpleQueue[tuple[Sequence[bytes], BlockArray] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not store.is_local:
            self._thread = threading.Thread(target=self._run, name="kv-store-write", daemon=True)

    def start(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def take(self, memory: KvMemory, blocks: BlockIds, hashes: Sequence[bytes]) -> None:
        """Called by the step's thread: when it returns, the pool's blocks are not needed any more."""
        if self._is_closed:
            return
        if not self._store.accepts:
            self._count(StoreReason.UNAVAILABLE, len(hashes))
            return
        if self._store.is_local:
            memory.to_host(blocks)
            step = self._store.num_blocks_per_call
            # The last first: of a prefix that does not fit, the beginning is worth more, and should be the newest.
            for first in reversed(range(0, len(hashes), step)):
                self._put(hashes[first : first + step], memory.blocks[blocks[first : first + step]])
            return
        with self._lock:
            count = min(len(hashes), max(self._max_num_staged - self._num_staged, 0))
            self._num_staged += count
        self._count(StoreReason.BACKLOG, len(hashes) - count)
        if count:
            memory.to_host(blocks[:count])
            self._index.begin_storing(hashes[:count])
            self._queue.put((hashes[:count], memory.blocks[blocks[:count]]))

    def add_to(self, stats: ConnectorStats) -> None:
        with self._lock:
            stats.num_stored_blocks += self._num_stored
            stats.num_stored_bytes += self._num_stored * self._geometry.block_size_bytes
            for reason, count in self._failures.items():
                stats.store_failures[reason] = stats.store_failures.get(reason, 0) + count
        stats.num_evicted_blocks += self._store.num_evicted()

    def close(self, timeout_s: float) -> None:
        """What is staged is still written, as far as the time goes. Idempotent."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)
        self._is_closed = True

    # ---- inside ----

    def _run(self) -> None:
        next_maintenance = time.monotonic() + self._interval_s
        while True:
            try:
                item = self._queue.get(timeout=max(next_maintenance - time.monotonic(), 0.0))
            except queue.Empty:
                self._maintain()
                next_maintenance = time.monotonic() + self._interval_s
                continue
            if item is None:
                return
            hashes, blocks = item
            try:
                step = self._store.num_blocks_per_call
                for first in reversed(range(0, len(hashes), step)):
                    if not self._is_closed:
                        self._put(hashes[first : first + step], blocks[first : first + step])
            finally:
                self._index.end_storing(hashes)
                with self._lock:
                    self._num_staged -= len(hashes)
            del item, blocks

    def _put(self, hashes: Sequence[bytes], blocks: BlockArray) -> None:
        finite = finite_rows(blocks, self._geometry.dtype)
        if not finite.all():
            self._count(StoreReason.NOT_FINITE, int((~finite).sum()))
            hashes = [block_hash for block_hash, is_finite in zip(hashes, finite.tolist(), strict=True) if is_finite]
            blocks = blocks[finite]
            if not hashes:
                return
        try:
            outcome = self._store.put(hashes, blocks)
            num_stored, failure = outcome.num_blocks, outcome.failure
        except Exception as error:
            _log.exception("A KV store has failed in an unforeseen way")
            num_stored, failure = 0, StoreFailure(StoreReason.ERROR, repr(error))
        with self._lock:
            self._num_stored += num_stored
        if failure is not None:
            self._count(failure.reason, len(hashes) - num_stored)

    def _maintain(self) -> None:
        try:
            self._store.maintain()
        except Exception:
            _log.exception("A KV store has failed in an unforeseen way")

    def _count(self, reason: StoreReason, num_blocks: int) -> None:
        if num_blocks:
            with self._lock:
                self._failures[reason] = self._failures.get(reason, 0) + num_blocks
