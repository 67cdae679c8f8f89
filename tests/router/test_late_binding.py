"""Ranks get work when they have room for it; until then it waits in the router, in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rank_scheduler.messages import RankLoad
from router.control_messages import Members, PoolRole, RankRecord
from router.room import NUM_STEPS_AHEAD, Room, num_step_tokens_left, room
from tests.router.fake_cluster import Cluster, FakeRank, in_loop, running, until

IDLE = 2
"""What a fake rank has deferred all the time, which takes a slot each."""


def hold(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        rank.allowance = 0


def ask(cluster: Cluster, prompt: str, user: str | None = None, **fields: Any) -> asyncio.Task[httpx.Response]:
    headers = fields.pop("headers", {})
    body = {"model": "small", "prompt": prompt, "user": user, **fields}
    return asyncio.create_task(cluster.client.post("/v1/completions", json=body, headers=headers))


async def waiting(cluster: Cluster, count: int) -> None:
    await until(lambda: cluster.service.pool.dispatcher.num_waiting == count)


async def submitted(rank: FakeRank, count: int) -> list[str]:
    await until(lambda: len(rank.submits) >= count)
    return [rank.prompt_text(index) for index in range(len(rank.submits))]


async def finish(cluster: Cluster, *asked: asyncio.Task[httpx.Response]) -> None:
    for rank in cluster.ranks:
        rank.allow(float("inf"))
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


def test_room_ends_with_slots_and_with_two_steps_of_prompt_tokens() -> None:
    record = RankRecord("m/0", "m", "b", "h", 1, 1, "n", 4096, 4, 100, 16, max_num_batched_tokens=100)
    busy, full = RankLoad(num_running=1), RankLoad(num_running=1, num_step_tokens=100)
    assert room(record, RankLoad(), 0, 0) is Room.ANYTHING
    assert room(record, busy, 2, 100 * NUM_STEPS_AHEAD - 1) is Room.PROMPT
    assert room(record, busy, 2, 100 * NUM_STEPS_AHEAD) is Room.SLOT
    assert room(record, full, 0, 0) is Room.PROMPT
    capped = msgspec.structs.replace(record, long_prefill_token_threshold=20)
    assert room(capped, busy, 1, 19) is Room.PROMPT
    assert room(capped, busy, 1, 20) is Room.STEP
    assert num_step_tokens_left(capped, busy, 4, 900) == 100 - 4 * 20, "a step takes no more of each"
    assert num_step_tokens_left(capped, busy, 0, 0) == 20 * NUM_STEPS_AHEAD
    uncut = msgspec.structs.replace(capped, short_prefill_tokens=50)
    assert (room(uncut, busy, 1, 20), num_step_tokens_left(uncut, busy, 1, 900)) == (Room.STEP, 50)
    long = RankLoad(num_running=2, num_waiting_tokens=900, num_step_tokens=30)
    assert (room(record, long, 1, 69), num_step_tokens_left(record, long, 1, 69)) == (Room.STEP, 1)
    assert room(record, long, 1, 70) is Room.SLOT
    assert room(record, RankLoad(num_running=1, num_waiting=1, num_deferred=1), 0, 0) is Room.PROMPT
    assert room(record, RankLoad(num_running=1, num_waiting=1, num_deferred=1), 1, 0) is Room.NONE


def test_a_full_rank_takes_what_it_can_load_meanwhile() -> None:
    record = RankRecord("d/0", "d", "b", "h", 1, 1, "n", 4096, 4, 100, 16, max_num_inflight_kv_loads=2)
    assert room(record, RankLoad(num_running=4), 0, 0) is Room.SLOT
    assert room(record, RankLoad(num_running=4, num_waiting=1), 0, 0) is Room.SLOT
    assert room(record, RankLoad(num_running=4, num_waiting=1), 1, 0) is Room.NONE


@in_loop
async def test_what_finds_no_slot_waits_in_order_and_longer_than_for_a_rank(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_seqs=IDLE + 1, rank_wait_timeout_s=0.05) as cluster:
        (rank,) = cluster.ranks
        hold(cluster)
        asked = []
        for index, prompt in enumerate("abcd"):
            asked.append(ask(cluster, prompt))
            await (submitted(rank, 1) if index == 0 else waiting(cluster, index))
        await asyncio.sleep(0.1)  # more than there is for a rank, if there is none
        assert await submitted(rank, 1) == ["a"]
        await finish(cluster, *asked)
        assert await submitted(rank, 4) == ["a", "b", "c", "d"]
        waits = cluster.service.metrics.registry.get_sample_value("serried_router_wait_seconds_count")
        assert waits == 4


@in_loop
async def test_tenants_take_turns(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_seqs=IDLE + 1) as cluster:
        (rank,) = cluster.ranks
        hold(cluster)
        asked = [ask(cluster, "first")]
        await submitted(rank, 1)
        for index in range(4):
            asked.append(ask(cluster, f"a{index}", user="a"))
            await waiting(cluster, index + 1)
        for index in range(2):
            asked.append(ask(cluster, f"b{index}", user="b"))
            await waiting(cluster, index + 5)
        await finish(cluster, *asked)
        assert (await submitted(rank, 7))[1:] == ["a0", "b0", "a1", "b1", "a2", "a3"]


@in_loop
async def test_a_client_that_leaves_the_line_costs_nobody_anything(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_seqs=IDLE + 1) as cluster:
        (rank,) = cluster.ranks
        hold(cluster)
        asked = [ask(cluster, "first")]
        await submitted(rank, 1)
        gone = [ask(cluster, "x" * 100, user="a") for _ in range(3)]
        late = ask(cluster, "late", user="a", headers={"x-request-deadline-ms": "400"})
        await waiting(cluster, 4)
        asked += [ask(cluster, "a", user="a")]
        await waiting(cluster, 5)
        asked += [ask(cluster, "b", user="b")]
        await waiting(cluster, 6)
        for task in gone:
            task.cancel()
        assert (await late).json()["error"]["code"] == "deadline_exceeded"
        await waiting(cluster, 2)
        await finish(cluster, *asked)
        assert await submitted(rank, 3) == ["first", "a", "b"]


@in_loop
async def test_one_that_lacks_kv_room_is_passed_and_goes_when_there_is_some(tmp_path: Path) -> None:
    async with running(tmp_path, num_blocks=16 + 4) as cluster:
        (rank,) = cluster.ranks
        hold(cluster)
        asked = [ask(cluster, "first")]
        await submitted(rank, 1)
        large = ask(cluster, "L" * 100)
        await waiting(cluster, 1)
        asked += [ask(cluster, "small")]
        assert await submitted(rank, 2) == ["first", "small"]
        explained = await cluster.client.get(f"/v1/requests/{next(iter(waiting_ids(cluster)))}/explain")
        (sequence,) = explained.json()["sequences"]
        assert "KV room for 100 tokens" in sequence["message"]
        assert sequence["position"] == 0
        rank.num_blocks = 1_000
        await finish(cluster, *asked, large)


def waiting_ids(cluster: Cluster) -> list[str]:
    dispatcher = cluster.service.pool.dispatcher
    return [waiter.item.request_id for waiter in [*dispatcher._prefill_line, *dispatcher._other_line]]


@in_loop
async def test_who_waits_can_be_explained(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_seqs=IDLE + 1) as cluster:
        hold(cluster)
        asked = [ask(cluster, "first")]
        await submitted(cluster.ranks[0], 1)
        asked += [ask(cluster, "abc", user="me", max_tokens=10, headers={"x-request-id": "b"})]
        await waiting(cluster, 1)
        asked += [ask(cluster, "abcde", user="me", max_tokens=10, headers={"x-request-id": "c"})]
        await waiting(cluster, 2)
        (sequence,) = (await cluster.client.get("/v1/requests/cmpl-c/explain")).json()["sequences"]
        assert (sequence["position"], sequence["figures"]["num_tokens_before"]) == (1, 13)
        assert "room on one of 1 ranks" in sequence["message"]
        assert "1 before it, with 13 tokens; it goes of tenant 'me', weight 1, with 15 tokens" in sequence["message"]
        gauge = cluster.service.metrics.registry.get_sample_value
        assert gauge("serried_router_waiting", {"of": "requests"}) == 2
        assert gauge("serried_router_waiting", {"of": "tokens"}) == 28
        await finish(cluster, *asked)


@in_loop
async def test_a_lost_ranks_work_goes_before_what_waits(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2, max_num_seqs=IDLE + 1) as cluster:
        hold(cluster)
        asked = [ask(cluster, "a"), ask(cluster, "b")]
        for rank in cluster.ranks:
            await submitted(rank, 1)
        asked.append(ask(cluster, "c"))
        await waiting(cluster, 1)
        lost, other = cluster.ranks
        moved = lost.prompt_text()
        lost.kill()
        await waiting(cluster, 2)
        cluster.control.tell(Members([record for record in cluster.control.records if record.boot_id == "boot-1"]))
        other.allow(float("inf"))
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert (await submitted(other, 3))[1:] == [moved, "c"]


@in_loop
async def test_an_urgent_request_goes_to_a_full_rank_that_would_put_another_aside(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_seqs=IDLE + 1, policy="priority") as cluster:
        (rank,) = cluster.ranks
        hold(cluster)
        asked = [ask(cluster, "usual", priority=5)]
        await submitted(rank, 1)
        rank.allow(1)
        await until(lambda: cluster.service.pool.links[0].load.num_steps == 1)
        asked.append(ask(cluster, "as usual", priority=5))
        await waiting(cluster, 1)
        asked.append(ask(cluster, "urgent", priority=1))
        assert await submitted(rank, 2) == ["usual", "urgent"]
        asked.append(ask(cluster, "also urgent", priority=1))
        await waiting(cluster, 2)  # one at a time
        await finish(cluster, *asked)
        assert (await submitted(rank, 4))[2:] == ["also urgent", "as usual"]


@pytest.mark.parametrize("falls_back", [True, False])
@in_loop
async def test_prefill_and_other_parts_do_not_wait_for_each_other(tmp_path: Path, falls_back: bool) -> None:
    roles = [PoolRole.PREFILL, PoolRole.DECODE]
    settings = {"remote_prefill_min_tokens": 4, "pd_fallback": falls_back}
    async with running(tmp_path, roles=roles, max_num_seqs=IDLE + 1, **settings) as cluster:
        prefill, decode = cluster.ranks
        hold(cluster)
        asked = [ask(cluster, "long1")]
        await submitted(prefill, 1)
        asked.append(ask(cluster, "long2"))
        await waiting(cluster, 1)
        asked.append(ask(cluster, "s1"))
        assert await submitted(decode, 1) == ["s1"]
        asked.append(ask(cluster, "s2"))
        await waiting(cluster, 2)
        # What is handed off goes before what has waited longer for the same rank.
        prefill.allow(1)
        await submitted(prefill, 2)
        await waiting(cluster, 2)
        await finish(cluster, *asked)
        prompts = await submitted(decode, 4)
        assert prompts[1].startswith("long1")
        assert "s2" in prompts
