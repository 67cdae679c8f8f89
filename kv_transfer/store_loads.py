"""Asynchronous loads out of a store: one thread reads, and every load ends by its deadline, also if the store hangs.

**Fence**: the thread reads into memory of its own, and copies from there into the pool under the load's lock, only
while the load has not ended. So once `LoadFinished` has been posted nothing is written for it any more, and what it
counts as loaded is where the runner computes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from kv_transfer.block_store import BlockStore, StoreFailure, StoreReason
from kv_transfer.connector import ConnectorEvent, ConnectorStats, LoadFinished, RequestKey
from kv_transfer.deadlines import Deadlines
from kv_transfer.geometry import Geometry
from kv_transfer.memory import KvMemory
from kv_transfer.params import LOAD_SECONDS_BOUNDS
from kv_transfer.store_scheduler import LoadBlocks

_log = logging.getLogger(__name__)

Post = Callable[[ConnectorEvent], None]


class StoreLoads(Protocol):
    """How a store connector's worker half loads. Called by the step's thread, but `add_to` and `close`."""

    def start(self, memory: KvMemory, post: Post) -> None: ...
    def begin(self, orders: Sequence[LoadBlocks]) -> None:
        """Those of one plan. Returns at once."""
        ...

    def drop(self, key: RequestKey) -> None: ...
    def wait_for_layer(self, layer: int) -> None: ...
    def finish_step(self, *, was_computed: bool) -> frozenset[int]:
        """See `WorkerConnector.finish_step`."""
        ...

    def add_to(self, stats: ConnectorStats) -> None: ...
    def close(self, timeout_s: float) -> None:
        """End everything. Idempotent. Nothing is written into the pool after it."""
        ...


@dataclass(slots=True)
class LoadCounts:
    """What became of loads; touched under the owner's lock."""

    num_loads: int = 0
    num_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    seconds: list[int] = field(default_factory=lambda: [0] * (len(LOAD_SECONDS_BOUNDS) + 1))
    seconds_sum: float = 0.0

    def ended(self, seconds: float, num_bytes: int, failure: StoreFailure | None) -> None:
        self.num_bytes += num_bytes
        if failure is None:
            self.num_loads += 1
            self.seconds[bisect_left(LOAD_SECONDS_BOUNDS, seconds)] += 1
            self.seconds_sum += seconds
        elif failure.reason is not StoreReason.ENDED:
            self.failures[failure.reason] = self.failures.get(failure.reason, 0) + 1

    def add_to(self, stats: ConnectorStats) -> None:
        stats.num_loads += self.num_loads
        stats.num_loaded_bytes += self.num_bytes
        for reason, count in self.failures.items():
            stats.load_failures[reason] = stats.load_failures.get(reason, 0) + count
        for place, count in enumerate(self.seconds):
            stats.load_seconds[place] += count
        stats.load_seconds_sum += self.seconds_sum


class _Load:
    def __init__(self, order: LoadBlocks, geometry: Geometry) -> None:
        self.order = order
        self.lock = threading.Lock()
        """Over the fields below, and held while blocks are written."""
        self.has_ended = False
        self.num_loaded = 0
        self.deadline = 0
        self.began_at = time.monotonic()
        self._block_size = geometry.block_size

    @property
    def num_valid_tokens(self) -> int:
        order = self.order
        return min(order.num_local_tokens + self.num_loaded * self._block_size, order.num_tokens)


class AsyncLoads:
    """`StoreLoads` that take place while their requests wait."""

    def __init__(self, geometry: Geometry, store: BlockStore, deadlines: Deadlines, timeout_s: float) -> None:
        self._geometry = geometry
        self._store = store
        self._deadlines = deadlines
        self._timeout_s = timeout_s
        self._memory: KvMemory | None = None
        self._post: Post | None = None
        self._lock = threading.Lock()
        """Over the fields below; never held while a load's lock is waited for."""
        self._live: dict[RequestKey, _Load] = {}
        self._counts = LoadCounts()
        self._is_closed = False
        self._queue: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-store-load", daemon=True)

    def start(self, memory: KvMemory, post: Post) -> None:
        self._memory, self._post = memory, post
        self._thread.start()

    def begin(self, orders: Sequence[LoadBlocks]) -> None:
        for order in orders:
            load = _Load(order, self._geometry)
            with self._lock:
                is_closed = self._is_closed
                if not is_closed:
                    self._live[order.key] = load
            if is_closed:
                self._end(load, StoreFailure(StoreReason.ENDED, "this rank closes its connector"))
                continue
            message = f"the blocks have not been read within {self._timeout_s:g} s"
            late = partial(self._end, load, StoreFailure(StoreReason.TIMEOUT, message))
            load.deadline = self._deadlines.call_in(self._timeout_s, late)
            self._queue.put(load)

    def drop(self, key: RequestKey) -> None:
        load = self._live.get(key)
        if load is not None:
            self._end(load, StoreFailure(StoreReason.ENDED, "its request has ended"))

    def wait_for_layer(self, layer: int) -> None:
        """Nothing is loaded within a step."""

    def finish_step(self, *, was_computed: bool) -> frozenset[int]:
        return frozenset()

    def add_to(self, stats: ConnectorStats) -> None:
        with self._lock:
            self._counts.add_to(stats)

    def close(self, timeout_s: float) -> None:
        with self._lock:
            self._is_closed = True
        for load in list(self._live.values()):
            self._end(load, StoreFailure(StoreReason.ENDED, "this rank closes its connector"))
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # ---- inside ----

    def _end(self, load: _Load, failure: StoreFailure | None) -> None:
        """Once; whoever comes later finds that it has ended."""
        with load.lock:
            if load.has_ended:
                return
            load.has_ended = True
        self._deadlines.call_off(load.deadline)
        with self._lock:
            if self._live.get(load.order.key) is load:
                del self._live[load.order.key]
            num_bytes = load.num_loaded * self._geometry.block_size_bytes
            self._counts.ended(time.monotonic() - load.began_at, num_bytes, failure)
        assert self._post is not None
        if failure is None:
            self._post(LoadFinished(load.order.key))
        else:
            cause = f"{failure.reason}: {failure.message}"
            self._post(LoadFinished(load.order.key, load.num_valid_tokens, cause))

    # ---- its thread ----

    def _run(self) -> None:
        buffer = np.empty((self._store.num_blocks_per_call, self._geometry.block_size_bytes), np.uint8)
        while (load := self._queue.get()) is not None:
            failure: StoreFailure | None = None
            try:
                failure = self._read(load, buffer)
            except Exception as error:
                _log.exception("A KV store has failed in an unforeseen way")
                failure = StoreFailure(StoreReason.ERROR, repr(error))
            self._end(load, failure)
            del load

    def _read(self, load: _Load, buffer: np.ndarray) -> StoreFailure | None:
        order = load.order
        assert self._memory is not None
        for first in range(0, len(order.hashes), len(buffer)):
            if load.has_ended:
                return None
            hashes = order.hashes[first : first + len(buffer)]
            outcome = self._store.get(hashes, buffer[: len(hashes)])
            count = outcome.num_blocks
            with load.lock:
                if load.has_ended:
                    return None
                blocks = order.blocks[first : first + count]
                self._memory.blocks[blocks] = buffer[:count]
                self._memory.to_device(blocks)
                load.num_loaded += count
            if count < len(hashes):
                return outcome.failure or StoreFailure(StoreReason.MISSING, "the store has lost a block of them")
        return None
