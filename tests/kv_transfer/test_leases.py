"""The producer's leases, under a virtual clock."""

from __future__ import annotations

import pytest

from kv_transfer.connector import SendFinished
from kv_transfer.leases import NUM_REMEMBERED, GoneNotice, LeaseTable, ReadyNotice

KEY = (1, 7)
LEASE_S = 30.0


@pytest.fixture
def table() -> LeaseTable:
    table = LeaseTable(LEASE_S)
    table.open(1, KEY)
    return table


def completed(table: LeaseTable, num_tokens: int = 10, now: float = 0.0) -> LeaseTable:
    assert table.advance(1, num_tokens) == []
    assert table.complete(1, KEY, num_tokens, now) == []
    return table


def test_a_confirmed_lease_ends_with_one_send(table: LeaseTable) -> None:
    completed(table)
    assert table.num_complete == 1
    assert table.acquire(1, "d") == 10
    assert table.confirm(1, "d", 10) == ("", [SendFinished(KEY)])
    assert table.confirm(1, "d", 10) == ("its reader has confirmed", [])
    assert table.release(1, "d") == []
    assert table.expire(1e9) == []
    assert (len(table), table.num_complete, table.num_expired) == (0, 0, 0)
    table.check_integrity()


def test_a_released_lease_ends_with_one_send(table: LeaseTable) -> None:
    completed(table)
    assert table.release(1, "d") == [SendFinished(KEY)]
    assert table.acquire(1, "d") == "its reader has released it"


def test_an_abandoned_lease_ends_with_one_send(table: LeaseTable) -> None:
    assert table.abandon(KEY) == []
    completed(table)
    assert table.acquire(1, "d") == 10
    assert table.abandon((1, 8)) == []
    assert table.abandon(KEY) == [SendFinished(KEY), GoneNotice("d", 1, "its request was given up")]
    assert table.abandon(KEY) == []
    assert table.confirm(1, "d", 10) == ("its request was given up", [])
    table.check_integrity()


def test_one_whose_reader_is_not_known_yet_is_prolonged(table: LeaseTable) -> None:
    table.prolong(KEY, 0.0)
    completed(table)
    table.prolong((1, 8), 100.0)
    table.prolong(KEY, 20.0)
    table.prolong(KEY, 10.0)
    assert table.expire(20.0 + LEASE_S - 0.1) == []
    assert table.expire(20.0 + LEASE_S) == [SendFinished(KEY)]
    table.prolong(KEY, 60.0)


def test_an_open_lease_has_no_clock(table: LeaseTable) -> None:
    assert table.expire(1e9) == []
    completed(table, now=1e9)
    assert table.expire(1e9 + LEASE_S - 0.1) == []
    assert table.expire(1e9 + LEASE_S) == [SendFinished(KEY)]
    assert table.num_expired == 1
    assert "expired" in str(table.acquire(1, "d"))


def test_heartbeats_extend_and_never_shorten(table: LeaseTable) -> None:
    assert table.heartbeat(1, "d", 100.0)
    completed(table, now=0.0)
    assert table.expire(129.0) == []
    assert table.heartbeat(1, "d", 50.0)
    assert table.expire(129.0) == []
    assert table.heartbeat(1, "d", 129.0)
    assert table.expire(158.9) == []
    assert table.expire(159.0) == [SendFinished(KEY)]
    assert not table.heartbeat(1, "d", 159.0)


def test_its_reader_is_told_of_progress(table: LeaseTable) -> None:
    assert table.advance(1, 4) == []
    assert table.acquire(1, "d") == 4
    assert table.advance(1, 8) == [ReadyNotice("d", 1, 8)]
    assert table.advance(1, 8) == []
    assert table.advance(1, 6) == []
    assert table.confirm(1, "d", 10) == ("10 tokens were read, and 8 are ready", [])
    assert table.advance(1, 10) == [ReadyNotice("d", 1, 10)]


def test_what_was_confirmed_before_its_request_has_ended_is_sent_when_it_has(table: LeaseTable) -> None:
    table.advance(1, 10)
    table.acquire(1, "d")
    assert table.confirm(1, "d", 10) == ("", [])
    assert table.acquire(1, "d") == "its reader has confirmed"
    assert table.complete(1, KEY, 10, 0.0) == [SendFinished(KEY)]
    assert len(table) == 0


def test_what_was_released_before_its_request_has_ended_is_sent_when_it_has(table: LeaseTable) -> None:
    assert table.release(1, "d") == []
    assert table.advance(1, 10) == []
    table.check_integrity()
    assert table.complete(1, KEY, 10, 0.0) == [SendFinished(KEY)]


