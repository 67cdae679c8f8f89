"""Pushed blocks over TCP between two well-behaved ends: data, refusals, limits, and one end for each receive."""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import kv_transfer.tcp_connections
import kv_transfer.tcp_peer
import kv_transfer.tcp_transport
from kv_transfer.transport import BlockIds, FailureReason, Peer
from tests.kv_transfer.push_rig import (
    BLOCK_SIZE_BYTES,
    CANARY,
    CASE,
    NUM_BLOCKS,
    Receive,
    ids,
    is_over,
    push_all,
    scattered,
    tcp,
)
from tests.kv_transfer.test_socket_server import num_serving
from tests.kv_transfer.transport_peer import CLOSE_TIMEOUT_S
from tests.kv_transfer.transport_rig import (
    PATIENCE_S,
    Ends,
    LocalPeer,
    Rank,
    assert_has,
    closing,
    own_resources,
    wait_until,
)


@pytest.fixture
def pair() -> Iterator[tuple[Rank, LocalPeer, Peer]]:
    """Both ends here. In the end nothing is left of what was done."""
    before = own_resources()
    peer, rank = LocalPeer(CASE, NUM_BLOCKS, BLOCK_SIZE_BYTES), Rank(CASE, NUM_BLOCKS, BLOCK_SIZE_BYTES)
    with closing(rank, peer):
        yield rank, peer, rank.connect(peer)
    wait_until(lambda: own_resources()[0] <= before[0], "threads have ended")
    # While the pools are mapped, which the test's frame sees to, each mapping has a descriptor.
    assert own_resources()[1] <= before[1] + 2


# ---- data ----


@pytest.mark.parametrize("num_pushes", [1, 7, 100])
def test_blocks_arrive_in_the_order_of_the_pushes(pair: tuple[Rank, LocalPeer, Peer], num_pushes: int) -> None:
    rank, peer, way = pair
    remote, local = scattered(10_000, 1), scattered(10_000, 2)
    receive = Receive(rank, way, local)

    for part in np.array_split(remote, num_pushes):
        push_all(peer, receive.grant, part)

    assert receive.wait().reason is None
    assert_has(rank, local, remote, peer.seed)
    untouched = np.setdiff1d(np.arange(NUM_BLOCKS), local)
    assert not rank.memory.blocks[untouched].any()
    stats = rank.transport.stats()
    assert (stats.num_transfers, stats.num_blocks, stats.num_bytes) == (1, 10_000, 10_000 * BLOCK_SIZE_BYTES)
    assert not stats.failures


