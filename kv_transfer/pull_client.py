"""The reader's side of the control plane: one connection per peer engine, and the way to that engine's pool.

Runs on the event loop of the thread `kv-io`. A link connects when it is first needed, once for all who wait. After a
failure it does not try again for a short, growing time, during which everybody who needs it fails at once with the
same reason. While leases are held through it, it heartbeats them, and connects anew for that if it must.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol

from kv_transfer.connection import Connection, connect
from kv_transfer.geometry import KV_PROTOCOL_VERSION, Geometry
from kv_transfer.kv_messages import (
    MAX_IDS,
    BadMessageError,
    Gone,
    Greeting,
    Heard,
    Heartbeat,
    Ready,
    Rejection,
    Release,
    Reply,
    Request,
    decode_answer,
    decode_from_holder,
    decode_version,
    encode,
)
from kv_transfer.lanes import Lanes
from kv_transfer.pull_server import ROLE
from kv_transfer.pull_settings import PullSettings
from kv_transfer.ticket import Ticket
from kv_transfer.transport import Endpoint, FailureReason, KvTransport, Peer, TransferError
from kv_transfer.transports import Lane
from kv_transfer.wire import WireError

_log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
MIN_HEARTBEAT_S = 0.01
# For how long a connection that nobody uses is kept.
IDLE_S = 300.0


class Holder(Protocol):
    """Who holds a lease through a link, and is told about it."""

    lease_id: int

    def on_ready(self, num_ready_tokens: int) -> None: ...

    def on_failed(self, error: TransferError) -> None:
        """The lease is gone, or the connection."""
        ...


class Identity:
    """What a rank's links have in common."""

    def __init__(
        self,
        engine_id: str,
        geometry: Geometry,
        secret: bytes,
        settings: PullSettings,
        lanes: Lanes,
        executor: Executor,
    ) -> None:
        self.engine_id = engine_id
        self.geometry = geometry
        self.secret = secret
        self.settings = settings
        self.lanes = lanes
        self.executor = executor
        """For calls of transports that block."""


