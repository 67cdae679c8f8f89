"""Authenticated, framed TCP connections on asyncio: the edge around `kv_transfer.wire`.

One `Connection` per socket, used from its own event loop only. Frames arrive through a callback (no task per
frame); `closed` resolves once, whatever ended the connection. A peer that does not read is cut off when
MAX_SEND_BUFFER_BYTES of unsent data have piled up, so that nobody's memory or step loop waits for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, cast

from kv_transfer.wire import NONCE_BYTES, ClientHandshake, FrameBuffer, Hello, ServerHandshake, WireError, frame

HANDSHAKE_TIMEOUT_S = 5.0
# How long a peer may take to read what is queued for it when its connection is closed.
CLOSE_TIMEOUT_S = 1.0
MAX_SEND_BUFFER_BYTES = 64 << 20
# What each side reads until the other has proved itself.
_NUM_SERVER_FRAMES = 2
_NUM_CLIENT_FRAMES = 1


class Connection(asyncio.Protocol):
    """One framed connection. Frames wait until `start`."""

    def __init__(self, num_handshake_frames: int, on_open: Callable[[Connection], None] | None = None) -> None:
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves with the reason. Shield it when awaiting it in a task that may be cancelled."""
        self.peer: Hello | None = None
        self._on_open = on_open
        self._on_frame: Callable[[bytes], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._frames = FrameBuffer(num_handshake_frames)
        self._undelivered: list[bytes] = []
        self._arrived = asyncio.Event()
        self._reason: str | None = None
        """Why this end has closed the connection; None as long as it has not."""
        self._close_timer: asyncio.TimerHandle | None = None

    @property
    def num_unsent_bytes(self) -> int:
        """What is queued for the peer and has not left this process."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, payload: bytes) -> bool:
        """Queue one frame. False if the connection is closed; never blocks, never raises for a dead peer."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        transport.write(frame(payload))
        if transport.get_write_buffer_size() > MAX_SEND_BUFFER_BYTES:
            self.abort(f"peer left more than {MAX_SEND_BUFFER_BYTES} bytes unread")
            return False
        return True

    def close(self, reason: str = "closed") -> None:
        """Send what is queued, then close. A peer that does not read it within CLOSE_TIMEOUT_S loses it."""
        if self._transport is not None and not self._transport.is_closing():
            self._reason = self._reason or reason
            self._transport.close()
            self._close_timer = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self, reason: str) -> None:
        """Close at once, dropping what is queued."""
        if self._transport is not None:
            self._reason = self._reason or reason
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports, which Ray's and Serve's processes use, have the methods but not the base class.
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._on_open is not None:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        try:
            payloads = self._frames.feed(data)
        except WireError as error:
            self.abort(str(error))
            return
        self._undelivered += payloads
        self._deliver()
        self._arrived.set()

    def connection_lost(self, error: Exception | None) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
        if not self.closed.done():
            reason = self._reason or "closed by peer"
            self.closed.set_result(f"{reason}: {error}" if error else reason)
        self._arrived.set()

    def start(self, on_frame: Callable[[bytes], None]) -> None:
        """Deliver frames to `on_frame` from now on, first those that came with the handshake's last packet."""
        self._on_frame = on_frame
        self._deliver()

    def _deliver(self) -> None:
        if self._on_frame is None:
            return
        payloads, self._undelivered = self._undelivered, []
        for payload in payloads:
            # Nothing is delivered after `close` or `abort`, not even what came in the same packet.
            if self._reason is None:
                self._on_frame(payload)

    async def next_handshake_frame(self) -> bytes:
        while not self._undelivered:
            if self.closed.done():
                raise WireError(f"connection ended during the handshake: {self.closed.result()}")
            self._arrived.clear()
            await self._arrived.wait()
        return self._undelivered.pop(0)


async def connect(
    host: str, port: int, *, secret: bytes, role: str, name: str, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> Connection:
    """Open a connection and prove both ends. Raises OSError, TimeoutError or WireError."""
    loop = asyncio.get_running_loop()
    connection: Connection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(lambda: Connection(_NUM_SERVER_FRAMES), host, port)
            handshake = ClientHandshake(secret, os.urandom(NONCE_BYTES), role, name)
            connection.send(handshake.answer(await connection.next_handshake_frame()))
            handshake.verify(await connection.next_handshake_frame())
    except BaseException:
        if connection is not None:
            connection.abort("handshake failed")
        raise
    return connection


class Listener:
    """Accepts authenticated connections and hands each to `on_connection` (on the event loop, once proved)."""

    def __init__(self, secret: bytes, on_connection: Callable[[Connection], None]) -> None:
        self._secret = secret
        self._on_connection = on_connection
        self._server: asyncio.Server | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self.num_refused = 0

    async def start(self, host: str, port: int = 0, *, sock: socket.socket | None = None) -> int:
        """Listen; returns the port. `sock`: a listening socket to take over instead of `host` and `port`."""

        def begin(connection: Connection) -> None:
            if self._server is None:
                connection.abort("server closed")
                return
            self._connections.add(connection)
            connection.closed.add_done_callback(lambda _: self._connections.discard(connection))
            task = asyncio.get_running_loop().create_task(self._handshake(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

        where: dict[str, Any] = {"host": host, "port": port} if sock is None else {"sock": sock}
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(_NUM_CLIENT_FRAMES, begin), start_serving=False, **where
        )
        await self._server.start_serving()
        bound: Any = self._server.sockets[0].getsockname()
        return int(bound[1])

    async def _handshake(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                handshake = ServerHandshake(self._secret, os.urandom(NONCE_BYTES))
                connection.send(handshake.challenge())
                connection.peer, proof = handshake.accept(await connection.next_handshake_frame())
        except (WireError, TimeoutError) as error:
            self.num_refused += 1
            connection.abort(f"handshake failed: {error}")
            return
        connection.send(proof)
        self._on_connection(connection)

    async def close(self) -> None:
        """Stop listening and close every connection, those in the handshake too; returns when all are closed."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._handshakes:
            task.cancel()
        for connection in self._connections:
            connection.close("server closed")
        if self._connections:
            await asyncio.wait([connection.closed for connection in self._connections])
