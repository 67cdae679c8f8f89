"""Pools of processes of one host: the peer's memory file is mapped, and a pull is a copy in memory.

The server sends a read-only descriptor of its memory file over an abstract Unix socket to clients that have proved
that they hold the cluster secret; then the connection ends. Nothing here has a name in a file system or in /dev/shm:
the socket's name goes with its server, the memory with the last process that maps it, however those end. So a pull
goes on, and gives the right data, when the owner has died or stands still.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable

import msgspec
import numpy as np

from kv_transfer.block_moves import Pool
from kv_transfer.copy_lane import CopyLane
from kv_transfer.host import host_id
from kv_transfer.memory import KvMemory
from kv_transfer.socket_server import PROTOCOL_VERSION, SocketServer, Welcome, decode_address, enter
from kv_transfer.transport import (
    BlockIds,
    Endpoint,
    FailureReason,
    OnEnd,
    Peer,
    Transfer,
    TransferError,
    TransportCaps,
    TransportStats,
)

ROLE = "kv-shm"
# A connection lasts for one handshake.
MAX_CONNECTIONS = 64
_BACKLOG = 64


class ShmAddress(msgspec.Struct, frozen=True):
    name: bytes
    """Of an abstract Unix socket, with the leading zero byte."""
    instance: bytes


class ShmTransport:
    """Threads: one that accepts, one per handshake; from the first pull on one that copies and one for deadlines."""

    name = "shm"
    caps = TransportCaps(cancel_is_fence=True, same_host=True)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._memory: KvMemory | None = None
        self._server: SocketServer | None = None
        self._lane = CopyLane(self.name)

    def start(self, memory: KvMemory, host: str) -> Endpoint:
        self._memory = memory
        address = ShmAddress(b"\0serried-kv-" + secrets.token_hex(16).encode(), secrets.token_bytes(16))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(address.name)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise TransferError(FailureReason.BACKEND, f"no abstract Unix socket can be had here: {error}") from None
        welcome = Welcome(PROTOCOL_VERSION, address.instance, memory.num_blocks, memory.block_size_bytes)
        self._server = SocketServer(
            listener, self._secret, ROLE, welcome, self._send_memory, max_connections=MAX_CONNECTIONS
        )
        return Endpoint(
            self.name, msgspec.msgpack.encode(address), memory.num_blocks, memory.block_size_bytes, host_id()
        )

    def _send_memory(self, sock: socket.socket) -> None:
        assert self._memory is not None
        # Opened anew, so that the client cannot map it for writing.
        read_only = os.open(f"/proc/self/fd/{self._memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            socket.send_fds(sock, [b"\0"], [read_only])
        finally:
            os.close(read_only)

    def connect(self, endpoint: Endpoint, timeout_s: float) -> Peer:
        assert self._memory is not None, "start() comes first"
        deadline = time.monotonic() + timeout_s
        address = decode_address(endpoint, ShmAddress)
        expected = Welcome(PROTOCOL_VERSION, address.instance, endpoint.num_blocks, self._memory.block_size_bytes)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            try:
                sock.connect(address.name)
            except TimeoutError:
                raise TransferError(FailureReason.TIMEOUT, "the peer does not accept connections") from None
            except OSError as error:
                raise TransferError(FailureReason.NO_ROUTE, f"no such peer on this host: {error}") from None
            welcome = enter(sock, self._secret, ROLE, expected, deadline)
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                _, descriptors, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except TimeoutError:
                raise TransferError(FailureReason.TIMEOUT, "the peer does not send its memory file") from None
            except OSError as error:
                raise TransferError(FailureReason.PEER_LOST, str(error)) from None
        if not descriptors:
            raise TransferError(FailureReason.PEER_LOST, "the peer closed the connection")
        try:
            blocks = _map(descriptors[0], welcome)
        finally:
            os.close(descriptors[0])
        return self._lane.make_peer(endpoint, blocks)

    def pull(
        self,
        peer: Peer,
        remote_blocks: BlockIds,
        local_blocks: BlockIds,
        timeout_s: float,
        on_end: OnEnd,
        on_fenced: Callable[[], None] | None = None,
    ) -> Transfer:
        assert self._memory is not None, "start() comes first"
        return self._lane.pull(peer, self._memory, remote_blocks, local_blocks, timeout_s, on_end)

    def stats(self) -> TransportStats:
        return self._lane.stats()

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if self._server is not None:
            self._server.close(deadline)
            # It refers to this object, and this one to the pool: without the cycle the mapping goes at once.
            self._server = None
        self._lane.close(deadline)


def _map(descriptor: int, welcome: Welcome) -> Pool:
    """A read-only view of the peer's pool. Raises TransferError if reading it could ever fail."""
    try:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            # Whoever reads behind the end of a file that has shrunk is killed by SIGBUS.
            raise TransferError(FailureReason.INCOMPATIBLE, "the peer's memory file may shrink: it is not sealed")
        size_bytes = welcome.num_blocks * welcome.block_size_bytes
        mapping = mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise TransferError(FailureReason.BACKEND, f"the peer's memory file cannot be mapped: {error}") from None
    return np.frombuffer(mapping, np.uint8).reshape(welcome.num_blocks, welcome.block_size_bytes)
