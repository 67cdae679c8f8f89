"""The pull connector in push mode: the prefill rank sends blocks as it computes them; real sockets, real processes."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.kv_transfer.kv_peer import GARBAGE, RIGHT, KvRank, StartProcess, StartRank, ends, give_up, until
from tests.kv_transfer.test_pull_connector import is_released

PUSH = {"mode": "push"}
BLOCK_BYTES = 512


def holder(ranks: StartRank) -> KvRank:
    return ranks("kv_producer", extra=PUSH)


def reader(ranks: StartRank, **extra: Any) -> KvRank:
    return ranks("kv_consumer", extra=PUSH | extra)


def test_a_whole_ticket_is_sent_at_once(ranks: StartRank) -> None:
    prefill, decode = holder(ranks), reader(ranks)
    ticket = prefill.prefill(1, 30) or {}
    assert ticket["is_pushed"]
    assert ticket["remote_block_ids"] == []
    assert decode.load(5, ticket, seed=1)
    assert ends(decode, 5) == {"valid": 30, **RIGHT}
    assert decode.worker.stats().lanes == {"tcp": 1}
    assert decode.worker.stats().num_loaded_bytes == 16 * BLOCK_BYTES
    is_released(prefill)


def test_one_early_ticket_brings_all_full_blocks_as_they_are_computed(ranks: StartRank) -> None:
    prefill, decode = holder(ranks), reader(ranks)
    prefill.begin(1, 30)
    early = prefill.compute(1, 10) or {}
    assert (early["num_tokens"], early["is_partial"]) == (28, True)
    assert decode.load(5, early, seed=1)
    table = decode.requests[5].table
    until(lambda: decode.holds(table, 1, 2), "the first two columns are here")
    assert decode.result(5) is None
    assert (decode.memory.blocks[table[:, 2:].ravel()] == GARBAGE).all()
    assert prefill.compute(1, 20) is None  # there is nothing more to tell
    until(lambda: decode.holds(table, 1, 5), "the first five columns are here")
    prefill.compute(1, 30)
    assert ends(decode, 5) == {"valid": 28, **RIGHT}
    whole = prefill.finish(1) or {}
    prefill.step()
    assert (whole["num_tokens"], whole["remote_lease_id"]) == (30, early["remote_lease_id"])
    assert decode.load(6, whole, seed=1, num_local=28)
    assert ends(decode, 6) == {"valid": 30, **RIGHT}
    is_released(prefill)
    assert decode.worker.stats().num_loaded_bytes == 16 * BLOCK_BYTES
    assert decode.worker.stats().load_failures == {}


def test_only_what_is_missing_is_sent(ranks: StartRank) -> None:
    prefill, decode = holder(ranks), reader(ranks)
    assert decode.load(5, prefill.prefill(1, 30) or {}, seed=1, num_local=20)
    assert ends(decode, 5) == {"valid": 30, **RIGHT}
    assert decode.worker.stats().num_loaded_bytes == 3 * 2 * BLOCK_BYTES
    is_released(prefill)


def test_a_local_hit_of_everything_gives_the_lease_back(ranks: StartRank) -> None:
    prefill, decode = holder(ranks), reader(ranks)
    assert not decode.load(5, prefill.prefill(1, 28) or {}, seed=1, num_local=28)
    is_released(prefill)


def test_several_read_ahead_of_one_lease(ranks: StartRank) -> None:
    prefill, decode = holder(ranks), reader(ranks)
    other = reader(ranks)
    prefill.begin(1, 30)
    early = prefill.compute(1, 10) or {}
    assert decode.load(5, early, seed=1)
    assert other.load(5, early, seed=1, num_local=8)
    prefill.compute(1, 30)
    assert ends(decode, 5) == {"valid": 28, **RIGHT}
    assert ends(other, 5) == {"valid": 28, **RIGHT}
    assert decode.load(6, prefill.finish(1) or {}, seed=1, num_local=28)
    prefill.step()
    assert ends(decode, 6) == {"valid": 30, **RIGHT}
    is_released(prefill)


@pytest.mark.parametrize("what", ["preempted", "not computed", "ended"])
def test_what_was_sent_of_a_lease_that_becomes_void_is_not_used(ranks: StartRank, what: str) -> None:
    prefill, decode = holder(ranks), reader(ranks)
    prefill.begin(1, 30)
    early = prefill.compute(1, 10) or {}
    assert decode.load(5, early, seed=1, num_local=4)
    table = decode.requests[5].table
    until(lambda: decode.holds(table, 1, 2), "the first two columns are here")
    give_up(prefill, 1, what)
    end = ends(decode, 5)
    assert end["cause"].split(":")[0] in ("lease_expired", "peer_lost")
    assert (end["valid"], end["fenced"], end["right"]) == (4, True, True)
    if what == "preempted":
        again = prefill.compute(1, 12) or {}
        assert again["remote_lease_id"] != early["remote_lease_id"]
        assert decode.load(6, again, seed=1)
        prefill.compute(1, 30)
        assert ends(decode, 6) == {"valid": 28, **RIGHT}


def test_a_request_that_ends_meanwhile_ends_the_push(ranks: StartRank) -> None:
    prefill, decode = holder(ranks), reader(ranks)
    prefill.begin(1, 30)
    assert decode.load(5, prefill.compute(1, 10) or {}, seed=1)
    until(lambda: decode.holds(decode.requests[5].table, 1, 2), "a part is here")
    decode.abort(5)
    assert ends(decode, 5)["cause"] == "ended: the request has ended"
    prefill.compute(1, 30)
    until(lambda: not len(pushes(prefill)), "nothing is sent any more")
    assert decode.load(6, prefill.finish(1) or {}, seed=1)
    prefill.step()
    assert ends(decode, 6) == {"valid": 30, **RIGHT}
    is_released(prefill)


def pushes(rank: KvRank) -> Any:
    return rank.worker._server._pushes


def test_a_ticket_of_the_holder_before_the_last_restart_does_not_end_a_push(ranks: StartRank) -> None:
    prefill, decode = holder(ranks), reader(ranks)
    prefill.begin(1, 30)
    early = prefill.compute(1, 10) or {}
    assert decode.load(5, early, seed=1)
    until(lambda: len(pushes(prefill)), "it is being sent")
    assert decode.load(6, early | {"remote_engine_id": "before"}, seed=1)
    assert ends(decode, 6)["cause"].startswith("epoch_mismatch: ")
    until(lambda: prefill.worker._server._num_connections == 1, "the rejected connection is gone")
    prefill.compute(1, 30)
    assert ends(decode, 5) == {"valid": 28, **RIGHT}


def test_a_holder_that_gets_no_further_is_given_up(ranks: StartRank) -> None:
    prefill = holder(ranks)
    decode = reader(ranks, lease_s=0.3)
    prefill.begin(1, 30)
    assert decode.load(5, prefill.compute(1, 10) or {}, seed=1)
    end = ends(decode, 5)
    assert end["cause"] == "timeout: 10 of 28 tokens ready, and none more within 0.3 s"
    assert end["fenced"]


@pytest.mark.parametrize("modes", [("push", "pull"), ("pull", "push")])
def test_ranks_of_different_modes_serve_without_each_other(ranks: StartRank, modes: tuple[str, str]) -> None:
    prefill, decode = (ranks(extra={"mode": mode, "transport": "tcp"}) for mode in modes)
    decode.queue(5, prefill.prefill(1, 30) or {}, seed=1)
    assert not decode.admit(5)
    until(lambda: decode.worker.stats().num_rejected_params == 1, "it is told")


def test_blocks_come_from_another_process(ranks: StartRank, processes: StartProcess) -> None:
    decode = reader(ranks)
    process = processes("kv_producer", extra=PUSH)
    ticket = process.call("prefill", number=1, num_tokens=30)
    assert decode.load(5, ticket, seed=1)
    assert ends(decode, 5) == {"valid": 30, **RIGHT}
    counts = until(lambda: (c := process.call("counts"))["kept"] == 0 and c, "the lease is released")
    assert (counts["sends_finished"], counts["free"]) == (1, 255)


def test_a_holder_that_is_killed_while_it_sends(ranks: StartRank, processes: StartProcess) -> None:
    decode = reader(ranks)
    process = processes("kv_producer", extra=PUSH)
    process.call("begin", number=1, num_tokens=30)
    assert decode.load(5, process.call("compute", number=1, num_tokens=10), seed=1)
    until(lambda: decode.holds(decode.requests[5].table, 1, 2), "a part is here")
    process.kill()
    end = ends(decode, 5)
    assert end["cause"].startswith("peer_lost: ")
    assert end["fenced"]


def test_a_receiver_that_is_killed_costs_the_holder_nothing(ranks: StartRank, processes: StartProcess) -> None:
    prefill = holder(ranks)
    process = processes("kv_consumer", extra=PUSH)
    prefill.begin(1, 30)
    early = prefill.compute(1, 10) or {}
    assert process.call("load", number=5, params=early, seed=1)
    until(lambda: len(pushes(prefill)) == 1, "it waits for more")
    process.kill()
    until(lambda: not len(pushes(prefill)), "it is forgotten")
    prefill.compute(1, 30)
    prefill.finish(1, hands_off=False)
    assert prefill.counts()["free"] == 255


def test_a_holder_that_stood_still_cannot_write_late(ranks: StartRank, processes: StartProcess) -> None:
    decode = reader(ranks, lease_s=0.5, pull_timeout_s=0.5, connect_timeout_s=0.5)
    process = processes("kv_producer", extra=PUSH)
    process.call("begin", number=1, num_tokens=30)
    assert decode.load(5, process.call("compute", number=1, num_tokens=10), seed=1)
    table = decode.requests[5].table.copy()
    until(lambda: decode.holds(table, 1, 2), "a part is here")
    process.signal(signal.SIGSTOP)
    end = ends(decode, 5)
    assert (end["cause"].split(":")[0], end["fenced"]) == ("timeout", True)
    decode.abort(5)
    decode.memory.blocks[table.ravel()] = 0x55
    process.signal(signal.SIGCONT)
    process.call("compute", number=1, num_tokens=30)
    assert decode.load(6, process.call("finish", number=1), seed=1)
    process.call("step")
    assert ends(decode, 6) == {"valid": 30, **RIGHT}
    others = sorted(set(table.ravel().tolist()) - set(decode.requests[6].table.ravel().tolist()))
    assert (decode.memory.blocks[others] == 0x55).all()


def test_what_a_holder_cannot_send_is_no_lost_lease(ranks: StartRank, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = holder(ranks), reader(ranks)
    monkeypatch.setattr(prefill.worker._server, "_pushes", None)
    assert decode.load(5, prefill.prefill(1, 30) or {}, seed=1)
    end = ends(decode, 5)
    assert end["cause"].startswith("incompatible: this rank does not send blocks; set the same mode")
