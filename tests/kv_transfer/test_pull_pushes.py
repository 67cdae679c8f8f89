"""What a holder sends to whom, and when: pure, with a transport that only writes down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kv_transfer.kv_messages import PushTo
from kv_transfer.leases import GoneNotice, ReadyNotice
from kv_transfer.pull_pushes import Pushes

BLOCK_SIZE = 4
LEASE = 7
ONE_GROUP = np.array([[11, 12, 13]], np.int32)
TWO_GROUPS = np.array([[11, 12, 13], [21, 22, 23]], np.int32)


class Transport:
    """Takes what it is given, for grants below 100 that have not been revoked."""

    def __init__(self) -> None:
        self.sent: dict[int, list[int]] = {}
        self.revoked: list[int] = []
        self.num_granted = 100

    def push(self, grant: int, blocks: np.ndarray) -> bool:
        if grant >= 100 or grant in self.revoked:
            return False
        sent = self.sent.setdefault(grant, [])
        if len(sent) + len(blocks) > self.num_granted:
            raise ValueError("more blocks than the receiver waits for")
        sent += blocks.tolist()
        return True

    def revoke(self, grant: int) -> None:
        self.revoked.append(grant)


class Rig:
    def __init__(self, table: np.ndarray = ONE_GROUP) -> None:
        self.transport = Transport()
        self.pushes = Pushes(self.transport, BLOCK_SIZE)  # type: ignore[arg-type]
        self.pushes.show(LEASE, table)

    def add(
        self, cells: Sequence[int], num_tokens: int = 12, *, ready: int = 0, grant: int = 1, ahead: bool = False
    ) -> str:
        wanted = PushTo(grant, num_tokens, np.array(cells, "<i4").tobytes())
        return self.pushes.add(LEASE, "reader", ahead, wanted, ready)


def test_blocks_are_sent_as_they_are_complete() -> None:
    rig = Rig()
    assert rig.add([0, 1, 2], 10, ready=5) == ""
    assert rig.transport.sent == {1: [11]}
    rig.pushes.advance(LEASE, 7)
    assert rig.transport.sent == {1: [11]}
    rig.pushes.advance(LEASE, 8)
    assert rig.transport.sent == {1: [11, 12]}
    assert len(rig.pushes) == 1
    rig.pushes.advance(LEASE, 10)  # the last block is complete with the last token wanted
    assert rig.transport.sent == {1: [11, 12, 13]}
    assert len(rig.pushes) == 0
    assert rig.transport.revoked == []


def test_what_is_ready_already_is_sent_at_once_and_only_what_is_wanted() -> None:
    rig = Rig()
    assert rig.add([1, 2], ready=12) == ""
    assert rig.transport.sent == {1: [12, 13]}
    assert len(rig.pushes) == 0


def test_cells_go_by_columns_and_then_by_groups() -> None:
    rig = Rig(TWO_GROUPS)
    assert rig.add([0, 1, 3, 4], ready=8) == ""
    assert rig.transport.sent == {1: [11, 21, 22]}
    rig.pushes.advance(LEASE, 12)
    assert rig.transport.sent == {1: [11, 21, 22, 13]}


def test_later_blocks_are_those_that_are_shown_later() -> None:
    rig = Rig(ONE_GROUP[:, :1])
    assert rig.add([0, 1, 2], ready=4, ahead=True) == ""
    rig.pushes.show(LEASE, ONE_GROUP)
    rig.pushes.advance(LEASE, 12)
    assert rig.transport.sent == {1: [11, 12, 13]}


def test_who_reads_ahead_hears_of_progress_and_of_the_end() -> None:
    rig = Rig()
    rig.add([0, 1, 2], grant=1, ahead=True)
    rig.add([0, 1, 2], grant=2)
    assert rig.pushes.advance(LEASE, 8) == [ReadyNotice("reader", LEASE, 8)]  # the other one is told by the lease
    assert rig.pushes.end(LEASE, "why") == [GoneNotice("reader", LEASE, "why")]
    assert rig.transport.revoked == [1, 2]
    assert len(rig.pushes) == 0
    assert rig.pushes.advance(LEASE, 12) == []
    assert rig.pushes.end(LEASE, "why") == []


def test_pushes_of_leases_that_are_gone_end() -> None:
    rig = Rig()
    rig.add([0, 1], ahead=True)
    assert rig.pushes.keep([LEASE]) == []
    (notice,) = rig.pushes.keep([LEASE + 1])
    assert (notice.reader, notice.lease_id) == ("reader", LEASE)
    assert rig.transport.revoked == [1]
    assert rig.add([0]) != ""


def test_a_reader_that_waits_no_more_is_forgotten() -> None:
    rig = Rig()
    assert rig.add([0, 1, 2], grant=100, ready=4) == ""
    assert len(rig.pushes) == 0
    rig.add([0, 1, 2], grant=1)
    rig.pushes.forget("another")
    assert len(rig.pushes) == 1
    rig.pushes.forget("reader")
    assert len(rig.pushes) == 0
    assert rig.transport.revoked == [1]


def test_a_block_that_was_given_up_is_not_sent() -> None:
    rig = Rig(np.array([[0, 12, 13]], np.int32))
    assert rig.add([0, 1], ready=8) == ""
    assert rig.transport.sent == {}
    assert rig.transport.revoked == [1]
    assert len(rig.pushes) == 0


def test_more_cells_than_were_granted_end_the_push() -> None:
    rig = Rig()
    rig.transport.num_granted = 1
    assert rig.add([0, 1], ready=8) == ""
    assert rig.transport.revoked == [1]
    assert len(rig.pushes) == 0


@pytest.mark.parametrize(
    "cells", [[], [-1, 0], [1, 0], [0, 0], [0, 3], [2**31 - 1]], ids=["none", "<0", "descends", "twice", ">", "huge"]
)
def test_impossible_cells_are_refused(cells: list[int]) -> None:
    rig = Rig()
    assert "not an ascending choice of 3 columns of 1 groups" in rig.add(cells, ready=12)
    assert len(rig.pushes) == 0
    assert rig.transport.sent == {}


def test_tokens_beyond_all_that_will_ever_be_are_waited_for() -> None:
    rig = Rig()
    assert rig.add([0, 2**31 - 1], num_tokens=2**31 - 1, ready=12) != ""
    assert rig.add([0, 2**29 - 1], num_tokens=2**31 - 1, ready=12) == ""
    assert rig.transport.sent == {1: [11]}
    rig.pushes.advance(LEASE, 12)
    assert len(rig.pushes) == 1


def test_cells_that_are_cut_short_and_unknown_leases_are_refused() -> None:
    rig = Rig()
    assert "cut short" in rig.pushes.add(LEASE, "reader", False, PushTo(1, 12, b"\0\0\0\0\0"), 12)
    assert "nothing of it has been computed" in rig.pushes.add(8, "reader", False, PushTo(1, 12, bytes(4)), 12)
