"""One suite that every transport passes: data, refusals, and exactly one end whatever happens to the peer.

The peer is a process of its own where the transport allows it, and is killed, stopped and restarted by signals. A
transport that does not work here is skipped with its own reason.
"""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kv_transfer.transport import BlockIds, FailureReason, Peer, TransferError
from tests.kv_transfer.transport_peer import CLOSE_TIMEOUT_S
from tests.kv_transfer.transport_rig import (
    AnyPeer,
    Case,
    Ends,
    PeerProcess,
    Rank,
    assert_has,
    closing,
    own_resources,
    start_peer,
    wait_until,
)

CASES = [
    Case("inproc", has_process=False),
    Case("shm", reads_stopped_peer=True),
    Case("tcp", has_port=True),
    # Over TCP also on one host: there UCX would read the memory of a peer that stands still.
    Case("nixl", variables=(("UCX_TLS", "tcp"),)),
    Case("ucx", variables=(("UCX_TLS", "tcp"),)),
    Case("mooncake"),
]
NUM_BLOCKS, BLOCK_SIZE_BYTES = 12_000, 1024
# Pulls of so much take long enough to be met in the middle.
NUM_LARGE_BLOCKS, LARGE_BLOCK_SIZE_BYTES = 512, 128 << 10
CANARY = 0xA5
OTHER_SEED = 99


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in request.param.variables:
            patch.setenv(name, value)
        yield request.param


@pytest.fixture(scope="module")
def shared(case: Case) -> Iterator[tuple[Rank, AnyPeer, Peer]]:
    """For tests that do no harm to either end."""
    peer = start_peer(case, NUM_BLOCKS, BLOCK_SIZE_BYTES)
    rank = Rank(case, NUM_BLOCKS, BLOCK_SIZE_BYTES)
    with closing(rank, peer):
        yield rank, peer, rank.connect(peer)


@pytest.fixture(scope="module")
def calm(case: Case) -> Iterator[tuple[Rank, AnyPeer, Peer]]:
    """For tests that act in the middle of a pull, and hurt their own end only."""
    peer = start_peer(case, NUM_LARGE_BLOCKS, LARGE_BLOCK_SIZE_BYTES)
    rank = Rank(case, NUM_LARGE_BLOCKS, LARGE_BLOCK_SIZE_BYTES)
    with closing(rank, peer):
        yield rank, peer, rank.connect(peer)


@pytest.fixture
def large(case: Case) -> Iterator[tuple[Rank, AnyPeer, Peer]]:
    """For tests that hurt the peer."""
    peer = start_peer(case, NUM_LARGE_BLOCKS, LARGE_BLOCK_SIZE_BYTES)
    rank = Rank(case, NUM_LARGE_BLOCKS, LARGE_BLOCK_SIZE_BYTES)
    with closing(rank, peer):
        yield rank, peer, rank.connect(peer)


def ids(*blocks: int) -> BlockIds:
    return np.array(blocks, np.int32)


def scattered(num_blocks: int, seed: int, pool: int = NUM_BLOCKS) -> BlockIds:
    return np.random.default_rng(seed).permutation(pool)[:num_blocks].astype(np.int32)


def process_of(peer: AnyPeer) -> PeerProcess:
    if not isinstance(peer, PeerProcess):
        pytest.skip("both ends are one process")
    return peer


def is_done_or_lost(rank: Rank, ends: Ends, local: BlockIds, remote: BlockIds, seed: int) -> FailureReason | None:
    """The reason of the one end; if it is none, the data are right."""
    end = ends.wait()
    if end.reason is None:
        assert_has(rank, local, remote, seed)
    return end.reason


# ---- data ----


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 700, 11_000])
def test_scattered_blocks_arrive(shared: tuple[Rank, AnyPeer, Peer], num_blocks: int) -> None:
    rank, peer, way = shared
    remote, local = scattered(num_blocks, 1), scattered(num_blocks, 2)
    rank.memory.blocks[:] = 0
    before = rank.transport.stats()

    assert rank.pull(way, remote, local).wait().reason is None

    assert_has(rank, local, remote, peer.seed)
    untouched = np.setdiff1d(np.arange(NUM_BLOCKS), local)
    assert not rank.memory.blocks[untouched].any()
    stats = rank.transport.stats()
    assert stats.num_transfers == before.num_transfers + 1
    assert stats.num_blocks == before.num_blocks + num_blocks
    assert stats.num_bytes == before.num_bytes + num_blocks * BLOCK_SIZE_BYTES


