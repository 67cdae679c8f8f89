"""Many requests at once, limits and deaths, against the running system."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable

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


def test_streams_of_a_killed_rank_go_on_at_another_with_the_same_text(served):
    served.wait_until_idle(timeout_s=20)
    victim = served.ranks()[0]
    num_tokens = 120
    prompts = [f"Once upon a time, {number} travellers" for number in range(6)]

    def body(prompt: str) -> dict:
        return {"model": served.model, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "seed": 7}

    async def stream(client: httpx.AsyncClient, prompt: str, started: asyncio.Event) -> str:
        text = ""
        async with client.stream("POST", "/v1/completions", json=body(prompt) | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    started.set()
        return text

    async def run(disturb: Callable[[], None]) -> list[str]:
        async with httpx.AsyncClient(base_url=served.base_url, timeout=300) as client:
            started = [asyncio.Event() for _ in prompts]
            streams = [
                asyncio.create_task(stream(client, prompt, event))
                for prompt, event in zip(prompts, started, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in started))
            disturb()
            return await asyncio.gather(*streams)

    undisturbed = asyncio.run(run(lambda: None))
    assert asyncio.run(run(lambda: os.kill(victim["pid"], signal.SIGKILL))) == undisturbed
    moved = metric(httpx.get(f"{served.base_url}/metrics").text, "serried_failovers_total")
    assert sum(count for labels, count in moved.items() if "moved" in labels) >= 1
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
