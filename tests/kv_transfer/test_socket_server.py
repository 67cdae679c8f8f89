"""What raw clients and raw servers can do to the data planes over sockets: cost a thread for a while, nothing else."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

import kv_transfer.shm_transport
import kv_transfer.socket_server
import kv_transfer.tcp_peer
import kv_transfer.tcp_transport
from kv_transfer.shm_transport import ShmAddress
from kv_transfer.socket_server import receive_exactly, receive_frame, send_frame
from kv_transfer.tcp_requests import STATUS, PullRequest, TcpAddress
from kv_transfer.transport import Endpoint, FailureReason, TransferError
from kv_transfer.wire import NONCE_BYTES, ClientHandshake, Proof, frame
from tests.kv_transfer.transport_rig import SECRET, Case, LocalPeer, Rank, assert_has, closing, wait_until

NUM_BLOCKS, BLOCK_SIZE_BYTES = 16, 4096
MAX_CONNECTIONS = 6
ROLES = {"shm": "kv-shm", "tcp": "kv-tcp"}
GARBAGE = [
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 5000,
    frame(b""),
    frame(b"\xc1" * 100),
    frame(b"x" * 100)[:50],
    (1 << 31).to_bytes(4, "little"),
    frame(msgspec.msgpack.encode({"type": "hello", "version": 1})),
]


@pytest.fixture(params=["shm", "tcp"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPeer]:
    monkeypatch.setattr(kv_transfer.socket_server, "HANDSHAKE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(kv_transfer.shm_transport, "MAX_CONNECTIONS", MAX_CONNECTIONS)
    monkeypatch.setattr(kv_transfer.tcp_transport, "MAX_CONNECTIONS", MAX_CONNECTIONS)
    monkeypatch.setattr(kv_transfer.tcp_transport, "SERVER_IDLE_S", 0.3)
    peer = LocalPeer(Case(request.param), NUM_BLOCKS, BLOCK_SIZE_BYTES)
    num_threads, num_descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with closing(peer):
        yield peer
        # Whatever was done to it, it serves; and what was done costs nothing any more.
        wait_until(lambda: num_serving(peer) == 0, "the server is rid of its clients")
        assert_serves(peer)
        wait_until(lambda: threading.active_count() <= num_threads, "threads have ended")
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= num_descriptors, "descriptors are closed")


def num_serving(peer: LocalPeer) -> int:
    name = f"{ROLES[peer.endpoint.transport]}-serve"
    return sum(thread.name == name for thread in threading.enumerate())


def assert_serves(peer: LocalPeer) -> None:
    rank = Rank(Case(peer.endpoint.transport), NUM_BLOCKS, BLOCK_SIZE_BYTES)
    blocks = np.arange(NUM_BLOCKS, dtype=np.int32)
    with closing(rank):
        assert rank.pull(rank.connect(peer), blocks, blocks).wait().reason is None
        assert_has(rank, blocks, blocks, peer.seed)


def raw_connection(endpoint: Endpoint) -> socket.socket:
    if endpoint.transport == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(msgspec.msgpack.decode(endpoint.address, type=ShmAddress).name)
    else:
        address = msgspec.msgpack.decode(endpoint.address, type=TcpAddress)
        sock = socket.create_connection((address.host, address.port))
    sock.settimeout(10.0)
    return sock


def soon() -> float:
    return time.monotonic() + 10.0


def prove(sock: socket.socket, role: str) -> None:
    """The handshake, up to the welcome."""
    handshake = ClientHandshake(SECRET, os.urandom(NONCE_BYTES), role, "raw")
    send_frame(sock, handshake.answer(receive_frame(sock, 4096, soon())), soon())
    handshake.verify(receive_frame(sock, 4096, soon()))
    receive_frame(sock, 4096, soon())


def proved_connection(endpoint: Endpoint) -> socket.socket:
    sock = raw_connection(endpoint)
    prove(sock, ROLES[endpoint.transport])
    return sock


def is_ended(sock: socket.socket) -> bool:
    """Waits until the server has closed the connection."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