def test_no_deadline_is_a_deadline_too(shared: tuple[Rank, AnyPeer, Peer]) -> None:
    rank, peer, way = shared
    assert rank.pull(way, ids(9), ids(2), timeout_s=float("inf")).wait().reason is None
    assert_has(rank, ids(2), ids(9), peer.seed)


def test_runs_of_neighbours_arrive(shared: tuple[Rank, AnyPeer, Peer]) -> None:
    rank, peer, way = shared
    # Neighbours at both ends, at one end only, backwards, and the pools' first and last blocks; some asked for twice.
    remote = np.concatenate([np.arange(50, 3050), np.arange(200)[::-1], scattered(100, 3), ids(0, 11_999, 11_999)])
    local = np.concatenate([np.arange(3000), np.arange(4000, 4200), np.arange(5000, 5100), ids(11_998, 11_999, 7000)])
    remote, local = remote.astype(np.int32), local.astype(np.int32)

    assert rank.pull(way, remote, local).wait().reason is None

    assert_has(rank, local, remote, peer.seed)


def test_pulls_at_once_do_not_mix(shared: tuple[Rank, AnyPeer, Peer]) -> None:
    rank, peer, way = shared
    second_way = rank.connect(peer)
    remotes = [scattered(700, 10 + number) for number in range(16)]
    locals_ = np.split(scattered(16 * 700, 4), 16)
    all_ends: list[Ends | None] = [None] * 16

    def pull(numbers: range) -> None:
        for number in numbers:
            all_ends[number] = rank.pull((way, second_way)[number % 2], remotes[number], locals_[number])

    threads = [threading.Thread(target=pull, args=(range(first, 16, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for ends, remote, local in zip(all_ends, remotes, locals_, strict=True):
        assert ends is not None
        assert ends.wait().reason is None
        assert_has(rank, local, remote, peer.seed)
    second_way.close()


def test_ends_are_told_on_a_thread_of_the_transport_or_at_once(shared: tuple[Rank, AnyPeer, Peer]) -> None:
    rank, _, way = shared
    told = threading.Event()
    has_returned = is_late = False

    def on_end(_: object) -> None:
        nonlocal is_late
        is_late = has_returned and threading.current_thread() is threading.main_thread()
        told.set()

    rank.transport.pull(way, ids(1), ids(1), 10.0, on_end)
    has_returned = True

    assert told.wait(10.0)
    assert not is_late


# ---- refusals ----


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS])
def test_local_ids_out_of_range_are_refused(shared: tuple[Rank, AnyPeer, Peer], block: int) -> None:
    rank, _, way = shared
    with pytest.raises(ValueError, match=f"block {block} "):
        rank.pull(way, ids(0, 1), ids(1, block))


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS, 2**31 - 1])
def test_remote_ids_out_of_range_end_the_pull_with_nothing_read(shared: tuple[Rank, AnyPeer, Peer], block: int) -> None:
    rank, peer, way = shared
    rank.memory.blocks[:] = CANARY
    failures = rank.transport.stats().failures.get("backend", 0)

    end = rank.pull(way, ids(5, block, 6), ids(1, 2, 3)).wait()

    assert (end.reason, end.is_fenced) == (FailureReason.BACKEND, True)
    assert str(block) in end.message
    assert (rank.memory.blocks == CANARY).all()
    assert rank.transport.stats().failures["backend"] == failures + 1
    # The way is as good as before.
    assert rank.pull(way, ids(5), ids(1)).wait().reason is None
    assert_has(rank, ids(1), ids(5), peer.seed)


def test_lists_that_do_not_pair_are_refused(shared: tuple[Rank, AnyPeer, Peer]) -> None:
    rank, _, way = shared
    with pytest.raises(ValueError, match="2 remote and 1 local"):
        rank.pull(way, ids(0, 1), ids(1))