def test_empty_pushes_runs_and_doubled_blocks(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, peer, way = pair
    remote = [ids(), ids(5, 6, 7, 7, 7), ids(), ids(), np.arange(300, dtype=np.int32), ids(9, 8, 7), ids(), ids(5)]
    local = np.arange(100, 100 + sum(len(part) for part in remote), dtype=np.int32)
    receive = Receive(rank, way, local, timeout_s=math.inf)

    for part in remote:
        push_all(peer, receive.grant, part)

    assert receive.wait().reason is None

    assert_has(rank, local, np.concatenate(remote), peer.seed)


def test_what_is_pushed_arrives_before_the_rest_is(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, peer, way = pair
    receive = Receive(rank, way, ids(3, 4, 5))
    for local, remote in zip(ids(3, 4, 5), ids(70, 60, 50), strict=True):
        assert not rank.memory.blocks[local].any()
        assert not receive.ends
        push_all(peer, receive.grant, ids(remote))
        wait_until(lambda local=local: rank.memory.blocks[local].any(), "the block has arrived")
    assert receive.wait().reason is None


def test_a_connection_serves_one_receive_after_the_other(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, peer, way = pair
    grants = set()
    for number in range(20):
        receive = Receive(rank, way, ids(number, 30))
        grants.add(receive.grant)
        push_all(peer, receive.grant, ids(number + 1, number))
        assert receive.wait().reason is None
        assert_has(rank, ids(number, 30), ids(number + 1, number), peer.seed)
        wait_until(lambda grant=receive.grant: is_over(peer, grant), "the outbox is gone")
    assert len(grants) == 20


def test_receives_at_once_do_not_mix(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, peer, way = pair
    remotes = [scattered(300, 10 + number) for number in range(30)]
    receives = [Receive(rank, way, local) for local in np.split(scattered(30 * 300, 4), 30)]

    def push(numbers: range) -> None:
        for half in range(2):
            for number in numbers:
                push_all(peer, receives[number].grant, np.split(remotes[number], 2)[half])

    threads = [threading.Thread(target=push, args=(range(first, 30, 3),)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for receive, remote in zip(receives, remotes, strict=True):
        assert receive.wait().reason is None
        assert_has(rank, receive.local, remote, peer.seed)


# ---- refusals ----


def test_what_a_receive_cannot_be(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, _, way = pair
    for wrong in (ids(), ids(-1), ids(0, NUM_BLOCKS), np.array([0.5])):
        with pytest.raises(ValueError, match="block"):
            Receive(rank, way, wrong)
    assert not rank.transport.stats().num_transfers


def test_what_a_push_cannot_be(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, peer, way = pair
    receive = Receive(rank, way, ids(1, 2, 3))
    push_all(peer, receive.grant, ids(7))
    for wrong in (ids(-1), ids(NUM_BLOCKS), np.array([0.5]), np.zeros((2, 1), np.int32)):
        with pytest.raises(ValueError, match="block"):
            push_all(peer, receive.grant, wrong)
    with pytest.raises(ValueError, match="3 blocks are pushed, the receiver waits for 2 more"):
        push_all(peer, receive.grant, ids(1, 2, 3))
    # Refused whole: what comes is what was pushed well.
    push_all(peer, receive.grant, ids(8, 9))
    assert receive.wait().reason is None
    assert_has(rank, ids(1, 2, 3), ids(7, 8, 9), peer.seed)


def test_grants_that_nobody_has(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, peer, way = pair
    receive = Receive(rank, way, ids(1))
    for grant in (0, -1, receive.grant + 1, 1 << 80):
        assert tcp(peer).push(grant, ids(1)) is False
        tcp(peer).revoke(grant)
    # And what one end has granted is nothing at the other.
    assert tcp(rank).push(receive.grant, ids(1)) is False
    push_all(peer, receive.grant, ids(1))
    assert receive.wait().reason is None


def test_a_callback_that_fails_ends_the_receive(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, _, way = pair
    ends = Ends()

    def fail(_: int) -> None:
        raise RuntimeError("no use for it")

    tcp(rank).receive(way, ids(1), PATIENCE_S, fail, ends.on_end)
    end = ends.wait()
    assert end.reason is FailureReason.BACKEND
    assert "no use for it" in end.message


# ---- limits ----


def test_receives_leave_connections_for_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer.tcp_transport, "MAX_CONNECTIONS", 8)
    peer, rank, other = LocalPeer(CASE, 16, 64), Rank(CASE, 16, 64), Rank(CASE, 16, 64)
    with closing(peer, rank, other):
        way = rank.connect(peer)
        receives = [Receive(rank, way, ids(number)) for number in range(4)]
        grants = [receive.grant for receive in receives]

        refused = Receive(rank, way, ids(5)).wait()

        assert refused.reason is FailureReason.BACKEND
        assert "4 receivers wait" in refused.message
        assert other.pull(other.connect(peer), ids(3), ids(3)).wait().reason is None
        # A receive that is over makes room.
        push_all(peer, grants[0], ids(9))
        assert receives[0].wait().reason is None
        wait_until(lambda: is_over(peer, grants[0]), "the outbox is gone")
        late = Receive(rank, way, ids(5))
        push_all(peer, late.grant, ids(9))
        assert late.wait().reason is None


def test_receives_wait_for_their_turn_and_keep_no_pull_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer.tcp_peer, "MAX_RECEIVES_PER_PEER", 3)
    peer, rank = LocalPeer(CASE, 16, 64), Rank(CASE, 16, 64)
    with closing(peer, rank):
        way = rank.connect(peer)
        first = [Receive(rank, way, ids(number)) for number in range(3)]
        for receive in first:
            assert receive.grant
        cancelled, last = Receive(rank, way, ids(3)), Receive(rank, way, ids(4))
        hurried = Receive(rank, way, ids(5), timeout_s=0.05)

        assert rank.pull(way, ids(8), ids(8)).wait().reason is None
        cancelled.transfer.cancel()
        assert cancelled.wait().reason is FailureReason.TIMEOUT
        assert hurried.wait().reason is FailureReason.TIMEOUT
        assert not last.grants

        first[1].transfer.cancel()
        push_all(peer, last.grant, ids(9))
        assert last.wait().reason is None
        assert not cancelled.grants
        assert not hurried.grants


def test_few_idle_connections_are_kept_and_used_again(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, peer, way = pair
    # And one for pulls.
    most_idle = kv_transfer.tcp_peer.MAX_IDLE_RECEIVERS + 1
    push_ten(rank, peer, way)
    wait_until(lambda: num_serving(peer) == most_idle, "the other connections are closed")
    again = [Receive(rank, way, ids(number)) for number in range(most_idle - 1)]
    assert all(receive.grant for receive in again)
    assert num_serving(peer) == most_idle


def test_idle_connections_end(pair: tuple[Rank, LocalPeer, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    rank, peer, way = pair
    monkeypatch.setattr(kv_transfer.tcp_connections, "CLIENT_IDLE_S", 0.05)
    push_ten(rank, peer, way)
    # That for pulls may have begun to be idle before.
    wait_until(lambda: num_serving(peer) <= 1, "the connections are closed")
    push_ten(rank, peer, way)


def push_ten(rank: Rank, peer: LocalPeer, way: Peer) -> None:
    """To ten receives at a time."""
    receives = [Receive(rank, way, ids(number)) for number in range(10)]
    grants = [receive.grant for receive in receives]
    for receive, grant in zip(receives, grants, strict=True):
        push_all(peer, grant, ids(1))
        assert receive.wait().reason is None


# ---- stops ----


def test_revoke(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, peer, way = pair
    waiting, begun = Receive(rank, way, ids(1)), Receive(rank, way, ids(2, 3))
    grants = waiting.grant, begun.grant
    push_all(peer, begun.grant, ids(7))
    for grant in grants:
        tcp(peer).revoke(grant)
        assert is_over(peer, grant)
        tcp(peer).revoke(grant)
    for receive in (waiting, begun):
        assert receive.wait().reason is FailureReason.PEER_LOST
    assert rank.transport.stats().failures == {"peer_lost": 2}
    wait_until(lambda: num_serving(peer) == 1, "the connections are closed")


def test_cancel_and_deadline_free_the_sender(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, peer, way = pair
    late, cancelled = Receive(rank, way, ids(1, 2), timeout_s=0.2), Receive(rank, way, ids(3, 4))
    push_all(peer, cancelled.grant, ids(7))
    wait_until(lambda: rank.memory.blocks[3].any(), "the first block has arrived")
    cancelled.transfer.cancel()
    cancelled.transfer.cancel()

    for receive in (late, cancelled):
        assert receive.wait().reason is FailureReason.TIMEOUT
        for grant in receive.grants:
            wait_until(lambda grant=grant: is_over(peer, grant), "the sender has noticed")
    wait_until(lambda: num_serving(peer) == 1, "the connections are closed")
    cancelled.transfer.cancel()
    late.only()
    cancelled.only()


def test_closing_the_way_ends_its_receives_and_no_others(pair: tuple[Rank, LocalPeer, Peer]) -> None:
    rank, peer, way = pair
    other_way = rank.connect(peer)
    receives = [Receive(rank, way, ids(number)) for number in range(5)]
    other = Receive(rank, other_way, ids(9))
    grants = [receive.grant for receive in receives]

    way.close()

    assert {receive.wait().reason for receive in receives} == {FailureReason.PEER_LOST}
    assert Receive(rank, way, ids(1)).wait().reason is FailureReason.PEER_LOST
    push_all(peer, other.grant, ids(3))
    assert other.wait().reason is None
    for grant in grants:
        wait_until(lambda grant=grant: is_over(peer, grant), "the sender has noticed")


@pytest.mark.parametrize("which", ["sender", "receiver"])
def test_closing_a_transport_ends_all(pair: tuple[Rank, LocalPeer, Peer], which: str) -> None:
    rank, peer, way = pair
    receives = [Receive(rank, way, ids(number, 100 + number)) for number in range(10)]
    grants = [receive.grant for receive in receives]
    for grant in grants[:5]:
        push_all(peer, grant, ids(1))

    (peer if which == "sender" else rank).transport.close(CLOSE_TIMEOUT_S)

    assert {receive.wait().reason for receive in receives} == {FailureReason.PEER_LOST}
    for grant in grants:
        wait_until(lambda grant=grant: is_over(peer, grant), "the sender has noticed")
        tcp(peer).revoke(grant)
    rank.memory.blocks[:] = CANARY
    rank.transport.close(CLOSE_TIMEOUT_S)
    assert (rank.memory.blocks == CANARY).all()


# ---- leaks ----


def test_nothing_is_left() -> None:
    chance = random.Random(7)
    churn(chance, 3)
    threads, num_descriptors, shared_memory = own_resources()

    num_ended_well = churn(chance, 400)

    assert num_ended_well > 50
    wait_until(lambda: own_resources()[0] <= threads, "threads have ended")
    assert own_resources()[1] <= num_descriptors
    assert own_resources()[2] <= shared_memory


def churn(chance: random.Random, num_receives: int) -> int:
    """Receives of all fates, a hundred at a time over a few ways; returns how many have ended well."""
    num_blocks = 32
    rank, peer = Rank(CASE, 100 * num_blocks, 4096), LocalPeer(CASE, 100 * num_blocks, 4096)
    free = list(np.split(np.arange(100 * num_blocks, dtype=np.int32), 100))
    live: list[tuple[Receive, BlockIds]] = []
    all_receives: list[Receive] = []
    with closing(rank, peer):
        serving, descriptors = num_serving(peer), len(os.listdir("/proc/self/fd"))
        ways: list[Peer] = []
        while len(all_receives) < num_receives or live:
            if len(all_receives) < num_receives and free:
                if not ways or (chance.random() < 0.1 and len(ways) < 4):
                    ways.append(rank.connect(peer))
                timeout_s = chance.choice([0.0, 0.02, PATIENCE_S, PATIENCE_S])
                receive = Receive(rank, chance.choice(ways), free.pop(), timeout_s)
                live.append((receive, np.array(chance.sample(range(rank.memory.num_blocks), num_blocks), np.int32)))
                all_receives.append(receive)
                if chance.random() < 0.02:
                    ways.pop(chance.randrange(len(ways))).close()
            if len(live) > 90 or len(all_receives) == num_receives:
                finish(rank, peer, chance, *live[0])
                free.append(live.pop(0)[0].local)
            elif chance.random() < 0.2:
                chance.choice(live)[0].transfer.cancel()
        for way in ways:
            way.close()
        stats = rank.transport.stats()
        reasons = [receive.only().reason for receive in all_receives]
        assert stats.num_transfers == num_receives
        assert sum(stats.failures.values()) == sum(reason is not None for reason in reasons)
        assert set(reasons) <= {None, FailureReason.TIMEOUT, FailureReason.PEER_LOST}
        wait_until(lambda: num_serving(peer) <= serving, "the sender has given back what it took")
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "descriptors are closed")
    return reasons.count(None)


def finish(rank: Rank, peer: LocalPeer, chance: random.Random, receive: Receive, remote: BlockIds) -> None:
    """Push it whole, in parts, and maybe less than that; whatever it ends with, what has arrived is right."""
    wait_until(lambda: receive.grants or receive.ends, "it has a grant or an end")
    if receive.grants:
        fate = chance.random()
        for part in np.array_split(remote, chance.choice([1, 3])):
            if fate < 0.1:
                tcp(peer).revoke(receive.grants[0])
            elif fate < 0.2:
                receive.transfer.cancel()
            tcp(peer).push(receive.grants[0], part)
    if receive.wait().reason is None:
        assert_has(rank, receive.local, remote, peer.seed)
