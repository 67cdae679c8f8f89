"""Blocking sockets between ranks: proved at both ends, every wait bounded, and a server with a thread per client.

The data planes use this instead of `kv_transfer.connection`, whose event loop would cost them half the throughput.
The handshake is the same (`kv_transfer.wire`); its `role` names the service, so that a proof for one service is
none for another. What a client may cost a server, whatever it sends or does not send: a slot of `max_connections`
and its thread, for HANDSHAKE_TIMEOUT_S until it has proved itself, and then for what `serve` allows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kv_transfer.pulls import join
from kv_transfer.transport import Endpoint, FailureReason, TransferError, check_block_sizes
from kv_transfer.wire import MAX_HANDSHAKE_FRAME_BYTES, NONCE_BYTES, ClientHandshake, ServerHandshake, WireError, frame

_log = logging.getLogger(__name__)
T = TypeVar("T")

HANDSHAKE_TIMEOUT_S = 5.0
MAX_WAIT_S = 3600.0
"""In one call; the kernel takes no endless deadline."""
PROTOCOL_VERSION = 1
"""Of what follows the handshake, in all services."""
# How long the server rests when the process is out of descriptors.
_ACCEPT_PAUSE_S = 0.1
_LENGTH_BYTES = 4


class Welcome(msgspec.Struct, frozen=True):
    """Server → client, right behind the handshake: which pool this is."""

    version: int
    instance: bytes
    """New for every start of a transport: a restarted peer is not the one that was asked for."""
    num_blocks: int
    block_size_bytes: int


def decode_address(endpoint: Endpoint, kind: type[T]) -> T:
    """Raises TransferError (`incompatible`) for an address of another kind."""
    try:
        return msgspec.msgpack.decode(endpoint.address, type=kind)
    except msgspec.DecodeError as error:
        raise TransferError(FailureReason.INCOMPATIBLE, f"the peer's {endpoint.transport} address: {error}") from None


def receive_exactly(sock: socket.socket, num_bytes: int, deadline: float) -> bytearray:
    """Raises TimeoutError at `deadline` (monotonic), ConnectionError if the peer ends before."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        _set_deadline(sock, deadline)
        received = sock.recv_into(view)
        if not received:
            raise ConnectionResetError("the peer closed the connection")
        view = view[received:]
    return data


def receive_frame(sock: socket.socket, max_bytes: int, deadline: float) -> bytes:
    """One frame's payload. Raises WireError for a longer one, and as `receive_exactly`."""
    length = int.from_bytes(receive_exactly(sock, _LENGTH_BYTES, deadline), "little")
    if length > max_bytes:
        raise WireError(f"peer announced a frame of {length} bytes, the limit is {max_bytes}")
    return bytes(receive_exactly(sock, length, deadline))


def send_frame(sock: socket.socket, payload: bytes, deadline: float) -> None:
    """Raises TimeoutError at `deadline`, OSError if the peer has gone."""
    _set_deadline(sock, deadline)
    sock.sendall(frame(payload))


def _set_deadline(sock: socket.socket, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("out of time")
    sock.settimeout(min(remaining, MAX_WAIT_S))


def shut(sock: socket.socket) -> None:
    """Wake whoever waits on it, and let nothing pass any more. Its descriptor stays its owner's to close."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def enter(sock: socket.socket, secret: bytes, role: str, expected: Welcome, deadline: float) -> Welcome:
    """The client's part on a connected socket: prove both ends, and see that it is the pool that is meant.

    Raises TransferError: `no_route`, `timeout`, `incompatible`, `epoch_mismatch`.
    """
    try:
        handshake = ClientHandshake(secret, os.urandom(NONCE_BYTES), role, str(os.getpid()))
        send_frame(sock, handshake.answer(receive_frame(sock, MAX_HANDSHAKE_FRAME_BYTES, deadline)), deadline)
        handshake.verify(receive_frame(sock, MAX_HANDSHAKE_FRAME_BYTES, deadline))
        welcome = msgspec.msgpack.decode(receive_frame(sock, MAX_HANDSHAKE_FRAME_BYTES, deadline), type=Welcome)
    except TimeoutError:
        raise TransferError(FailureReason.TIMEOUT, "the peer accepted the connection and does not answer") from None
    except OSError as error:
        raise TransferError(
            FailureReason.NO_ROUTE,
            f"the peer ended the handshake ({error}): it has another cluster secret, or all the connections it takes",
        ) from None
    except (WireError, msgspec.DecodeError) as error:
        raise TransferError(FailureReason.INCOMPATIBLE, str(error)) from None
    if welcome.version != expected.version:
        raise TransferError(
            FailureReason.INCOMPATIBLE, f"the peer speaks version {welcome.version}, this process {expected.version}"
        )
    if welcome.instance != expected.instance:
        raise TransferError(FailureReason.EPOCH_MISMATCH, "the peer was restarted since its endpoint was told")
    check_block_sizes(expected.block_size_bytes, welcome.block_size_bytes)
    return welcome


class SocketServer:
    """Accepts on `listener`, which it owns, and calls `serve` for each proved client, on that client's thread.

    `serve` may raise OSError, WireError or msgspec.DecodeError to end the connection, and must bound its waits.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        role: str,
        welcome: Welcome,
        serve: Callable[[socket.socket], None],
        *,
        max_connections: int,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._role = role
        self._welcome = msgspec.msgpack.encode(welcome)
        self._serve = serve
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, threading.Thread] = {}
        """Open connections and their threads; guarded by the lock."""
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name=f"{role}-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    _log.warning("%s cannot accept a connection: %s", self._role, error)
                    self._closing.wait(_ACCEPT_PAUSE_S)
                continue
            with self._lock:
                if self._closing.is_set() or len(self._clients) >= self._max_connections:
                    sock.close()
                    continue
                thread = threading.Thread(target=self._attend, args=(sock,), name=f"{self._role}-serve", daemon=True)
                self._clients[sock] = thread
            try:
                thread.start()
            except RuntimeError as error:
                _log.warning("%s cannot serve a connection: %s", self._role, error)
                with self._lock:
                    sock.close()
                    del self._clients[sock]

    def _attend(self, sock: socket.socket) -> None:
        try:
            deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
            handshake = ServerHandshake(self._secret, os.urandom(NONCE_BYTES))
            send_frame(sock, handshake.challenge(), deadline)
            hello, proof = handshake.accept(receive_frame(sock, MAX_HANDSHAKE_FRAME_BYTES, deadline))
            if hello.role != self._role:
                raise WireError(f"a client for {hello.role!r} came to {self._role!r}")
            send_frame(sock, proof, deadline)
            send_frame(sock, self._welcome, deadline)
            self._serve(sock)
        except (OSError, WireError, msgspec.DecodeError, RecursionError) as error:
            if not self._closing.is_set():
                _log.debug("%s: connection ended: %s", self._role, error)
        finally:
            with self._lock:
                sock.close()
                del self._clients[sock]

    def close(self, deadline: float) -> None:
        """Stop listening, end every connection, and wait for the threads. Idempotent."""
        self._closing.set()
        # Wakes `accept`, which closing the descriptor does not.
        shut(self._listener)
        join(self._acceptor, deadline)
        self._listener.close()
        with self._lock:
            clients = list(self._clients.values())
            for sock in self._clients:
                shut(sock)
        for thread in clients:
            join(thread, deadline)
