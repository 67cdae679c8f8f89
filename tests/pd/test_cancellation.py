"""Requests that end before their end, wherever they are by then: nothing of them is held any more, on any rank.

`python -m tests.pd.test_cancellation --rounds 100` goes on for longer, and tells how long that takes: from the moment
at which a client goes, a deadline passes or a DELETE comes, until no router, rank, lease or load holds anything. A rank
lets go between two steps, so a step's time is told as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics

import pytest

from benchmarks.serving import percentile
from router.caller import Caller
from router.errors import ApiError, Cause
from router.protocol import CompletionRequest, parse
from tests.pd.rig import PdSystem, in_loop, make_prompts, running

pytestmark = pytest.mark.model

SYSTEMS = {"mixed": ("mixed",) * 2, "pd": ("prefill", "decode")}
SCHEDULER = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
"""Short steps, and fewer slots than requests: some wait, in the router or for a slot."""
NUM_REQUESTS = 6
MOMENTS_S = (0.0, 0.01, 0.05, 0.2, 0.5, 1.0)
WAYS = ("client", "deadline", "delete")


async def ask(pd: PdSystem, request_id: str, prompt: list[int], deadline_s: float | None) -> Cause | None:
    """Ends without an answer: by an error, whose cause is returned, or since its task is cancelled."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 400, "ignore_eos": True}
    request = parse(json.dumps(body).encode(), CompletionRequest)
    flow = pd.service.open_flow(request, request_id, Caller(deadline_s=deadline_s))
    error: ApiError | None = None
    try:
        await flow.begin()
        while not flow.is_finished:
            await flow.next()
    except ApiError as caught:
        error = caught
    finally:
        flow.close(error)
    return None if error is None else error.cause


async def is_free(pd: PdSystem) -> bool:
    for rank in pd.living:
        stats = await rank.stats()
        load, kv = stats["load"], stats["kv_transfer"]
        if any(load[name] for name in ("num_running", "num_waiting", "num_deferred", "num_loads")):
            return False
        if load["num_free_blocks"] != load["num_blocks"] or kv["num_leases"] or kv["num_quarantined_blocks"]:
            return False
    return True


async def end_one(pd: PdSystem, prompts: list[list[int]], way: str, moment_s: float) -> float:
    """All requests of a round end at one moment; returns how long it took until nothing was held, in seconds."""
    loop = asyncio.get_running_loop()
    deadline_s = moment_s if way == "deadline" else None
    ids = [f"cmpl-{pd.num_requests + index}" for index in range(len(prompts))]
    pd.num_requests += len(prompts)
    asked_at = loop.time()
    tasks = [
        asyncio.create_task(ask(pd, request_id, prompt, deadline_s))
        for request_id, prompt in zip(ids, prompts, strict=True)
    ]
    await asyncio.sleep(moment_s)
    ended_at = max(loop.time(), asked_at + (deadline_s or 0.0))
    if way == "client":
        for task in tasks:
            task.cancel()
    elif way == "delete":
        await asyncio.gather(*(pd.service.cancel(request_id, "") for request_id in ids))
    causes = {"deadline": Cause.DEADLINE_EXCEEDED, "delete": Cause.CANCELLED}
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError) if way == "client" else ended is causes[way], ended
    assert not pd.service.control.num_holdings
    async with asyncio.timeout(20):
        while not await is_free(pd):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return loop.time() - ended_at


@pytest.mark.parametrize("name", SYSTEMS)
@in_loop(120)
async def test_nothing_is_held_after_the_end(name: str) -> None:
    async with running(*SYSTEMS[name], scheduler=SCHEDULER) as pd:
        prompts = iter(make_prompts(NUM_REQUESTS * len(WAYS) * 2, seed=9, shortest=100, longest=200))
        for way in WAYS:
            for moment_s in (0.02, 0.7):
                await end_one(pd, [next(prompts) for _ in range(NUM_REQUESTS)], way, moment_s)
        await pd.wait_until_nothing_is_held()


async def measure(name: str, num_rounds: int, seed: int) -> None:
    choose = random.Random(seed)
    async with running(*SYSTEMS[name], scheduler=SCHEDULER) as pd:
        prompts = iter(make_prompts(NUM_REQUESTS * num_rounds, seed=seed, shortest=100, longest=200))
        took: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(num_rounds):
            way = WAYS[number % len(WAYS)]
            asked = [next(prompts) for _ in range(NUM_REQUESTS)]
            took[way].append(await end_one(pd, asked, way, choose.choice(MOMENTS_S)))
        await pd.wait_until_nothing_is_held()
        busy = [(await rank.stats())["load"] for rank in pd.living]
        step_ms = 1e3 * sum(load["busy_s"] for load in busy) / sum(load["num_steps"] for load in busy)
        for way, found in took.items():
            figures = (1e3 * statistics.median(found), 1e3 * percentile(found, 95), 1e3 * max(found))
            print(f"{name} {way:>9}: {len(found)} rounds, free after", end=" ")
            print("median {:.0f} ms, p95 {:.0f} ms, at most {:.0f} ms".format(*figures), end=" ")
            print(f"(a step takes {step_ms:.0f} ms)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for system in SYSTEMS:
        asyncio.run(measure(system, arguments.rounds, arguments.seed))
