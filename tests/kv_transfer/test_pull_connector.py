"""The pull connector from ticket to loaded blocks: two ranks with real sockets, in one process and in two."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer import pull_handshake, pull_load
from kv_transfer.config import KVTransferConfig
from kv_transfer.connection import Connection, Listener, connect
from kv_transfer.geometry import KV_PROTOCOL_VERSION
from kv_transfer.kv_messages import (
    Acquire,
    Confirm,
    Confirmed,
    Denied,
    Gone,
    Granted,
    Greeting,
    Heard,
    Heartbeat,
    Ready,
    Release,
    Request,
    Welcome,
    decode_from_holder,
    decode_request,
    encode,
)
from kv_transfer.lanes import Lanes
from kv_transfer.pull_connector import PullConnector
from kv_transfer.pull_settings import PullSettings
from kv_transfer.pull_worker import PullWorker
from kv_transfer.transport import Endpoint, FailureReason, TransferEnd, TransportCaps, TransportStats
from tests.kv_transfer.kv_peer import (
    GARBAGE,
    HOST,
    RIGHT,
    SECRET,
    KvRank,
    PeerProcess,
    StartRank,
    ends,
    geometry,
    give_up,
    until,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def is_released(prefill: KvRank) -> None:
    """Its leases are gone, long before they expire, and its blocks are back."""

    def is_back() -> bool:
        counts = prefill.counts()
        return not counts["kept"] and counts["free"] + sum(r.table.size for r in prefill.requests.values()) == 255

    until(is_back, "leases are released", 5.0)
    assert prefill.worker.stats().num_leases == 0
    assert prefill.worker.stats().num_expired_leases == 0


# ---- loads ----


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_blocks_go_from_one_process_to_another(ranks: StartRank, transport: str) -> None:
    prefill = PeerProcess("kv_producer", extra={"transport": transport})
    decode = ranks("kv_consumer", extra={"transport": transport})
    ticket = prefill.call("prefill", number=1, num_tokens=30)
    assert decode.load(5, ticket, seed=1)
    assert ends(decode, 5) == {"valid": 30, **RIGHT}
    counts = until(lambda: (c := prefill.call("counts"))["kept"] == 0 and c, "the lease is released")
    assert (counts["sends_finished"], counts["free"]) == (1, 255)
    stats = decode.worker.stats()
    assert (stats.num_loads, stats.num_loaded_bytes, stats.lanes) == (1, 16 * 512, {transport: 1})
    assert (sum(stats.load_seconds), stats.load_failures) == (1, {})
    assert stats.load_seconds_sum > 0
    prefill.end()


def test_auto_takes_the_shortest_way(ranks: StartRank) -> None:
    prefill, decode = ranks(), ranks()
    assert decode.load(5, prefill.prefill(1, 30) or {}, seed=1)
    assert ends(decode, 5) == {"valid": 30, **RIGHT}
    assert decode.worker.stats().lanes == {"inproc": 1}
    is_released(prefill)


def test_a_rank_takes_over_from_itself(ranks: StartRank) -> None:
    rank = ranks()
    assert rank.load(5, rank.prefill(1, 30) or {}, seed=1)
    assert ends(rank, 5) == {"valid": 30, **RIGHT}
    rank.abort(5)
    is_released(rank)


def test_only_what_is_missing_is_read(ranks: StartRank) -> None:
    prefill, decode = ranks(), ranks()
    ticket = prefill.prefill(1, 30) or {}
    assert decode.load(5, ticket, seed=1, num_local=20)
    assert ends(decode, 5) == {"valid": 30, **RIGHT}
    assert decode.worker.stats().num_loaded_bytes == 3 * 2 * 512
    is_released(prefill)


def test_a_local_hit_of_everything_gives_the_lease_back(ranks: StartRank) -> None:
    prefill, decode = ranks(), ranks()
    assert not decode.load(5, prefill.prefill(1, 28) or {}, seed=1, num_local=28)
    is_released(prefill)
    assert decode.worker.stats().num_loads == 0


def test_what_is_ready_is_read_while_the_rest_is_computed(ranks: StartRank) -> None:
    prefill, decode = ranks(), ranks()
    prefill.begin(1, 30)
    prefill.compute(1, 10)
    ticket = prefill.early_ticket(1)
    assert decode.load(5, ticket, seed=1)
    table = decode.requests[5].table
    until(lambda: decode.holds(table, 1, 2) and not decode.result(5), "the first two columns are here")
    assert (decode.memory.blocks[table[:, 2:].ravel()] == GARBAGE).all()
    prefill.compute(1, 20)
    until(lambda: decode.holds(table, 1, 5), "the first five columns are here")
    prefill.compute(1, 30)
    assert ends(decode, 5) == {"valid": 30, **RIGHT}
    # Confirmed, but its request has not ended yet: only then its blocks are kept, and come back at once.
    assert prefill.finish(1) == ticket
    is_released(prefill)


@pytest.mark.parametrize("what", ["preempted", "not computed", "ended"])
def test_an_early_read_of_what_is_given_up_fails(ranks: StartRank, what: str) -> None:
    prefill, decode = ranks(), ranks()
    prefill.begin(1, 30)
    prefill.compute(1, 10)
    assert decode.load(5, prefill.early_ticket(1), seed=1, num_local=4)
    table = decode.requests[5].table
    until(lambda: decode.holds(table, 1, 2), "the first two columns are here")
    give_up(prefill, 1, what)
    end = ends(decode, 5)
    assert end["cause"].startswith("lease_expired: ")
    assert what in end["cause"]
    assert end["valid"] == 4
    assert decode.worker.stats().load_failures == {"lease_expired": 1}
    if what == "preempted":
        prefill.compute(1, 30)
        assert decode.load(6, prefill.finish(1) or {}, seed=1)
        assert ends(decode, 6) == {"valid": 30, **RIGHT}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_is_read_ahead_need_not_be_read_again(ranks: StartRank, transport: str) -> None:
    prefill, decode = ranks(extra={"transport": transport}), ranks(extra={"transport": transport})
    prefill.begin(1, 30)
    ticket = prefill.compute(1, 13) or {}
    assert ticket["num_tokens"] == 12
    assert decode.load(5, ticket, seed=1)
    assert ends(decode, 5) == {"valid": 12, **RIGHT}
    ticket = prefill.compute(1, 22) or {}
    assert decode.load(6, ticket, seed=1, num_local=12)
    assert ends(decode, 6) == {"valid": 20, **RIGHT}
    assert prefill.worker.stats().num_leases == 0  # still open, and nobody's
    prefill.compute(1, 30)
    whole = prefill.finish(1) or {}
    assert whole["remote_lease_id"] == ticket["remote_lease_id"]
    prefill.step()
    assert decode.load(7, whole, seed=1, num_local=20)
    assert ends(decode, 7) == {"valid": 30, **RIGHT}
    is_released(prefill)
    assert decode.worker.stats().num_loaded_bytes == (3 + 2 + 3) * 2 * 512
    assert decode.worker.stats().load_failures == {}


def test_another_rank_may_go_on_than_the_one_that_read_ahead(ranks: StartRank) -> None:
    prefill, first, second = ranks(), ranks(), ranks()
    prefill.begin(1, 30)
    assert first.load(5, prefill.compute(1, 13) or {}, seed=1)
    assert ends(first, 5) == {"valid": 12, **RIGHT}
    prefill.compute(1, 30)
    assert second.load(5, prefill.finish(1) or {}, seed=1)
    prefill.step()
    assert ends(second, 5) == {"valid": 30, **RIGHT}
    is_released(prefill)


@pytest.mark.parametrize("what", ["preempted", "not computed", "ended"])
def test_what_is_read_ahead_of_a_lease_that_is_void_is_not_used(ranks: StartRank, what: str) -> None:
    prefill, decode = ranks(), ranks()
    prefill.begin(1, 30)
    ticket = prefill.compute(1, 13) or {}
    give_up(prefill, 1, what)
    assert decode.load(5, ticket, seed=1, num_local=4)
    end = ends(decode, 5)
    assert (end["valid"], end["cause"].split(":")[0]) == (4, "lease_expired")
    assert what in end["cause"]


def test_a_holder_that_gets_no_further_is_given_up(ranks: StartRank) -> None:
    prefill, decode = ranks(), ranks(extra={"lease_s": 0.3})
    prefill.begin(1, 30)
    prefill.compute(1, 10)
    assert decode.load(5, prefill.early_ticket(1), seed=1)
    assert ends(decode, 5)["cause"] == "timeout: 10 of 30 tokens ready, and none more within 0.3 s"


def test_ten_thousand_blocks(ranks: StartRank) -> None:
    prefill = ranks(num_blocks=10_100, extra={"transport": "tcp"})
    decode = ranks(num_blocks=10_100, extra={"transport": "tcp"})
    assert decode.load(5, prefill.prefill(1, 20_000) or {}, seed=1)
    assert ends(decode, 5) == {"valid": 20_000, **RIGHT}
    assert decode.worker.stats().num_loaded_bytes == 10_000 * 512


def test_a_ticket_is_good_for_one_request(ranks: StartRank) -> None:
    prefill, decode, other = ranks(), ranks(), ranks()
    ticket = prefill.prefill(1, 30) or {}
    decode.queue(5, ticket, seed=1)
    decode.queue(6, ticket, seed=1)
    until(lambda: len(prefill.worker._server._readers) == 1, "the first reader is there")
    # (The lease is the first one's as soon as it has heartbeat.)
    held = prefill.worker._server._table
    until(lambda: held._leases[ticket["remote_lease_id"]].reader, "it has heartbeat")
    assert other.load(5, ticket, seed=1)
    assert ends(other, 5)["cause"].startswith("lease_expired: ")
    decode.admit(5)
    assert ends(decode, 5) == {"valid": 30, **RIGHT}
    decode.admit(6)
    assert ends(decode, 6)["cause"].startswith("lease_expired: ")
    is_released(prefill)


# ---- ends of requests and of leases ----


@pytest.mark.parametrize("stage", ["queued", "loading", "loaded", "at once"])
def test_a_request_that_ends_gives_its_lease_back(ranks: StartRank, stage: str) -> None:
    prefill, decode = ranks(), ranks()
    prefill.begin(1, 30)
    prefill.compute(1, 10 if stage == "loading" else 30)
    ticket = prefill.early_ticket(1)
    decode.queue(5, ticket, seed=1)
    if stage != "queued":
        decode.admit(5)
    if stage == "loading":
        until(lambda: decode.holds(decode.requests[5].table, 1, 2), "a part is here")
    if stage == "loaded":
        assert ends(decode, 5) == {"valid": 30, **RIGHT}
    decode.abort(5)
    prefill.compute(1, 30)
    assert prefill.finish(1) == ticket
    is_released(prefill)
    counts = until(lambda: (c := decode.counts())["free"] == 255 and c, "its blocks come back")
    assert counts["stats"]["load_failures"] == {}
    if stage == "loading":
        assert ends(decode, 5)["cause"] == "ended: the request has ended"


def test_an_expired_lease_is_not_read(ranks: StartRank) -> None:
    prefill, decode = ranks(extra={"lease_s": 0.1}), ranks()
    ticket = prefill.prefill(1, 30) or {}
    until(lambda: not prefill.counts()["kept"], "the lease expires")
    assert decode.load(5, ticket, seed=1)
    end = ends(decode, 5)
    assert (
        end["cause"].startswith("lease_expired: its lease is gone: it expired, 0.1 s after") or "hold" in end["cause"]
    )
    assert (prefill.worker.stats().num_expired_leases, prefill.worker.stats().num_leases) == (1, 0)


def test_heartbeats_keep_a_lease_while_its_request_is_queued(ranks: StartRank) -> None:
    prefill, decode = ranks(extra={"lease_s": 0.5}), ranks()
    ticket = prefill.prefill(1, 30) or {}
    decode.queue(5, ticket, seed=1)
    until_s = time.monotonic() + 1.5
    until(lambda: prefill.counts()["kept"] == 1 and time.monotonic() > until_s, "three leases' time passes")
    assert prefill.worker.stats().num_leases == 1
    decode.admit(5)
    assert ends(decode, 5) == {"valid": 30, **RIGHT}
    is_released(prefill)


def test_close_ends_loads_and_leases_before_it_returns(ranks: StartRank) -> None:
    prefill, decode = ranks(), ranks()
    prefill.begin(1, 30)
    prefill.compute(1, 10)
    prefill.prefill(2, 30)
    assert decode.load(5, prefill.early_ticket(1), seed=1)
    decode.queue(6, prefill.early_ticket(1), seed=1)
    until(lambda: decode.holds(decode.requests[5].table, 1, 2), "a part is here")
    decode.close()
    assert decode.loads[5]["cause"] == "ended: this rank closes its connector"
    assert decode.loads[5]["fenced"]
    prefill.close()
    assert prefill.num_sends_finished == 1
    # What comes now is nobody's.
    prefill.compute(1, 30)
    prefill.finish(1)
    prefill.step()
    assert prefill.num_sends_finished == 1
    prefill.kept.clear()


# ---- peers that do not fit ----


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"block_size": 8},
        {"num_layers": 4},
        {"model": "other"},
        {"num_groups": 1},
        {"block_size_bytes": 1024},
    ],
)
def test_other_geometries_are_refused_in_words(ranks: StartRank, changes: dict[str, Any]) -> None:
    prefill, decode = ranks(), ranks(**changes)
    assert decode.load(5, prefill.prefill(1, 30) or {}, seed=1)
    end = ends(decode, 5)
    assert end["cause"].startswith("incompatible: ")
    ((name, value),) = changes.items()
    assert f"{name} {value!r} here and {getattr(geometry(), name)!r} there" in end["cause"]
    assert decode.worker.stats().load_failures == {"incompatible": 1}
    fits = ranks()
    assert fits.load(5, prefill.prefill(2, 30) or {}, seed=2)
    assert ends(fits, 5) == {"valid": 30, **RIGHT}


def test_other_versions_are_refused_in_words(ranks: StartRank, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = ranks(), ranks()
    monkeypatch.setattr(pull_handshake, "KV_PROTOCOL_VERSION", KV_PROTOCOL_VERSION + 1)
    assert decode.load(5, prefill.prefill(1, 30) or {}, seed=1)
    assert ends(decode, 5)["cause"].startswith("incompatible: protocol version 2 here and 1 at engine ")


def test_another_secret_is_refused(ranks: StartRank) -> None:
    prefill, decode = ranks(), ranks(secret=b"another")
    assert decode.load(5, prefill.prefill(1, 30) or {}, seed=1)
    assert ends(decode, 5)["cause"].startswith("no_route: engine ")
    assert prefill.worker._server._listener.num_refused == 1


def test_a_lane_that_only_one_end_has_is_no_route(ranks: StartRank) -> None:
    prefill, decode = ranks(extra={"transport": "shm"}), ranks(extra={"transport": "tcp"})
    assert decode.load(5, prefill.prefill(1, 30) or {}, seed=1)
    assert ends(decode, 5)["cause"] == "no_route: transport is 'tcp' here (tcp), shm there"


def test_a_ticket_that_names_blocks_that_are_not_there_is_refused(ranks: StartRank) -> None:
    prefill, decode = ranks(), ranks()
    ticket = prefill.prefill(1, 30) or {}
    ticket["remote_block_ids"] = [256, *ticket["remote_block_ids"][1:]]
    assert decode.load(5, ticket, seed=1)
    assert ends(decode, 5)["cause"] == "backend: the ticket names block 256 of 256"
    is_released(prefill)


@pytest.mark.parametrize("changes", [{"fingerprint": "f"}, {"num_groups": 1, "remote_block_ids": list(range(1, 9))}])
def test_a_ticket_that_contradicts_its_engine_is_refused(ranks: StartRank, changes: dict[str, Any]) -> None:
    prefill, decode = ranks(), ranks()
    assert decode.load(5, (prefill.prefill(1, 30) or {}) | changes, seed=1)
    assert ends(decode, 5)["cause"].startswith("incompatible: the ticket is for ")
    is_released(prefill)


def test_an_unreachable_peer_is_not_tried_again_for_a_while(ranks: StartRank) -> None:
    prefill, decode = ranks(), ranks()
    ticket = prefill.prefill(1, 30) or {}
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        ticket["remote_port"] = unused.getsockname()[1]
        assert decode.load(5, ticket, seed=1)
        assert ends(decode, 5)["cause"].startswith("no_route: engine ")
        for number in range(6, 9):
            decode.queue(number, ticket, seed=1)
        causes = []
        for number in range(6, 9):
            decode.admit(number)
            causes.append(ends(decode, number)["cause"])
        assert any("(tried again in 0." in cause for cause in causes)
        assert decode.worker.stats().load_failures == {"no_route": 4}


def test_params_that_cannot_be_used_are_counted(ranks: StartRank) -> None:
    rank = ranks()
    rank.queue(5, {"do_remote_prefill": True}, seed=1)
    assert not rank.admit(5)
    until(lambda: rank.worker.stats().num_rejected_params == 1, "it is counted")
    rank.abort(5)


# ---- what a peer may say ----


class Reader:
    """Another rank, played by hand on the control connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.payloads: asyncio.Queue[bytes] = asyncio.Queue()
        connection.start(self.payloads.put_nowait)

    def send(self, *messages: object) -> None:
        for message in messages:
            assert self.connection.send(encode(message))

    async def next(self) -> Any:
        async with asyncio.timeout(10):
            return decode_from_holder(await self.payloads.get())

    async def closed(self) -> str:
        async with asyncio.timeout(10):
            return await asyncio.shield(self.connection.closed)


