"""How a reader of KV gets through to a holder: connection, secret, who is who, geometry, and then a lane to its pool.

Each step is refused with a `TransferError` that says which end has what; nothing of a later one is looked at before.
Runs on the event loop of the thread `kv-io`; opening a lane, which blocks, in the executor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from kv_transfer.connection import Connection, connect
from kv_transfer.geometry import KV_PROTOCOL_VERSION, Geometry
from kv_transfer.kv_messages import (
    BadMessageError,
    Greeting,
    Rejection,
    Welcome,
    decode_answer,
    decode_version,
    encode,
)
from kv_transfer.lanes import Lanes
from kv_transfer.pull_server import ROLE
from kv_transfer.pull_settings import PullSettings
from kv_transfer.ticket import Ticket
from kv_transfer.transport import FailureReason, KvTransport, Peer, TransferError
from kv_transfer.transports import Lane
from kv_transfer.wire import WireError

_log = logging.getLogger(__name__)

_REASONS = {reason.value: reason for reason in FailureReason}


@dataclass(frozen=True, slots=True)
class Address:
    """A process, and where its control plane is."""

    engine_id: str
    host: str
    port: int

    @classmethod
    def of(cls, ticket: Ticket) -> Address:
        return cls(ticket.remote_engine_id, ticket.remote_host, ticket.remote_port)

    def __str__(self) -> str:
        return f"engine {self.engine_id} at {self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this rank is to its peers, and what it reaches them with."""

    engine_id: str
    geometry: Geometry
    secret: bytes
    settings: PullSettings
    lanes: Lanes
    executor: Executor
    """For calls of transports that block."""


@dataclass(frozen=True, slots=True)
class OpenLink:
    """A holder that has been reached. Whoever has it closes both."""

    connection: Connection
    """Its frames go to what `open_link` was given."""
    transport: KvTransport
    peer: Peer
    lease_s: float
    """The holder's."""


async def open_link(
    address: Address, identity: Identity, on_frame: Callable[[bytes], None], unreachable: FailureReason
) -> OpenLink:
    """Raises TransferError; as `unreachable` if there is no connection to be had."""
    settings = identity.settings
    deadline = asyncio.get_running_loop().time() + settings.connect_timeout_s
    connection: Connection | None = None
    try:
        connection = await connect(
            address.host,
            address.port,
            secret=identity.secret,
            role=ROLE,
            name=identity.engine_id,
            timeout_s=settings.connect_timeout_s,
        )
        async with asyncio.timeout_at(deadline):
            payload = await _greet(connection, address, identity, on_frame)
        if payload is None:
            raise TransferError(unreachable, f"{address}: {connection.closed.result()}")
        welcome = _check(payload, address, identity.geometry)
        transport, peer = await _open_lane(welcome, address, identity, max(deadline - _now(), 0.001))
        return OpenLink(connection, transport, peer, welcome.lease_s)
    except BaseException as error:
        if connection is not None:
            connection.abort("handshake failed")
        match error:
            case TransferError():
                raise
            case TimeoutError():
                message = f"{address} could not be reached within {settings.connect_timeout_s:g} s"
                raise TransferError(FailureReason.TIMEOUT, message) from error
            case OSError() | WireError():
                raise TransferError(unreachable, f"{address} cannot be reached: {error}") from error
            case BadMessageError():
                raise TransferError(FailureReason.INCOMPATIBLE, f"{address} sent {error}") from error
            case Exception():
                _log.exception("No way to %s", address)
                raise TransferError(FailureReason.BACKEND, f"{address} cannot be reached: {error!r}") from error
        raise


async def _greet(
    connection: Connection, address: Address, identity: Identity, on_frame: Callable[[bytes], None]
) -> bytes | None:
    """The answer to our greeting; None if there was none. What comes after it goes to `on_frame`."""
    answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    connection.start(lambda payload: on_frame(payload) if answered.done() else answered.set_result(payload))
    connection.send(encode(Greeting(KV_PROTOCOL_VERSION, address.engine_id, identity.geometry)))
    waited: list[asyncio.Future[Any]] = [answered, connection.closed]
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    return answered.result() if answered.done() else None


def _check(payload: bytes, address: Address, geometry: Geometry) -> Welcome:
    """The holder's welcome, if it is whom we want and has what we need. Raises TransferError, BadMessageError."""
    version = decode_version(payload)
    if version != KV_PROTOCOL_VERSION:
        message = f"protocol version {KV_PROTOCOL_VERSION} here and {version} at {address}"
        raise TransferError(FailureReason.INCOMPATIBLE, message)
    answer = decode_answer(payload)
    if isinstance(answer, Rejection):
        raise TransferError(_REASONS.get(answer.reason, FailureReason.BACKEND), f"{address} says: {answer.message}")
    if answer.engine_id != address.engine_id:
        raise TransferError(FailureReason.EPOCH_MISMATCH, f"{address} is {answer.engine_id} now")
    if differences := geometry.differences(answer.geometry):
        raise TransferError(FailureReason.INCOMPATIBLE, f"{address}: {differences}")
    return answer


async def _open_lane(
    welcome: Welcome, address: Address, identity: Identity, timeout_s: float
) -> tuple[KvTransport, Peer]:
    connecting = asyncio.get_running_loop().run_in_executor(
        identity.executor, identity.lanes.connect, welcome.endpoints, timeout_s
    )
    try:
        transport, peer, lane = await asyncio.shield(connecting)
    except asyncio.CancelledError:
        # The call goes on in its thread; what it opens is nobody's.
        connecting.add_done_callback(_close_unwanted)
        raise
    _log.info("KV of %s comes by %s (%s)", address, lane.transport, lane.reason)
    return transport, peer


def _close_unwanted(connecting: asyncio.Future[tuple[KvTransport, Peer, Lane]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[1].close()


def _now() -> float:
    return asyncio.get_running_loop().time()
