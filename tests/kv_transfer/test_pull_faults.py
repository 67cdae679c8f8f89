"""The pull connector while the rank at the other end is killed, stopped or started anew."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from typing import Any

import pytest

from tests.kv_transfer.kv_peer import GARBAGE, RIGHT, KvRank, PeerProcess, StartProcess, StartRank, ends, until

SHORT = {"connect_timeout_s": 0.5, "pull_timeout_s": 0.5}

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def comes_back(rank: KvRank, number: int) -> None:
    """A request whose load has failed ends: all blocks are there, and the pool is clean."""
    rank.abort(number)
    assert len(rank.free) == 255
    assert (rank.memory.blocks == GARBAGE).all()


def half_loaded(prefill: PeerProcess, decode: KvRank) -> dict[str, Any]:
    """The ticket of a load that has read what is ready, and waits for the rest."""
    prefill.call("begin", number=1, num_tokens=30)
    prefill.call("compute", number=1, num_tokens=10)
    ticket = dict(prefill.call("early_ticket", number=1))
    decode.load(5, ticket, seed=1)
    until(lambda: decode.holds(decode.requests[5].table, 1, 2), "a part is here")
    return ticket


# ---- the prefill rank ----


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("when", ["before", "queued", "loading", "stopped"])
def test_a_killed_holder(processes: StartProcess, ranks: StartRank, when: str, transport: str) -> None:
    extra = {"transport": transport}
    prefill, decode = processes(extra=extra), ranks(extra=extra)
    if when == "loading":
        half_loaded(prefill, decode)
        prefill.kill()
    else:
        ticket = prefill.call("prefill", number=1, num_tokens=30)
        if when != "before":
            decode.queue(5, ticket, seed=1)
            until(lambda: link_is_open(decode), "the link is open")
        if when == "stopped":
            # Its blocks can be read by shm, and not confirmed; by tcp they are asked for, and do not come.
            prefill.signal(signal.SIGSTOP)
            decode.admit(5)
        prefill.kill()
        if when == "before":
            decode.load(5, ticket, seed=1)
        elif when == "queued":
            decode.admit(5)
    started_at = time.monotonic()
    end = ends(decode, 5)
    assert time.monotonic() - started_at < 3.0
    reason = end["cause"].split(":")[0]
    assert reason == ("no_route" if when == "before" else "peer_lost")
    assert (end["valid"], end["fenced"]) == (0, True)
    assert decode.worker.stats().load_failures == {reason: 1}
    comes_back(decode, 5)


def link_is_open(rank: KvRank) -> bool:
    links = list(rank.worker._loads._links.values())
    return bool(links) and links[0].is_open


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_stopped_holder_and_what_it_sends_later(processes: StartProcess, ranks: StartRank, transport: str) -> None:
    prefill, decode = processes(extra={"transport": transport}), ranks(extra={"transport": transport, **SHORT})
    ticket = prefill.call("prefill", number=1, num_tokens=400)
    decode.queue(5, ticket, seed=1)
    until(lambda: link_is_open(decode), "the link is open")
    prefill.signal(signal.SIGSTOP)
    decode.admit(5)
    end = ends(decode, 5)
    assert end["cause"].split(":")[0] in ("timeout", "peer_lost")
    assert end["fenced"]
    comes_back(decode, 5)
    prefill.signal(signal.SIGCONT)
    until(lambda: prefill.call("counts")["kept"] == 0, "it hears that the lease is not needed")
    # The pool is as it was, whatever had been on its way.
    assert (decode.memory.blocks == GARBAGE).all()
    assert decode.load(6, prefill.call("prefill", number=2, num_tokens=30), seed=2)
    assert ends(decode, 6) == {"valid": 30, **RIGHT}


def test_a_holder_that_is_started_anew_on_its_port(processes: StartProcess, ranks: StartRank) -> None:
    decode = ranks()
    first = processes()
    port = first.port
    old = first.call("prefill", number=1, num_tokens=30)
    decode.queue(4, old, seed=1)
    until(lambda: link_is_open(decode), "the link is open")
    first.kill()
    second = processes(port=port)
    new = second.call("prefill", number=1, num_tokens=30)
    assert new["remote_port"] == port
    assert decode.load(5, old, seed=1)
    assert ends(decode, 5)["cause"].split(":")[0] in ("epoch_mismatch", "peer_lost", "no_route")
    assert decode.load(6, new, seed=1)
    assert ends(decode, 6) == {"valid": 30, **RIGHT}
    other = ranks()
    assert other.load(5, old, seed=1)
    assert ends(other, 5)["cause"].startswith("epoch_mismatch: ")
    # The queued one is told as well, as soon as it may connect again.
    decode.admit(4)
    assert ends(decode, 4)["cause"].split(":")[0] in ("epoch_mismatch", "no_route", "peer_lost")


def test_a_new_process_of_the_same_name_does_not_honour_old_tickets(processes: StartProcess, ranks: StartRank) -> None:
    decode, first = ranks(), processes(engine_id="p")
    port = first.port
    old = first.call("prefill", number=1, num_tokens=30)
    first.kill()
    second = processes(engine_id="p", port=port)
    second.call("prefill", number=2, num_tokens=30)
    assert decode.load(5, old, seed=1)
    assert ends(decode, 5)["cause"].startswith("lease_expired: ")
    assert second.call("counts")["kept"] == 1


# ---- the decode rank ----


def test_a_killed_reader_lets_its_lease_expire(processes: StartProcess, ranks: StartRank) -> None:
    prefill, decode = ranks(extra={"lease_s": 0.4}), processes()
    prefill.begin(1, 30)
    prefill.compute(1, 10)
    decode.call("load", number=5, params=prefill.early_ticket(1), seed=1)
    held = prefill.worker._server._table._leases
    until(lambda: next(iter(held.values())).is_acquired, "it reads")
    decode.kill()
    prefill.compute(1, 30)
    assert prefill.finish(1) is not None
    counts = until(lambda: (c := prefill.counts())["free"] == 255 and c, "its blocks come back")
    assert counts["stats"]["num_expired_leases"] == 1
    other = ranks()
    assert other.load(5, prefill.prefill(2, 30) or {}, seed=2)
    assert ends(other, 5) == {"valid": 30, **RIGHT}


def test_a_stopped_reader_loses_its_lease_and_hears_of_it(processes: StartProcess, ranks: StartRank) -> None:
    prefill, decode = ranks(extra={"lease_s": 0.4}), processes()
    prefill.begin(1, 30)
    prefill.compute(1, 10)
    decode.call("load", number=5, params=prefill.early_ticket(1), seed=1)
    held = prefill.worker._server._table._leases
    until(lambda: next(iter(held.values())).is_acquired, "it reads")
    decode.signal(signal.SIGSTOP)
    prefill.compute(1, 30)
    assert prefill.finish(1) is not None
    until(lambda: prefill.counts()["free"] == 255, "its lease expires, and its blocks are used for something else")
    decode.signal(signal.SIGCONT)
    end = until(lambda: decode.call("result", number=5), "its load ends")
    assert end["cause"].startswith("lease_expired: ")
    assert end["valid"] == 0
    decode.call("abort", number=5)
    assert decode.call("counts")["free"] == 255
    decode.end()


# ---- all of it ----


def test_a_thousand_pulls_with_aborts_and_kills(processes: StartProcess, ranks: StartRank) -> None:
    """Every load ends, nothing wrong is taken for right, and nothing is left, on either side."""
    rng = random.Random(7)
    extra = {"transport": "tcp", "lease_s": 4.0}
    decode = ranks(extra=extra)
    holders = [processes(extra=extra, num_blocks=4000) for _ in range(2)]
    first = decode.counts()
    tickets: list[list[tuple[int, dict[str, Any]]]] = [[], []]
    number, active, causes = 0, [], dict[str, int]()
    kills = {250, 500, 750}
    for i in range(1000):
        which = rng.randrange(2)
        if i in kills:
            holders[which].kill()
            holders[which] = processes(extra=extra, num_blocks=4000)
            tickets[which] = tickets[which][:3]  # some are for the one that is gone
        if not tickets[which]:
            numbers = list(range(number + 1, number + 21))
            number += 20
            made = holders[which].call("prefill_many", numbers=numbers, num_tokens=30)
            tickets[which] = list(zip(numbers, made, strict=True))
        seed, ticket = tickets[which].pop()
        key = 10_000 + i
        decode.queue(key, ticket, seed)
        if rng.random() < 0.1:
            decode.abort(key)
            continue
        until(lambda: len(decode.free) >= 16 or not decode.step(), "there is room")
        decode.admit(key, num_local=rng.choice([0, 0, 4, 16]))
        active.append(key)
        if rng.random() < 0.15:
            aborted = active.pop(rng.randrange(len(active)))
            decode.abort(aborted)
        if len(active) >= 8:
            for done in active:
                end = ends(decode, done)
                assert end["right"], end
                assert end["valid"] == 30 or end["cause"]
                reason = end["cause"].split(":")[0]
                causes[reason] = causes.get(reason, 0) + 1
                decode.abort(done)
            active.clear()
    for key in active:
        assert ends(decode, key)["right"]
        decode.abort(key)
    until(lambda: decode.counts()["free"] == 255, "all blocks are back")
    # (On a slow machine some leases expire before their tickets are used.)
    assert set(causes) <= {"", "peer_lost", "no_route", "lease_expired"}
    assert causes[""] > 300
    for holder in holders:
        until(lambda h=holder: h.call("counts")["kept"] == 0, "what nobody asked for any more expires")
        assert holder.call("counts")["free"] == 3999
    stats = decode.worker.stats()
    assert sum(stats.load_seconds) == stats.num_loads
    assert stats.num_quarantined_blocks == 0
    # Links to those who are gone are forgotten.
    until(lambda: len(decode.worker._loads._links) == 2, "links are forgotten")
    with contextlib.suppress(AssertionError):
        until(lambda: decode.counts()["fds"] <= first["fds"] + 8, "connections are closed", 5.0)
    now = decode.counts()
    assert now["fds"] <= first["fds"] + 8
    assert len(now["threads"]) <= len(first["threads"]) + 8
    assert now["pending"] == 0
