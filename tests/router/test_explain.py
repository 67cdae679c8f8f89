"""`GET /v1/requests/{id}/explain` over real sockets: on a rank, in the router, unknown, with ranks that say nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rank_scheduler.messages import Explained, Explanation, Grammar, TimelineEntry
from router.control_messages import Members
from router.explanation import InRouter, RankAnswer, RouterStage, put_together
from router.grammar_check import GrammarChecker
from router.rank_link import RankLink
from router.room import Room
from router.service import RouterService
from tests.router.fake_cluster import SECRET, Cluster, in_loop, running, until

MANY = "x" * 200


async def explain(cluster: Cluster, request_id: str) -> httpx.Response:
    return await cluster.client.get(f"/v1/requests/{request_id}/explain")


async def explained(cluster: Cluster, request_id: str) -> dict[str, Any]:
    response = await explain(cluster, request_id)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def refusal(response: httpx.Response, status: int, code: str) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, "id")
    return str(error["message"])


def id_of_only_flow(cluster: Cluster) -> str:
    (flow,) = cluster.service._flows
    return flow.request_id


@in_loop
async def test_a_waiting_request_is_explained(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 0
        before = asyncio.create_task(cluster.complete("first"))
        await until(lambda: len(rank.submits) == 1)
        asked = asyncio.create_task(cluster.complete("second"))
        await until(lambda: len(rank.submits) == 2)
        request_id = rank.submits[1].request_id
        body = await explained(cluster, request_id)
        assert (body["id"], body["ranks"], body["ranks_without_answer"]) == (request_id, ["mixed/0"], [])
        (sequence,) = body["sequences"]
        timeline = sequence.pop("timeline")
        assert sequence == {
            "rank": "mixed/0",
            "state": "waiting",
            "reason": "max_num_seqs",
            "message": "all 8 slots run",
            "figures": {"max_num_seqs": 8},
            "position": 1,
            "num_prompt_tokens": 6,
            "num_computed_tokens": 0,
            "num_generated_tokens": 0,
            "num_cached_tokens": 0,
            "num_preemptions": 0,
        }
        assert [(entry["event"], entry["cause"]) for entry in timeline] == [("QUEUED", ""), ("ASKED", "by a router")]
        assert timeline[0]["at_s"] == 0
        assert 0 < timeline[1]["at_s"] < 30
        assert timeline[0]["age_s"] == pytest.approx(timeline[1]["at_s"] + timeline[1]["age_s"], abs=1e-5)
        rank.allow(float("inf"))
        answers = await asyncio.gather(before, asked)
        assert answers[1].json()["id"] == answers[1].headers["x-request-id"] == request_id


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_answers_carry_their_public_id_in_a_header(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as cluster:
        response = await cluster.client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}], "stream": stream},
            headers={"x-request-id": "mine"},
        )
        first = response.text.split("\n\n")[0].removeprefix("data: ")
        assert response.headers.get_list("x-request-id") == [json.loads(first)["id"]]
        assert response.headers["x-request-id"] == "chatcmpl-mine"
        assert cluster.ranks[0].submits[0].request_id == response.headers["x-request-id"]
        refused = await cluster.complete("x" * 300, stream=stream)
        assert refused.status_code == 400
        assert refused.headers["x-request-id"].startswith("cmpl-")


@in_loop
async def test_a_running_stream_is_explained_by_the_header_of_its_answer(tmp_path: Path) -> None:
    async with running(tmp_path, reply=MANY) as cluster:
        cluster.ranks[0].allowance = 3
        async with cluster.client.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
            await until(lambda: cluster.ranks[0].allowance == 0)
            (sequence,) = (await explained(cluster, response.headers["x-request-id"]))["sequences"]
            assert (sequence["state"], sequence["num_generated_tokens"], sequence["position"]) == ("running", 3, None)
            cluster.ranks[0].allow(float("inf"))
            await response.aread()
        message = refusal(await explain(cluster, response.headers["x-request-id"]), 404, "not_found")
        assert response.headers["x-request-id"] in message


@in_loop
async def test_sequences_on_several_ranks_share_one_timeline(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2) as cluster:
        for rank in cluster.ranks:
            rank.allowance = 0
        asked = asyncio.create_task(cluster.complete(["a", "b"]))
        await until(lambda: all(rank.submits for rank in cluster.ranks))
        body = await explained(cluster, cluster.ranks[0].submits[0].request_id)
        assert body["ranks"] == ["mixed/0", "mixed/1"]
        assert [sequence["rank"] for sequence in body["sequences"]] == ["mixed/0", "mixed/1"]
        # Their clocks are a thousand seconds apart.
        begins = sorted(sequence["timeline"][0]["at_s"] for sequence in body["sequences"])
        assert begins[0] == 0
        assert begins[1] < 30
        for rank in cluster.ranks:
            rank.allow(float("inf"))
        await asked


@in_loop
async def test_any_router_explains(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        cluster.ranks[0].allowance = 0
        asked = asyncio.create_task(cluster.complete())
        await until(lambda: len(cluster.ranks[0].submits) == 1)
        other = RouterService(cluster.service.settings)
        await other.start(cluster.control.address, SECRET, "router-2")
        try:
            await until(lambda: len(other.pool.links) == 1)
            explanation = await other.explain(cluster.ranks[0].submits[0].request_id)
        finally:
            await other.stop()
        assert [sequence.state for sequence in explanation.sequences] == ["waiting"]
        # The fake rank sends its frames over its latest connection, which is gone.
        cluster.ranks[0].connections.pop()
        cluster.ranks[0].allow(float("inf"))
        assert (await asked).status_code == 200


@in_loop
async def test_a_request_that_waits_for_a_rank_is_in_the_router(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=0, rank_wait_timeout_s=20) as cluster:
        asked = asyncio.create_task(cluster.complete("abc", n=2))
        await until(lambda: cluster.taken.tokens == 6 and not cluster.service.control._pending)
        await asyncio.sleep(0)
        body = await explained(cluster, id_of_only_flow(cluster))
        assert (body["ranks"], body["ranks_without_answer"]) == ([], [])
        (sequence,) = body["sequences"]
        assert (sequence["rank"], sequence["state"], sequence["reason"]) == (None, "in_router", "placement")
        assert "any rank for its whole part: there is none" in sequence["message"]
        assert sequence["position"] == 0
        assert sequence["figures"] == {
            "num_sequences": 2,
            "num_ranks_known": 0,
            "num_ranks_connected": 0,
            "num_ranks_with_room": 0,
            "num_before": 0,
            "num_tokens_before": 0,
            "num_ranks_suitable": 0,
            "num_ranks_suitable_with_room": 0,
        }
        assert sequence["num_prompt_tokens"] == 3
        assert [(entry["event"], entry["at_s"]) for entry in sequence["timeline"]] == [("ARRIVED", 0)]
        assert 0 < sequence["timeline"][0]["age_s"] < 30
        asked.cancel()


@in_loop
async def test_a_request_that_is_not_counted_yet_is_in_the_router(tmp_path: Path) -> None:
    async with running(tmp_path, acquire_timeout_s=20, max_num_queued_reqs=1) as cluster:
        cluster.control.is_mute = True
        asked = asyncio.create_task(cluster.complete())
        await until(lambda: len(cluster.service._arriving) == 1)
        (arriving,) = cluster.service._arriving
        (sequence,) = (await explained(cluster, arriving.request_id))["sequences"]
        assert (sequence["state"], sequence["reason"]) == ("in_router", "admission")
        assert not cluster.ranks[0].explains
        asked.cancel()


@in_loop
async def test_a_request_whose_output_format_is_being_checked_is_in_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = asyncio.Event()

    async def check(self: GrammarChecker, grammar: Grammar, param: str) -> None:
        await checked.wait()

    monkeypatch.setattr(GrammarChecker, "check", check)
    async with running(tmp_path, max_num_queued_reqs=1, acquire_timeout_s=20) as cluster:
        cluster.control.is_mute = True
        asked = asyncio.create_task(cluster.complete(structured_outputs={"regex": "a+"}))
        await until(lambda: len(cluster.service._arriving) == 1)
        (arriving,) = cluster.service._arriving
        (sequence,) = (await explained(cluster, arriving.request_id))["sequences"]
        assert sequence["reason"] == "admission"
        asked.cancel()
        await until(lambda: not cluster.service._arriving)
        cluster.control.is_mute = False
        asked = asyncio.create_task(cluster.complete(structured_outputs={"regex": "a+"}))
        await until(lambda: [flow._stage for flow in cluster.service._flows] == [RouterStage.FORMAT_CHECK])
        (sequence,) = (await explained(cluster, id_of_only_flow(cluster)))["sequences"]
        assert (sequence["state"], sequence["reason"]) == ("in_router", "format_check")
        assert sequence["message"] == "waits for its output format to be checked"
        checked.set()
        assert (await asked).status_code == 200


@in_loop
async def test_a_request_of_which_a_rank_has_a_part_is_in_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, rank_wait_timeout_s=20) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 0
        monkeypatch.setattr(RankLink, "room", property(lambda link: Room.NONE if link.num_live else Room.PROMPT))
        asked = asyncio.create_task(cluster.complete(["a", "b"]))
        await until(lambda: len(rank.submits) == 1)
        monkeypatch.undo()
        body = await explained(cluster, rank.submits[0].request_id)
        assert [(s["rank"], s["state"]) for s in body["sequences"]] == [(None, "in_router"), ("mixed/0", "waiting")]
        assert body["sequences"][0]["timeline"][0]["at_s"] == 0
        assert 0 <= body["sequences"][1]["timeline"][0]["at_s"] < 30
        asked.cancel()


@in_loop
async def test_an_unknown_id_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2) as cluster:
        message = refusal(await explain(cluster, "chatcmpl-nobody"), 404, "not_found")
        assert "chatcmpl-nobody" in message
        assert "2 ranks" in message
        assert "ask again" in message
        assert cluster.counted("serried_refused") == {"not_found": 1}


@pytest.mark.parametrize(
    "request_id", ["x", "chatcmpl-", "chatcmpl-a%20b", "chatcmpl-%00", "cmpl-" + "x" * 133, "%F0%9F%98%80"]
)
@in_loop
async def test_what_is_no_id_is_refused_without_asking_anybody(tmp_path: Path, request_id: str) -> None:
    async with running(tmp_path) as cluster:
        message = refusal(await explain(cluster, request_id), 400, "invalid_request")
        assert "at most 137" in message if len(request_id) > 137 else "chatcmpl-" in message
        assert not cluster.ranks[0].explains


@in_loop
async def test_a_rank_within_a_long_step_is_named(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=2, explain_timeout_s=0.05) as cluster:
        for rank in cluster.ranks:
            rank.allowance = 0
        asked = asyncio.create_task(cluster.complete())
        await until(lambda: any(rank.submits for rank in cluster.ranks))
        holder = next(rank for rank in cluster.ranks if rank.submits)
        silent = cluster.ranks[1 - holder.index]
        silent.num_answers_to_explain = 0
        body = await explained(cluster, holder.submits[0].request_id)
        assert (body["ranks"], body["ranks_without_answer"]) == ([f"mixed/{holder.index}"], [f"mixed/{silent.index}"])
        message = refusal(await explain(cluster, "cmpl-nobody"), 503, "no_rank_available")
        assert f"mixed/{silent.index}" in message
        assert f"mixed/{holder.index}" not in message
        # What it says afterwards is of no use to anybody, and costs nothing.
        for asking in silent.explains:
            silent.connections[0].send(msgspec.msgpack.encode(silent.explained(asking)))
        await until(lambda: cluster.counted("serried_peer_faults") == {"rank,stale": 2})
        holder.allow(float("inf"))
        assert (await asked).status_code == 200
        assert len(silent.connections) == 1


@in_loop
async def test_a_second_answer_is_ignored_and_counted(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        cluster.ranks[0].num_answers_to_explain = 3
        refusal(await explain(cluster, "cmpl-nobody"), 404, "not_found")
        await until(lambda: cluster.counted("serried_peer_faults") == {"rank,stale": 2})
        assert (await cluster.complete()).status_code == 200


@in_loop
async def test_a_rank_that_is_lost_while_it_is_asked_ends_the_wait(tmp_path: Path) -> None:
    async with running(tmp_path, explain_timeout_s=20) as cluster:
        cluster.ranks[0].num_answers_to_explain = 0
        asking = asyncio.create_task(explain(cluster, "cmpl-nobody"))
        await until(lambda: len(cluster.ranks[0].explains) == 1)
        cluster.ranks[0].kill()
        async with asyncio.timeout(10):
            assert "mixed/0" in refusal(await asking, 503, "no_rank_available")
        await until(lambda: not cluster.service.pool.links)
        message = refusal(await explain(cluster, "cmpl-nobody"), 503, "no_rank_available")
        assert "0 ranks" in message


@in_loop
async def test_a_rank_that_is_behind_with_reading_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as cluster:
        monkeypatch.setattr("router.rank_link.MAX_UNSENT_BYTES", 0)
        assert "mixed/0" in refusal(await explain(cluster, "cmpl-nobody"), 503, "no_rank_available")
        assert not cluster.ranks[0].explains


@in_loop
async def test_a_rank_that_is_no_member_any_more_is_asked_too(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 0
        asked = asyncio.create_task(cluster.complete())
        await until(lambda: len(rank.submits) == 1)
        cluster.control.tell(Members([]))
        await until(lambda: not cluster.service.pool.links)
        assert (await explained(cluster, rank.submits[0].request_id))["ranks"] == ["mixed/0"]
        rank.allow(float("inf"))
        assert (await asked).status_code == 200


def test_times_are_told_from_the_first_event_wherever_it_was() -> None:
    def on_rank(*times: float) -> Explanation:
        return Explanation("running", [TimelineEntry(at, f"E{i}") for i, at in enumerate(times)])

    here = InRouter(RouterStage.PLACEMENT, "waits", {}, 3, arrived_at=98.0, now=110.0)
    first = RankAnswer("mixed/0", Explained(1, 5_005.0, [on_rank(5_000.0, 5_004.0)]), received_at=105.0)
    late = RankAnswer("mixed/1", Explained(1, 30.0, [on_rank(22.0), on_rank(23.5)]), received_at=109.0)
    mute = RankAnswer("mixed/2", None, received_at=110.0)
    knows_nothing = RankAnswer("mixed/3", Explained(1, 1.0, []), received_at=104.0)
    body = put_together("cmpl-1", here, [first, late, mute, knows_nothing])
    assert (body.ranks, body.ranks_without_answer) == (["mixed/0", "mixed/1"], ["mixed/2"])
    assert [[(event.at_s, event.age_s) for event in sequence.timeline] for sequence in body.sequences] == [
        [(0.0, 12.0)],
        [(2.0, 5.0), (6.0, 1.0)],
        [(3.0, 8.0)],
        [(4.5, 6.5)],
    ]
    assert put_together("cmpl-1", None, [first]).sequences[0].timeline[0].at_s == 0.0
    assert put_together("cmpl-1", None, []).sequences == []


@in_loop
async def test_garbage_in_place_of_an_answer_costs_only_the_connection(tmp_path: Path) -> None:
    async with running(tmp_path, rank_wait_timeout_s=5, explain_timeout_s=20) as cluster:
        rank = cluster.ranks[0]
        rank.num_answers_to_explain = 0
        asking = asyncio.create_task(explain(cluster, "cmpl-nobody"))
        await until(lambda: len(rank.explains) == 1)
        rank.connections[0].send(msgspec.msgpack.encode({"type": "explained", "query": 1, "now": "noon"}))
        async with asyncio.timeout(10):
            refusal(await asking, 503, "no_rank_available")
        assert cluster.counted("serried_peer_faults") == {"rank,malformed": 1}
        assert (await cluster.complete()).status_code == 200


@in_loop
async def test_turns_of_sessions_are_nothing_to_this_router(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.connections[0].send(
            msgspec.msgpack.encode({"type": "step", "load": rank.load(), "turn_ends": [{"id": 9, "reason": "stop"}]})
        )
        assert (await cluster.complete()).status_code == 200
        assert cluster.counted("serried_peer_faults") == {}