async def reader_of(rank: KvRank, *, greets: bool = True, role: str = "kv") -> Reader:
    port = rank.context.ports["PullConnector"]
    reader = Reader(await connect(HOST, port, secret=SECRET, role=role, name="reader"))
    if greets:
        reader.send(Greeting(KV_PROTOCOL_VERSION, rank.context.engine_id, rank.geometry))
        async with asyncio.timeout(10):
            await reader.payloads.get()
    return reader


def test_doubled_and_late_messages_change_nothing(ranks: StartRank) -> None:
    prefill = ranks()
    ticket = prefill.prefill(1, 30) or {}
    lease_id = ticket["remote_lease_id"]

    async def talk() -> None:
        reader = await reader_of(prefill)
        reader.send(Heartbeat(1, [lease_id, 9]), Acquire(2, lease_id), Acquire(3, lease_id), Confirm(4, lease_id, 31))
        assert await reader.next() == Heard(1, [9])
        assert await reader.next() == Granted(2, 30)
        assert await reader.next() == Granted(3, 30)
        assert await reader.next() == Denied(4, "31 tokens were read, and 30 are ready")
        reader.send(
            Confirm(5, lease_id, 30), Confirm(6, lease_id, 30), Release(lease_id), Release(9), Acquire(7, lease_id)
        )
        assert await reader.next() == Confirmed(5)
        assert await reader.next() == Denied(6, "its reader has confirmed")
        assert await reader.next() == Denied(7, "its reader has confirmed")
        reader.send(Heartbeat(8, [lease_id]))
        assert await reader.next() == Heard(8, [lease_id])
        reader.connection.close()
        await reader.closed()

    asyncio.run(talk())
    is_released(prefill)
    assert prefill.num_sends_finished == 1


