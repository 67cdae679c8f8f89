"""Loads within a step, layer by layer: a thread reads a layer while the ones before it are computed.

The step waits before each layer until that layer of all blocks has been filled (`wait_for_layer`), and when it is done
it hears which blocks have not (`finish_step`); no longer than `timeout_s` all in all. **Fence**: the thread reads into
memory of its own, and copies into the pool under the job's lock, only while the job is not over. So after `finish_step`
nothing is written for that step, also if the disk hangs; in that case no more loads are begun until it answers.

Where the pool is a mirror of a device's, the first layer waits for all: blocks are brought to the device as a whole,
once every layer of them has been read.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

import numpy as np

from kv_transfer.block_store import StoreFailure, StoreReason
from kv_transfer.connector import ConnectorStats, RequestKey
from kv_transfer.file_store import FileStore
from kv_transfer.geometry import Geometry
from kv_transfer.known_blocks import KnownBlocks
from kv_transfer.memory import KvMemory
from kv_transfer.open_block import OpenBlock
from kv_transfer.store_loads import LoadCounts, Post
from kv_transfer.store_scheduler import LoadBlocks

_log = logging.getLogger(__name__)

# Files that are open at a time; the blocks beyond are read as a whole, before the first layer is needed.
MAX_NUM_OPEN = 256


class _Job:
    """The loads of one step."""

    def __init__(self, orders: Sequence[LoadBlocks], num_layers: int, deadline: float) -> None:
        self.orders = orders
        self.hashes = [block_hash for order in orders for block_hash in order.hashes]
        self.blocks = np.concatenate([order.blocks for order in orders]).tolist()
        self.num_layers = num_layers
        self.deadline = deadline
        self.began_at = time.monotonic()
        self.changed = threading.Condition()
        """Over the fields below, and held while blocks are written."""
        self.num_filled = 0
        """Layers that are where the runner computes, of all blocks that have not failed."""
        self.failures: dict[int, StoreFailure] = {}
        """By index of the block."""
        self.is_over = False
        self.is_read = False
        """The thread has done with it; under the lock of its owner."""

    def fill(self, index: int, where: slice, content: np.ndarray, memory: KvMemory) -> None:
        with self.changed:
            if not self.is_over:
                memory.blocks[self.blocks[index], where] = content

    def advance(self, num_layers: int, memory: KvMemory) -> None:
        """So many layers have been filled."""
        with self.changed:
            if memory.is_mirror:
                if num_layers < self.num_layers:
                    return
                # None, once the job is over: then all that was not complete has failed.
                filled = [block for index, block in enumerate(self.blocks) if index not in self.failures]
                memory.to_device(np.array(filled, np.int32))
            self.num_filled = num_layers
            self.changed.notify_all()

    def end(self, failure: StoreFailure | None = None) -> None:
        """`failure`: of all blocks that are not complete."""
        with self.changed:
            if not self.is_over and failure is not None and self.num_filled < self.num_layers:
                for index in range(len(self.blocks)):
                    self.failures.setdefault(index, failure)
            self.is_over = True
            self.changed.notify_all()

    def wait(self, num_layers: int) -> bool:
        """False if that took too long, and was given up."""
        with self.changed:
            left = self.deadline - time.monotonic()
            self.changed.wait_for(lambda: self.is_over or self.num_filled >= num_layers, max(left, 0.0))
            has_come = self.is_over or self.num_filled >= num_layers
        if not has_come:
            self.end(StoreFailure(StoreReason.TIMEOUT, "the blocks have not been read in time"))
        return has_come


class LayeredLoads:
    """`StoreLoads` that take place within their request's first step."""

    def __init__(self, geometry: Geometry, store: FileStore, index: KnownBlocks, timeout_s: float) -> None:
        self._geometry = geometry
        self._store = store
        self._index = index
        self._timeout_s = timeout_s
        self._memory: KvMemory | None = None
        self._job: _Job | None = None
        """Of the present step."""
        self._lock = threading.Lock()
        self._counts = LoadCounts()
        self._is_closed = False
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-store-read", daemon=True)

    def start(self, memory: KvMemory, post: Post) -> None:
        """Nothing is posted: the step itself ends its loads."""
        self._memory = memory
        self._thread.start()

    def begin(self, orders: Sequence[LoadBlocks]) -> None:
        job = self._job = _Job(orders, self._geometry.num_layers, time.monotonic() + self._timeout_s)
        if self._is_closed:
            job.end(StoreFailure(StoreReason.ENDED, "this rank closes its connector"))
        else:
            self._queue.put(job)

    def drop(self, key: RequestKey) -> None:
        """The step that its load belongs to ends it."""

    def wait_for_layer(self, layer: int) -> None:
        if self._job is not None:
            self._wait(self._job, layer + 1)

    def finish_step(self, *, was_computed: bool) -> frozenset[int]:
        job, self._job = self._job, None
        if job is None:
            return frozenset()
        if was_computed:
            self._wait(job, job.num_layers)
            self._count(job)
        job.end(StoreFailure(StoreReason.ENDED, "the step has ended before"))
        return frozenset(job.blocks[index] for index in job.failures)

    def add_to(self, stats: ConnectorStats) -> None:
        with self._lock:
            self._counts.add_to(stats)
        if self._store.num_corrupt:
            stats.store_failures[StoreReason.CORRUPT] = self._store.num_corrupt

    def close(self, timeout_s: float) -> None:
        self._is_closed = True
        if (job := self._job) is not None:
            job.end(StoreFailure(StoreReason.ENDED, "this rank closes its connector"))
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # ---- inside ----

    def _wait(self, job: _Job, num_layers: int) -> None:
        if not job.wait(num_layers):
            with self._lock:
                # Else it would be left alone for good.
                if not job.is_read:
                    self._index.suspend(True)

    def _count(self, job: _Job) -> None:
        seconds, first = time.monotonic() - job.began_at, 0
        with self._lock:
            for order in job.orders:
                failures = [job.failures[i] for i in range(first, first + len(order.hashes)) if i in job.failures]
                first += len(order.hashes)
                num_bytes = (len(order.hashes) - len(failures)) * self._geometry.block_size_bytes
                self._counts.ended(seconds, num_bytes, failures[0] if failures else None)

    # ---- its thread ----

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._read(job)
            except Exception as error:
                _log.exception("A KV store has failed in an unforeseen way")
                job.end(StoreFailure(StoreReason.ERROR, repr(error)))
            with self._lock:
                job.is_read = True
                self._index.suspend(False)
            del job

    def _read(self, job: _Job) -> None:
        opened: dict[int, OpenBlock] = {}
        assert self._memory is not None
        try:
            for index, block_hash in enumerate(job.hashes):
                if job.is_over:
                    return
                if len(opened) == MAX_NUM_OPEN:
                    self._read_whole(job, index)
                elif isinstance(found := self._store.open(block_hash), StoreFailure):
                    self._fail(job, index, found)
                else:
                    opened[index] = found
            for layer in range(job.num_layers):
                self._read_layer(job, layer, opened)
                job.advance(layer + 1, self._memory)
        finally:
            for block in opened.values():
                block.close()

    def _read_layer(self, job: _Job, layer: int, opened: dict[int, OpenBlock]) -> None:
        size = self._geometry.layer_size_bytes
        content = np.empty(size, np.uint8)
        assert self._memory is not None
        for index, block in list(opened.items()):
            if job.is_over:
                return
            failure = block.read_layer(layer, content)
            if failure is None:
                job.fill(index, slice(layer * size, (layer + 1) * size), content, self._memory)
            else:
                opened.pop(index).close()
                if failure.reason is StoreReason.CORRUPT:
                    self._store.discard(job.hashes[index], failure.message)
                self._fail(job, index, failure)

    def _read_whole(self, job: _Job, index: int) -> None:
        content = np.empty((1, self._geometry.block_size_bytes), np.uint8)
        assert self._memory is not None
        outcome = self._store.get(job.hashes[index : index + 1], content)
        if outcome.failure is None:
            job.fill(index, slice(None), content[0], self._memory)
        else:
            self._fail(job, index, outcome.failure)

    def _fail(self, job: _Job, index: int, failure: StoreFailure) -> None:
        with job.changed:
            if not job.is_over:
                job.failures[index] = failure
