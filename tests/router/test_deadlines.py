"""Requests that are not done in time: one clear error wherever they are, and everything they held is free."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from router.explanation import RouterStage
from tests.router.fake_cluster import MODEL, Cluster, in_loop, running, until
from tests.router.test_bad_input import check_error

SOON = {"x-request-deadline-ms": "30"}
LATE = {"x-request-deadline-ms": "3600000"}


async def times_out(cluster: Cluster, stage_then: RouterStage | None, **fields: Any) -> None:
    """A request with a near deadline ends in this stage (None: it is no flow yet), with the right error."""
    stages = []
    open_flow = cluster.service.open_flow

    def watched(*arguments: Any) -> Any:
        flow = open_flow(*arguments)
        close = flow.close

        def closed(error: Any) -> None:
            stages.append(flow._stage)
            close(error)

        flow.close = closed  # type: ignore[method-assign]
        return flow

    cluster.service.open_flow = watched  # type: ignore[method-assign]
    response = await cluster.client.post(
        "/v1/completions", headers=SOON, json={"model": MODEL, "prompt": "hi", **fields}
    )
    check_error(response, 504, "deadline_exceeded", "x-request-deadline-ms", "30 ms")
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers
    assert stages[:1] == ([] if stage_then is None else [stage_then])
    await until(cluster.is_idle)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_in_the_queue(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, max_num_queued_reqs=10, acquire_timeout_s=20.0) as cluster:
        cluster.control.is_mute = True
        await times_out(cluster, None, stream=stream)
        cluster.control.is_mute = False
        assert cluster.counted("serried_requests") == {"rejected": 1}


@in_loop
async def test_while_its_prompt_is_tokenized(tmp_path: Path) -> None:
    async with running(tmp_path, max_model_len=20_000) as cluster:
        may_go_on = threading.Event()
        encode = cluster.service.tokenizer._encode

        def slow(text: str, add_special_tokens: bool) -> list[int]:
            may_go_on.wait()
            return encode(text, add_special_tokens)

        cluster.service.tokenizer._encode = slow  # type: ignore[method-assign]
        try:
            await times_out(cluster, RouterStage.TOKENIZATION, prompt="x" * 10_000)  # not in the loop itself
        finally:
            may_go_on.set()
        assert cluster.ranks[0].submits == []


@in_loop
async def test_while_it_waits_for_a_rank(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=0, rank_wait_timeout_s=20.0) as cluster:
        await times_out(cluster, RouterStage.PLACEMENT)


@in_loop
async def test_before_the_first_token(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        cluster.ranks[0].allowance = 0
        response = await cluster.client.post(
            "/v1/completions", headers=SOON, json={"model": MODEL, "prompt": "hi", "stream": True}
        )
        check_error(response, 504, "deadline_exceeded")
        await until(cluster.is_idle)
        await until(lambda: len(cluster.ranks[0].aborts) == len(cluster.ranks[0].submits))


@in_loop
async def test_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 6
        async with cluster.client.stream(
            "POST", "/v1/completions", headers=LATE, json={"model": MODEL, "prompt": "hi", "stream": True, "n": 2}
        ) as response:
            lines = response.aiter_lines()
            text = ""
            while len(text) < 6:
                if line := await anext(lines):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            [flow] = cluster.service._flows
            assert flow._expiry is not None
            flow._expiry._run()  # its time has come
            rest = [line.removeprefix("data: ") async for line in lines if line]
        assert json.loads(rest[0])["error"]["code"] == "deadline_exceeded"
        assert rest[1:] == ["[DONE]"]
        await until(lambda: sorted(rank.aborts) == [1, 2])
        assert rank.live == {}
        await until(cluster.is_idle)
        assert cluster.counted("serried_requests") == {"dropped": 1}


@in_loop
async def test_one_that_comes_too_late_costs_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        response = await cluster.client.post(
            "/v1/completions", headers={"x-request-deadline-ms": "0.000001"}, json={"model": MODEL, "prompt": "hi"}
        )
        check_error(response, 504, "deadline_exceeded")
        assert cluster.ranks[0].submits == []


@in_loop
async def test_the_default_and_the_answer_in_time(tmp_path: Path) -> None:
    async with running(tmp_path, default_deadline_s=0.03) as cluster:
        cluster.ranks[0].allowance = 0
        check_error(await cluster.complete(), 504, "deadline_exceeded", "30 ms")
        cluster.ranks[0].allow(float("inf"))
        response = await cluster.client.post("/v1/completions", headers=LATE, json={"model": MODEL, "prompt": "hi"})
        assert response.json()["choices"][0]["text"] == "Hello, world!"


@in_loop
async def test_headers_are_checked_before_the_body(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        for header, value in (("x-request-deadline-ms", "soon"), ("x-session-id", "a b"), ("x-serried-rank", "ü")):
            response = await cluster.client.post(
                "/v1/chat/completions", headers={header: value.encode()}, content=b"not even JSON"
            )
            assert check_error(response, 400, "invalid_request", header)["param"] == header
        assert (await cluster.client.get("/health", headers={"x-request-deadline-ms": "soon"})).status_code == 200
