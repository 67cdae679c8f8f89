"""`Idempotency-Key`: a repeated request joins the first, or gets its answer; it runs once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fake_cluster import MODEL, Cluster, in_loop, running, until
from tests.router.test_api_keys import KEYS, bearer
from tests.router.test_bad_input import check_error

KEY = {"idempotency-key": "once"}


async def ask(cluster: Cluster, headers: dict[str, str] = KEY, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "hi", **fields}
    return await cluster.client.post("/v1/completions", json=body, headers=headers)


def was_replayed(response: httpx.Response) -> bool:
    return response.headers.get("idempotent-replayed") == "true"


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_finished_answer_is_given_again(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as cluster:
        first = await ask(cluster, stream=stream)
        again = await ask(cluster, KEY | {"x-request-id": "another"}, stream=stream)
        assert (first.status_code, again.status_code) == (200, 200)
        assert again.content == first.content
        assert again.headers["x-request-id"] == first.headers["x-request-id"]
        assert (was_replayed(first), was_replayed(again)) == (False, True)
        assert len(cluster.ranks[0].submits) == 1
        await ask(cluster, {}, stream=stream)
        await ask(cluster, {"idempotency-key": "twice"}, stream=stream)
        assert len(cluster.ranks[0].submits) == 3


@in_loop
async def test_a_running_stream_is_joined_from_its_beginning(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 5
        first = asyncio.create_task(ask(cluster, stream=True))
        await until(lambda: rank.allowance == 0)
        joined = [asyncio.create_task(ask(cluster, stream=True)) for _ in range(3)]
        [answer] = cluster.service.answers._running.values()
        await until(lambda: len(answer._readers) == 4)
        assert cluster.taken.requests == 1
        rank.allow(float("inf"))
        texts = [(await each).text for each in (first, *joined)]
        assert set(texts) == {texts[0]}
        assert texts[0].endswith("data: [DONE]\n\n")
        assert len(rank.submits) == 1


@in_loop
async def test_it_goes_on_as_long_as_one_reads(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 5
        first = asyncio.create_task(ask(cluster, stream=True))
        await until(lambda: rank.allowance == 0)
        joined = asyncio.create_task(ask(cluster, stream=True))
        [answer] = cluster.service.answers._running.values()
        await until(lambda: len(answer._readers) == 2)
        first.cancel()
        await until(lambda: len(answer._readers) == 1)
        rank.allow(float("inf"))
        events = [json.loads(event[6:]) for event in (await joined).text.split("\n\n") if "choices" in event]
        assert "".join(event["choices"][0]["text"] for event in events) == "Hello, world!"
        assert rank.aborts == []


@pytest.mark.parametrize("num_tokens", [0, 5])
@in_loop
async def test_it_ends_with_its_last_reader_and_the_next_begins_anew(tmp_path: Path, num_tokens: int) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = num_tokens
        asked = [asyncio.create_task(ask(cluster, stream=True)) for _ in range(2)]
        await until(lambda: len(rank.submits) == 1 and rank.allowance == 0)
        for each in asked:
            each.cancel()
        await until(lambda: rank.aborts == [1])
        await until(cluster.is_idle)
        assert cluster.counted("serried_refused") == {"client_gone": 1}
        rank.allow(float("inf"))
        response = await ask(cluster, stream=True)
        assert not was_replayed(response)
        assert len(rank.submits) == 2


@in_loop
async def test_another_request_under_the_key_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        await ask(cluster)
        error = check_error(await ask(cluster, max_tokens=3), 422, "idempotency_key_reused", "use a new key")
        assert error["param"] == "idempotency-key"
        body = {"model": MODEL, "prompt": "hi"}
        other = await cluster.client.post("/v1/chat/completions", json=body, headers=KEY)
        check_error(other, 422, "idempotency_key_reused")
        check_error(await ask(cluster, {"idempotency-key": "a b"}), 400, "invalid_request", "idempotency-key")


@in_loop
async def test_refusals_are_not_kept(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_reqs=1) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 0
        held = asyncio.create_task(ask(cluster, {}))
        await until(lambda: len(rank.submits) == 1)
        check_error(await ask(cluster), 503, "max_num_queued_reqs")
        rank.allow(float("inf"))
        assert (await held).status_code == 200
        await until(lambda: cluster.taken.requests == 0)
        response = await ask(cluster)
        assert (response.status_code, was_replayed(response)) == (200, False)


@in_loop
async def test_whoever_joined_hears_of_a_failure_and_of_a_cancellation(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        for how in ("fails", "is cancelled"):
            rank.allowance = 0
            num_submits = len(rank.submits)
            asked = [asyncio.create_task(ask(cluster, KEY | {"x-request-id": "mine"})) for _ in range(2)]
            await until(lambda n=num_submits: len(rank.submits) == n + 1)  # type: ignore[misc]
            [answer] = cluster.service.answers._running.values()
            await until(lambda answer=answer: len(answer._readers) == 2)  # type: ignore[misc]
            if how == "fails":
                rank.fail_with = "broken"
                rank.allow(10)
            else:
                await cluster.client.delete("/v1/requests/cmpl-mine")
            for each in asked:
                check_error(await each, *((500, "rank_error") if how == "fails" else (499, "cancelled")))
            rank.fail_with = None


@in_loop
async def test_keys_belong_to_accounts(tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=KEYS) as cluster:
        answers = [await ask(cluster, KEY | bearer(secret)) for secret in ("secret-1", "secret-2", "secret-3")]
        assert [was_replayed(each) for each in answers] == [False, True, False]


@in_loop
async def test_kept_answers_are_bounded(tmp_path: Path) -> None:
    async with running(tmp_path, idempotency_max_bytes=3000) as cluster:
        for index in range(6):
            await ask(cluster, {"idempotency-key": str(index)})
            cluster.service.check_integrity()
        assert was_replayed(await ask(cluster, {"idempotency-key": "5"}))
        assert not was_replayed(await ask(cluster, {"idempotency-key": "0"}))


@in_loop
async def test_one_too_large_to_keep_is_only_passed_on(tmp_path: Path) -> None:
    async with running(tmp_path, reply="x" * 200, idempotency_max_bytes=3000) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 100
        first = asyncio.create_task(ask(cluster, stream=True, max_tokens=200))
        await until(lambda: rank.allowance == 0)
        [answer] = cluster.service.answers._running.values()
        await until(lambda: answer._num_dropped > 0 and len(answer._log) == 0)
        check_error(await ask(cluster, stream=True, max_tokens=200), 409, "in_progress", "too large")
        rank.allow(float("inf"))
        events = [json.loads(event[6:]) for event in (await first).text.split("\n\n") if "choices" in event]
        assert "".join(event["choices"][0]["text"] for event in events) == "x" * 200
        assert cluster.service.answers.num_bytes == 0


@in_loop
async def test_an_internal_error_cuts_everybody_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path) as cluster:

        def broken(*_: object, **__: object) -> str:
            raise RuntimeError("broken")

        cluster.service.tokenizer.encode = broken  # type: ignore[method-assign]
        check_error(await ask(cluster), 500, "internal_error")
        assert cluster.counted("serried_refused") == {"internal_error": 1}
        assert "broken" in caplog.text