def test_another_block_size_is_refused(case: Case, shared: tuple[Rank, AnyPeer, Peer]) -> None:
    other = Rank(case, 8, BLOCK_SIZE_BYTES * 2)
    with closing(other), pytest.raises(TransferError) as caught:
        other.connect(shared[1])
    assert caught.value.reason is FailureReason.INCOMPATIBLE


def test_another_secret_is_refused(case: Case, shared: tuple[Rank, AnyPeer, Peer]) -> None:
    if not case.authenticates:
        pytest.skip("the control plane authenticates for it")
    stranger = Rank(case, 8, BLOCK_SIZE_BYTES, b"another secret")
    with closing(stranger), pytest.raises(TransferError) as caught:
        stranger.connect(shared[1])
    assert caught.value.reason in (FailureReason.INCOMPATIBLE, FailureReason.NO_ROUTE)


def test_nobody_there(case: Case) -> None:
    rank, peer = Rank(case, 8, BLOCK_SIZE_BYTES), start_peer(case, 8, BLOCK_SIZE_BYTES)
    with closing(rank):
        assert peer.endpoint
        peer.close()
        with pytest.raises(TransferError) as caught:
            rank.connect(peer)
    assert caught.value.reason in (FailureReason.NO_ROUTE, FailureReason.TIMEOUT, FailureReason.PEER_LOST)


# ---- stops ----


def test_cancel_at_any_moment_ends_once(calm: tuple[Rank, AnyPeer, Peer]) -> None:
    rank, peer, way = calm
    chance = random.Random(5)
    remote, local = scattered(NUM_LARGE_BLOCKS, 1, NUM_LARGE_BLOCKS), scattered(NUM_LARGE_BLOCKS, 2, NUM_LARGE_BLOCKS)
    for _ in range(25):
        num_blocks = chance.choice([0, 1, 20, NUM_LARGE_BLOCKS])
        transfer, ends = rank.start_pull(way, remote[:num_blocks], local[:num_blocks])
        threading.Event().wait(chance.choice([0.0, 0.0, chance.random() * 0.03]))
        transfer.cancel()
        transfer.cancel()
        reason = is_done_or_lost(rank, ends, local[:num_blocks], remote[:num_blocks], peer.seed)
        assert reason in (None, FailureReason.TIMEOUT)
        ends.wait_until_fenced()
        transfer.cancel()

    # A cancel stops nothing else, and writes nothing any more: what comes after it is whole.
    rank.memory.blocks[:] = CANARY
    assert rank.pull(way, remote[:7], local[:7]).wait().reason is None
    assert_has(rank, local[:7], remote[:7], peer.seed)
    assert (rank.memory.blocks[local[7:]] == CANARY).all()
    ends.only()


def test_cancel_of_a_pull_that_waits_for_its_turn(calm: tuple[Rank, AnyPeer, Peer]) -> None:
    rank, _, way = calm
    blocks = scattered(NUM_LARGE_BLOCKS, 1, NUM_LARGE_BLOCKS)
    pulls = [rank.start_pull(way, part, part) for part in np.split(blocks, 32)]
    for transfer, _ in reversed(pulls):
        transfer.cancel()
    reasons = [ends.wait().reason for _, ends in pulls]
    assert set(reasons) <= {None, FailureReason.TIMEOUT}
    assert reasons[-1] is FailureReason.TIMEOUT


def test_closing_the_way_ends_its_pulls_and_no_others(calm: tuple[Rank, AnyPeer, Peer]) -> None:
    rank, peer, _ = calm
    way, other_way = rank.connect(peer), rank.connect(peer)
    half = NUM_LARGE_BLOCKS // 2
    blocks = np.arange(NUM_LARGE_BLOCKS, dtype=np.int32)
    pulls = [rank.pull(way, part, part) for part in np.split(blocks[:half], 8)]
    others = [rank.pull(other_way, part, part) for part in np.split(blocks[half:], 8)]

    way.close()
    way.close()

    assert {ends.wait().reason for ends in pulls} <= {None, FailureReason.PEER_LOST}
    assert {ends.wait().reason for ends in others} == {None}
    assert_has(rank, blocks[half:], blocks[half:], peer.seed)
    late = rank.pull(way, blocks[:1], blocks[:1]).wait()
    assert late.reason is FailureReason.PEER_LOST
    for ends in pulls:
        ends.only()
    other_way.close()


