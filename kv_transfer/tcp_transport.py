"""Pools of any hosts, over TCP: no library, no copy besides the kernel's, blocking sockets with a thread each.

What is said is in `kv_transfer.tcp_requests`, the client's end in `kv_transfer.tcp_connections`, the sending of pushed
blocks in `kv_transfer.tcp_pushes`. Bytes of a pull or a receive that was given up can reach no other: its connection
is closed.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable

import msgspec
import numpy as np

from kv_transfer import block_moves
from kv_transfer.block_runs import check_block_ids, check_pairs
from kv_transfer.memory import KvMemory
from kv_transfer.pulls import Pulls, join
from kv_transfer.socket_server import (
    PROTOCOL_VERSION,
    SocketServer,
    Welcome,
    decode_address,
)
from kv_transfer.tcp_connections import SERVER_IDLE_S, Connections
from kv_transfer.tcp_peer import TcpPeer
from kv_transfer.tcp_pushes import Outboxes
from kv_transfer.tcp_requests import (
    IDS,
    ROLE,
    STATUS,
    PullRequest,
    PushRequest,
    Request,
    TcpAddress,
    decode_request,
    send_refusal,
)
from kv_transfer.tcp_stream import configure, set_timeout
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
from kv_transfer.wire import FrameBuffer, WireError

MAX_CONNECTIONS = 256
# However long a client says that it waits.
MAX_PULL_S = 3600.0
_BACKLOG = 128
_RECEIVE_BYTES = 64 << 10


class TcpTransport:
    """Threads: one that accepts and one per connection served; one per connection to a peer; one for deadlines."""

    name = "tcp"
    caps = TransportCaps(cancel_is_fence=True, same_host=False, can_push=True)

    def __init__(self, secret: bytes, port: int = 0) -> None:
        """`port` 0: any free one."""
        self._secret = secret
        self._port = port
        self._memory: KvMemory | None = None
        self._outboxes: Outboxes | None = None
        self._server: SocketServer | None = None
        self._pulls = Pulls(self.name)
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        """Of connections to peers; guarded by the lock, as what follows."""
        self._connections: weakref.WeakSet[Connections] = weakref.WeakSet()
        """Of all peers. They live as long as their threads do, which may be longer than the peer."""
        self._is_closed = False

    def start(self, memory: KvMemory, host: str) -> Endpoint:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, self._port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise TransferError(FailureReason.BACKEND, f"host {host!r}: {error}") from None
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            message = f"cannot listen on {host!r}, port {self._port}: {error}; give an address of this host's"
            raise TransferError(FailureReason.BACKEND, message) from None
        self._memory = memory
        # Receivers may wait for long, and whoever pulls must come in all the time: to those is left the other half.
        self._outboxes = Outboxes(memory, MAX_CONNECTIONS // 2)
        bound_host, port = listener.getsockname()[:2]
        instance = secrets.token_bytes(16)
        welcome = Welcome(PROTOCOL_VERSION, instance, memory.num_blocks, memory.block_size_bytes)
        self._server = SocketServer(listener, self._secret, ROLE, welcome, self._serve, max_connections=MAX_CONNECTIONS)
        encoded = msgspec.msgpack.encode(TcpAddress(bound_host, port, instance))
        return Endpoint(self.name, encoded, memory.num_blocks, memory.block_size_bytes)

    def _serve(self, sock: socket.socket) -> None:
        configure(sock)
        sock.settimeout(None)
        set_timeout(sock, socket.SO_RCVTIMEO, SERVER_IDLE_S)
        frames = FrameBuffer()
        while data := sock.recv(_RECEIVE_BYTES):
            for payload in frames.feed(data):
                self._answer(sock, decode_request(payload))

    def _answer(self, sock: socket.socket, request: Request) -> None:
        # Written so that it holds for NaN.
        if not request.timeout_s >= 0:
            raise WireError(f"the client waits for {request.timeout_s} s")
        deadline = time.monotonic() + min(request.timeout_s, MAX_PULL_S)
        match request:
            case PullRequest(blocks):
                self._send(sock, blocks, deadline)
            case PushRequest(num_blocks):
                assert self._outboxes is not None
                self._outboxes.serve(sock, num_blocks, deadline)

    def _send(self, sock: socket.socket, ids: bytes, deadline: float) -> None:
        assert self._memory is not None
        try:
            blocks = check_block_ids(np.frombuffer(ids, IDS), self._memory.num_blocks, "the peer's")
        except ValueError as error:
            send_refusal(sock, str(error), deadline)
            return
        block_moves.send(sock, STATUS.pack(0), self._memory.blocks, blocks, deadline)

    def connect(self, endpoint: Endpoint, timeout_s: float) -> Peer:
        assert self._memory is not None, "start() comes first"
        address = decode_address(endpoint, TcpAddress)
        peer = TcpPeer(endpoint, address, self._secret, self._memory, self._pulls, self._start_thread)
        with self._lock:
            if self._is_closed:
                raise TransferError(FailureReason.BACKEND, "the tcp transport is closed")
            self._connections.update(peer.connections)
        peer.connect(time.monotonic() + timeout_s)
        return peer

    def _start_thread(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="kv-tcp-pull", daemon=True)
        with self._lock:
            thread.start()
            self._threads.add(thread)

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
        assert isinstance(peer, TcpPeer)
        check_pairs(remote_blocks, local_blocks)
        local = check_block_ids(local_blocks, self._memory.num_blocks, "this rank's")
        pull = self._pulls.add(peer, len(local), len(local) * self._memory.block_size_bytes, timeout_s, on_end)
        try:
            peer.pull(pull, check_block_ids(remote_blocks, peer.endpoint.num_blocks, "the peer's"), local)
        except ValueError as error:
            self._pulls.stop(pull, FailureReason.BACKEND, str(error))
        return pull

    def receive(
        self,
        peer: Peer,
        local_blocks: BlockIds,
        timeout_s: float,
        on_grant: Callable[[int], None],
        on_end: OnEnd,
    ) -> Transfer:
        assert self._memory is not None, "start() comes first"
        assert isinstance(peer, TcpPeer)
        local = check_block_ids(local_blocks, self._memory.num_blocks, "this rank's")
        if not len(local):
            raise ValueError("no blocks are to be received; at least one must be")
        pull = self._pulls.add(peer, len(local), len(local) * self._memory.block_size_bytes, timeout_s, on_end)
        peer.receive(pull, local, on_grant)
        return pull

    def push(self, grant: int, blocks: BlockIds) -> bool:
        assert self._outboxes is not None, "start() comes first"
        return self._outboxes.push(grant, blocks)

    def revoke(self, grant: int) -> None:
        assert self._outboxes is not None, "start() comes first"
        self._outboxes.revoke(grant)

    def stats(self) -> TransportStats:
        return self._pulls.stats()

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            all_connections, threads = list(self._connections), list(self._threads)
        for connections in all_connections:
            connections.close()
        self._pulls.stop_all(None, FailureReason.PEER_LOST, "the transport is being closed")
        if self._server is not None:
            self._server.close(deadline)
            # It refers to this object, and this one to the pool: without the cycle the mapping goes at once.
            self._server = None
        for thread in threads:
            join(thread, deadline)
        self._pulls.close(deadline)