# ---- raw clients ----


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize("then_close", [False, True], ids=["stays", "goes"])
def test_garbage(server: LocalPeer, garbage: bytes, then_close: bool) -> None:
    with raw_connection(server.endpoint) as sock:
        sock.sendall(garbage)
        if then_close:
            with contextlib.suppress(OSError):  # the server may have been quicker
                sock.shutdown(socket.SHUT_WR)
        assert is_ended(sock)


def test_doubled_hello(server: LocalPeer) -> None:
    with raw_connection(server.endpoint) as sock:
        handshake = ClientHandshake(SECRET, os.urandom(NONCE_BYTES), ROLES[server.endpoint.transport], "raw")
        hello = frame(handshake.answer(receive_frame(sock, 4096, soon())))
        sock.sendall(hello + hello)
        handshake.verify(receive_frame(sock, 4096, soon()))
        assert is_ended(sock)


def test_proof_for_another_service_is_none(server: LocalPeer) -> None:
    with raw_connection(server.endpoint) as sock, pytest.raises(ConnectionError):
        prove(sock, "router")


def test_replayed_hello(server: LocalPeer) -> None:
    with raw_connection(server.endpoint) as first, raw_connection(server.endpoint) as second:
        handshake = ClientHandshake(SECRET, os.urandom(NONCE_BYTES), ROLES[server.endpoint.transport], "raw")
        hello = handshake.answer(receive_frame(first, 4096, soon()))
        receive_frame(second, 4096, soon())
        send_frame(second, hello, soon())
        assert is_ended(second)


def test_drip_of_bytes_does_not_prolong_the_handshake(server: LocalPeer) -> None:
    with raw_connection(server.endpoint) as sock:
        receive_frame(sock, 4096, soon())
        sock.sendall((4000).to_bytes(4, "little"))

        def is_cut_off() -> bool:
            try:
                sock.sendall(b"x")
            except ConnectionError:
                return True
            return False

        # It sends a byte each time that it looks.
        wait_until(is_cut_off, "the server has given up")


def test_idle_connections_are_limited_and_end(server: LocalPeer) -> None:
    idle = [raw_connection(server.endpoint) for _ in range(MAX_CONNECTIONS)]
    wait_until(lambda: num_serving(server) == MAX_CONNECTIONS, "the server is full")
    with raw_connection(server.endpoint) as one_too_many:
        # Not even a challenge.
        assert not one_too_many.recv(1)
    assert num_serving(server) <= MAX_CONNECTIONS
    for sock in idle:
        assert is_ended(sock)
        sock.close()


@pytest.mark.parametrize("server", ["tcp"], indirect=True)
class TestTcpRequests:
    def test_idle_after_the_handshake(self, server: LocalPeer) -> None:
        with proved_connection(server.endpoint) as sock:
            assert is_ended(sock)

    @pytest.mark.parametrize("garbage", [b"\xff" * 20, frame(b"\xc1"), frame(b"x" * 50)[:20]], ids=range(3))
    def test_garbage_instead_of_a_request(self, server: LocalPeer, garbage: bytes) -> None:
        with proved_connection(server.endpoint) as sock:
            sock.sendall(garbage)
            assert is_ended(sock)

    @pytest.mark.parametrize(
        "blocks", [b"\x01", np.array([NUM_BLOCKS], "<i4").tobytes(), np.array([3, -1], "<i4").tobytes()], ids=range(3)
    )
    def test_wrong_ids_are_refused_and_nothing_is_read(self, server: LocalPeer, blocks: bytes) -> None:
        with proved_connection(server.endpoint) as sock:
            send_frame(sock, msgspec.msgpack.encode(PullRequest(blocks, 5.0)), soon())
            (num_bytes,) = STATUS.unpack(receive_exactly(sock, STATUS.size, soon()))
            assert receive_exactly(sock, num_bytes, soon())
            # In step: the next request is served, right behind the refusal.
            send_frame(sock, msgspec.msgpack.encode(PullRequest(np.array([2], "<i4").tobytes(), 5.0)), soon())
            assert receive_exactly(sock, STATUS.size, soon()) == STATUS.pack(0)
            assert receive_exactly(sock, BLOCK_SIZE_BYTES, soon()) == server.memory.blocks[2].tobytes()

    @pytest.mark.parametrize("timeout_s", [0.2, float("nan"), -1.0])
    def test_client_that_does_not_read(self, server: LocalPeer, timeout_s: float) -> None:
        # Far more than sockets hold.
        blocks = np.zeros(20_000, "<i4").tobytes()
        with proved_connection(server.endpoint) as sock:
            send_frame(sock, msgspec.msgpack.encode(PullRequest(blocks, timeout_s)), soon())
            wait_until(lambda: num_serving(server) == 0, "the server has given up")

    def test_client_that_goes_in_the_middle(self, server: LocalPeer) -> None:
        blocks = np.zeros(20_000, "<i4").tobytes()
        with proved_connection(server.endpoint) as sock:
            send_frame(sock, msgspec.msgpack.encode(PullRequest(blocks, 60.0)), soon())
            receive_exactly(sock, 100_000, soon())

    def test_requests_at_once_are_served_in_order(self, server: LocalPeer) -> None:
        with proved_connection(server.endpoint) as sock:
            requests = [PullRequest(np.array([block], "<i4").tobytes(), 5.0) for block in (3, 9)]
            sock.sendall(b"".join(frame(msgspec.msgpack.encode(request)) for request in requests))
            for block in (3, 9):
                assert receive_exactly(sock, STATUS.size, soon()) == STATUS.pack(0)
                assert receive_exactly(sock, BLOCK_SIZE_BYTES, soon()) == server.memory.blocks[block].tobytes()

    def test_idle_connection_that_the_server_closed_is_replaced(self, server: LocalPeer) -> None:
        rank = Rank(Case("tcp"), NUM_BLOCKS, BLOCK_SIZE_BYTES)
        blocks = np.arange(NUM_BLOCKS, dtype=np.int32)
        with closing(rank):
            way = rank.connect(server)
            for _ in range(3):
                wait_until(lambda: num_serving(server) == 0, "the server has closed the idle connection")
                assert rank.pull(way, blocks, blocks).wait().reason is None


