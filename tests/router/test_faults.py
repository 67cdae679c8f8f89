"""Ranks, clients and the control actor that go away: every request ends once, and nothing stays counted."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kv_transfer.connection import MAX_SEND_BUFFER_BYTES
from rank_scheduler.messages import End, FinishReason, StepFrame
from router.control_messages import Members, ShuttingDown
from router.protocol import (
    MAX_NUM_PROMPT_TOKENS,
    MAX_NUM_SEQUENCES,
    MAX_NUM_STOP_STRINGS,
    MAX_NUM_STOP_TOKEN_IDS,
    MAX_STOP_CHARACTERS,
)
from router.rank_link import MAX_UNSENT_BYTES
from router.room import Room
from tests.router.fake_cluster import HOST, MODEL, Cluster, FakeRank, in_loop, running, until

MANY = "x" * 200


async def open_stream(cluster: Cluster, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request over a socket of its own, so that it can be closed at any moment."""
    reader, writer = await asyncio.open_connection(HOST, cluster.port)
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 100, **fields}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
@in_loop
async def test_a_client_that_leaves_is_aborted_on_the_rank(tmp_path: Path, stream: bool, num_tokens: int) -> None:
    async with running(tmp_path, reply=MANY) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = num_tokens
        _, writer = await open_stream(cluster, stream=stream, n=2)
        await until(lambda: len(rank.submits) == 2 and rank.allowance == 0)
        assert cluster.taken.requests == 2
        writer.close()
        await until(lambda: sorted(rank.aborts) == [1, 2])
        await until(cluster.is_idle)
        assert cluster.counted("serried_refused") == {"client_gone": 1}