def test_closing_the_transport_ends_all_and_writes_no_more(case: Case, calm: tuple[Rank, AnyPeer, Peer]) -> None:
    _, peer, _ = calm
    rank = Rank(case, NUM_LARGE_BLOCKS, LARGE_BLOCK_SIZE_BYTES)
    with closing(rank):
        way = rank.connect(peer)
        blocks = np.arange(NUM_LARGE_BLOCKS, dtype=np.int32)
        pulls = [rank.pull(way, part, part) for part in np.split(blocks, 16)]
        wait_until(lambda: rank.memory.blocks[0].any() or pulls[0].ends, "the first block has arrived")

        rank.transport.close(CLOSE_TIMEOUT_S)

        reasons = [ends.only().reason for ends in pulls]
        assert set(reasons) <= {None, FailureReason.PEER_LOST}
        rank.memory.blocks[:] = CANARY
        with pytest.raises(TransferError):
            rank.pull(way, blocks[:1], blocks[:1])
        rank.transport.close(CLOSE_TIMEOUT_S)
        assert (rank.memory.blocks == CANARY).all()


# ---- the peer's process ----


def test_kill_of_the_peer_in_the_middle(case: Case, large: tuple[Rank, AnyPeer, Peer]) -> None:
    rank, peer, way = large
    process = process_of(peer)
    blocks = scattered(NUM_LARGE_BLOCKS, 1, NUM_LARGE_BLOCKS)
    ends = rank.pull(way, blocks, blocks)
    wait_until(lambda: rank.memory.blocks[blocks[0]].any() or ends.ends, "the first block has arrived")

    process.send(signal.SIGKILL)

    reason = is_done_or_lost(rank, ends, blocks, blocks, peer.seed)
    assert reason in (None, FailureReason.PEER_LOST)
    ends.wait_until_fenced()
    process.process.wait()
    later = rank.pull(way, blocks[:3], blocks[:3])
    reason = is_done_or_lost(rank, later, blocks[:3], blocks[:3], peer.seed)
    if case.reads_stopped_peer:
        assert reason is None
    else:
        assert reason in (FailureReason.PEER_LOST, FailureReason.NO_ROUTE)
    ends.only()


def test_kill_of_a_peer_that_stands_still(case: Case, large: tuple[Rank, AnyPeer, Peer]) -> None:
    rank, peer, way = large
    process = process_of(peer)
    process.send(signal.SIGSTOP)
    blocks = scattered(NUM_LARGE_BLOCKS, 1, NUM_LARGE_BLOCKS)
    ends = rank.pull(way, blocks, blocks)
    process.send(signal.SIGKILL)

    reason = is_done_or_lost(rank, ends, blocks, blocks, peer.seed)

    assert reason is (None if case.reads_stopped_peer else FailureReason.PEER_LOST)
    ends.wait_until_fenced()


@pytest.mark.parametrize("is_under_way", [False, True], ids=["before", "in the middle"])
def test_peer_stands_still_past_the_deadline(case: Case, large: tuple[Rank, AnyPeer, Peer], is_under_way: bool) -> None:
    rank, peer, way = large
    process = process_of(peer)
    blocks = scattered(NUM_LARGE_BLOCKS, 1, NUM_LARGE_BLOCKS)
    if is_under_way:
        ends = rank.pull(way, blocks, blocks, timeout_s=0.5)
        wait_until(lambda: rank.memory.blocks[blocks[0]].any() or ends.ends, "the first block has arrived")
        process.send(signal.SIGSTOP)
    else:
        process.send(signal.SIGSTOP)
        ends = rank.pull(way, blocks, blocks, timeout_s=0.5)

    reason = is_done_or_lost(rank, ends, blocks, blocks, peer.seed)

    if case.reads_stopped_peer:
        assert reason is None
    elif not is_under_way:
        assert reason is FailureReason.TIMEOUT
    if ends.only().is_fenced:
        rank.memory.blocks[:] = CANARY
    process.send(signal.SIGCONT)
    if not ends.only().is_fenced:
        ends.wait_until_fenced()
        rank.memory.blocks[:] = CANARY
    # When a pull of after the stop has ended, whatever was late is over.
    fresh = rank.connect(peer)
    assert rank.pull(fresh, blocks[:1], blocks[:1]).wait().reason is None
    assert_has(rank, blocks[:1], blocks[:1], peer.seed)
    assert (rank.memory.blocks[blocks[1:]] == CANARY).all()
    ends.only()


