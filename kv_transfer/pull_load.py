"""One load: a held ticket, from its request's arrival until its KV is here and confirmed, or given up.

Runs on the event loop of the thread `kv-io`. `fetch` ends within the sum of its deadlines: `connect_timeout_s` to
reach the holder and for each of its two answers, `pull_s` for the transfers, and `lease_s` whenever the holder, who is
still computing, has nothing new to read. What has been read counts only once the holder has confirmed that the lease
was held all the time (see `leases`). By a partial ticket it reads ahead: the lease is neither heartbeated nor ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import numpy as np

from kv_transfer.connector import RequestKey
from kv_transfer.kv_messages import Acquire, Confirm, Confirmed, Denied, Granted, PushTo, Reply
from kv_transfer.pull_client import PeerLink
from kv_transfer.pull_handshake import Identity
from kv_transfer.pull_orders import LoadBlocks
from kv_transfer.ticket import Ticket
from kv_transfer.transport import BlockIds, FailureReason, PushTransport, TransferEnd, TransferError

_log = logging.getLogger(__name__)

T = TypeVar("T")

# How long beyond its own deadline a transport may take to tell a transfer's end.
GRACE_S = 2.0
# A prompt may be computed for long while its blocks come; what is too slow is decided here, by what is ready.
_MAX_RECEIVE_S = 3600.0


class EndedError(Exception):
    """Nobody wants the load any more: no failure."""


class Write:
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
        """Call it then, once; it is not fenced yet."""
        self._then = then


class Load:
    """What is known of one; a `Holder` of its link."""

    def __init__(self, key: RequestKey, ticket: Ticket, link: PeerLink, identity: Identity) -> None:
        self.key = key
        self.lease_id = ticket.remote_lease_id
        self.reads_ahead = ticket.is_partial
        self.link = link
        self.task: asyncio.Task[None] | None = None
        """None: its request is queued."""
        self.write: Write | None = None
        """The latest transfer."""
        self._ticket = ticket
        self._geometry = identity.geometry
        self._settings = identity.settings
        self._num_ready_tokens = 0
        self._progress = asyncio.Event()
        self._stopped: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._is_confirming = False

    def on_ready(self, num_ready_tokens: int) -> None:
        self._num_ready_tokens = max(self._num_ready_tokens, num_ready_tokens)
        self._progress.set()

    def on_failed(self, error: TransferError) -> None:
        if self._is_confirming and error.reason is FailureReason.LEASE_EXPIRED:
            return  # the answer to the confirmation decides, which itself ends the lease
        if self.task is not None or error.reason is FailureReason.LEASE_EXPIRED:
            self.stop(error)

    def stop(self, why: Exception) -> None:
        """`fetch` raises it, now or when it is called."""
        if not self._stopped.done():
            self._stopped.set_result(why)

    async def fetch(self, order: LoadBlocks) -> str:
        """Fetch all blocks and have that confirmed; returns the transport's name. Raises TransferError, EndedError."""
        await self._unless_stopped(self.link.open())
        transport, _ = self.link.lane()
        if order.misfit:
            raise TransferError(FailureReason.INCOMPATIBLE, order.misfit)
        if order.is_pushed and len(order.local_blocks):
            await self._receive(order)
        else:
            await self._pull(order)
        self._is_confirming = True
        num_tokens = self._ticket.num_tokens
        confirmed = await self._unless_stopped(
            self.link.call(lambda ref: Confirm(ref, self.lease_id, num_tokens, self.reads_ahead))
        )
        _checked(confirmed, Confirmed)
        return transport.name

    async def _acquire(self, push_to: PushTo | None = None) -> None:
        granted = await self._unless_stopped(
            self.link.call(lambda ref: Acquire(ref, self.lease_id, self.reads_ahead, push_to))
        )
        self.on_ready(_checked(granted, Granted).num_ready_tokens)

    async def _pull(self, order: LoadBlocks) -> None:
        """Fetch what is ready, until all is."""
        num_blocks = len(order.local_blocks)
        _, peer = self.link.lane()
        if num_blocks and int(order.remote_blocks.max()) >= peer.endpoint.num_blocks:
            told = f"the ticket names block {order.remote_blocks.max()} of {peer.endpoint.num_blocks}"
            raise TransferError(FailureReason.BACKEND, told)
        await self._acquire()
        num_done, left_s = 0, self._settings.pull_s(num_blocks * self._geometry.block_size_bytes)
        while num_done < num_blocks or self._num_ready_tokens < self._ticket.num_tokens:
            num_ready = int(np.searchsorted(order.complete_at, self._num_ready_tokens, side="right"))
            if num_ready == num_done:
                await self._until_progress()
                continue
            batch = slice(num_done, num_ready)
            left_s = await self._transfer(order.remote_blocks[batch], order.local_blocks[batch], left_s)
            num_done = num_ready

    async def _receive(self, order: LoadBlocks) -> None:
        """Say where the blocks go, and wait until the holder has sent all of them."""
        loop = asyncio.get_running_loop()
        transport, peer = self.link.lane()
        assert transport.caps.can_push
        granted: asyncio.Future[int] = loop.create_future()
        write = Write()
        try:
            transfer = cast(PushTransport, transport).receive(
                peer,
                order.local_blocks,
                _MAX_RECEIVE_S,
                lambda grant: _on_loop(loop, granted.set_result, grant),
                lambda end: _on_loop(loop, write.end, end),
            )
        except ValueError as error:
            raise TransferError(FailureReason.BACKEND, str(error)) from error
        self.write = write
        pull_s = self._settings.pull_s(len(order.local_blocks) * self._geometry.block_size_bytes)
        try:
            await self._until(granted, write.ended, pull_s, "the holder grants nothing")
            if granted.done():
                cells = order.remote_blocks.astype("<i4").tobytes()
                await self._acquire(PushTo(granted.result(), self._ticket.num_tokens, cells))
            while self._num_ready_tokens < self._ticket.num_tokens and not write.ended.done():
                await self._until_progress(write.ended)
            await self._until(write.ended, write.ended, pull_s, "not all blocks have come")
        finally:
            if not write.ended.done():
                transfer.cancel()
                await asyncio.wait([write.ended], timeout=GRACE_S)
        end = write.ended.result()
        if end.reason is not None:
            raise TransferError(end.reason, end.message)

    async def _until(
        self, first: asyncio.Future[Any], second: asyncio.Future[Any], timeout_s: float, otherwise: str
    ) -> None:
        """Wait for either. Raises what `stop` was called with, or TransferError (`timeout`)."""
        waited = {first, second, self._stopped}
        await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if first.done() or second.done():
            return
        if self._stopped.done():
            raise self._stopped.result()
        raise TransferError(FailureReason.TIMEOUT, f"{otherwise} within {timeout_s:g} s")

    async def _until_progress(self, ended: asyncio.Future[Any] | None = None) -> None:
        """Wait for more tokens to be ready, or until the transfer has `ended`."""
        self._progress.clear()
        lease_s = self._settings.lease_s
        progress = asyncio.ensure_future(self._progress.wait())
        told = f"{self._num_ready_tokens} of {self._ticket.num_tokens} tokens ready, and none more"
        try:
            await self._until(progress, ended or progress, lease_s, told)
        finally:
            progress.cancel()

    async def _transfer(self, remote_blocks: BlockIds, local_blocks: BlockIds, timeout_s: float) -> float:
        """Copy some blocks; returns what is left of `timeout_s`."""
        if self._stopped.done():
            raise self._stopped.result()
        loop = asyncio.get_running_loop()
        transport, peer = self.link.lane()
        started_at, write = loop.time(), Write()
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
        self.write = write
        waited: list[asyncio.Future[Any]] = [write.ended, self._stopped]
        await asyncio.wait(waited, timeout=timeout_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        if not write.ended.done():
            transfer.cancel()
            await asyncio.wait([write.ended], timeout=GRACE_S)
            if self._stopped.done():
                raise self._stopped.result()
        if not write.ended.done():
            raise TransferError(FailureReason.TIMEOUT, f"{transport.name} did not end a transfer of {timeout_s:g} s")
        end = write.ended.result()
        if end.reason is not None:
            raise TransferError(end.reason, end.message)
        return timeout_s - (loop.time() - started_at)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; raises what `stop` was called with if that comes first."""
        task = asyncio.ensure_future(work)
        waited: list[asyncio.Future[Any]] = [task, self._stopped]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise self._stopped.result()
        return task.result()


def _checked(reply: Reply, kind: type[T]) -> T:
    if isinstance(reply, Denied) and not reply.is_lost:
        raise TransferError(FailureReason.INCOMPATIBLE, reply.message)
    if isinstance(reply, Denied):
        raise TransferError(FailureReason.LEASE_EXPIRED, f"its lease is gone: {reply.message}")
    if not isinstance(reply, kind):
        raise TransferError(FailureReason.INCOMPATIBLE, f"the holder answered with {type(reply).__name__}")
    return reply


def _on_loop(loop: asyncio.AbstractEventLoop, then: Callable[..., None], *args: object) -> None:
    """From a thread of a transport's, which may outlive the loop if it could not be stopped in time."""
    try:
        loop.call_soon_threadsafe(then, *args)
    except RuntimeError:
        _log.warning("A transfer ended after its connector had been closed")