@asynccontextmanager
async def stalled_client(cluster: Cluster) -> AsyncIterator[None]:
    """It asks for far more than sockets hold, with 20 logprobs per token, and never reads."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, (HOST, cluster.port))
        content = json.dumps({"prompt": "hi", "max_tokens": 200, "n": 128, "logprobs": 20, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content)
        await loop.sock_sendall(client, head + content)
        yield


@in_loop
async def test_a_client_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path, reply=MANY, send_timeout_s=0.2) as cluster:
        rank = cluster.ranks[0]
        # No choice comes to its end.
        rank.allowance = 128 * 100
        async with stalled_client(cluster):
            await until(lambda: len(rank.aborts) == 128)
            await until(cluster.is_idle)
            assert cluster.counted("serried_refused") == {"client_gone": 1}
            assert cluster.counted("serried_requests") == {"dropped": 1}
            rank.allow(float("inf"))
            assert (await cluster.complete()).status_code == 200


@in_loop
async def test_of_64_clients_the_one_that_does_not_read_costs_the_others_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, reply=MANY, send_timeout_s=4.0) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 0
        async with stalled_client(cluster):
            await until(lambda: len(rank.submits) == 128)
            others = [asyncio.create_task(cluster.complete(max_tokens=50, stream=True)) for _ in range(63)]
            await until(lambda: len(rank.submits) == 128 + 63)
            rank.allow(float("inf"))
            for answer in await asyncio.gather(*others):
                *events, done = answer.text.removesuffix("\n\n").split("\n\n")
                texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
                assert ("".join(texts), done) == ("x" * 50, "data: [DONE]")
            assert cluster.taken.requests == 128, "it is paused, not cut yet"
            assert max(cluster.num_unsent_bytes) < 1 << 20
            await until(cluster.is_idle)
        assert cluster.counted("serried_refused") == {"client_gone": 1}


@in_loop
async def test_a_client_that_leaves_while_no_rank_is_there_releases_its_counts(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=0, rank_wait_timeout_s=20) as cluster:
        _, writer = await open_stream(cluster)
        await until(lambda: cluster.taken.tokens == 2)
        writer.close()
        await until(cluster.is_idle)


@in_loop
async def test_a_rank_that_comes_back_is_another_one(tmp_path: Path) -> None:
    async with running(tmp_path, rank_wait_timeout_s=5) as cluster:
        cluster.ranks[0].kill()
        await until(lambda: not cluster.service.pool.links)
        waiting = asyncio.create_task(cluster.complete())
        await until(lambda: cluster.taken.requests == 1)
        replacement = FakeRank(0, cluster.ranks[0].reply)
        record = await replacement.start()
        cluster.ranks.append(replacement)
        cluster.control.tell(Members([msgspec.structs.replace(record, boot_id="another")]))
        assert (await waiting).status_code == 200
        assert len(replacement.submits) == 1


@in_loop
async def test_a_rank_that_is_no_member_finishes_its_work_and_gets_none(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 0
        waiting = asyncio.create_task(cluster.complete())
        await until(lambda: len(rank.submits) == 1)
        cluster.control.tell(Members([]))
        await until(lambda: not cluster.service.pool.links)
        assert (await cluster.complete()).json()["error"]["code"] == "no_rank_available"
        rank.allow(float("inf"))
        assert (await waiting).json()["choices"][0]["text"] == "Hello, world!"
        await until(lambda: all(connection.closed.done() for connection in rank.connections))


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_rank_that_refuses_gives_a_status(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as cluster:
        cluster.ranks[0].fail_with = "the pool has too few blocks"
        answer = await cluster.complete(stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "rank_error")
        assert "too few blocks" in answer.json()["error"]["message"]


@in_loop
async def test_words_about_unknown_requests_are_ignored(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        nonsense = StepFrame(
            rank.load(), ids=[77, 78], tokens=[1, 2], ends=[End(77, FinishReason.STOP)], first_token_ids=[99]
        )
        rank.connections[0].send(msgspec.msgpack.encode(nonsense))
        assert (await cluster.complete()).status_code == 200
        assert cluster.counted("serried_peer_faults") == {"rank,stale": 3}


# Nested more deeply than a decoder follows, under a name that nobody knows.
DEEP = b"\x82\xa4type\xa4step\xa1x" + b"\x91" * 100_000 + b"\x90"
GARBAGE = {
    "no msgpack": b"\xc1",
    "tokens and ids differ": msgspec.msgpack.encode({"type": "step", "load": [], "ids": [1]}),
    "no UTF-8": b"\x81\xa2\xff\xff\x01",
    "deep": DEEP,
}


@pytest.mark.parametrize("garbage", GARBAGE)
@in_loop
async def test_garbage_from_a_rank_costs_only_its_connection(tmp_path: Path, garbage: str) -> None:
    async with running(tmp_path, rank_wait_timeout_s=5) as cluster:
        rank = cluster.ranks[0]
        rank.connections[0].send(GARBAGE[garbage])
        await until(rank.connections[0].closed.done)
        assert (await cluster.complete()).status_code == 200
        assert len(rank.connections) == 2
        assert cluster.counted("serried_peer_faults") == {"rank,malformed": 1}


@pytest.mark.parametrize("garbage", GARBAGE)
@in_loop
async def test_garbage_right_behind_the_handshake(
    tmp_path: Path, garbage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, rank_wait_timeout_s=5, greetings=[GARBAGE[garbage]] * 3) as cluster:
        await until(lambda: len(cluster.ranks[0].connections) == 4)
        assert (await cluster.complete()).status_code == 200
        assert cluster.counted("serried_peer_faults") == {"rank,malformed": 3}
        assert caplog.text.count("trying on") == 1


@pytest.mark.parametrize("garbage", [b"\xc1", DEEP.replace(b"\xa4step", b"\xa7members")])
@in_loop
async def test_garbage_from_the_control_actor_costs_only_its_connection(tmp_path: Path, garbage: bytes) -> None:
    async with running(tmp_path) as cluster:
        cluster.control.tell_raw(garbage)
        await until(lambda: cluster.control.num_resumes == 2)
        assert (await cluster.complete()).status_code == 200
        assert cluster.counted("serried_peer_faults") == {"control,malformed": 1}


@in_loop
async def test_a_rank_at_an_impossible_address_is_tried_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path) as cluster:
        nowhere = msgspec.structs.replace(cluster.control.records[0], rank_id="mixed/9", boot_id="b", host="x" * 64)
        cluster.control.tell(Members([*cluster.control.records, nowhere]))
        await until(lambda: cluster.counted("serried_peer_faults").get("rank,unreachable", 0) >= 3)
        assert caplog.text.count("rank mixed/9") == 1
        cluster.service.check_integrity()
        assert (await cluster.complete()).status_code == 200


@in_loop
async def test_prefill_counts_end_with_the_first_token_if_not_announced(tmp_path: Path) -> None:
    async with running(tmp_path, reply=MANY) as cluster:
        rank = cluster.ranks[0]
        rank.announces_prefill, rank.allowance = False, 1
        waiting = asyncio.create_task(cluster.complete("abc", max_tokens=5))
        await until(lambda: rank.allowance == 0 and cluster.taken.tokens == 0)
        assert cluster.taken.requests == 1
        rank.allow(10)
        assert (await waiting).status_code == 200


@in_loop
async def test_a_restarted_control_actor_learns_the_counts(tmp_path: Path) -> None:
    async with running(tmp_path, reply=MANY) as cluster:
        rank, control = cluster.ranks[0], cluster.control
        rank.allowance = 0
        first = asyncio.create_task(cluster.complete("abc", max_tokens=2))
        gone = asyncio.create_task(cluster.complete("abcde", max_tokens=2))
        await until(lambda: len(rank.submits) == 2)
        await control.stop()
        await until(lambda: not cluster.service.control.is_connected)
        gone.cancel()  # released while nobody hears it
        await until(lambda: len(rank.live) == 1)
        control.ledger = type(control.ledger)(None, None)
        await control.start()
        await until(lambda: control.num_resumes == 2)
        await until(lambda: control.ledger.counts().num_requests == 1)
        assert control.ledger.counts().num_tokens == 3
        rank.allow(float("inf"))
        assert (await first).status_code == 200


@in_loop
async def test_an_acquire_waits_for_the_control_actor_to_come_back(tmp_path: Path) -> None:
    async with running(tmp_path, acquire_timeout_s=5, max_num_queued_reqs=1) as cluster:
        await cluster.control.stop()
        await until(lambda: not cluster.service.control.is_connected)
        waiting = asyncio.create_task(cluster.complete())
        await until(lambda: len(cluster.service._arriving) == 1)
        await cluster.control.start()
        assert (await waiting).status_code == 200


@in_loop
async def test_a_router_goes_on_within_its_lease_while_the_control_actor_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.control_link.LEASE_VALID_S", 2.0)
    async with running(tmp_path, acquire_timeout_s=0.1, max_num_queued_reqs=100) as cluster:
        assert (await cluster.complete()).status_code == 200
        assert cluster.ledger.lent.requests > 1  # some are kept for those who come
        await cluster.control.stop()
        await until(lambda: not cluster.service.control.is_connected)
        assert (await cluster.complete()).status_code == 200
        refused = None
        async with asyncio.timeout(20):
            while refused is None or refused.status_code == 200:
                refused = await cluster.complete()
        assert refused.json()["error"]["code"] == "admission_unavailable"
        await cluster.control.start()
        await until(lambda: cluster.service.control.is_connected)
        assert (await cluster.complete()).status_code == 200


@in_loop
async def test_a_router_that_ends_gives_back_what_it_was_lent(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_reqs=100) as cluster:
        assert (await cluster.complete()).status_code == 200
        assert cluster.ledger.lent.requests > 0
        await cluster.service.stop()
        await until(lambda: cluster.ledger.lent.requests == 0)


@in_loop
async def test_a_mute_control_actor_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path, acquire_timeout_s=0.1, max_num_queued_reqs=1) as cluster:
        cluster.control.is_mute = True
        refused = await cluster.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "admission_unavailable")
        assert "retry-after" in refused.headers
        assert cluster.counted("serried_peer_faults") == {"control,silent": 1}
        cluster.control.is_mute = False
        await until(lambda: cluster.control.num_resumes == 2)
        assert (await cluster.complete()).status_code == 200


@in_loop
async def test_shutting_down_ends_streams_and_refuses_what_comes(tmp_path: Path) -> None:
    async with running(tmp_path, reply=MANY) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 2
        stream = asyncio.create_task(cluster.complete(stream=True, max_tokens=50))
        await until(lambda: rank.allowance == 0)
        whole = asyncio.create_task(cluster.complete(max_tokens=50))
        await until(lambda: len(rank.submits) == 2)
        cluster.control.tell(ShuttingDown())
        events = [line for line in (await stream).text.splitlines() if line]
        assert json.loads(events[-2][6:])["error"]["code"] == "shutting_down"
        assert events[-1] == "data: [DONE]"
        assert (await whole).json()["error"]["code"] == "shutting_down"
        refused = await cluster.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in refused.headers
        assert (await cluster.client.get("/ready")).status_code == 503
        assert (await cluster.client.get("/health")).status_code == 200
        await until(lambda: sorted(rank.aborts) == [1, 2])
        # Two were on the rank when it happened, one came afterwards.
        assert cluster.counted("serried_requests") == {"dropped": 2, "rejected": 1}
        assert cluster.counted("serried_refused") == {"shutting_down": 3}


@in_loop
async def test_a_burst_is_spread_evenly_over_two_ranks(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2, reply="ok", num_blocks=4_096) as cluster:
        for rank in cluster.ranks:
            rank.allowance = 0
        burst = [asyncio.create_task(cluster.complete("x" * (1 + i * 37 % 200), max_tokens=3)) for i in range(60)]
        await until(lambda: sum(len(rank.submits) for rank in cluster.ranks) == 60)
        shares = [sum(len(rank.prompt(i)) for i in range(len(rank.submits))) for rank in cluster.ranks]
        assert min(shares) >= 0.4 * sum(shares)
        for rank in cluster.ranks:
            rank.allow(float("inf"))
        assert {answer.status_code for answer in await asyncio.gather(*burst)} == {200}


@in_loop
async def test_a_rank_that_is_behind_with_reading_gets_no_more_until_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.rank_link.MAX_UNSENT_BYTES", 500_000)
    async with running(tmp_path, max_model_len=20_000, num_blocks=1_000_000) as cluster:
        rank, link = cluster.ranks[0], cluster.service.pool.links[0]
        sending, reading = link._connection._transport, rank.connections[0]._transport
        assert sending is not None
        assert reading is not None
        sending.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        reading.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        reading.pause_reading()
        # 400 kB each.
        requests = [asyncio.create_task(cluster.complete([5] * 10_000, n=10, max_tokens=1)) for _ in range(8)]
        await until(lambda: cluster.taken.tokens == 800_000 and not cluster.service.control._pending)
        await until(lambda: link.room is Room.NONE)
        for _ in range(10):
            await asyncio.sleep(0)
        assert 500_000 <= link._connection.num_unsent_bytes < 910_000
        reading.resume_reading()
        assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}
        assert len(rank.connections) == 1


def test_what_a_link_takes_never_fills_its_send_buffer() -> None:
    largest_request = 4 * MAX_NUM_PROMPT_TOKENS + MAX_NUM_SEQUENCES * (
        MAX_NUM_STOP_STRINGS * MAX_STOP_CHARACTERS * 4 + MAX_NUM_STOP_TOKEN_IDS * 5 + 1_000
    )
    assert MAX_UNSENT_BYTES + largest_request < MAX_SEND_BUFFER_BYTES


@in_loop
async def test_stop_ends_requests_before_it_closes_connections(tmp_path: Path) -> None:
    async with running(tmp_path, reply=MANY) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 2
        stream = asyncio.create_task(cluster.complete(stream=True, max_tokens=50))
        await until(lambda: rank.allowance == 0)
        await cluster.service.stop()
        assert "shutting_down" in (await stream).text
        await until(lambda: rank.aborts == [1])
        await until(lambda: cluster.taken.requests == 0)
        await cluster.service.stop()