def test_timeout_of_pulls_that_wait_for_their_turn(case: Case, large: tuple[Rank, AnyPeer, Peer]) -> None:
    rank, peer, way = large
    process = process_of(peer)
    process.send(signal.SIGSTOP)
    blocks = np.arange(NUM_LARGE_BLOCKS, dtype=np.int32)
    pulls = [rank.pull(way, part, part, timeout_s=0.2) for part in np.split(blocks, 8)]
    reasons = {ends.wait().reason for ends in pulls}
    assert reasons == ({None} if case.reads_stopped_peer else {FailureReason.TIMEOUT})
    assert all(ends.only().is_fenced or not rank.transport.caps.cancel_is_fence for ends in pulls)


def test_restart_of_the_peer(case: Case) -> None:
    if not case.has_process:
        pytest.skip("both ends are one process")
    rank, old = Rank(case, 8, BLOCK_SIZE_BYTES), PeerProcess(case, 8, BLOCK_SIZE_BYTES)
    with closing(rank, old):
        port = 0
        if case.has_port:
            old.close()
            port = free_port()
            old = PeerProcess(case, 8, BLOCK_SIZE_BYTES, port=port)
        way = rank.connect(old)
        assert rank.pull(way, ids(3), ids(3)).wait().reason is None
        old.send(signal.SIGKILL)
        old.process.wait()
        new = PeerProcess(case, 8, BLOCK_SIZE_BYTES, seed=OTHER_SEED, port=port)
        with closing(new):
            # By the old way nothing of the new process may be read.
            reason = is_done_or_lost(rank, rank.pull(way, ids(4), ids(4)), ids(4), ids(4), old.seed)
            assert (reason is None) == case.reads_stopped_peer
            with pytest.raises(TransferError):
                rank.connect(old)

            new_way = rank.connect(new)
            assert rank.pull(new_way, ids(4), ids(5)).wait().reason is None
            assert_has(rank, ids(5), ids(4), OTHER_SEED)
        old.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# ---- leaks ----


def test_nothing_is_left(case: Case) -> None:
    chance = random.Random(7)
    # What a first use keeps for good (imports, a library's own threads) is no leak.
    churn(case, chance, 3)
    threads, num_descriptors, shared_memory = own_resources()

    churn(case, chance, 300)

    wait_until(lambda: own_resources()[0] <= threads, "threads have ended")
    assert own_resources()[1] <= num_descriptors
    assert own_resources()[2] <= shared_memory


def churn(case: Case, chance: random.Random, num_pulls: int) -> None:
    rank, peer = Rank(case, 64, 16 << 10), start_peer(case, 64, 16 << 10)
    all_ends: list[Ends] = []
    with closing(rank, peer):
        before = peer.num_resources() if isinstance(peer, PeerProcess) else None
        ways: list[Peer] = []
        for _ in range(num_pulls):
            if not ways or (chance.random() < 0.1 and len(ways) < 4):
                ways.append(rank.connect(peer))
            remote, local = (np.array(chance.sample(range(64), 32), np.int32) for _ in range(2))
            transfer, ends = rank.start_pull(chance.choice(ways), remote, local)
            all_ends.append(ends)
            if chance.random() < 0.3:
                transfer.cancel()
            if chance.random() < 0.3:
                ends.wait()
            if chance.random() < 0.1:
                ways.pop(chance.randrange(len(ways))).close()
        for ends in all_ends:
            ends.wait_until_fenced()
        for way in ways:
            way.close()
        ways.clear()
        stats = rank.transport.stats()
        assert stats.num_transfers == num_pulls
        assert sum(stats.failures.values()) == sum(ends.only().reason is not None for ends in all_ends)
        assert stats.num_unfenced == 0
        if before is not None and isinstance(peer, PeerProcess):
            remembered = peer
            wait_until(lambda: remembered.num_resources() <= before, "the peer has given back what it took")
