"""Many requests at once, limits and deaths, against the running system."""

import asyncio
import json
import os
import random
import signal
import time

import httpx
import pytest

from tests.e2e.system import metric

pytestmark = pytest.mark.ray


async def complete(client: httpx.AsyncClient, model: str, **body: object) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": model, **body})


def test_200_requests_at_concurrency_64_are_all_answered_by_both_ranks(served):
    served.wait_until_idle(timeout_s=20)
    generator = random.Random(5)
    sizes = [(generator.choice([3, 20, 60, 150]), generator.choice([1, 8, 24])) for _ in range(200)]
    before = {rank["rank_id"]: rank["load"]["num_generated_tokens"] for rank in served.ranks()}

    async def run() -> list[httpx.Response]:
        limit = asyncio.Semaphore(64)
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=served.base_url, timeout=300, limits=limits) as client:

            async def one(length: int, max_tokens: int) -> httpx.Response:
                prompt = [generator.randrange(100, 30000) for _ in range(length)]
                async with limit:
                    return await complete(
                        client, served.model, prompt=prompt, max_tokens=max_tokens, ignore_eos=True, temperature=0.8
                    )

            return await asyncio.gather(*(one(*size) for size in sizes))

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200] * 200
    for answer, (length, max_tokens) in zip(answers, sizes, strict=True):
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, max_tokens)
    served.wait_until_idle(timeout_s=20)
    generated = {
        rank["rank_id"]: rank["load"]["num_generated_tokens"] - before[rank["rank_id"]] for rank in served.ranks()
    }
    assert len(generated) == 2
    assert sum(generated.values()) == sum(max_tokens for _, max_tokens in sizes)
    assert min(generated.values()) >= 0.4 * sum(generated.values()), generated
    assert_nothing_left(served)


def assert_nothing_left(served) -> None:
    served.check_integrity()
    text = httpx.get(f"{served.base_url}/metrics").text
    for name in (
        "serried_num_requests_running",
        "serried_num_requests_waiting",
        "serried_kv_blocks_used",
        "serried_num_requests_in_flight",
        "serried_queued_requests",
        "serried_queued_tokens",
    ):
        values = metric(text, name)
        assert values, f"{name} is missing"
        assert set(values.values()) == {0.0}, f"{name}: {values}"


def test_requests_beyond_the_limit_are_refused_and_the_rest_served(served):
    """The system runs with a limit of `served.max_num_queued_reqs` requests."""
    served.wait_until_idle(timeout_s=20)
    surplus = 25

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            base_url=served.base_url, timeout=300, limits=httpx.Limits(max_connections=400)
        ) as client:
            calls = (
                complete(client, served.model, prompt="Once", max_tokens=40, ignore_eos=True)
                for _ in range(served.max_num_queued_reqs + surplus)
            )
            return await asyncio.gather(*calls)

    answers = asyncio.run(run())
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 1 <= len(refused) <= surplus
    for answer in refused:
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        error = answer.json()["error"]
        assert error["code"] == "max_num_queued_reqs"
        assert str(served.max_num_queued_reqs) in error["message"]
    served.wait_until_idle(timeout_s=20)
    assert_nothing_left(served)


def test_a_choice_count_beyond_the_limit_is_refused_as_a_whole(served):
    served.wait_until_idle(timeout_s=20)
    n = served.max_num_queued_reqs + 1
    answer = httpx.post(
        f"{served.base_url}/v1/completions", json={"model": served.model, "prompt": "Once", "n": n, "max_tokens": 1}
    )
    assert answer.status_code == 503
    assert_nothing_left(served)


def test_a_killed_rank_gives_its_clients_an_error_event_and_the_system_goes_on(served):
    served.wait_until_idle(timeout_s=20)
    victim = served.ranks()[0]

    async def stream(client: httpx.AsyncClient, started: asyncio.Event) -> str:
        body = {"model": served.model, "prompt": "Once upon", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for piece in response.aiter_text():
                text += piece
                started.set()
        return text

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=served.base_url, timeout=300) as client:
            started = [asyncio.Event() for _ in range(4)]
            streams = [asyncio.create_task(stream(client, event)) for event in started]
            await asyncio.gather(*(event.wait() for event in started))
            os.kill(victim["pid"], signal.SIGKILL)
            first_end = time.monotonic()
            done, alive = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED, timeout=20)
            assert done, "nobody was told"
            assert time.monotonic() - first_end < 10
            ended = [task.result() for task in done]
            await asyncio.sleep(0.5)
            for task in alive:
                if task.done():
                    ended.append(task.result())
                else:
                    task.cancel()
            await asyncio.gather(*alive, return_exceptions=True)
            return ended

    ended = asyncio.run(run())
    assert 1 <= len(ended) < 4, "least-loaded placement had put all streams on one rank"
    for text in ended:
        events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
        assert events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
        assert error["code"] == "rank_lost"
    answer = httpx.post(
        f"{served.base_url}/v1/completions",
        json={"model": served.model, "prompt": "Once", "max_tokens": 4},
        timeout=60,
    )
    assert answer.status_code == 200
    served.wait_for_ranks(2, timeout_s=60)
    assert victim["boot_id"] not in {rank["boot_id"] for rank in served.ranks()}
    served.wait_until_idle(timeout_s=20)
    assert_nothing_left(served)
