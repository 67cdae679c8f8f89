"""Sequences that lose their rank go on at another, and their clients see nothing but a pause."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rank_scheduler.messages import End, FinishReason, StepFrame, Submit
from router.control_messages import Members, PoolRole
from tests.router.fake_cluster import MODEL, Cluster, FakeRank, in_loop, running, until

REPLY = "Hello, world!"


def holder(cluster: Cluster) -> FakeRank:
    """The rank that has a sequence."""
    (rank,) = (rank for rank in cluster.ranks if rank.live)
    return rank


async def stopped_at(cluster: Cluster, num_tokens: int, num_sequences: int = 1) -> FakeRank:
    """The rank that has a sequence, when it has sent all that it may."""
    await until(lambda: any(len(rank.live) == num_sequences and rank.allowance == 0 for rank in cluster.ranks))
    assert all(rank.allowance in (0, num_tokens) for rank in cluster.ranks)
    return holder(cluster)


def latest(ranks: Iterable[FakeRank]) -> Submit:
    """What was submitted to one of them, behind most tokens."""
    return max((submit for rank in ranks for submit in rank.submits), key=lambda submit: submit.num_generated)


def allow(cluster: Cluster, num_tokens: float) -> None:
    for rank in cluster.ranks:
        rank.allow(num_tokens)


def limit(cluster: Cluster, num_tokens: int) -> None:
    for rank in cluster.ranks:
        rank.allowance = num_tokens


async def events(cluster: Cluster, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "prompt": "hi", "stream": True, **fields}
    async with cluster.client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in found if event["choices"])


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@in_loop
async def test_a_stream_whose_rank_is_killed_goes_on(tmp_path: Path, num_tokens: int) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2) as cluster:
        undisturbed = await events(cluster, logprobs=2, stream_options={"include_usage": True})
        limit(cluster, num_tokens)
        stream = asyncio.create_task(events(cluster, logprobs=2, stream_options={"include_usage": True}))
        victim = await stopped_at(cluster, num_tokens)
        (first,) = victim.live.values()
        victim.kill()
        allow(cluster, float("inf"))
        found = await stream
        assert all("error" not in event for event in found)
        assert text_of(found) == REPLY
        assert found[-1]["usage"] == undisturbed[-1]["usage"]
        logprobs = [event["choices"][0].get("logprobs") for event in found if event["choices"]]
        assert sum(len(entry["tokens"]) for entry in logprobs if entry) == len(REPLY)
        other = cluster.ranks[1 - victim.index]
        again = other.submits[-1]
        assert again.num_generated == num_tokens
        assert len(again.token_ids) == len(first.submit.token_ids) + 4 * num_tokens
        assert again.token_ids.startswith(first.submit.token_ids)
        assert (again.sampling, again.request_id) == (first.submit.sampling, first.submit.request_id)
        assert cluster.counted("serried_failovers") == {"moved": 1}
        assert cluster.counted("serried_requests") == {"finished": 2}
        assert cluster.counted("serried_refused") == {}


@in_loop
async def test_a_whole_answer_and_all_its_choices_go_on(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2) as cluster:
        limit(cluster, 9)
        waiting = asyncio.create_task(cluster.complete(n=3, stop=["ld"]))
        victim = await stopped_at(cluster, 9, num_sequences=3)
        victim.kill()
        allow(cluster, float("inf"))
        answer = (await waiting).json()
        assert [choice["text"] for choice in answer["choices"]] == ["Hello, wor"] * 3
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
        assert answer["usage"]["completion_tokens"] == 3 * len("Hello, world")
        assert cluster.counted("serried_failovers") == {"moved": 3}


@in_loop
async def test_a_rank_that_gives_a_request_up_is_not_the_end_of_it(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2) as cluster:
        limit(cluster, 4)
        waiting = asyncio.create_task(cluster.complete())
        rank = await stopped_at(cluster, 4)
        ((number, _),) = rank.live.items()
        rank.live.clear()
        end = End(number, FinishReason.ABORT, message="since it ends")
        cluster.control.tell(Members([r for r in cluster.control.records if r.boot_id != f"boot-{rank.index}"]))
        await until(lambda: len(cluster.service.pool.links) == 1)
        rank.connections[-1].send(msgspec.msgpack.encode(StepFrame(rank.load(), ends=[end])))
        allow(cluster, float("inf"))
        assert (await waiting).json()["choices"][0]["text"] == REPLY
        assert cluster.counted("serried_failovers") == {"moved": 1}


@in_loop
async def test_a_request_waits_for_a_rank_to_come(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, rank_wait_timeout_s=20) as cluster:
        limit(cluster, 4)
        waiting = asyncio.create_task(cluster.complete())
        victim = await stopped_at(cluster, 4)
        (first,) = victim.live.values()
        victim.kill()
        await until(lambda: not cluster.service.pool.links)
        explained = (await cluster.client.get(f"/v1/requests/{first.submit.request_id}/explain")).json()
        (sequence,) = explained["sequences"]
        assert (sequence["figures"]["num_ranks_known"], sequence["figures"]["num_ranks_connected"]) == (1, 0)
        assert "any rank for its whole part: there is none" in sequence["message"]
        assert "it goes as a move" in sequence["message"]
        replacement = FakeRank(0, victim.reply)
        record = await replacement.start()
        cluster.ranks.append(replacement)
        cluster.control.tell(Members([msgspec.structs.replace(record, boot_id="another")]))
        assert (await waiting).json()["choices"][0]["text"] == REPLY
        assert replacement.submits[0].num_generated == 4


@in_loop
async def test_with_no_rank_left_the_client_hears_why(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY) as cluster:
        limit(cluster, 3)
        waiting = asyncio.create_task(cluster.complete())
        (await stopped_at(cluster, 3)).kill()
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "rank_lost")
        assert "rank mixed/0 was lost" in answer.json()["error"]["message"]
        assert "no rank can take the request (1 known, 0 connected" in answer.json()["error"]["message"]
        assert "retry-after" in answer.headers
        none_left = await cluster.complete()
        assert (none_left.status_code, none_left.json()["error"]["code"]) == (503, "no_rank_available")
        assert cluster.counted("serried_failovers") == {"no_rank": 1}


@in_loop
async def test_a_stream_with_no_rank_left_ends_with_an_error_event(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY) as cluster:
        limit(cluster, 3)
        stream = asyncio.create_task(events(cluster))
        (await stopped_at(cluster, 3)).kill()
        *found, last = await stream
        assert text_of(found) == REPLY[:3]
        assert last["error"]["code"] == "rank_lost"


@in_loop
async def test_a_request_that_loses_one_rank_after_the_other_is_given_up(tmp_path: Path) -> None:
    """Perhaps it is the request that kills them."""
    async with running(tmp_path, reply=REPLY, num_ranks=4, max_failovers=2) as cluster:
        limit(cluster, 1)
        waiting = asyncio.create_task(cluster.complete())
        for _ in range(3):
            await until(lambda: any(rank.live and rank.allowance == 0 for rank in cluster.ranks))
            victim = holder(cluster)
            victim.kill()
            victim.live.clear()
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "rank_lost")
        assert "it was moved 2 times before; send the request again" in answer.json()["error"]["message"]
        assert cluster.counted("serried_failovers") == {"moved": 2, "given_up": 1}
        allow(cluster, float("inf"))
        assert (await cluster.complete()).status_code == 200


@in_loop
async def test_a_silent_rank_counts_as_lost(tmp_path: Path) -> None:
    async with running(tmp_path, rank_silence_timeout_s=0.3, max_failovers=0) as cluster:
        cluster.ranks[0].allowance = 0
        answer = await cluster.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "rank_lost")
        assert "nothing heard" in answer.json()["error"]["message"]


@in_loop
async def test_what_a_silent_rank_says_later_is_not_heard(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2, rank_silence_timeout_s=0.5) as cluster:
        limit(cluster, 3)
        waiting = asyncio.create_task(cluster.complete())
        silent = await stopped_at(cluster, 3)
        other = cluster.ranks[1 - silent.index]
        other.allow(float("inf"))
        assert (await waiting).json()["choices"][0]["text"] == REPLY
        assert other.submits[-1].num_generated == 3
        silent.allow(float("inf"))
        answers = [await cluster.complete() for _ in range(4)]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [REPLY] * 4


@in_loop
async def test_a_client_that_leaves_while_its_request_moves(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, rank_wait_timeout_s=20) as cluster:
        limit(cluster, 3)
        waiting = asyncio.create_task(cluster.complete())
        (await stopped_at(cluster, 3)).kill()
        await until(lambda: not cluster.service.pool.links)
        waiting.cancel()
        await until(cluster.is_idle)
        assert cluster.counted("serried_refused") == {"client_gone": 1}


@pytest.mark.parametrize("num_tokens", [0, 3])
@in_loop
async def test_a_lost_prefill_or_decode_rank_is_replaced_by_its_like(tmp_path: Path, num_tokens: int) -> None:
    roles = [PoolRole.PREFILL, PoolRole.PREFILL, PoolRole.DECODE, PoolRole.DECODE]
    async with running(tmp_path, reply=REPLY, roles=roles, remote_prefill_min_tokens=1) as cluster:
        prefill, decode = cluster.ranks[:2], cluster.ranks[2:]
        if num_tokens == 0:
            for rank in prefill:
                rank.allowance = 0
        else:
            for rank in decode:
                rank.allowance = num_tokens - 1
        waiting = asyncio.create_task(cluster.complete())
        await until(lambda: any(rank.live and rank.allowance == 0 for rank in cluster.ranks))
        victim = holder(cluster)
        assert victim.role is (PoolRole.DECODE if num_tokens else PoolRole.PREFILL)
        victim.kill()
        allow(cluster, float("inf"))
        assert (await waiting).json()["choices"][0]["text"] == REPLY
        # Another prefill rank computes the prompt (and what has been generated), and hands off behind it.
        again = latest(rank for rank in prefill if rank is not victim)
        assert (again.hands_off, again.num_generated) == (True, num_tokens)
        assert again.kv_transfer_params == {"do_remote_decode": True}
        last = latest(rank for rank in decode if rank is not victim)
        assert (last.hands_off, last.num_generated) == (False, num_tokens + 1)
        assert last.kv_transfer_params == {"whole": True}


@in_loop
async def test_what_has_been_generated_counts_for_where_a_lost_request_goes(tmp_path: Path) -> None:
    """A short prompt with a long answer so far is work for a prefill rank."""
    roles = [PoolRole.PREFILL, PoolRole.DECODE, PoolRole.DECODE]
    async with running(tmp_path, reply=REPLY, roles=roles, remote_prefill_min_tokens=6) as cluster:
        prefill, decode = cluster.ranks[0], cluster.ranks[1:]
        for rank in decode:
            rank.allowance = 5
        waiting = asyncio.create_task(cluster.complete())
        await until(lambda: any(rank.live and rank.allowance == 0 for rank in decode))
        assert not prefill.submits
        holder(cluster).kill()
        allow(cluster, float("inf"))
        assert (await waiting).json()["choices"][0]["text"] == REPLY
        assert [(submit.hands_off, submit.num_generated) for submit in prefill.submits] == [(True, 5)]


@in_loop
async def test_whatever_goes_wrong_with_a_move_ends_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2) as cluster:
        limit(cluster, 3)
        waiting = asyncio.create_task(cluster.complete())
        victim = await stopped_at(cluster, 3)

        async def fail(*_: object) -> None:
            raise RuntimeError("no hashes today")

        monkeypatch.setattr(type(cluster.service.tokenizer), "hash_prefix", fail)
        victim.kill()
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert "no hashes today" in caplog.text