def test_a_void_lease_cannot_be_confirmed_once_its_plan_has_begun(ranks: StartRank) -> None:
    """Also if the thread that owns the leases has not heard of it yet: the plan may write into the blocks."""
    prefill = ranks()
    prefill.begin(1, 30)
    prefill.compute(1, 30)
    lease_id = prefill.requests[1].lease_id
    server, loop = prefill.worker._server, prefill.worker._loop
    answers: list[Any] = []
    is_busy, has_begun, is_done = threading.Event(), threading.Event(), threading.Event()

    class Answers:
        def send(self, payload: bytes) -> None:
            answers.append(decode_from_holder(payload))

    def confirm_late() -> None:
        server.serve(encode(Acquire(1, lease_id)), "reader", Answers())
        is_busy.set()
        assert has_begun.wait(10)
        server.serve(encode(Confirm(2, lease_id, 30)), "reader", Answers())
        is_done.set()

    loop.call_soon_threadsafe(confirm_late)
    assert is_busy.wait(10)
    prefill.scheduler.request_preempted((1, 1))
    metadata = prefill.begin_step()  # does not wait for that thread
    has_begun.set()
    assert is_done.wait(10)
    assert answers == [Granted(1, 30), Denied(2, "its request has lost its blocks")]
    prefill.finish_step(metadata)
    until(lambda: not server._refused, "the lease is gone")


