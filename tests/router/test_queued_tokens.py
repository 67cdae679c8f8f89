"""Prompt tokens count as queued until ranks say that they are computed, in parts or at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from rank_scheduler.messages import StepFrame
from router.amounts import Amounts
from tests.router.fake_cluster import Cluster, FakeRank, in_loop, running, until


async def tell(cluster: Cluster, rank: FakeRank, *frames: StepFrame) -> None:
    for frame in frames:
        rank.connections[-1].send(msgspec.msgpack.encode(frame))


@in_loop
async def test_a_prompt_counts_less_with_each_part_that_is_computed(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_tokens=1000) as cluster:
        (rank,) = cluster.ranks
        rank.allowance = 0
        rank.announces_prefill = False
        answer = asyncio.create_task(cluster.complete("x" * 100, n=2))
        await until(lambda: len(rank.submits) == 2)
        first, second = rank.submits
        num_tokens = len(first.token_ids) // 4
        assert cluster.taken == Amounts(2, 2 * num_tokens)
        await tell(cluster, rank, StepFrame(rank.load(), computed={first.id: 30}))
        await until(lambda: cluster.taken.tokens == 2 * num_tokens - 30)
        # What is computed again after a preemption, doubled, of nobody or nonsense changes nothing.
        wrong = {first.id: 10, second.id: -5, 999: 50}
        frames = [StepFrame(rank.load(), computed=computed) for computed in (wrong, {first.id: 30, second.id: 45})]
        await tell(cluster, rank, *frames)
        await until(lambda: cluster.taken.tokens == 2 * num_tokens - 75)
        await tell(cluster, rank, StepFrame(rank.load(), computed={first.id: 10**6}))
        await until(lambda: cluster.taken.tokens == num_tokens - 45)
        await until(lambda: cluster.ledger.counts().num_tokens == num_tokens - 45)
        rank.allow(float("inf"))
        assert (await answer).status_code == 200
        await until(cluster.is_idle)
        cluster.service.check_integrity()


@in_loop
async def test_what_is_computed_makes_room_for_others(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_tokens=120) as cluster:
        (rank,) = cluster.ranks
        rank.allowance = 0
        rank.announces_prefill = False
        first = asyncio.create_task(cluster.complete("x" * 100))
        await until(lambda: len(rank.submits) == 1)
        assert (await cluster.complete("y" * 60)).status_code == 503
        await tell(cluster, rank, StepFrame(rank.load(), computed={rank.submits[0].id: 64}))
        await until(lambda: cluster.taken.tokens == 36)
        second = asyncio.create_task(cluster.complete("y" * 60))
        await until(lambda: len(rank.submits) == 2)
        rank.allow(float("inf"))
        assert [(await answer).status_code for answer in (first, second)] == [200, 200]
