"""The moving half of the connectors that keep blocks by prefix hash in a store.

Its parts: `StoreLoads`, asynchronous (`store_loads`) or within the step (`layered_loads`), and `StoreWriter`, over one
`BlockStore`. The step's thread hands orders over and never waits for the store, but for the layers of loads that are
to be done within the step, and for those no longer than their deadline.

**What is stored is right**: blocks of a step that failed are not stored, nor those of a step in which a load within it
has lost blocks, nor those of the step after that, which may have been planned on top of it before that was known.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import cast

from kv_transfer.block_store import BlockIndex, BlockStore
from kv_transfer.connector import ConnectorEvent, ConnectorStats, SendFinished
from kv_transfer.deadlines import Deadlines
from kv_transfer.geometry import Geometry
from kv_transfer.memory import KvMemory
from kv_transfer.store_loads import StoreLoads
from kv_transfer.store_scheduler import DropLoad, LoadBlocks, StoreComputed, StoreKept, StoreMetadata
from kv_transfer.store_writer import StoreWriter

_log = logging.getLogger(__name__)

NUM_STEPS_PLANNED_AHEAD = 1
"""How many steps a scheduler may have planned already when it hears that one of them has lost blocks."""


class StoreWorker:
    """The worker half of one rank."""

    def __init__(
        self,
        geometry: Geometry,
        store: BlockStore,
        index: BlockIndex,
        loads: StoreLoads,
        writer: StoreWriter,
        deadlines: Deadlines,
    ) -> None:
        self._geometry = geometry
        self._store = store
        self._index = index
        self._loads = loads
        self._writer = writer
        self._deadlines = deadlines
        self._memory: KvMemory | None = None
        self._num_tainted_steps = 0
        self._lock = threading.Lock()
        """Over whether something may still be posted."""
        self._is_closed = False
        self._receiver: Callable[[ConnectorEvent], None] | None = None

    def start(self, memory: KvMemory, post: Callable[[ConnectorEvent], None]) -> None:
        self._geometry.check_pool(memory.block_size_bytes)
        self._memory, self._receiver = memory, post
        self._store.start()
        self._deadlines.start()
        self._loads.start(memory, self._post)
        self._writer.start()

    # ---- the step's thread ----

    def handle_preemptions(self, metadata: object) -> None:
        """Nobody reads the blocks of requests: what is stored is a copy."""

    def start_load_kv(self, metadata: object) -> None:
        assert self._memory is not None
        orders = cast(StoreMetadata, metadata)
        loads = [order for order in orders if isinstance(order, LoadBlocks)]
        if loads:
            self._loads.begin(loads)
        for order in orders:
            match order:
                case DropLoad(key):
                    self._loads.drop(key)
                case StoreKept(key, blocks, hashes):
                    self._writer.take(self._memory, blocks, hashes)
                    self._post(SendFinished(key))

    def wait_for_layer_load(self, layer: int) -> None:
        self._loads.wait_for_layer(layer)

    def save_kv_layer(self, layer: int) -> None:
        """Blocks are copied when the step is done, in `finish_step`: only then it is known that they are right."""

    def finish_step(self, metadata: object | None, *, was_computed: bool) -> frozenset[int]:
        invalid = self._loads.finish_step(was_computed=was_computed)
        if invalid:
            self._num_tainted_steps = 1 + NUM_STEPS_PLANNED_AHEAD
        is_right = was_computed and not self._num_tainted_steps
        self._num_tainted_steps = max(self._num_tainted_steps - 1, 0)
        if is_right and metadata is not None:
            assert self._memory is not None
            for order in cast(StoreMetadata, metadata):
                if isinstance(order, StoreComputed):
                    self._writer.take(self._memory, order.blocks, order.hashes)
        return invalid

    # ---- any thread ----

    def stats(self) -> ConnectorStats:
        stats = ConnectorStats()
        self._loads.add_to(stats)
        self._writer.add_to(stats)
        return stats

    def close(self, timeout_s: float) -> None:
        with self._lock:
            if self._is_closed:
                return
        deadline = time.monotonic() + timeout_s
        self._loads.close(timeout_s)
        self._writer.close(max(deadline - time.monotonic(), 0.0))
        self._store.close()
        self._deadlines.close(max(deadline - time.monotonic(), 0.1))
        with self._lock:
            self._is_closed = True

    def _post(self, event: ConnectorEvent) -> None:
        with self._lock:
            if not self._is_closed and self._receiver is not None:
                self._receiver(event)