class PeerLink:
    """The way to one engine."""

    def __init__(self, ticket: Ticket, identity: Identity) -> None:
        self.engine_id = ticket.remote_engine_id
        self._host = ticket.remote_host
        self._port = ticket.remote_port
        self._identity = identity
        self._holders: set[Holder] = set()
        self._connection: Connection | None = None
        self._attempt: asyncio.Task[None] | None = None
        self._beats: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._next_ref = 1
        self._unreleased: set[int] = set()
        """Leases to be released as soon as there is a connection."""
        self._failure: TransferError | None = None
        """Of the last attempt to connect, until one succeeds."""
        self._num_failures = 0
        self._retry_at = 0.0
        self._has_been_open = False
        self._used_at = 0.0
        self.transport: KvTransport | None = None
        self.peer: Peer | None = None
        """How its pool is read; both are set while the link is open."""
        self.num_blocks = 0
        self._lease_s = identity.settings.lease_s
        self.num_late_messages = 0

    @property
    def is_done(self) -> bool:
        """Nobody needs it, nor what it remembers of failures."""
        if self._holders or self._unreleased or self._attempt is not None:
            return False
        now = self._now()
        return now >= self._used_at + IDLE_S if self._connection is not None else now >= self._retry_at

    # ---- holders ----

    def hold(self, holder: Holder) -> None:
        """Heartbeat its lease from now on."""
        self._holders.add(holder)
        if self._beats is None:
            self._beats = asyncio.get_running_loop().create_task(self._heartbeat())

    def let_go(self, holder: Holder, *, releases: bool) -> None:
        self._holders.discard(holder)
        self._used_at = self._now()
        if releases and not self.send(Release(holder.lease_id)):
            self._unreleased.add(holder.lease_id)
            if self._begin() is None:
                self._unreleased.clear()  # too early to try again: they expire
        if not self._holders and self._beats is not None:
            self._beats.cancel()
            self._beats = None

    # ---- messages ----

    def send(self, message: Request) -> bool:
        return self._connection is not None and self._connection.send(encode(message))

    async def call(self, make: Callable[[int], Request]) -> Reply:
        """Raises TransferError: `peer_lost`, or `timeout` after connect_timeout_s."""
        ref, timeout_s = self._next_ref, self._identity.settings.connect_timeout_s
        self._next_ref += 1
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[ref] = reply
        try:
            if not self.send(make(ref)):
                raise TransferError(FailureReason.PEER_LOST, f"no connection to {self._name}")
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise TransferError(FailureReason.TIMEOUT, f"{self._name} did not answer within {timeout_s:g} s") from None
        finally:
            del self._calls[ref]

    async def open(self) -> None:
        """Return when it is open. Raises TransferError."""
        if self._connection is None:
            attempt = self._begin()
            if attempt is None:
                assert self._failure is not None
                wait_s = self._retry_at - self._now()
                raise TransferError(
                    self._failure.reason, f"{self._failure.message} (tried again in {max(wait_s, 0.0):.1f} s)"
                )
            await asyncio.wait([attempt])
            if self._connection is None:
                raise self._failure or TransferError(FailureReason.PEER_LOST, f"{self._name} was lost at once")

    async def close(self) -> None:
        tasks = [task for task in (self._attempt, self._beats) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._connection is not None:
            connection = self._connection
            connection.close("this rank closes its connector")
            await asyncio.wait([connection.closed])

    # ---- inside ----

    @property
    def _name(self) -> str:
        return f"engine {self.engine_id} at {self._host}:{self._port}"

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _begin(self) -> asyncio.Task[None] | None:
        """The attempt to connect that is under way; None: it is too early for another one, or there is no need."""
        if self._attempt is None and self._connection is None and self._now() >= self._retry_at:
            self._attempt = asyncio.get_running_loop().create_task(self._connect())
        return self._attempt

    async def _connect(self) -> None:
        """Sets `_connection`, or `_failure`."""
        try:
            await self._handshake()
        except TransferError as error:
            self._failure = error
            backoff_s = min(FIRST_BACKOFF_S * 2**self._num_failures, MAX_BACKOFF_S)
            self._retry_at = self._now() + backoff_s
            self._num_failures += 1
            self._unreleased.clear()  # they expire
            _log.warning("No KV by tickets of engine %s: %s", self.engine_id, str(error))
        else:
            self._failure, self._num_failures, self._retry_at = None, 0, 0.0
            for lease_id in self._unreleased:
                self.send(Release(lease_id))
            self._unreleased.clear()
        finally:
            self._attempt = None

    async def _handshake(self) -> None:
        identity, timeout_s = self._identity, self._identity.settings.connect_timeout_s
        deadline = self._now() + timeout_s
        connection: Connection | None = None
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        try:
            connection = await connect(
                self._host, self._port, secret=identity.secret, role=ROLE, name=identity.engine_id, timeout_s=timeout_s
            )
            opened = connection
            opened.start(lambda payload: self._receive(payload) if answered.done() else answered.set_result(payload))
            opened.send(encode(Greeting(KV_PROTOCOL_VERSION, self.engine_id, identity.geometry)))
            async with asyncio.timeout_at(deadline):
                waited: list[asyncio.Future[Any]] = [answered, opened.closed]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise TransferError(FailureReason.PEER_LOST, f"{self._name}: {opened.closed.result()}")
            endpoints = self._check(answered.result())
            self.transport, self.peer = await self._open_lane(endpoints, max(deadline - self._now(), 0.001))
            if opened.closed.done():
                raise TransferError(FailureReason.PEER_LOST, f"{self._name}: {opened.closed.result()}")
        except BaseException as error:
            if connection is not None:
                connection.abort("handshake failed")
            self._close_lane()
            if isinstance(error, Exception) and not isinstance(error, TransferError):
                raise self._told(error) from error
            raise
        self._connection, self._has_been_open = opened, True
        opened.closed.add_done_callback(self._lost)

    def _told(self, error: Exception) -> TransferError:
        """What a failed attempt means to those who wait for it."""
        lost = FailureReason.PEER_LOST if self._has_been_open else FailureReason.NO_ROUTE
        match error:
            case TimeoutError():
                timeout_s = self._identity.settings.connect_timeout_s
                return TransferError(FailureReason.TIMEOUT, f"{self._name} could not be reached within {timeout_s:g} s")
            case OSError() | WireError():
                return TransferError(lost, f"{self._name} cannot be reached: {error}")
            case BadMessageError():
                return TransferError(FailureReason.INCOMPATIBLE, f"{self._name} sent {error}")
        return TransferError(FailureReason.BACKEND, f"{self._name} cannot be reached: {error!r}")

    def _check(self, payload: bytes) -> list[Endpoint]:
        """The peer's endpoints, if it is whom we want and has what we need."""
        version = decode_version(payload)
        if version != KV_PROTOCOL_VERSION:
            raise TransferError(
                FailureReason.INCOMPATIBLE, f"protocol version {KV_PROTOCOL_VERSION} here and {version} at {self._name}"
            )
        answer = decode_answer(payload)
        if isinstance(answer, Rejection):
            reasons = {reason.value: reason for reason in FailureReason}
            reason = reasons.get(answer.reason, FailureReason.BACKEND)
            raise TransferError(reason, f"{self._name} says: {answer.message}")
        if answer.engine_id != self.engine_id:
            raise TransferError(FailureReason.EPOCH_MISMATCH, f"{self._name} is {answer.engine_id} now")
        if differences := self._identity.geometry.differences(answer.geometry):
            raise TransferError(FailureReason.INCOMPATIBLE, f"{self._name}: {differences}")
        self._lease_s = answer.lease_s
        return answer.endpoints

    async def _open_lane(self, endpoints: list[Endpoint], timeout_s: float) -> tuple[KvTransport, Peer]:
        identity = self._identity
        connecting = asyncio.get_running_loop().run_in_executor(
            identity.executor, identity.lanes.connect, endpoints, timeout_s
        )
        try:
            transport, peer, lane = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            # The call goes on in its thread; what it opens is nobody's.
            connecting.add_done_callback(_close_unwanted)
            raise
        self.num_blocks = peer.endpoint.num_blocks
        _log.info("KV of %s comes by %s (%s)", self._name, lane.transport, lane.reason)
        return transport, peer

    def _receive(self, payload: bytes) -> None:
        try:
            message = decode_from_holder(payload)
        except BadMessageError as error:
            assert self._connection is not None
            self._connection.abort(f"it sent {error}")
            return
        if isinstance(message, Ready | Gone):
            told = [holder for holder in self._holders if holder.lease_id == message.lease_id]
            self.num_late_messages += not told
            for holder in told:
                if isinstance(message, Ready):
                    holder.on_ready(message.num_ready_tokens)
                else:
                    holder.on_failed(TransferError(FailureReason.LEASE_EXPIRED, message.message))
            return
        reply = self._calls.get(message.ref)
        if reply is None or reply.done():
            self.num_late_messages += 1
        else:
            reply.set_result(message)

    def _lost(self, closed: asyncio.Future[str]) -> None:
        """Whoever reads, or waits for an answer, fails; who only holds a lease stays."""
        self._connection = None
        self._close_lane()
        error = TransferError(FailureReason.PEER_LOST, f"{self._name}: {closed.result()}")
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)
        for holder in list(self._holders):
            holder.on_failed(error)

    def _close_lane(self) -> None:
        if self.peer is not None:
            self.peer.close()
        self.transport = self.peer = None

    async def _heartbeat(self) -> None:
        """As long as leases are held: extend them, and learn which are gone."""
        while True:
            try:
                await self.open()
                ids = sorted({holder.lease_id for holder in self._holders})
                for start in range(0, len(ids), MAX_IDS):
                    await self._beat(ids[start : start + MAX_IDS])
            except TransferError as error:
                _log.debug("No heartbeat: %s", str(error))
                if self._connection is not None:
                    self._connection.abort(f"silent: {error.message}")
            await asyncio.sleep(max(min(self._identity.settings.heartbeat_s, self._lease_s / 6), MIN_HEARTBEAT_S))

    async def _beat(self, lease_ids: list[int]) -> None:
        heard = await self.call(lambda ref: Heartbeat(ref, lease_ids))
        if isinstance(heard, Heard) and heard.gone:
            gone = set(heard.gone)
            error = TransferError(FailureReason.LEASE_EXPIRED, f"{self._name} does not hold it any more")
            for holder in [holder for holder in self._holders if holder.lease_id in gone]:
                holder.on_failed(error)


def _close_unwanted(connecting: asyncio.Future[tuple[KvTransport, Peer, Lane]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[1].close()
