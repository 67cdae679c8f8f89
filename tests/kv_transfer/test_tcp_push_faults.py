"""Pushed blocks over TCP when one end does not behave: bare clients, and processes that are stopped and killed."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import socket
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

import kv_transfer.tcp_transport
from kv_transfer.socket_server import receive_exactly, send_frame
from kv_transfer.tcp_requests import GRANT, STATUS, PullRequest, PushRequest
from kv_transfer.transport import BlockIds, FailureReason
from kv_transfer.wire import frame
from tests.kv_transfer.push_rig import (
    CANARY,
    CASE,
    LARGE_BLOCK_SIZE_BYTES,
    NUM_LARGE_BLOCKS,
    PushProcess,
    Receive,
    ids,
    is_over,
    push_all,
    scattered,
    tcp,
)
from tests.kv_transfer.test_socket_server import is_ended, num_serving, proved_connection, soon
from tests.kv_transfer.transport_rig import (
    PATIENCE_S,
    LocalPeer,
    Rank,
    assert_has,
    closing,
    own_resources,
    wait_until,
)


@pytest.fixture(scope="module")
def large_rank() -> Iterator[Rank]:
    rank = Rank(CASE, NUM_LARGE_BLOCKS, LARGE_BLOCK_SIZE_BYTES)
    with closing(rank):
        yield rank


@pytest.fixture(scope="module")
def large_peer() -> Iterator[LocalPeer]:
    peer = LocalPeer(CASE, NUM_LARGE_BLOCKS, LARGE_BLOCK_SIZE_BYTES)
    with closing(peer):
        yield peer


@pytest.fixture
def process() -> Iterator[PushProcess]:
    process = PushProcess()
    with closing(process):
        yield process


# ---- bare clients ----


@contextlib.contextmanager
def bare_client(peer: LocalPeer, num_blocks: int, timeout_s: float = PATIENCE_S) -> Iterator[tuple[socket.socket, int]]:
    """A client that has asked and been granted, and reads only what the test does; the sender is rid of it in time."""
    with proved_connection(peer.endpoint) as sock:
        yield sock, ask(sock, num_blocks, timeout_s)
    wait_until(lambda: num_serving(peer) == 0, "the sender is rid of the client")


def ask(sock: socket.socket, num_blocks: int, timeout_s: float = PATIENCE_S) -> int:
    send_frame(sock, msgspec.msgpack.encode(PushRequest(num_blocks, timeout_s)), soon())
    assert receive_exactly(sock, STATUS.size, soon()) == STATUS.pack(0)
    return int(GRANT.unpack(receive_exactly(sock, GRANT.size, soon()))[0])


def test_after_a_revoke_nothing_is_read_from_the_pool() -> None:
    peer = LocalPeer(CASE, NUM_LARGE_BLOCKS, LARGE_BLOCK_SIZE_BYTES)
    blocks = np.arange(NUM_LARGE_BLOCKS, dtype=np.int32)
    with closing(peer), bare_client(peer, NUM_LARGE_BLOCKS) as (sock, grant):
        peer.memory.blocks[:] = 1
        push_all(peer, grant, blocks)
        # The sender is in the middle of its call: the client reads nothing yet.
        receive_exactly(sock, 1, soon())

        tcp(peer).revoke(grant)
        peer.memory.blocks[:] = CANARY

        num_bytes = 1
        while data := sock.recv(1 << 20):
            assert not np.frombuffer(data, np.uint8).tobytes().strip(b"\x01")
            num_bytes += len(data)
        assert num_bytes < peer.memory.size_bytes


def test_client_that_does_not_read(large_peer: LocalPeer) -> None:
    blocks = np.arange(NUM_LARGE_BLOCKS, dtype=np.int32)
    with bare_client(large_peer, NUM_LARGE_BLOCKS, timeout_s=1.0) as (_, grant):
        push_all(large_peer, grant, blocks)
        wait_until(lambda: is_over(large_peer, grant), "the sender has given up")


@pytest.mark.parametrize("timeout_s", [0.3, math.inf])
def test_client_that_stays_past_its_deadline(
    large_peer: LocalPeer, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    monkeypatch.setattr(kv_transfer.tcp_transport, "MAX_PULL_S", 0.3)
    with bare_client(large_peer, 3, timeout_s) as (sock, grant):
        assert is_ended(sock)
        wait_until(lambda: is_over(large_peer, grant), "the outbox is gone")


@pytest.mark.parametrize("then", ["goes", "goes half", "speaks out of turn"])
def test_client_that_breaks_off(large_peer: LocalPeer, then: str) -> None:
    with bare_client(large_peer, 3) as (sock, grant):
        push_all(large_peer, grant, ids(1))
        if then == "goes":
            sock.close()
        elif then == "goes half":
            sock.shutdown(socket.SHUT_WR)
        else:
            send_frame(sock, msgspec.msgpack.encode(PushRequest(1, 1.0)), soon())
        wait_until(lambda: is_over(large_peer, grant), "the sender has noticed")


def test_no_descriptors_are_left_for_an_outbox(large_peer: LocalPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with proved_connection(large_peer.endpoint) as sock:
        with monkeypatch.context() as patch:
            patch.setattr(os, "eventfd", fail)
            send_frame(sock, msgspec.msgpack.encode(PushRequest(1, 5.0)), soon())
            (num_bytes,) = STATUS.unpack(receive_exactly(sock, STATUS.size, soon()))
            assert b"too many open files" in receive_exactly(sock, num_bytes, soon())
        assert ask(sock, 1)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_request_for_no_blocks_is_refused(large_peer: LocalPeer, num_blocks: int) -> None:
    with proved_connection(large_peer.endpoint) as sock:
        send_frame(sock, msgspec.msgpack.encode(PushRequest(num_blocks, 5.0)), soon())
        (num_bytes,) = STATUS.unpack(receive_exactly(sock, STATUS.size, soon()))
        assert b"at least one" in receive_exactly(sock, num_bytes, soon())
        # In step: other requests of both kinds are served behind it.
        push_all(large_peer, ask(sock, 2), ids(5, 6))
        assert receive_exactly(sock, 2 * LARGE_BLOCK_SIZE_BYTES, soon()) == large_peer.memory.blocks[5:7].tobytes()
        send_frame(sock, msgspec.msgpack.encode(PullRequest(np.array([2], "<i4").tobytes(), 5.0)), soon())
        assert receive_exactly(sock, STATUS.size, soon()) == STATUS.pack(0)
        assert receive_exactly(sock, LARGE_BLOCK_SIZE_BYTES, soon()) == large_peer.memory.blocks[2].tobytes()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 20,
        frame(b"\xc1"),
        frame(msgspec.msgpack.encode({"num_blocks": 1, "timeout_s": 1.0})),
        frame(msgspec.msgpack.encode({"type": "push", "num_blocks": "one", "timeout_s": 1.0})),
        frame(msgspec.msgpack.encode(PushRequest(1, math.nan))),
        frame(msgspec.msgpack.encode(PushRequest(1, -1.0))),
    ],
    ids=range(6),
)
def test_garbage_instead_of_a_request(large_peer: LocalPeer, garbage: bytes) -> None:
    with proved_connection(large_peer.endpoint) as sock:
        sock.sendall(garbage)
        assert is_ended(sock)


# ---- the processes ----


def begin_push(rank: Rank, process: PushProcess) -> tuple[Receive, BlockIds]:
    """A receive in the middle, which cannot end well: the last block is not pushed. (The receive, its blocks.)"""
    rank.memory.blocks[:] = 0
    blocks = scattered(NUM_LARGE_BLOCKS, 1, NUM_LARGE_BLOCKS)
    receive = Receive(rank, rank.connect(process), blocks)
    assert process.push(receive.grant, blocks[:-1]) is True
    wait_until(lambda: rank.memory.blocks[blocks[0]].any(), "the first block has arrived")
    return receive, blocks


def test_late_bytes_of_a_sender_that_stood_still_reach_nothing(large_rank: Rank, process: PushProcess) -> None:
    receive, blocks = begin_push(large_rank, process)
    process.send(signal.SIGSTOP)

    receive.transfer.cancel()
    assert receive.wait().reason is FailureReason.TIMEOUT
    large_rank.memory.blocks[:] = CANARY
    process.send(signal.SIGCONT)

    wait_until(lambda: process.push(receive.grant, ids()) is False, "the sender has noticed")
    # When a receive of after that has ended, whatever was late is over.
    way = large_rank.connect(process)
    again = Receive(large_rank, way, blocks[:1])
    assert process.push(again.grant, blocks[:1]) is True
    assert again.wait().reason is None
    assert_has(large_rank, blocks[:1], blocks[:1], process.seed)
    assert (large_rank.memory.blocks[blocks[1:]] == CANARY).all()
    receive.only()


def test_sender_that_stands_still_past_the_deadline(large_rank: Rank, process: PushProcess) -> None:
    way = large_rank.connect(process)
    process.send(signal.SIGSTOP)
    # The connection is accepted by the sender's kernel, and nobody answers.
    assert Receive(large_rank, way, ids(1), timeout_s=0.2).wait().reason is FailureReason.TIMEOUT


@pytest.mark.parametrize("when", ["waiting", "in the middle"])
def test_kill_of_the_sender(large_rank: Rank, process: PushProcess, when: str) -> None:
    if when == "waiting":
        receive = Receive(large_rank, large_rank.connect(process), ids(1, 2))
        assert receive.grant
    else:
        receive, _ = begin_push(large_rank, process)

    process.send(signal.SIGKILL)

    assert receive.wait().reason is FailureReason.PEER_LOST


@pytest.mark.parametrize("when", ["waiting", "in the middle"])
def test_kill_of_the_receiver(large_peer: LocalPeer, process: PushProcess, when: str) -> None:
    before = own_resources()
    grant = process.receive(large_peer, NUM_LARGE_BLOCKS)
    if when == "in the middle":
        # Stopped, so that the sender is in the middle for certain.
        process.send(signal.SIGSTOP)
        push_all(large_peer, grant, np.arange(NUM_LARGE_BLOCKS, dtype=np.int32))

    process.send(signal.SIGKILL)

    wait_until(lambda: is_over(large_peer, grant), "the sender has noticed")
    wait_until(lambda: num_serving(large_peer) == 0, "the connections are closed")
    wait_until(lambda: own_resources()[1] <= before[1], "descriptors are closed")


@pytest.mark.parametrize("ends_by", ["deadline", "revoke"])
def test_receiver_that_stands_still(large_peer: LocalPeer, process: PushProcess, ends_by: str) -> None:
    grant = process.receive(large_peer, NUM_LARGE_BLOCKS, timeout_s=1.5 if ends_by == "deadline" else PATIENCE_S)
    process.send(signal.SIGSTOP)
    push_all(large_peer, grant, np.arange(NUM_LARGE_BLOCKS, dtype=np.int32))
    if ends_by == "revoke":
        tcp(large_peer).revoke(grant)

    # The connection for pulls is idle, and stays.
    wait_until(lambda: num_serving(large_peer) == 1, "the sender has given up")
    assert is_over(large_peer, grant)

    process.send(signal.SIGCONT)
    assert process.answer() in ("timeout", "peer_lost")