def test_who_read_ahead_while_blocks_were_given_up_is_denied(ranks: StartRank) -> None:
    """`handle_preemptions` alone decides it: it comes before copies and zeroing, and `start_load_kv` after them."""
    prefill = ranks()
    prefill.begin(1, 30)
    prefill.compute(1, 13)
    lease_id = prefill.requests[1].lease_id
    table = prefill.requests[1].table

    async def talk() -> None:
        reader = await reader_of(prefill)
        reader.send(Acquire(1, lease_id, is_ahead=True), Confirm(2, lease_id, 12, is_ahead=True))
        assert await reader.next() == Granted(1, 13)
        assert await reader.next() == Confirmed(2)
        reader.send(Acquire(3, lease_id, is_ahead=True))
        assert await reader.next() == Granted(3, 13)
        assert prefill.holds(table, 1, 3)  # it reads them here
        prefill.scheduler.request_preempted((1, 1))
        metadata = prefill.scheduler.build_connector_meta()
        prefill.worker.handle_preemptions(metadata)
        prefill.memory.blocks[table.ravel()] = GARBAGE
        reader.send(Confirm(4, lease_id, 12, is_ahead=True))
        assert await reader.next() == Denied(4, "its request has lost its blocks")
        prefill.worker.start_load_kv(metadata)
        prefill.worker.finish_step(metadata, was_computed=True)
        reader.send(Acquire(5, lease_id, is_ahead=True))
        assert await reader.next() == Denied(5, "its request was preempted")
        reader.connection.close()
        await reader.closed()

    asyncio.run(talk())


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1 garbage",
        encode({"type": "surprise"}),
        encode({"type": "acquire", "ref": -1, "lease_id": 1}),
        encode({"type": "acquire", "ref": 1}),
        encode(Heartbeat(1, list(range(5000)))),
        b"x" * (2 << 20),
    ],
    ids=["empty", "garbage", "unknown", "negative", "incomplete", "too many", "too large"],
)
@pytest.mark.parametrize("greets", [True, False])
def test_what_is_malformed_cuts_its_sender_off(ranks: StartRank, payload: bytes, greets: bool) -> None:
    prefill, decode = ranks(), ranks()
    ticket = prefill.prefill(1, 30) or {}

    async def talk() -> None:
        reader = await reader_of(prefill, greets=greets)
        assert reader.connection.send(payload)
        await reader.closed()

    asyncio.run(talk())
    until(lambda: prefill.worker._server.num_bad_messages == 1, "it is counted")
    assert decode.load(5, ticket, seed=1)
    assert ends(decode, 5) == {"valid": 30, **RIGHT}


