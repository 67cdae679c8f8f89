"""All loads of a rank, the links they share, and what they add up to.

Runs on the event loop of the thread `kv-io`; a task per load that has begun. Every `LoadBlocks` ends with exactly one
`LoadFinished`. Blocks that a transfer may still write into then are counted as quarantined, and followed by a
`LoadFenced`.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import threading
from collections.abc import Callable

from kv_transfer.connector import ConnectorEvent, ConnectorStats, LoadFenced, LoadFinished, RequestKey
from kv_transfer.memory import KvMemory
from kv_transfer.params import LOAD_SECONDS_BOUNDS
from kv_transfer.pull_client import PeerLink
from kv_transfer.pull_handshake import Address, Identity
from kv_transfer.pull_load import EndedError, Load, Write
from kv_transfer.pull_orders import LoadBlocks
from kv_transfer.ticket import Ticket
from kv_transfer.transport import FailureReason, TransferError

_log = logging.getLogger(__name__)

SWEEP_S = 1.0


class PullLoads:
    """Owns loads and links."""

    def __init__(self, identity: Identity, post: Callable[[ConnectorEvent], None]) -> None:
        self.memory: KvMemory | None = None
        """The pool that is loaded into; set before anything begins."""
        self._identity = identity
        self._post = post
        self._links: dict[Address, PeerLink] = {}
        self._loads: dict[RequestKey, Load] = {}
        self._unfenced: set[Write] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._is_closing = False
        self._stats = ConnectorStats()
        """Its fields about loads; under `_stats_lock`."""
        self._stats_lock = threading.Lock()

    def start(self) -> None:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def add_to(self, stats: ConnectorStats) -> None:
        """From any thread."""
        with self._stats_lock:
            ours = self._stats
            stats.num_loads, stats.num_loaded_bytes = ours.num_loads, ours.num_loaded_bytes
            stats.load_failures, stats.lanes = dict(ours.load_failures), dict(ours.lanes)
            stats.load_seconds, stats.load_seconds_sum = list(ours.load_seconds), ours.load_seconds_sum
            stats.num_quarantined_blocks = ours.num_quarantined_blocks

    # ---- orders ----

    def hold(self, key: RequestKey, ticket: Ticket) -> None:
        if self._is_closing or key in self._loads:
            return
        address = Address.of(ticket)
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = PeerLink(address, self._identity)
        load = self._loads[key] = Load(key, ticket, link, self._identity)
        link.hold(load)

    def begin(self, order: LoadBlocks) -> None:
        load = self._loads.get(order.key)
        if load is None:
            self._finish(order, f"{FailureReason.BACKEND}: no ticket is held for this request", None)
        elif load.task is None:
            load.task = asyncio.get_running_loop().create_task(self._run(load, order))

    def drop(self, key: RequestKey) -> None:
        load = self._loads.get(key)
        if load is None:
            return
        if load.task is None:
            del self._loads[key]
            load.link.let_go(load, releases=not load.reads_ahead)
        else:
            load.stop(EndedError("the request has ended"))

    def begin_close(self) -> None:
        """End all loads; those that are under way may need their transports to be closed."""
        self._is_closing = True
        for key, load in list(self._loads.items()):
            if load.task is None:
                self.drop(key)
            else:
                load.stop(EndedError("this rank closes its connector"))

    async def close(self) -> None:
        """After `begin_close` and the transports' end: nothing writes any more."""
        tasks = [load.task for load in self._loads.values() if load.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        for write in list(self._unfenced):
            write.fence()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))

    # ---- inside ----

    async def _run(self, load: Load, order: LoadBlocks) -> None:
        loop = asyncio.get_running_loop()
        started_at, cause, reason, lane = loop.time(), "", None, ""
        try:
            lane = await load.fetch(order)
            if self.memory is not None and self.memory.is_mirror:
                await loop.run_in_executor(self._identity.executor, self.memory.to_device, order.local_blocks)
        except TransferError as error:
            reason, cause = error.reason, str(error)
        except EndedError as error:
            cause = f"ended: {error}"
        except Exception as error:
            _log.exception("A KV load has failed")
            reason, cause = FailureReason.BACKEND, f"{FailureReason.BACKEND}: {error!r}"
        del self._loads[load.key]
        load.link.let_go(load, releases=bool(cause) and not load.reads_ahead)
        with self._stats_lock:
            if not cause:
                self._stats.num_loads += 1
                self._stats.num_loaded_bytes += len(order.local_blocks) * self._identity.geometry.block_size_bytes
                self._stats.lanes[lane] = self._stats.lanes.get(lane, 0) + 1
                seconds = loop.time() - started_at
                self._stats.load_seconds[bisect.bisect_left(LOAD_SECONDS_BOUNDS, seconds)] += 1
                self._stats.load_seconds_sum += seconds
            elif reason is not None:
                self._stats.load_failures[reason] = self._stats.load_failures.get(reason, 0) + 1
        self._finish(order, cause, load.write)

    def _finish(self, order: LoadBlocks, cause: str, write: Write | None) -> None:
        num_valid = order.num_local_tokens if cause else None
        if write is None or write.is_fenced:
            self._post(LoadFinished(order.key, num_valid, cause))
            return
        self._post(LoadFinished(order.key, num_valid, cause, is_fenced=False))
        unfenced, num_blocks = write, len(order.local_blocks)
        self._unfenced.add(unfenced)
        self._quarantine(num_blocks)

        def fenced() -> None:
            self._unfenced.discard(unfenced)
            self._quarantine(-num_blocks)
            self._post(LoadFenced(order.key))

        unfenced.when_fenced(fenced)

    def _quarantine(self, num_blocks: int) -> None:
        with self._stats_lock:
            self._stats.num_quarantined_blocks += num_blocks

    async def _sweep(self) -> None:
        """Close links that nobody has used for long, and forget those that are gone."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for address, link in list(self._links.items()):
                if link.is_done:
                    del self._links[address]
                    await link.close()
