"""Copies within one memory: what is copied, that a stop is heeded between two parts, and who tells the ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kv_transfer import block_moves
from kv_transfer.copy_lane import PART_BYTES, CopyLane, CopyPeer
from kv_transfer.memory import KvMemory
from kv_transfer.pulls import Pulls
from kv_transfer.transport import Endpoint, FailureReason, TransferEnd, TransferError
from tests.kv_transfer.transport_rig import PATIENCE_S, Ends, wait_until

NUM_BLOCKS = 6


@pytest.fixture
def memory() -> KvMemory:
    return KvMemory(NUM_BLOCKS, PART_BYTES)


@pytest.fixture
def lane() -> Iterator[CopyLane]:
    lane = CopyLane("test")
    yield lane
    lane.close(time.monotonic() + PATIENCE_S)


def numbers(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_a_stop_is_heeded_between_two_parts(memory: KvMemory, lane: CopyLane, monkeypatch: pytest.MonkeyPatch) -> None:
    has_copied, may_go_on = threading.Event(), threading.Event()

    copy = block_moves.copy

    def paced(*arguments: np.ndarray) -> None:
        copy(*arguments)
        has_copied.set()
        assert may_go_on.wait(PATIENCE_S)

    monkeypatch.setattr(block_moves, "copy", paced)
    ends = Ends()
    peer = lane.make_peer(Endpoint("test", b"", NUM_BLOCKS, PART_BYTES), np.full((NUM_BLOCKS, PART_BYTES), 7, np.uint8))
    everything = np.arange(NUM_BLOCKS, dtype=np.int32)
    pull = lane.pull(peer, memory, everything, everything, PATIENCE_S, ends.on_end)
    assert has_copied.wait(PATIENCE_S)

    pull.cancel()
    assert not ends.ends, "it is still being written"
    may_go_on.set()

    assert ends.wait() == TransferEnd(FailureReason.TIMEOUT, "cancelled")
    assert memory.blocks[0].all()
    assert not memory.blocks[1:].any()


def test_a_copy_that_fails_ends_its_pull_only(
    memory: KvMemory, lane: CopyLane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: np.ndarray) -> None:
        raise MemoryError("no room")

    peer = lane.make_peer(Endpoint("test", b"", NUM_BLOCKS, PART_BYTES), np.full((NUM_BLOCKS, PART_BYTES), 7, np.uint8))
    with monkeypatch.context() as patch:
        patch.setattr(block_moves, "copy", fail)
        for blocks in (numbers(1), numbers(1, 2)):
            ends = Ends()
            lane.pull(peer, memory, blocks, blocks, PATIENCE_S, ends.on_end)
            assert ends.wait().reason is FailureReason.BACKEND
    for blocks in (numbers(1), numbers(1, 2)):
        ends = Ends()
        lane.pull(peer, memory, blocks, blocks, PATIENCE_S, ends.on_end)
        assert ends.wait().reason is None
    assert caplog.text.count("no room") >= 2
    assert lane.stats().failures == {"backend": 2}


def test_a_close_waits_for_copies_of_callers(memory: KvMemory, lane: CopyLane, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    copy = block_moves.copy

    def slow(*arguments: np.ndarray) -> None:
        has_begun.set()
        assert may_go_on.wait(PATIENCE_S)
        copy(*arguments)

    monkeypatch.setattr(block_moves, "copy", slow)
    ends = Ends()
    peer = lane.make_peer(Endpoint("test", b"", NUM_BLOCKS, PART_BYTES), np.full((NUM_BLOCKS, PART_BYTES), 7, np.uint8))
    pull = threading.Thread(
        target=lane.pull, args=(peer, memory, numbers(1), numbers(1), PATIENCE_S, ends.on_end), daemon=True
    )
    pull.start()
    assert has_begun.wait(PATIENCE_S)
    close = threading.Thread(target=lane.close, args=(time.monotonic() + PATIENCE_S,), daemon=True)
    close.start()
    wait_until(lambda: is_closed(lane, peer, memory), "nothing more is taken")
    assert close.is_alive()
    assert not memory.blocks[1].any()

    may_go_on.set()
    close.join(PATIENCE_S)

    assert not close.is_alive()
    assert memory.blocks[1].all()
    assert ends.wait().reason is None
    pull.join(PATIENCE_S)


def is_closed(lane: CopyLane, peer: CopyPeer, memory: KvMemory) -> bool:
    """Pulls of nothing are refused."""
    try:
        lane.pull(peer, memory, numbers(), numbers(), PATIENCE_S, lambda _: None)
    except TransferError:
        return True
    return False


# ---- the account of pulls ----


@pytest.fixture
def pulls() -> Iterator[Pulls]:
    pulls = Pulls("test")
    yield pulls
    pulls.close(time.monotonic() + PATIENCE_S)


def test_the_keeper_ends_what_nobody_works_on(pulls: Pulls) -> None:
    ends = Ends()
    pull = pulls.add(None, 1, 10, 0.01, ends.on_end)
    assert ends.wait().reason is FailureReason.TIMEOUT
    assert not pull.begin()


def test_the_earliest_deadline_is_kept_whatever_the_order(pulls: Pulls) -> None:
    late, early = Ends(), Ends()
    pulls.add(None, 1, 10, PATIENCE_S * 10, late.on_end)
    pulls.add(None, 1, 10, 0.01, early.on_end)
    assert early.wait().reason is FailureReason.TIMEOUT
    assert not late.ends


def test_a_running_pull_is_interrupted_once_and_ends_with_the_first_reason(pulls: Pulls) -> None:
    ends, interrupts = Ends(), []
    pull = pulls.add(None, 1, 10, PATIENCE_S, ends.on_end)
    assert pull.begin(lambda: interrupts.append(1))
    assert not pull.begin()
    pulls.stop(pull, FailureReason.PEER_LOST, "first")
    pull.cancel()
    assert interrupts == [1]
    assert not ends.ends, "its thread has not come back yet"
    pull.finish(TransferEnd())
    assert ends.only() == TransferEnd(FailureReason.PEER_LOST, "first")
    pull.cancel()
    ends.only()
    assert interrupts == [1]


def test_a_callback_that_fails_harms_nobody(pulls: Pulls, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: TransferEnd) -> None:
        raise RuntimeError("callback")

    pulls.add(None, 1, 10, PATIENCE_S, fail).cancel()
    ends = Ends()
    pulls.add(None, 1, 10, PATIENCE_S, ends.on_end).cancel()
    assert ends.wait().reason is FailureReason.TIMEOUT
    wait_until(lambda: "callback" in caplog.text, "the failure is told")
    assert pulls.stats().failures == {"timeout": 2}


def test_after_close_nothing_is_taken(pulls: Pulls) -> None:
    ends = Ends()
    pulls.add(None, 1, 10, PATIENCE_S, ends.on_end)
    pulls.close(time.monotonic() + PATIENCE_S)
    assert ends.only().reason is FailureReason.PEER_LOST
    with pytest.raises(TransferError, match="closed"):
        pulls.add(None, 1, 10, PATIENCE_S, ends.on_end)
