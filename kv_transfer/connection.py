"""Authenticated, framed TCP connections on asyncio: the edge around `kv_transfer.wire`.

One `Connection` per socket, used from its own event loop only. Frames arrive through a callback (no task per
frame); `closed` resolves once, whatever ended the connection. A peer that does not read is cut off when
`max_send_buffer_bytes` of unsent data have piled up, so that nobody's memory or step loop waits for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, cast

from kv_transfer.wire import NONCE_BYTES, ClientHandshake, FrameBuffer, Hello, ServerHandshake, WireError, frame

HANDSHAKE_TIMEOUT_S = 5.0
MAX_SEND_BUFFER_BYTES = 64 << 20
# Before a peer has proved itself it may send no more than a handshake needs.
_MAX_HANDSHAKE_FRAME_BYTES = 4096


class Connection(asyncio.Protocol):
    """One framed connection. Set `on_frame` before yielding to the event loop after the handshake."""

    def __init__(self, on_open: Callable[[Connection], None] | None = None) -> None:
        self.on_frame: Callable[[bytes], None] | None = None
        self._on_open = on_open
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.peer: Hello | None = None
        self._transport: asyncio.Transport | None = None
        self._frames = FrameBuffer(_MAX_HANDSHAKE_FRAME_BYTES)
        self._early: list[bytes] = []
        self._arrived = asyncio.Event()
        self._reason = "closed by peer"

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
        """Send what is queued, then close."""
        if self._transport is not None and not self._transport.is_closing():
            self._reason = reason
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once, dropping what is queued."""
        if self._transport is not None:
            self._reason = reason
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
        for payload in payloads:
            if self.on_frame is None:
                self._early.append(payload)
            else:
                self.on_frame(payload)
        self._arrived.set()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(f"{self._reason}: {error}" if error else self._reason)
        self._arrived.set()

    def start(self, on_frame: Callable[[bytes], None]) -> None:
        """Deliver frames to `on_frame` from now on, first those that came with the handshake's last packet."""
        self.on_frame = on_frame
        early, self._early = self._early, []
        for payload in early:
            on_frame(payload)

    def authenticated(self) -> None:
        """The peer has proved itself: lift the handshake's frame limit."""
        self._frames.raise_limit()

    async def next_handshake_frame(self) -> bytes:
        while not self._early:
            if self.closed.done():
                raise WireError(f"connection ended during the handshake: {self.closed.result()}")
            self._arrived.clear()
            await self._arrived.wait()
        return self._early.pop(0)


async def connect(
    host: str, port: int, *, secret: bytes, role: str, name: str, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> Connection:
    """Open a connection and prove both ends. Raises OSError, TimeoutError or WireError."""
    loop = asyncio.get_running_loop()
    connection: Connection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(Connection, host, port)
            handshake = ClientHandshake(secret, os.urandom(NONCE_BYTES), role, name)
            connection.send(handshake.answer(await connection.next_handshake_frame()))
            handshake.verify(await connection.next_handshake_frame())
    except BaseException:
        if connection is not None:
            connection.abort("handshake failed")
        raise
    connection.authenticated()
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

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port."""

        def begin(connection: Connection) -> None:
            task = asyncio.get_running_loop().create_task(self._handshake(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

        self._server = await asyncio.get_running_loop().create_server(lambda: Connection(begin), host, port)
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
        connection.authenticated()
        connection.send(proof)
        self._connections.add(connection)
        connection.closed.add_done_callback(lambda _: self._connections.discard(connection))
        self._on_connection(connection)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._handshakes):
            task.cancel()
        for connection in list(self._connections):
            connection.close("server closed")
