"""Loads: each held ticket, from the request's arrival until its KV is here and confirmed, or given up.

Runs on the event loop of the thread `kv-io`; a task per load. Every `LoadBlocks` ends with exactly one `LoadFinished`,
within the sum of its deadlines: `connect_timeout_s` to reach the holder and for each of its two answers, `pull_s` for
the transfers, and `lease_s` whenever the holder, who is still computing, has nothing new to read. Blocks that a
transfer may still write into when its load ends are counted as quarantined, and followed by a `LoadFenced`.

What has been read counts only once the holder has confirmed that the lease was held all the time (see `leases`).
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from kv_transfer.connector import ConnectorEvent, ConnectorStats, LoadFenced, LoadFinished, RequestKey
from kv_transfer.kv_messages import Acquire, Confirm, Confirmed, Denied, Granted, Reply
from kv_transfer.params import LOAD_SECONDS_BOUNDS
from kv_transfer.pull_client import Identity, PeerLink
from kv_transfer.pull_scheduler import LoadBlocks
from kv_transfer.ticket import Ticket
from kv_transfer.transport import BlockIds, FailureReason, TransferEnd, TransferError

_log = logging.getLogger(__name__)

T = TypeVar("T")

# How long beyond its own deadline a transport may take to tell a transfer's end.
GRACE_S = 2.0
SWEEP_S = 1.0


class EndedError(Exception):
    """Nobody wants the load any more: no failure."""


class _Write:
    """A transfer into local blocks, until nothing can write into them any more."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[TransferEnd] = asyncio.get_running_loop().create_future()
        self.is_fenced = False
        self._then: Callable[[], None] | None = None

    def end(self, end: TransferEnd) -> None:
        if not self.ended.done():
            self.ended.set_result(end)
        if end.is_fenced:
            self.fence()

    def fence(self) -> None:
        self.is_fenced = True
        then, self._then = self._then, None
        if then is not None:
            then()

    def when_fenced(self, then: Callable[[], None]) -> None:
        self._then = then


