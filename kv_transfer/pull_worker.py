"""The moving half of the `PullConnector`: one thread, `kv-io`, with an event loop, for leases and loads.

The step's thread only hands orders over, in order, and never waits for the loop. Two of its calls have a meaning of
their own for whoever reads this rank's blocks: `handle_preemptions` makes void leases impossible to confirm **before
it returns**, since whatever follows may write into their blocks (see `leases` why no wrong token can come of it); and
`finish_step` says which tokens are complete. If a step was not computed, what was to be complete then never will be.

After `close` has returned nothing is posted; before, every load and every kept request has had its event.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np

from kv_transfer.connector import ConnectorContext, ConnectorEvent, ConnectorStats, LoadFinished, SendFinished
from kv_transfer.lanes import Lanes
from kv_transfer.memory import KvMemory
from kv_transfer.pull_handshake import Identity
from kv_transfer.pull_loads import PullLoads
from kv_transfer.pull_orders import (
    AbandonLease,
    AdvanceLease,
    CompleteLease,
    DropTicket,
    HoldTicket,
    LoadBlocks,
    OpenLease,
    Order,
    ProlongLease,
    PullMetadata,
    ReadyLease,
    RejectParams,
    ShowBlocks,
    VoidLease,
)
from kv_transfer.pull_pushes import Pushes
from kv_transfer.pull_server import PullServer
from kv_transfer.pull_settings import PullSettings
from kv_transfer.transport import BlockIds, TransferError

_log = logging.getLogger(__name__)

# For the control plane to listen.
_START_TIMEOUT_S = 10.0
# For the transports to end after a start that has failed.
_FAILED_START_TIMEOUT_S = 2.0
# Of an event loop, from an aborted connection to its closed socket, and some more.
_NUM_ROUNDS_TO_CLOSE = 5


class PullWorker:
    """The worker half of one rank."""

    def __init__(
        self,
        context: ConnectorContext,
        settings: PullSettings,
        lanes: Lanes,
        on_listening: Callable[[int], None],
    ) -> None:
        """`on_listening` is told the port, within `start`."""
        self._context = context
        self._settings = settings
        self._lanes = lanes
        self._on_listening = on_listening
        self._lock = threading.Lock()
        """Over whether, and what, may still be handed to the loop and posted."""
        self._is_closing = False
        self._is_closed = False
        self._memory: KvMemory | None = None
        self._receiver: Callable[[ConnectorEvent], None] | None = None
        self._num_rejected_params = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        """None before `start`; run by `_thread`."""
        self._thread: threading.Thread | None = None
        self._executor = ThreadPoolExecutor(4, thread_name_prefix="kv-connect")
        identity = Identity(
            engine_id=context.engine_id,
            geometry=context.geometry,
            secret=context.secret,
            settings=settings,
            lanes=lanes,
            executor=self._executor,
        )
        self._loads = PullLoads(identity, self._post)
        # On all ranks: one that only consumes hands on what it has when it leaves.
        self._server = PullServer(
            engine_id=context.engine_id,
            geometry=context.geometry,
            secret=context.secret,
            lease_s=settings.lease_s,
            greeting_timeout_s=settings.connect_timeout_s,
            post=self._post,
            pushes=Pushes(lanes.push_transport(), context.geometry.block_size) if settings.pushes else None,
        )

    def start(self, memory: KvMemory, post: Callable[[ConnectorEvent], None]) -> None:
        self._context.geometry.check_pool(memory.block_size_bytes)
        self._memory = memory
        self._receiver = post
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(loop,), name="kv-io", daemon=True)
        self._thread.start()
        try:
            self._loads.memory = memory
            self._lanes.start(memory, self._context.host)
            asyncio.run_coroutine_threadsafe(self._start(), loop).result(_START_TIMEOUT_S)
        except BaseException as error:
            self.close(_FAILED_START_TIMEOUT_S)
            if isinstance(error, TransferError):
                raise OSError(f"KV cannot be transferred: {error.message}") from error
            raise

    async def _start(self) -> None:
        self._loads.start()
        config, host = self._context.config, self._context.host
        try:
            port = await self._server.start(host, config.kv_port, self._lanes.endpoints)
        except OSError as error:
            raise OSError(
                error.errno, f"the KV connector cannot listen on {host}:{config.kv_port} (kv_ip, kv_port): {error}"
            ) from error
        self._on_listening(port)

    # ---- the step's thread ----

    def handle_preemptions(self, metadata: object) -> None:
        for order in cast(PullMetadata, metadata):
            if isinstance(order, VoidLease):
                self._server.refuse_at_once(order.lease_id)

    def start_load_kv(self, metadata: object) -> None:
        orders = cast(PullMetadata, metadata)
        self._show([order.block_ids.ravel() for order in orders if isinstance(order, ReadyLease)])
        if self._on_loop(self._obey, orders):
            return
        for order in orders:
            if isinstance(order, LoadBlocks):
                self._post(LoadFinished(order.key, order.num_local_tokens, "ended: this rank closes its connector"))
            elif isinstance(order, CompleteLease):
                self._post(SendFinished(order.key))

    def wait_for_layer_load(self, layer: int) -> None:
        """Nothing is loaded within a step."""

    def save_kv_layer(self, layer: int) -> None:
        """Nothing is sent within a step: what it has computed is, or is read, when it has ended."""

    def finish_step(self, metadata: object | None, *, was_computed: bool) -> frozenset[int]:
        shown, orders = [], []
        for order in cast(PullMetadata, metadata or ()):
            if isinstance(order, ShowBlocks):
                shown.append(order.block_ids[:, order.first_column :].ravel())
            elif isinstance(order, AdvanceLease):
                orders.append(order)
        if was_computed:
            self._show(shown)
        if orders:
            self._on_loop(self._advance, orders, was_computed)
        return frozenset()

    def _show(self, shown: Sequence[BlockIds]) -> None:
        """Bring these blocks to where others may read them."""
        if shown and self._memory is not None:
            fresh = np.concatenate(shown)
            self._memory.to_host(fresh[fresh != 0])

    def _on_loop(self, call: Callable[..., None], *args: object) -> bool:
        """Have it called there, after all that was given before; False if this half is being closed."""
        with self._lock:
            if self._is_closing or self._loop is None:
                return False
            self._loop.call_soon_threadsafe(call, *args)
            return True

    # ---- any thread ----

    def stats(self) -> ConnectorStats:
        stats = ConnectorStats()
        self._loads.add_to(stats)
        stats.num_leases, stats.num_expired_leases = self._server.num_leases, self._server.num_expired
        stats.num_rejected_params = self._num_rejected_params
        return stats

    def close(self, timeout_s: float) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            self._lanes.close(timeout_s)
            return
        try:
            asyncio.run_coroutine_threadsafe(self._begin_close(), loop).result()
            # The loop goes on meanwhile, and takes what the transports tell.
            self._lanes.close(timeout_s)
            asyncio.run_coroutine_threadsafe(self._end_close(), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            self._executor.shutdown()
            with self._lock:
                self._is_closed = True

    # ---- the loop's thread ----

    def _obey(self, orders: PullMetadata) -> None:
        for order in orders:
            self._obey_one(order)

    def _obey_one(self, order: Order) -> None:
        match order:
            case HoldTicket(key, ticket):
                self._loads.hold(key, ticket)
            case LoadBlocks():
                self._loads.begin(order)
            case DropTicket(key):
                self._loads.drop(key)
            case RejectParams(key, message):
                self._num_rejected_params += 1
                _log.warning("Request %s is served without remote KV: %s", key, message)
            case OpenLease(lease_id, key):
                self._server.open(lease_id, key)
            case ShowBlocks(lease_id, block_ids):
                self._server.show(lease_id, block_ids)
            case ReadyLease(lease_id, num_tokens, block_ids):
                self._server.show(lease_id, block_ids)
                self._server.advance(lease_id, num_tokens)
            case ProlongLease(key):
                self._server.prolong(key)
            case AbandonLease(key):
                self._server.abandon(key)
            case VoidLease(lease_id, why):
                self._server.void(lease_id, why)
            case CompleteLease(lease_id, key, num_tokens):
                self._server.complete(lease_id, key, num_tokens)

    def _advance(self, orders: Sequence[AdvanceLease], was_computed: bool) -> None:
        for order in orders:
            if was_computed:
                self._server.advance(order.lease_id, order.num_tokens)
            else:
                self._server.void(order.lease_id, "a step that was to compute its KV was not computed")

    async def _begin_close(self) -> None:
        self._loads.begin_close()
        await self._server.close()

    async def _end_close(self) -> None:
        await self._loads.close()
        # Connections that were accepted while the listener closed are closed when they are handed over.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:
            await asyncio.wait(rest, timeout=_START_TIMEOUT_S)
        for _ in range(_NUM_ROUNDS_TO_CLOSE):
            await asyncio.sleep(0)

    def _post(self, event: ConnectorEvent) -> None:
        with self._lock:
            if not self._is_closed and self._receiver is not None:
                self._receiver(event)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