@pytest.mark.parametrize("how", ["other role", "no greeting", "request first", "noise", "silence"])
def test_who_does_not_greet_is_cut_off(ranks: StartRank, how: str) -> None:
    prefill = ranks(extra={"connect_timeout_s": 0.2})
    lease_id = (prefill.prefill(1, 30) or {})["remote_lease_id"]

    async def talk() -> None:
        if how in ("noise", "silence"):
            streams = await asyncio.open_connection(HOST, prefill.context.ports["PullConnector"])
            if how == "noise":
                streams[1].write(b"GET / HTTP/1.1\r\n\r\n" * 10)
                async with asyncio.timeout(10):
                    with contextlib.suppress(ConnectionError):
                        await streams[0].read()
            streams[1].close()
            return
        reader = await reader_of(prefill, greets=False, role="router" if how == "other role" else "kv")
        if how == "request first":
            reader.send(Release(lease_id))
        await reader.closed()

    asyncio.run(talk())
    assert prefill.counts()["kept"] == 1
    decode = ranks()
    assert decode.load(5, prefill.prefill(2, 30) or {}, seed=2)
    assert ends(decode, 5) == {"valid": 30, **RIGHT}


class Holder:
    """A prefill rank, played by hand: each request is answered by `answer`."""

    def __init__(self, rank: KvRank, answer: Callable[[Connection, Request], None]) -> None:
        self._geometry = rank.geometry
        self._endpoint = rank.worker._lanes.endpoints[0]
        self._answer = answer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._listener = Listener(SECRET, self._accept)
        self.port = asyncio.run_coroutine_threadsafe(self._listener.start(HOST), self._loop).result(10)

    def _accept(self, connection: Connection) -> None:
        welcome = Welcome(KV_PROTOCOL_VERSION, "p", self._geometry, 30.0, [self._endpoint])
        connection.send(encode(welcome))
        greeted: list[bytes] = []

        def receive(payload: bytes) -> None:
            if greeted:
                self._answer(connection, decode_request(payload))
            greeted.append(payload)

        connection.start(receive)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._listener.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def with_holder(
    ranks: StartRank, answer: Callable[[Connection, Request], None], **extra: Any
) -> tuple[KvRank, dict[str, Any]]:
    """How a load ends whose holder answers like that."""
    prefill, decode = ranks(), ranks(extra=extra)
    ticket = prefill.prefill(1, 30) or {}
    holder = Holder(prefill, answer)
    try:
        ticket |= {"remote_engine_id": "p", "remote_port": holder.port}
        assert decode.load(5, ticket, seed=1)
        return decode, ends(decode, 5)
    finally:
        decode.worker.close(5.0)  # it would connect again
        holder.close()