def test_a_void_lease_is_told_to_its_reader_and_sends_nothing(table: LeaseTable) -> None:
    table.acquire(1, "d")
    assert table.void(1, "preempted") == [GoneNotice("d", 1, "preempted")]
    assert table.void(1, "preempted") == []
    assert table.confirm(1, "d", 0) == ("preempted", [])
    assert not table.heartbeat(1, "d", 0.0)


def test_a_reader_that_gave_up_is_not_told(table: LeaseTable) -> None:
    table.acquire(1, "d")
    table.release(1, "d")
    assert table.void(1, "preempted") == []


def test_a_request_that_ends_after_its_lease_was_void_is_sent_at_once(table: LeaseTable) -> None:
    table.void(1, "a step was not computed")
    assert table.complete(1, KEY, 10, 0.0) == [SendFinished(KEY)]


def test_a_request_that_ends_incomplete_is_sent_at_once_and_its_reader_told(table: LeaseTable) -> None:
    table.advance(1, 4)
    table.acquire(1, "d")
    gone = GoneNotice("d", 1, "only 4 of its 10 tokens were computed")
    assert table.complete(1, KEY, 10, 0.0) == [SendFinished(KEY), gone]


def test_a_lease_has_one_reader(table: LeaseTable) -> None:
    completed(table)
    assert table.heartbeat(1, "d", 0.0)
    assert table.acquire(1, "e") == "it is held for engine d"
    assert not table.heartbeat(1, "e", 0.0)
    assert table.confirm(1, "e", 10) == ("it is held for engine d", [])
    assert table.release(1, "e") == []
    assert table.acquire(1, "d") == 10


def test_who_reads_ahead_takes_nothing_from_the_lease(table: LeaseTable) -> None:
    table.advance(1, 8)
    assert table.num_ready(1) == 8
    assert table.confirm_ahead(1, 8) == ""
    assert table.confirm_ahead(1, 9) == "9 tokens were read, and 8 are ready"
    assert table.acquire(1, "d") == 8
    assert table.confirm_ahead(1, 8) == ""
    assert table.advance(1, 10) == [ReadyNotice("d", 1, 10)]
    assert table.complete(1, KEY, 10, 0.0) == []
    assert table.confirm(1, "d", 10) == ("", [SendFinished(KEY)])
    assert table.confirm_ahead(1, 8) == table.num_ready(1) == "its reader has confirmed"
    assert table.num_ready(9) == "there is no such lease"


def test_what_was_read_ahead_of_a_void_lease_is_not_confirmed(table: LeaseTable) -> None:
    table.advance(1, 8)
    assert table.num_ready(1) == 8
    assert table.void(1, "preempted") == []
    assert table.confirm_ahead(1, 8) == "preempted"


def test_reading_ahead_does_not_prolong_a_lease(table: LeaseTable) -> None:
    completed(table)
    assert table.num_ready(1) == 10
    assert table.confirm_ahead(1, 10) == ""
    assert table.expire(LEASE_S) == [SendFinished(KEY)]


def test_nothing_is_confirmed_that_was_not_acquired(table: LeaseTable) -> None:
    completed(table)
    assert table.confirm(1, "d", 10) == ("it was never acquired", [])


def test_unknown_leases_are_refused(table: LeaseTable) -> None:
    assert table.acquire(2, "d") == "there is no such lease"
    assert table.confirm(2, "d", 1) == ("there is no such lease", [])
    assert not table.heartbeat(2, "d", 0.0)
    assert table.release(2, "d") == []
    assert table.advance(2, 1) == []


def test_an_expired_lease_tells_a_reader_that_had_begun(table: LeaseTable) -> None:
    completed(table)
    table.acquire(1, "d")
    sent, gone = table.expire(LEASE_S)
    assert sent == SendFinished(KEY)
    assert isinstance(gone, GoneNotice)


def test_close_ends_all(table: LeaseTable) -> None:
    completed(table)
    table.open(2, (1, 8))
    table.acquire(2, "d")
    assert table.close() == [SendFinished(KEY), GoneNotice("d", 2, "its rank closes")]
    assert len(table) == 0


def test_what_is_remembered_is_bounded(table: LeaseTable) -> None:
    for lease_id in range(2, NUM_REMEMBERED + 3):
        table.open(lease_id, (1, lease_id))
        table.void(lease_id, "gone")
    assert table.acquire(2, "d") == "there is no such lease"
    assert table.acquire(NUM_REMEMBERED + 2, "d") == "gone"
    table.check_integrity()