# ---- raw servers ----


def serve_raw(behave: Callable[[socket.socket], None]) -> tuple[Endpoint, socket.socket]:
    """A TCP server that accepts one connection, and its listener."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        with sock:
            behave(sock)

    threading.Thread(target=run, daemon=True).start()
    address = TcpAddress("127.0.0.1", listener.getsockname()[1], b"i" * 16)
    return Endpoint("tcp", msgspec.msgpack.encode(address), NUM_BLOCKS, BLOCK_SIZE_BYTES), listener


def challenge() -> bytes:
    return frame(msgspec.msgpack.encode({"type": "challenge", "version": 1, "nonce": b"n" * NONCE_BYTES}))


def pretend(sock: socket.socket) -> None:
    sock.sendall(challenge())
    receive_frame(sock, 4096, soon())
    sock.sendall(frame(msgspec.msgpack.encode(Proof(b"p" * 32))))
    is_ended(sock)


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (lambda sock: sock.sendall(b"\xff" * 100), FailureReason.INCOMPATIBLE),
        (lambda sock: sock.sendall(frame(b"\xc1")), FailureReason.INCOMPATIBLE),
        (lambda sock: None, FailureReason.NO_ROUTE),
        (lambda sock: sock.sendall(challenge()[:7]), FailureReason.NO_ROUTE),
        (is_ended, FailureReason.TIMEOUT),
        (pretend, FailureReason.INCOMPATIBLE),
    ],
    ids=["garbage", "wrong frame", "closes", "truncates", "says nothing", "lacks the secret"],
)
def test_raw_server_is_refused(behave: Callable[[socket.socket], None], reason: FailureReason) -> None:
    rank = Rank(Case("tcp"), NUM_BLOCKS, BLOCK_SIZE_BYTES)
    endpoint, listener = serve_raw(behave)
    with closing(rank), listener, pytest.raises(TransferError) as caught:
        rank.transport.connect(endpoint, 0.5)
    assert caught.value.reason is reason


def test_endpoint_of_garbage_is_refused() -> None:
    for name in ("shm", "tcp"):
        rank = Rank(Case(name), NUM_BLOCKS, BLOCK_SIZE_BYTES)
        with closing(rank), pytest.raises(TransferError) as caught:
            rank.transport.connect(Endpoint(name, b"\xc1", NUM_BLOCKS, BLOCK_SIZE_BYTES), 0.5)
        assert caught.value.reason is FailureReason.INCOMPATIBLE