def test_a_reader_ignores_what_it_did_not_ask_for(ranks: StartRank) -> None:
    def answer(connection: Connection, message: Request) -> None:
        match message:
            case Acquire(ref, lease_id):
                for reply in (
                    Granted(ref + 100, 1),
                    Ready(lease_id + 1, 5),
                    Gone(lease_id + 1, "x"),
                    Ready(lease_id, 3),
                ):
                    connection.send(encode(reply))
                for _ in range(2):
                    connection.send(encode(Granted(ref, 30)))
            case Confirm(ref):
                for _ in range(3):
                    connection.send(encode(Confirmed(ref)))
            case Heartbeat(ref):
                connection.send(encode(Heard(ref, [])))

    assert with_holder(ranks, answer)[1] == {"valid": 30, **RIGHT}


@pytest.mark.parametrize("when", ["acquire", "confirm"])
@pytest.mark.parametrize("what", ["denied", "silent", "garbage", "wrong kind", "hangs up"])
def test_a_holder_that_does_not_confirm_is_not_believed(ranks: StartRank, when: str, what: str) -> None:
    def answer(connection: Connection, message: Request) -> None:
        match message:
            case Acquire(ref) if when == "confirm":
                connection.send(encode(Granted(ref, 30)))
            case Acquire(ref) | Confirm(ref):
                if what == "denied":
                    connection.send(encode(Denied(ref, "no")))
                elif what == "garbage":
                    connection.send(b"\xc1")
                elif what == "wrong kind":
                    connection.send(encode(Heard(ref, [])))
                elif what == "hangs up":
                    connection.abort("enough")

    decode, end = with_holder(ranks, answer, connect_timeout_s=0.3)
    reason = {"denied": "lease_expired", "silent": "timeout", "wrong kind": "incompatible"}.get(what, "peer_lost")
    assert end["cause"].startswith(f"{reason}: ")
    assert end["valid"] == 0
    assert sum(decode.worker.stats().load_failures.values()) == 1


