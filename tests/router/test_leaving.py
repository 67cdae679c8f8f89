"""Ranks that leave: they get nothing new, what they have ends there or goes on elsewhere, and nobody notices."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import pytest

from rank_scheduler.messages import Leaving, RankLoad, StepFrame
from router.control_messages import Members, PoolRole
from router.placement import Leg
from router.rank_link import MOVE_INTERVAL_S, RankLink
from router.room import Room
from tests.router.fake_cluster import Cluster, FakeRank, in_loop, running, until
from tests.router.test_failover import REPLY, allow, events, limit, stopped_at, text_of

KV = {"lease": 7}


async def heard(rank: FakeRank) -> None:
    await until(lambda: rank.num_heard == 1)


def other(cluster: Cluster, rank: FakeRank) -> FakeRank:
    return cluster.ranks[1 - rank.index]


@in_loop
async def test_a_rank_that_leaves_gets_nothing_new_and_ends_what_it_has(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2) as cluster:
        limit(cluster, 3)
        stream = asyncio.create_task(events(cluster))
        leaving = await stopped_at(cluster, 3)
        leaving.leave(60.0)
        await heard(leaving)
        assert cluster.service.pool.figures()["num_ranks_with_room"] == 1
        # Membership that is told anew does not make it one that serves.
        cluster.control.tell(Members(cluster.control.records))
        allow(cluster, float("inf"))
        answers = [await cluster.complete() for _ in range(4)]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [REPLY] * 4
        assert len(leaving.submits) == 1
        assert text_of(await stream) == REPLY
        assert leaving.hand_offs == leaving.aborts == []
        assert cluster.counted("serried_failovers") == {}


@pytest.mark.parametrize("params", [None, KV], ids=["by recompute", "with its KV"])
@in_loop
async def test_what_still_runs_there_goes_on_elsewhere(tmp_path: Path, params: dict[str, int] | None) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2, max_failovers=0) as cluster:
        undisturbed = await events(cluster, logprobs=2, stream_options={"include_usage": True})
        limit(cluster, 5)
        stream = asyncio.create_task(events(cluster, logprobs=2, stream_options={"include_usage": True}))
        leaving = await stopped_at(cluster, 5)
        leaving.handed_params = params
        leaving.leave(0.0)
        await until(lambda: bool(leaving.hand_offs))
        allow(cluster, float("inf"))
        found = await stream
        assert text_of(found) == REPLY
        assert found[-1]["usage"] == undisturbed[-1]["usage"]
        logprobs = [event["choices"][0].get("logprobs") for event in found if event["choices"]]
        assert sum(len(entry["tokens"]) for entry in logprobs if entry) == len(REPLY)
        again = other(cluster, leaving).submits[-1]
        assert (again.num_generated, again.kv_transfer_params) == (5, params)
        assert leaving.hand_offs == [2] or leaving.hand_offs == [1]
        assert cluster.counted("serried_failovers") == {"left_with_kv" if params else "left": 1}
        assert cluster.counted("serried_requests") == {"finished": 2}


@in_loop
async def test_a_prompt_without_a_token_is_placed_anew(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2, max_failovers=0) as cluster:
        limit(cluster, 0)
        waiting = asyncio.create_task(cluster.complete(n=3))
        leaving = await stopped_at(cluster, 0, num_sequences=3)
        leaving.leave(0.0)
        await until(lambda: len(leaving.aborts) == 3)
        allow(cluster, float("inf"))
        assert [choice["text"] for choice in (await waiting).json()["choices"]] == [REPLY] * 3
        assert len(other(cluster, leaving).submits) == 3
        assert cluster.counted("serried_failovers") == {"left": 3}


@in_loop
async def test_the_last_rank_keeps_what_it_has_until_another_comes(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, rank_wait_timeout_s=20) as cluster:
        limit(cluster, 3)
        stream = asyncio.create_task(events(cluster))
        leaving = await stopped_at(cluster, 3)
        leaving.leave(0.0)
        await heard(leaving)
        leaving.allow(2)
        await until(lambda: leaving.allowance == 0)
        waiting = asyncio.create_task(cluster.complete())
        await asyncio.sleep(2 * MOVE_INTERVAL_S)
        assert not leaving.hand_offs
        replacement = FakeRank(1, leaving.reply)
        cluster.ranks.append(replacement)
        cluster.control.tell(Members([*cluster.control.records, await replacement.start()]))
        assert text_of(await stream) == REPLY
        assert (await waiting).json()["choices"][0]["text"] == REPLY
        assert (len(leaving.submits), len(leaving.hand_offs)) == (1, 1)
        assert sorted(submit.num_generated for submit in replacement.submits) == [0, 5]


def link_to(cluster: Cluster, rank: FakeRank) -> RankLink:
    return next(link for link in cluster.service.pool.links if link.record.boot_id == f"boot-{rank.index}")


def says(link: RankLink, *messages: Leaving | StepFrame) -> None:
    """All in one read of its socket."""
    for message in messages:
        link._on_frame(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("num_tokens", [0, 1], ids=["prompts", "streams"])
@in_loop
async def test_no_more_leave_at_a_time_than_others_have_room_for(tmp_path: Path, num_tokens: int) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2, max_num_seqs=2 + 3) as cluster:
        limit(cluster, 3 * num_tokens)
        several = asyncio.create_task(cluster.complete(n=3))
        leaving = await stopped_at(cluster, 3 * num_tokens, num_sequences=3)
        stays = other(cluster, leaving)
        others = [asyncio.create_task(cluster.complete()) for _ in range(2)]
        await until(lambda: len(stays.submits) == 2)
        leaving.leave(0.0)
        await until(lambda: len(stays.submits) == 3)
        assert len(leaving.live) == 2
        assert cluster.service.pool.dispatcher.num_waiting == 0
        allow(cluster, float("inf"))
        assert [choice["text"] for choice in (await several).json()["choices"]] == [REPLY] * 3
        assert [answer.status_code for answer in await asyncio.gather(*others)] == [200, 200]
        assert cluster.counted("serried_failovers") == {"left": 1}


@in_loop
async def test_room_for_what_ends_before_it_could_leave_is_free(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2, max_num_seqs=2 + 1) as cluster:
        limit(cluster, len(REPLY))
        ended = asyncio.create_task(cluster.complete())
        leaving = await stopped_at(cluster, len(REPLY))
        link, target = link_to(cluster, leaving), link_to(cluster, other(cluster, leaving))
        await until(lambda: target.load.num_deferred == 2)
        leaving.allow(1)
        says(link, Leaving(60.0))
        link._move_live()
        assert target.room is Room.NONE
        assert (await ended).json()["choices"][0]["text"] == REPLY
        assert target.room > Room.NONE
        target.check_integrity()
        assert cluster.counted("serried_failovers") == {}


@pytest.mark.parametrize("params", [None, KV], ids=["without KV", "with its KV"])
@in_loop
async def test_what_was_to_go_to_a_rank_that_leaves_as_well_stays(
    tmp_path: Path, params: dict[str, int] | None
) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2, max_failovers=0) as cluster:
        limit(cluster, 3)
        stream = asyncio.create_task(events(cluster))
        leaving = await stopped_at(cluster, 3)
        leaving.handed_params = params
        link, target = link_to(cluster, leaving), link_to(cluster, other(cluster, leaving))
        says(link, Leaving(0.0))
        link._move_live()
        says(target, Leaving(60.0))
        await until(lambda: len(leaving.submits) == 2)
        assert leaving.submits[-1].kv_transfer_params is None
        assert leaving.aborts == ([] if params is None else leaving.hand_offs)
        allow(cluster, float("inf"))
        assert text_of(await stream) == REPLY
        assert not other(cluster, leaving).submits
        assert cluster.counted("serried_failovers") == {}


@in_loop
async def test_room_that_a_rank_gave_just_before_it_said_that_it_leaves_is_not_used(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2, max_num_seqs=2 + 1, max_failovers=0) as cluster:
        limit(cluster, 0)
        asked = [asyncio.create_task(cluster.complete()) for _ in range(3)]
        await until(lambda: cluster.service.pool.dispatcher.num_waiting == 1)
        leaving, stays = cluster.ranks
        # It has put aside what it ran, say.
        says(link_to(cluster, leaving), StepFrame(RankLoad(num_steps=9)), Leaving(60.0))
        assert cluster.service.pool.dispatcher.num_waiting == 0
        await until(lambda: cluster.service.pool.dispatcher.num_waiting == 1)
        assert len(leaving.submits) == 1
        allow(cluster, float("inf"))
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 3
        assert len(stays.submits) == 2


@in_loop
async def test_a_rank_that_is_lost_while_it_leaves(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2) as cluster:
        limit(cluster, 3)
        stream = asyncio.create_task(events(cluster))
        leaving = await stopped_at(cluster, 3)
        leaving.leave(60.0)
        await heard(leaving)
        leaving.kill()
        allow(cluster, float("inf"))
        assert text_of(await stream) == REPLY
        assert cluster.counted("serried_failovers") == {"moved": 1}


@in_loop
async def test_a_client_that_goes_while_its_rank_hands_off(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2) as cluster:
        limit(cluster, 3)
        waiting = asyncio.create_task(cluster.complete())
        await stopped_at(cluster, 3)
        link = next(link for link in cluster.service.pool.links if link.num_live)
        link._on_frame(msgspec.msgpack.encode(Leaving(0.0)))
        waiting.cancel()
        await until(cluster.is_idle)
        await until(lambda: not any(rank.live for rank in cluster.ranks))
        assert cluster.counted("serried_refused") == {"client_gone": 1}


@in_loop
async def test_nothing_is_handed_to_a_rank_that_leaves(tmp_path: Path) -> None:
    roles = [PoolRole.PREFILL, PoolRole.DECODE, PoolRole.DECODE]
    async with running(tmp_path, reply=REPLY, roles=roles, remote_prefill_min_tokens=1) as cluster:
        prefill, decode = cluster.ranks[0], cluster.ranks[1:]
        prefill.tickets = [{"num_tokens": 1}]
        prefill.allowance = 1
        waiting = asyncio.create_task(cluster.complete())
        await until(lambda: sum(len(rank.prefetches) for rank in decode) == 1)
        leaving, stays = sorted(decode, key=lambda rank: not rank.prefetches)
        leaving.leave(0.0)
        await heard(leaving)
        allow(cluster, float("inf"))
        assert (await waiting).json()["choices"][0]["text"] == REPLY
        assert not leaving.submits
        assert [submit.num_generated for submit in stays.submits] == [1]
        # With the last one of its kind gone, prefill ranks do all.
        stays.leave(0.0)
        await heard(stays)
        assert not cluster.service.pool.expects(Leg.DECODE)
        assert (await cluster.complete()).json()["choices"][0]["text"] == REPLY
        assert prefill.submits[-1].hands_off is False


@pytest.mark.parametrize("moves_in_s", [-1.0, math.nan, math.inf])
@in_loop
async def test_a_rank_that_says_nonsense_of_its_leaving_is_cut(tmp_path: Path, moves_in_s: float) -> None:
    async with running(tmp_path, num_ranks=2) as cluster:
        cluster.ranks[0].leave(moves_in_s)
        await until(lambda: cluster.counted("serried_peer_faults").get("rank,malformed", 0) == 1)
        assert (await cluster.complete()).status_code == 200
