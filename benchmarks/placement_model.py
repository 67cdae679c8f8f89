"""Placement on the real model: prompts that share prefixes, over real ranks, by each policy.

Each policy has a router of its own over the same ranks, and prefixes of its own, so that none profits from another's.
They are measured in turn, round by round.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import defaultdict

from benchmarks.serving import percentile
from router.placement_policies import POLICIES
from router.service import RouterService
from tests.pd.rig import PdSystem, running

NUM_PREFIXES = 6
PREFIX_TOKENS = 160
TAIL_TOKENS = 16
REQUESTS_PER_PREFIX = 6
CONCURRENCY = 4
NUM_OUTPUT_TOKENS = 4


async def _round(pd: PdSystem, service: RouterService, generator: random.Random) -> dict[str, float]:
    def tokens(count: int) -> list[int]:
        return [generator.randrange(100, 32_000) for _ in range(count)]

    prefixes = [tokens(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    prompts = [[*prefix, *tokens(TAIL_TOKENS)] for prefix in prefixes for _ in range(REQUESTS_PER_PREFIX)]
    generator.shuffle(prompts)
    num_prompt_tokens = sum(map(len, prompts))
    ttft: list[float] = []

    async def computed() -> int:
        return sum([int((await rank.stats())["load"]["num_prompt_tokens"]) for rank in pd.living])

    async def request(prompt: list[int]) -> None:
        start = time.perf_counter()
        seen: list[float] = []

        def on_token() -> None:
            seen.append(time.perf_counter())

        await pd.answer(prompt, service=service, on_token=on_token, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
        ttft.append(seen[0] - start)

    async def work() -> None:
        while prompts:
            await request(prompts.pop())

    before = await computed()
    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return {
        "cached_share": 1 - (await computed() - before) / num_prompt_tokens,
        "ttft_mean_ms": 1e3 * statistics.mean(ttft),
        "ttft_p99_ms": 1e3 * percentile(ttft, 99),
    }


async def measure_model(num_ranks: int, num_rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """By policy: medians over the rounds of the cached share, and of the mean and 99th percentile of the TTFT."""
    generator = random.Random(seed)
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    async with running(*["mixed"] * num_ranks, num_blocks=512, remote_prefill_min_tokens=None) as pd:
        for _ in range(num_rounds):
            for policy in POLICIES:
                async with pd.another_router(placement=policy) as service:
                    found[policy].append(await _round(pd, service, generator))
    return {
        policy: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        for policy, rounds in found.items()
    }