# ---- writes that may come late ----


class LateTransport:
    """Fails without a fence, and raises it when told to; or, if it `hangs`, does not even fail until told to."""

    name = "late"
    caps = TransportCaps(cancel_is_fence=False, same_host=False)

    def __init__(self, *, hangs: bool = False) -> None:
        self.hangs = hangs
        self.fence: Callable[[], None] | None = None
        self.end: Callable[[TransferEnd], None] | None = None
        self.num_cancels = 0

    def start(self, memory: Any, host: str) -> Endpoint:
        return Endpoint(self.name, b"", memory.num_blocks, memory.block_size_bytes)

    def connect(self, endpoint: Endpoint, timeout_s: float) -> Any:
        transport = self

        class LatePeer:
            def __init__(self) -> None:
                self.endpoint = endpoint

            def close(self) -> None:
                assert transport

        return LatePeer()

    def pull(
        self, peer: Any, remote_blocks: Any, local_blocks: Any, timeout_s: float, on_end: Any, on_fenced: Any = None
    ) -> Any:
        self.fence, self.end = on_fenced, on_end
        if not self.hangs:
            on_end(TransferEnd(FailureReason.BACKEND, "gave up", is_fenced=False))
        return self

    def cancel(self) -> None:
        self.num_cancels += 1

    def stats(self) -> TransportStats:
        return TransportStats()

    def close(self, timeout_s: float) -> None:
        pass


def late_connector(transport: LateTransport) -> Any:
    class LateConnector(PullConnector):
        @staticmethod
        def make_worker_half(context: Any) -> PullWorker:
            settings = PullSettings.of(context.config)
            lanes = Lanes("late", {"late": transport})
            return PullWorker(context, settings, lanes, lambda port: context.ports.update(PullConnector=port))

    return LateConnector


