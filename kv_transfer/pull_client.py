"""The reader's side of the control plane: one connection per peer engine, and the way to that engine's pool.

Runs on the event loop of the thread `kv-io`. A link connects when it is first needed, once for all who wait. After a
failure it does not try again for a short, growing time, during which everybody who needs it fails at once with the
same reason. While leases are held through it, it heartbeats them, and connects anew for that if it must.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from kv_transfer.kv_messages import (
    MAX_IDS,
    BadMessageError,
    Gone,
    Heard,
    Heartbeat,
    Ready,
    Release,
    Reply,
    Request,
    decode_from_holder,
    encode,
)
from kv_transfer.pull_handshake import Address, Identity, OpenLink, open_link
from kv_transfer.transport import FailureReason, KvTransport, Peer, TransferError

_log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
MIN_HEARTBEAT_S = 0.01
# For how long a connection that nobody uses is kept.
IDLE_S = 300.0


class Holder(Protocol):
    """Who holds a lease through a link, and is told about it."""

    lease_id: int
    reads_ahead: bool
    """Another keeps the lease alive, or nobody does."""

    def on_ready(self, num_ready_tokens: int) -> None: ...

    def on_failed(self, error: TransferError) -> None:
        """The lease is gone, or the connection."""
        ...


class PeerLink:
    """The way to one engine."""

    def __init__(self, address: Address, identity: Identity) -> None:
        self._address = address
        self._identity = identity
        self._holders: set[Holder] = set()
        self._open: OpenLink | None = None
        self._attempt: asyncio.Task[None] | None = None
        """Under way while there is no connection."""
        self._beats: asyncio.Task[None] | None = None
        """Runs while there are holders."""
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._next_ref = 1
        self._unreleased: set[int] = set()
        """Leases to be released as soon as the attempt succeeds."""
        self._failure: TransferError | None = None
        """Of the last attempt, until one succeeds."""
        self._num_failures = 0
        self._retry_at = 0.0
        self._unreachable = FailureReason.NO_ROUTE
        """What it means if there is no connection to be had."""
        self._loss = FailureReason.PEER_LOST
        """What it means when the connection ends."""
        self._used_at = 0.0
        self.num_late_messages = 0

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def is_done(self) -> bool:
        """Nobody needs it, nor what it remembers of failures."""
        if self._holders or self._unreleased or self._attempt is not None:
            return False
        return _now() >= (self._retry_at if self._open is None else self._used_at + IDLE_S)

    def lane(self) -> tuple[KvTransport, Peer]:
        """How the engine's pool is read. Raises TransferError (`peer_lost`) if the link is not open."""
        if self._open is None:
            raise TransferError(FailureReason.PEER_LOST, f"no connection to {self._address}")
        return self._open.transport, self._open.peer

    # ---- holders ----

    def hold(self, holder: Holder) -> None:
        """Heartbeat its lease from now on, unless it reads ahead."""
        self._holders.add(holder)
        if self._beats is None:
            self._beats = asyncio.get_running_loop().create_task(self._heartbeat())

    def let_go(self, holder: Holder, *, releases: bool) -> None:
        """`releases`: the lease has not been ended by a confirmation. If its engine cannot be told, it expires."""
        self._holders.discard(holder)
        self._used_at = _now()
        if releases and not self._send(Release(holder.lease_id)) and self._begin() is not None:
            self._unreleased.add(holder.lease_id)
        if not self._holders and self._beats is not None:
            self._beats.cancel()
            self._beats = None

    # ---- messages ----

    def _send(self, message: Request) -> bool:
        return self._open is not None and self._open.connection.send(encode(message))

    async def call(self, make: Callable[[int], Request]) -> Reply:
        """Raises TransferError: `peer_lost`, or `timeout` after connect_timeout_s."""
        ref, timeout_s = self._next_ref, self._identity.settings.connect_timeout_s
        self._next_ref += 1
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[ref] = reply
        try:
            if not self._send(make(ref)):
                raise TransferError(FailureReason.PEER_LOST, f"no connection to {self._address}")
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            message = f"{self._address} did not answer within {timeout_s:g} s"
            raise TransferError(FailureReason.TIMEOUT, message) from None
        finally:
            del self._calls[ref]

    # ---- the connection ----

    async def open(self) -> None:
        """Return when it is open. Raises TransferError."""
        if self._open is not None:
            return
        attempt = self._begin()
        if attempt is None:
            assert self._failure is not None
            told = f"{self._failure.message} (tried again in {max(self._retry_at - _now(), 0.0):.1f} s)"
            raise TransferError(self._failure.reason, told)
        await asyncio.wait([attempt])
        if self._open is None:
            raise self._failure or TransferError(FailureReason.PEER_LOST, f"{self._address} was lost at once")

    async def close(self) -> None:
        tasks = [task for task in (self._attempt, self._beats) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._open is not None:
            connection = self._open.connection
            connection.close("this rank needs it no more")
            await asyncio.wait([connection.closed])

    def _begin(self) -> asyncio.Task[None] | None:
        """The attempt to connect that is under way; None: it is too early for another one, or it is open."""
        if self._attempt is None and self._open is None and _now() >= self._retry_at:
            self._attempt = asyncio.get_running_loop().create_task(self._connect())
        return self._attempt

    async def _connect(self) -> None:
        """Sets `_open`, or `_failure`."""
        try:
            opened = await open_link(self._address, self._identity, self._receive, self._unreachable)
        except TransferError as error:
            self._failure = error
            self._retry_at = _now() + min(FIRST_BACKOFF_S * 2**self._num_failures, MAX_BACKOFF_S)
            self._num_failures += 1
            _log.warning("No KV by tickets of %s: %s", self._address, str(error))
        else:
            self._failure, self._num_failures = None, 0
            self._unreachable = self._loss = FailureReason.PEER_LOST
            self._open = opened
            # (At once, if it is closed already.)
            opened.connection.closed.add_done_callback(self._lost)
            for lease_id in self._unreleased:
                self._send(Release(lease_id))
        finally:
            self._attempt = None
            self._unreleased.clear()

    def _lost(self, closed: asyncio.Future[str]) -> None:
        """Whoever reads, or waits for an answer, fails; who only holds a lease stays."""
        assert self._open is not None
        self._open.peer.close()
        self._open = None
        error = TransferError(self._loss, f"{self._address}: {closed.result()}")
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)
        for holder in list(self._holders):
            holder.on_failed(error)

    def _receive(self, payload: bytes) -> None:
        if self._open is None:
            self.num_late_messages += 1  # nothing has been asked for yet
            return
        try:
            message = decode_from_holder(payload)
        except BadMessageError as error:
            self._open.connection.abort(f"it sent {error}")
            return
        if isinstance(message, Ready | Gone):
            self._notice(message)
            return
        reply = self._calls.get(message.ref)
        if reply is None or reply.done():
            self.num_late_messages += 1
        else:
            reply.set_result(message)

    def _notice(self, notice: Ready | Gone) -> None:
        told = [holder for holder in self._holders if holder.lease_id == notice.lease_id]
        self.num_late_messages += not told
        for holder in told:
            if isinstance(notice, Ready):
                holder.on_ready(notice.num_ready_tokens)
            else:
                holder.on_failed(TransferError(FailureReason.LEASE_EXPIRED, notice.message))

    # ---- heartbeats ----

    async def _heartbeat(self) -> None:
        """As long as leases are held: extend them, and learn which are gone."""
        while True:
            interval_s = self._identity.settings.heartbeat_s
            try:
                await self.open()
                ids = sorted({holder.lease_id for holder in self._holders if not holder.reads_ahead})
                for start in range(0, len(ids), MAX_IDS):
                    await self._beat(ids[start : start + MAX_IDS])
            except TransferError as error:
                _log.debug("No heartbeat: %s", str(error))
                if self._open is not None:
                    self._loss = error.reason
                    self._open.connection.abort(f"silent: {error.message}")
            if self._open is not None:
                interval_s = min(interval_s, self._open.lease_s / 6)
            await asyncio.sleep(max(interval_s, MIN_HEARTBEAT_S))

    async def _beat(self, lease_ids: list[int]) -> None:
        heard = await self.call(lambda ref: Heartbeat(ref, lease_ids))
        if isinstance(heard, Heard) and heard.gone:
            gone = set(heard.gone)
            error = TransferError(FailureReason.LEASE_EXPIRED, f"{self._address} does not hold it any more")
            for holder in [holder for holder in self._holders if holder.lease_id in gone]:
                holder.on_failed(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