class Load:
    """A ticket that is held; what its link tells it."""

    def __init__(self, key: RequestKey, ticket: Ticket, link: PeerLink) -> None:
        self.key = key
        self.lease_id = ticket.remote_lease_id
        self.ticket = ticket
        self.link = link
        self.task: asyncio.Task[None] | None = None
        """None: its request is queued."""
        self.num_ready_tokens = 0
        self.progress = asyncio.Event()
        self.stopped: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.is_confirming = False
        self.write: _Write | None = None
        """The latest transfer."""

    def on_ready(self, num_ready_tokens: int) -> None:
        self.num_ready_tokens = max(self.num_ready_tokens, num_ready_tokens)
        self.progress.set()

    def on_failed(self, error: TransferError) -> None:
        if self.is_confirming and error.reason is FailureReason.LEASE_EXPIRED:
            return  # the answer to the confirmation decides, which itself ends the lease
        if self.task is not None or error.reason is FailureReason.LEASE_EXPIRED:
            self.stop(error)

    def stop(self, why: Exception) -> None:
        if not self.stopped.done():
            self.stopped.set_result(why)

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; raises what `stop` was called with if that comes first."""
        task = asyncio.ensure_future(work)
        waited: list[asyncio.Future[Any]] = [task, self.stopped]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise self.stopped.result()
        return task.result()


class PullLoads:
    """All tickets of a rank, and its links."""

    def __init__(self, identity: Identity, post: Callable[[ConnectorEvent], None]) -> None:
        self._identity = identity
        self._post = post
        self._links: dict[tuple[str, str, int], PeerLink] = {}
        self._loads: dict[RequestKey, Load] = {}
        self._unfenced: set[_Write] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._is_closing = False
        self._stats = ConnectorStats()
        self._stats_lock = threading.Lock()

    def start(self) -> None:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def add_to(self, stats: ConnectorStats) -> None:
        """From any thread."""
        with self._stats_lock:
            ours = self._stats
            stats.num_loads, stats.num_loaded_bytes = ours.num_loads, ours.num_loaded_bytes
            stats.load_failures, stats.lanes = dict(ours.load_failures), dict(ours.lanes)
            stats.load_seconds = list(ours.load_seconds)
            stats.load_seconds_sum = ours.load_seconds_sum
            stats.num_quarantined_blocks = ours.num_quarantined_blocks

    # ---- orders ----

    def hold(self, key: RequestKey, ticket: Ticket) -> None:
        if self._is_closing or key in self._loads:
            return
        address = ticket.remote_engine_id, ticket.remote_host, ticket.remote_port
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = PeerLink(ticket, self._identity)
        load = self._loads[key] = Load(key, ticket, link)
        link.hold(load)

    def begin(self, order: LoadBlocks) -> None:
        load = self._loads.get(order.key)
        if load is None or load.task is not None:
            if load is None:
                self._finish(order, f"{FailureReason.BACKEND}: no ticket is held for this request")
            return
        load.task = asyncio.get_running_loop().create_task(self._run(load, order))

    def drop(self, key: RequestKey) -> None:
        load = self._loads.get(key)
        if load is None:
            return
        if load.task is None:
            del self._loads[key]
            load.link.let_go(load, releases=True)
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

    # ---- one load ----

    async def _run(self, load: Load, order: LoadBlocks) -> None:
        loop = asyncio.get_running_loop()
        started_at, cause, reason, lane = loop.time(), "", None, ""
        try:
            lane = await self._pull(load, order)
        except TransferError as error:
            reason, cause = error.reason, str(error)
        except EndedError as error:
            cause = f"ended: {error}"
        except Exception as error:
            _log.exception("A KV load has failed")
            reason, cause = FailureReason.BACKEND, f"{FailureReason.BACKEND}: {error!r}"
        del self._loads[load.key]
        load.link.let_go(load, releases=bool(cause))
        with self._stats_lock:
            if not cause:
                self._stats.num_loads += 1
                self._stats.num_loaded_bytes += len(order.local_blocks) * self._identity.geometry.block_size_bytes
                self._stats.lanes[lane] = self._stats.lanes.get(lane, 0) + 1
                took_s = loop.time() - started_at
                self._stats.load_seconds[bisect.bisect_left(LOAD_SECONDS_BOUNDS, took_s)] += 1
                self._stats.load_seconds_sum += took_s
            elif reason is not None:
                self._stats.load_failures[reason] = self._stats.load_failures.get(reason, 0) + 1
        self._finish(order, cause, load.write)

    def _finish(self, order: LoadBlocks, cause: str, write: _Write | None = None) -> None:
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

    async def _pull(self, load: Load, order: LoadBlocks) -> str:
        """Fetch all blocks and have that confirmed; returns the transport's name. Raises TransferError, EndedError."""
        link, ticket = load.link, load.ticket
        await load.unless_stopped(link.open())
        if ticket.fingerprint != self._identity.geometry.fingerprint():
            # Its holder would have been refused: this is another one's ticket, or a broken one.
            raise TransferError(FailureReason.INCOMPATIBLE, "the ticket is for another geometry than its engine's")
        if len(order.remote_blocks) and int(order.remote_blocks.max()) >= link.num_blocks:
            raise TransferError(
                FailureReason.BACKEND, f"the ticket names block {order.remote_blocks.max()} of {link.num_blocks}"
            )
        granted = await load.unless_stopped(link.call(lambda ref: Acquire(ref, load.lease_id)))
        load.on_ready(_checked(granted, Granted).num_ready_tokens)
        lane = "" if link.transport is None else link.transport.name
        num_done, left_s = 0, self._identity.settings.pull_s(
            len(order.local_blocks) * self._identity.geometry.block_size_bytes
        )  # fmt: skip
        while num_done < len(order.local_blocks) or load.num_ready_tokens < ticket.num_tokens:
            # All of them, once all tokens are ready; else those of which all tokens are.
            num_ready = int(np.searchsorted(order.complete_at, load.num_ready_tokens, side="right"))
            if num_ready == num_done:
                await self._progress(load)
                continue
            batch = slice(num_done, num_ready)
            left_s = await self._transfer(load, order.remote_blocks[batch], order.local_blocks[batch], left_s)
            num_done = num_ready
        load.is_confirming = True
        confirmed = await load.unless_stopped(link.call(lambda ref: Confirm(ref, load.lease_id, ticket.num_tokens)))
        _checked(confirmed, Confirmed)
        return lane

    async def _progress(self, load: Load) -> None:
        """Wait for more tokens to be ready."""
        load.progress.clear()
        lease_s = self._identity.settings.lease_s
        try:
            async with asyncio.timeout(lease_s):
                await load.unless_stopped(_wait(load.progress))
        except TimeoutError:
            raise TransferError(
                FailureReason.TIMEOUT,
                f"{load.num_ready_tokens} of {load.ticket.num_tokens} tokens ready, and none more for {lease_s:g} s",
            ) from None

    async def _transfer(self, load: Load, remote_blocks: BlockIds, local_blocks: BlockIds, timeout_s: float) -> float:
        """Copy some blocks; returns what is left of `timeout_s`."""
        loop = asyncio.get_running_loop()
        transport, peer = load.link.transport, load.link.peer
        if load.stopped.done():
            raise load.stopped.result()
        if transport is None or peer is None:
            raise TransferError(FailureReason.PEER_LOST, "the connection was lost")
        started_at = loop.time()
        write = _Write()
        try:
            transfer = transport.pull(
                peer,
                remote_blocks,
                local_blocks,
                max(timeout_s, 0.001),
                lambda end: _on_loop(loop, write.end, end),
                lambda: _on_loop(loop, write.fence),
            )
        except ValueError as error:
            raise TransferError(FailureReason.BACKEND, str(error)) from error
        load.write = write
        waited: list[asyncio.Future[Any]] = [write.ended, load.stopped]
        await asyncio.wait(waited, timeout=timeout_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        if not write.ended.done():
            transfer.cancel()
            await asyncio.wait([write.ended], timeout=GRACE_S)
            if load.stopped.done():
                raise load.stopped.result()
        if not write.ended.done():
            raise TransferError(FailureReason.TIMEOUT, f"{transport.name} did not end a transfer of {timeout_s:g} s")
        end = write.ended.result()
        if end.reason is not None:
            raise TransferError(end.reason, end.message)
        return timeout_s - (loop.time() - started_at)

    async def _sweep(self) -> None:
        """Close links that nobody has used for long, and forget those that are gone."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for address, link in list(self._links.items()):
                if link.is_done:
                    del self._links[address]
                    await link.close()


def _checked(reply: Reply, kind: type[T]) -> T:
    if isinstance(reply, Denied):
        raise TransferError(FailureReason.LEASE_EXPIRED, f"its lease is gone: {reply.message}")
    if not isinstance(reply, kind):
        raise TransferError(FailureReason.INCOMPATIBLE, f"the holder answered with {type(reply).__name__}")
    return reply


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def _on_loop(loop: asyncio.AbstractEventLoop, then: Callable[..., None], *args: object) -> None:
    """From a thread of a transport's, which may outlive the loop if it could not be stopped in time."""
    try:
        loop.call_soon_threadsafe(then, *args)
    except RuntimeError:
        _log.warning("A transfer ended after its connector had been closed")
