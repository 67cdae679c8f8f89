"""A client's connections over TCP: who sends a request, and what becomes of connections that are idle."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import kv_transfer.tcp_connections
import kv_transfer.tcp_line
import kv_transfer.tcp_transport
from kv_transfer.transport import FailureReason, Peer
from tests.kv_transfer.transport_rig import Case, LocalPeer, Rank, assert_has, closing, wait_until

NUM_BLOCKS, BLOCK_SIZE_BYTES = 64, 4096
CASE = Case("tcp")
BLOCKS = np.arange(NUM_BLOCKS, dtype=np.int32)


@pytest.fixture
def ends() -> Iterator[tuple[Rank, LocalPeer, Peer]]:
    peer, rank = LocalPeer(CASE, NUM_BLOCKS, BLOCK_SIZE_BYTES), Rank(CASE, NUM_BLOCKS, BLOCK_SIZE_BYTES)
    with closing(rank, peer):
        yield rank, peer, rank.connect(peer)


def threads(name: str) -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if thread.name == name}


def assert_pulls(ends: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, peer, way = ends
    rank.memory.blocks[:] = 0
    assert rank.pull(way, BLOCKS, BLOCKS[::-1]).wait().reason is None
    assert_has(rank, BLOCKS[::-1], BLOCKS, peer.seed)


def test_pulls_one_after_the_other_share_a_connection(ends: tuple[Rank, LocalPeer, Peer]) -> None:
    for _ in range(20):
        wait_until(lambda: is_idle(ends[2]), "the connection is idle")
        assert_pulls(ends)
    assert len(threads("kv-tcp-pull")) == len(threads("kv-tcp-serve")) == 1


def is_idle(way: Peer) -> bool:
    return bool(way._pulls._idle)  # type: ignore[attr-defined]


def test_on_an_idle_connection_the_caller_sends(
    ends: tuple[Rank, LocalPeer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: list[threading.Thread] = []
    send = kv_transfer.tcp_line._send_at_once

    def spy(sock: socket.socket, data: bytes) -> bool:
        senders.append(threading.current_thread())
        return send(sock, data)

    monkeypatch.setattr(kv_transfer.tcp_line, "_send_at_once", spy)
    wait_until(lambda: is_idle(ends[2]), "the connection is idle")
    assert_pulls(ends)
    assert senders == [threading.current_thread()]


@pytest.mark.parametrize("num_sent", [0, 3])
def test_what_cannot_be_sent_at_once_is_sent_by_the_thread_on_another_connection(
    ends: tuple[Rank, LocalPeer, Peer], monkeypatch: pytest.MonkeyPatch, num_sent: int
) -> None:
    def send_little(sock: socket.socket, data: bytes) -> bool:
        sock.sendall(data[:num_sent])
        return False

    monkeypatch.setattr(kv_transfer.tcp_line, "_send_at_once", send_little)
    for _ in range(3):
        wait_until(lambda: is_idle(ends[2]), "the connection is idle")
        assert_pulls(ends)
    wait_until(lambda: len(threads("kv-tcp-serve")) == 1, "the server is rid of the others")


def test_a_request_that_is_stopped_while_it_is_sent_is_not_answered_into_the_next(
    ends: tuple[Rank, LocalPeer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, _, way = ends
    wait_until(lambda: is_idle(way), "the connection is idle")
    with monkeypatch.context() as patch:
        send = kv_transfer.tcp_line._send_at_once

        def stop(sock: socket.socket, data: bytes) -> bool:
            rank.transport._pulls.stop_all(None, FailureReason.TIMEOUT, "stopped")  # type: ignore[attr-defined]
            return send(sock, data)

        patch.setattr(kv_transfer.tcp_line, "_send_at_once", stop)
        assert rank.pull(way, BLOCKS[:1], BLOCKS[:1]).wait().reason is FailureReason.TIMEOUT
    rank.memory.blocks[:] = 0xA5
    assert rank.pull(way, BLOCKS[1:], BLOCKS[1:]).wait().reason is None
    assert (rank.memory.blocks[0] == 0xA5).all()
    assert_pulls(ends)


def test_an_idle_connection_that_the_server_ends_is_given_up(
    ends: tuple[Rank, LocalPeer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threads("kv-tcp-pull")
    with monkeypatch.context() as patch:
        patch.setattr(kv_transfer.tcp_transport, "SERVER_IDLE_S", 0.05)
        second = ends[0].connect(ends[1])
        wait_until(lambda: threads("kv-tcp-pull") == before, "the thread of the second way has ended")
    assert_pulls((ends[0], ends[1], second))


def test_connections_end_when_they_have_been_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer.tcp_connections, "CLIENT_IDLE_S", 0.05)
    peer, rank = LocalPeer(CASE, NUM_BLOCKS, BLOCK_SIZE_BYTES), Rank(CASE, NUM_BLOCKS, BLOCK_SIZE_BYTES)
    with closing(rank, peer):
        way = rank.connect(peer)
        wait_until(lambda: not threads("kv-tcp-pull") and not threads("kv-tcp-serve"), "it has ended at both ends")
        assert_pulls((rank, peer, way))
