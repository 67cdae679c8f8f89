"""Requests go where their prefix is: ranks that tell what they have, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import msgspec
import pytest

from rank_scheduler.messages import PrefixEvents, PrefixSnapshot, RankLoad, StepFrame
from router.control_messages import Members, PoolRole
from router.placement import Candidate, Wanted
from tests.router.fake_cluster import Cluster, in_loop, running, until

PROMPT = [65 + index % 20 for index in range(100)]
NUM_CACHED = 96
"""Of PROMPT, in whole blocks."""


def num_known(cluster: Cluster, index: int) -> int:
    return cluster.service.pool.prefixes.num_hashes(f"boot-{index}")


async def takes(cluster: Cluster, prompt: list[int], **fields: object) -> int:
    """The rank that gets this prompt."""
    before = [len(rank.submits) for rank in cluster.ranks]
    assert (await cluster.complete(prompt, **fields)).status_code == 200
    (index,) = [at for at, rank in enumerate(cluster.ranks) if len(rank.submits) > before[at]]
    return index


@in_loop
async def test_a_prompt_goes_where_its_prefix_is(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=3) as cluster:
        cluster.ranks[1].cache(PROMPT)
        cluster.ranks[2].cache(PROMPT[:20])
        await until(lambda: (num_known(cluster, 1), num_known(cluster, 2)) == (6, 1))
        assert [await takes(cluster, [*PROMPT, 66 + turn]) for turn in range(4)] == [1] * 4
        cached = cluster.service.metrics.registry.get_sample_value(
            "serried_placement_cached_tokens_total", {"leg": "whole", "role": "mixed"}
        )
        assert cached == 4 * NUM_CACHED
        cluster.ranks[1].tell_prefixes(removed=cluster.ranks[1].cached)
        await until(lambda: num_known(cluster, 1) == 0)
        assert await takes(cluster, PROMPT) == 2


@in_loop
async def test_salts_and_requests_that_do_not_read_the_cache_are_strangers(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2) as cluster:
        cluster.ranks[1].cache(PROMPT, salt="mine")
        await until(lambda: num_known(cluster, 1) == 6)
        assert [await takes(cluster, PROMPT, cache_salt="mine") for _ in range(3)] == [1, 1, 1]
        assert {await takes(cluster, PROMPT) for _ in range(2)} == {0, 1}
        assert {await takes(cluster, PROMPT, cache_salt="yours") for _ in range(2)} == {0, 1}
        fields = {"cache_salt": "mine", "skip_reading_prefix_cache": True}
        assert {await takes(cluster, PROMPT, **fields) for _ in range(2)} == {0, 1}


@in_loop
async def test_what_the_rank_has_not_yet_told_of_counts_without_cached_tokens(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2) as cluster:
        for rank in cluster.ranks:
            rank.allowance = 0
        cluster.ranks[1].cache(PROMPT)
        await until(lambda: num_known(cluster, 1) == 6)
        waiting = asyncio.create_task(cluster.complete(PROMPT))
        await until(lambda: len(cluster.ranks[1].submits) == 1)
        pool = cluster.service.pool
        candidates = [pool.ranks.candidate(link.row) for link in pool.links]
        assert [candidate.num_unseen_tokens for candidate in candidates] == [0, len(PROMPT) - NUM_CACHED]
        for rank in cluster.ranks:
            rank.allow(float("inf"))
        assert (await waiting).status_code == 200


@in_loop
async def test_a_gap_is_mended(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2) as cluster:
        rank = cluster.ranks[1]
        await until(lambda: rank.num_watches == 1)
        rank.answers_watches = False
        rank.prefix_seq += 1
        rank.cache(PROMPT)
        await until(lambda: rank.num_watches == 2)
        rank.tell_prefixes()
        rank.answers_watches = True
        rank.tell_all_prefixes(rank.connections[0])
        await until(lambda: num_known(cluster, 1) == 6)
        assert rank.num_watches == 2, "it asked once"
        rank.cache([*PROMPT, *PROMPT])
        await until(lambda: num_known(cluster, 1) == 12)
        assert cluster.counted("serried_peer_faults") == {"rank,gap": 1}


@in_loop
async def test_a_connection_begins_with_all_that_the_rank_has(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2) as cluster:
        rank = cluster.ranks[1]
        rank.cache(PROMPT)
        await until(lambda: num_known(cluster, 1) == 6)
        rank.cached = rank.cached[:3]
        rank.connections[0].abort("a cable")
        await until(lambda: len(rank.connections) == 2 and num_known(cluster, 1) == 3)
        assert rank.num_watches == 2


@in_loop
async def test_a_rank_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2) as cluster:
        cluster.ranks[1].cache(PROMPT)
        await until(lambda: num_known(cluster, 1) == 6)
        cluster.control.tell(Members(cluster.control.records[:1]))
        await until(lambda: num_known(cluster, 1) == 0)
        assert await takes(cluster, PROMPT) == 0
        cluster.service.check_integrity()


@pytest.mark.parametrize(
    "message",
    [StepFrame(RankLoad(), prefixes=PrefixEvents(1, b"odd")), PrefixSnapshot(1, b"odd")],
    ids=["changes", "snapshot"],
)
@in_loop
async def test_what_are_no_hashes_costs_the_connection_only(tmp_path: Path, message: object) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.connections[0].send(msgspec.msgpack.encode(message))
        await until(lambda: len(rank.connections) == 2)
        assert (await cluster.complete()).status_code == 200
        assert cluster.counted("serried_peer_faults") == {"rank,malformed": 1}


@in_loop
async def test_one_rank_alone_costs_no_hashing(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        cluster.ranks[0].cache(PROMPT)
        await until(lambda: num_known(cluster, 0) == 6)
        assert cluster.service.pool.hashed_block_sizes == set()
        assert await takes(cluster, PROMPT) == 0


@in_loop
async def test_a_decode_rank_takes_a_prompt_whole_while_that_is_little_work(tmp_path: Path) -> None:
    roles = (PoolRole.PREFILL, PoolRole.DECODE, PoolRole.DECODE)
    async with running(tmp_path, roles=roles, remote_prefill_min_tokens=32) as cluster:
        prefill, holder, other = cluster.ranks
        for rank in (prefill, holder):
            rank.cache(PROMPT)
        await until(lambda: num_known(cluster, 0) == num_known(cluster, 1) == 6)
        # Enough that is new: it is the prefill rank's, and the rank that has the rest goes on.
        assert (await cluster.complete([*PROMPT, *PROMPT])).status_code == 200
        assert ([submit.hands_off for submit in prefill.submits], len(holder.submits)) == ([True], 1)
        # The frame of its last step, made before the end, was not the latest word.
        for rank in cluster.ranks:
            rank.tell_prefixes()
        await until(lambda: not any(link.load.num_running for link in cluster.service.pool.links))
        holder.allowance = 0
        waiting = [asyncio.create_task(cluster.complete([*PROMPT, 66 + turn])) for turn in range(2)]
        await until(lambda: len(holder.submits) == 3)
        assert len(prefill.submits) == 1
        # Two sequences there weigh more than what this prompt would save.
        assert (await cluster.complete([*PROMPT, 68])).status_code == 200
        assert (len(prefill.submits), len(holder.submits), len(other.submits)) == (2, 3, 1)
        assert prefill.submits[1].hands_off
        holder.allow(float("inf"))
        assert [(await answer).status_code for answer in waiting] == [200, 200]


@in_loop
async def test_a_session_keeps_to_its_rank_in_every_router(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=3) as cluster:
        homes = {}
        for session in [f"session-{number}" for number in range(12)]:
            cluster.client.headers["x-session-id"] = session
            homes[session] = {await takes(cluster, PROMPT) for _ in range(3)}
        assert all(len(ranks) == 1 for ranks in homes.values()), homes
        assert len(set.union(*homes.values())) > 1
        # Another rank's cache is no reason to leave.
        (home,) = homes["session-0"]
        cluster.ranks[home - 1].cache(PROMPT)
        await until(lambda: num_known(cluster, (home - 1) % 3) == 6)
        cluster.client.headers["x-session-id"] = "session-0"
        assert await takes(cluster, PROMPT) == home
        cluster.ranks[home].kill()
        await until(lambda: len(cluster.service.pool.links) == 2)
        assert len({await takes(cluster, PROMPT) for _ in range(3)}) == 1


@in_loop
async def test_a_rank_may_be_asked_for_by_name(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=3) as cluster:
        cluster.ranks[0].cache(PROMPT)
        await until(lambda: num_known(cluster, 0) == 6)
        cluster.client.headers["x-serried-rank"] = "mixed/2"
        assert [await takes(cluster, PROMPT) for _ in range(3)] == [2] * 3
        for name, status in [("mixed/7", 503), ("large/0", 400)]:
            cluster.client.headers["x-serried-rank"] = name
            refused = await cluster.complete(PROMPT)
            assert refused.status_code == status, refused.text
            error = refused.json()["error"]
            assert error["param"] == "x-serried-rank"
            assert f"'{name}'" in error["message"]
            assert "mixed/0, mixed/1, mixed/2" in error["message"]
        assert cluster.is_idle()


@in_loop
async def test_a_named_rank_takes_requests_whole_whatever_its_role(tmp_path: Path) -> None:
    roles = (PoolRole.PREFILL, PoolRole.DECODE)
    async with running(tmp_path, roles=roles, remote_prefill_min_tokens=32) as cluster:
        for name, index in [("prefill/0", 0), ("decode/1", 1)]:
            cluster.client.headers["x-serried-rank"] = name
            assert await takes(cluster, PROMPT) == index
            assert not cluster.ranks[index].submits[-1].hands_off


@pytest.mark.parametrize("placement", ["round_robin", "least_loaded", "tests.router.test_prefix_placement:LastRank"])
@in_loop
async def test_another_policy_takes_the_place_of_prefixes(tmp_path: Path, placement: str) -> None:
    async with running(tmp_path, num_ranks=3, placement=placement) as cluster:
        cluster.ranks[0].cache(PROMPT)
        await until(lambda: num_known(cluster, 0) == 6)
        took = [await takes(cluster, PROMPT) for _ in range(6)]
        if "LastRank" in placement:
            assert took == [2] * 6
        else:
            assert sorted(took[:3]) == [0, 1, 2]
            assert took[3:] == took[:3]


class LastRank:
    """A policy of somebody's own."""

    def choose(self, wanted: Wanted, candidates: SequenceOf[Candidate]) -> int:
        return max(range(len(candidates)), key=lambda index: candidates[index].rank_id)