@pytest.mark.parametrize("closes", [False, True])
def test_blocks_are_quarantined_until_the_fence(ranks: StartRank, closes: bool) -> None:
    transport = LateTransport()
    prefill, decode = ranks(connector=late_connector(LateTransport())), ranks(connector=late_connector(transport))
    assert decode.load(5, prefill.prefill(1, 30) or {}, seed=1)
    end = ends(decode, 5)
    assert (end["cause"], end["fenced"], end["valid"]) == ("backend: gave up", False, 0)
    assert decode.worker.stats().num_quarantined_blocks == 16
    assert decode.counts()["free"] == 255 - 16
    if closes:
        decode.close()
    else:
        assert transport.fence is not None
        transport.fence()
    until(lambda: not decode.take_events() and len(decode.free) == 255, "its blocks come back")
    assert decode.worker.stats().num_quarantined_blocks == 0
    is_released(prefill)


@pytest.mark.parametrize("aborts", [False, True])
def test_a_transport_that_hangs_does_not_hold_its_load(
    ranks: StartRank, monkeypatch: pytest.MonkeyPatch, aborts: bool
) -> None:
    monkeypatch.setattr(pull_load, "GRACE_S", 0.1)
    transport = LateTransport(hangs=True)
    prefill = ranks(connector=late_connector(LateTransport()))
    decode = ranks(connector=late_connector(transport), extra={"pull_timeout_s": 10.0 if aborts else 0.1})
    assert decode.load(5, prefill.prefill(1, 30) or {}, seed=1)
    until(lambda: transport.end, "the transfer begins")
    if aborts:
        decode.abort(5)
    end = ends(decode, 5)
    assert end["cause"].startswith("ended: " if aborts else "timeout: late did not end a transfer of 0.1")
    assert (end["fenced"], transport.num_cancels) == (False, 1)
    assert decode.worker.stats().num_quarantined_blocks == 16
    is_released(prefill)
    assert transport.end is not None
    transport.end(TransferEnd(FailureReason.TIMEOUT, "cancelled"))  # late, with a fence
    until(lambda: not decode.take_events() and len(decode.free) == 255, "its blocks come back")


def test_halves_that_never_start_and_close_twice(ranks: StartRank) -> None:
    rank = ranks()
    worker = PullConnector.make_worker_half(rank.context)
    worker.close(1.0)
    worker.close(1.0)
    rank.worker.close(1.0)
    rank.worker.close(1.0)


# ---- settings ----


def config(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector="PullConnector", kv_connector_extra_config=extra)


def test_settings_are_checked() -> None:
    plain = PullSettings.of(config())
    assert (plain.transport, plain.lease_s, plain.heartbeat_s, plain.connect_timeout_s) == ("auto", 30.0, 5.0, 5.0)
    assert plain.pull_s(500_000_000) == 20.0
    for extra, message in [
        ({"leases": 3}, "kv_connector_extra_config.leases is 3: Extra inputs"),
        ({"transport": "udp"}, "kv_connector_extra_config.transport"),
        ({"lease_s": 0}, "kv_connector_extra_config.lease_s"),
        ({"lease_s": float("nan")}, "kv_connector_extra_config.lease_s"),
        ({"mode": "push", "transport": "shm"}, "mode is 'push' and transport 'shm'"),
        ({"lease_s": 6, "heartbeat_interval_s": 4}, "set it to 3 or less"),
    ]:
        with pytest.raises(ValueError, match=message.replace("(", r"\(")) as raised:
            PullSettings.of(config(**extra))
        assert "PullConnector knows transport (What moves the blocks." in str(raised.value)


def test_a_port_that_is_taken_is_told(ranks: StartRank) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(OSError, match=r"cannot listen on 127.0.0.1:\d+ \(kv_ip, kv_port\)"):
            ranks(port=taken.getsockname()[1])


def test_a_pool_that_is_not_the_geometrys_is_told(ranks: StartRank) -> None:
    rank = ranks()
    worker = PullConnector.make_worker_half(rank.context)
    other = KvRank(block_size_bytes=1024)
    with pytest.raises(ValueError, match="1024 bytes, and the geometry says 512"):
        worker.start(other.memory, lambda event: None)
    worker.close(1.0)
    other.close()
