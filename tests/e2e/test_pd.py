"""Prefill and decode on ranks of their own: the served system of `examples/pd.yaml`."""

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from model_runner.embedded import embedded_model_dir
from model_runner.torch_runner import TorchRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from router.tokenizer import ChatTokenizer
from tests.e2e.system import Served, ServeProcess, metric, wait_for
from tests.engine import Engine

pytestmark = [pytest.mark.ray, pytest.mark.model]

NUM_PROMPTS = 24
NUM_TOKENS = 10
BLOCK_BYTES = 30 * 2 * 16 * 3 * 64 * 4
"""Layers, K and V, positions, KV heads, head size, float32."""
FLAGS = ("--config", "examples/pd.yaml", "--dtype", "float32", "--remote-prefill-min-tokens", "32")


@pytest.fixture(scope="module")
def pd() -> Iterator[Served]:
    with ServeProcess(*FLAGS) as process:
        system = Served(process.wait_until_ready(), pools=("prefill", "decode"))
        try:
            system.wait_for_ranks(2, 60)
            yield system
        finally:
            system.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The first quarter shares a long prefix; their lengths are not multiples of a block."""
    tokenizer = ChatTokenizer(embedded_model_dir(lambda message: None))
    with open("LICENSE", encoding="utf-8") as file:
        text = asyncio.run(tokenizer.encode(file.read(), add_special_tokens=False))
    tokenizer.close()
    shared = [text[:100] + text[200 + 11 * n : 210 + 12 * n] for n in range(NUM_PROMPTS // 4)]
    return shared + [text[29 * n : 29 * n + 33 + 5 * n] for n in range(NUM_PROMPTS - len(shared))]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[str]:
    """What one mixed rank answers."""
    model_dir = embedded_model_dir(lambda message: None)
    config = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=32)
    engine = Engine(
        TorchRunner(model_dir, scheduler=config, cache=CacheConfig(), dtype="float32", max_model_len=1024), config
    )
    for index, prompt in enumerate(prompts):
        engine.submit(index, prompt, NUM_TOKENS)
    engine.run()
    engine.runner.close()
    tokenizer = ChatTokenizer(model_dir)
    texts = [tokenizer.tokenizer.decode(engine.tokens[index]) for index in range(len(prompts))]
    tokenizer.close()
    return texts


async def complete(client: httpx.AsyncClient, system: Served, prompt: list[int]) -> str:
    body = {
        "model": system.model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = (await client.post(f"{system.base_url}/v1/completions", json=body)).json()
    assert "choices" in answer, answer
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < len(prompt)
    text: str = answer["choices"][0]["text"]
    return text


def complete_all(system: Served, prompts: list[list[int]]) -> list[str]:
    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            return await asyncio.gather(*(complete(client, system, prompt) for prompt in prompts))

    return asyncio.run(run())


def ranks(system: Served) -> tuple[dict, dict]:
    """Figures of the prefill rank and of the decode rank."""
    decode, prefill = system.ranks()
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    return prefill, decode


def test_prompts_are_computed_once_and_answers_are_those_of_one_rank(pd, prompts, expected) -> None:
    assert complete_all(pd, prompts) == expected
    prefill, decode = ranks(pd)
    # The second time the decode rank has every full block, and computes the few tokens behind them itself.
    assert complete_all(pd, prompts) == expected
    after = ranks(pd)
    assert after[0]["load"]["num_steps"] == prefill["load"]["num_steps"]
    num_computed = after[1]["load"]["num_prompt_tokens"] - decode["load"]["num_prompt_tokens"]
    assert 0 < num_computed <= 16 * len(prompts)
    stats = after[1]["kv_transfer"]
    assert stats["load_failures"] == {}
    assert stats["num_loaded_bytes"] <= sum(-(-len(prompt) // 16) for prompt in prompts) * BLOCK_BYTES
    pd.wait_until_idle(10)
    pd.check_integrity()
    text = httpx.get(f"{pd.base_url}/metrics").text
    routed = metric(text, "serried_routed_total")
    # Of prompts that share a prefix, later ones may find it on the decode rank already.
    num_handed_off = routed['{leg="prefill",role="prefill"}']
    assert len(prompts) * 3 // 4 < num_handed_off <= len(prompts)
    assert routed['{leg="whole",role="decode"}'] == 2 * len(prompts) - num_handed_off
    assert metric(text, "serried_handoff_seconds_count") == {None: num_handed_off}
    cached = metric(text, "serried_placement_cached_tokens_total")['{leg="whole",role="decode"}']
    assert cached >= sum(min(len(prompt) // 16 * 16, len(prompt) - 1) for prompt in prompts)


def test_a_short_prompt_is_computed_where_it_is_answered(pd, prompts) -> None:
    prefill, decode = ranks(pd)
    # Backwards: nobody has a block of it.
    complete_all(pd, [prompts[-1][19::-1]])
    after = ranks(pd)
    assert after[0]["load"]["num_steps"] == prefill["load"]["num_steps"]
    assert after[1]["load"]["num_prompt_tokens"] == decode["load"]["num_prompt_tokens"] + 20


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_with_one_pool_gone_the_other_serves_alone(pd, prompts, expected, role) -> None:
    found = {rank["role"]: rank for rank in pd.ranks()}
    os.kill(found[role]["pid"], signal.SIGKILL)
    wait_for(
        lambda: httpx.get(f"{pd.base_url}/ready").json()["num_ranks_connected"] == 1,
        20,
        lambda: "the router sees that the rank is gone",
    )
    assert complete_all(pd, prompts[:4]) == expected[:4]
    pd.wait_for_ranks(2, 120)
    assert complete_all(pd, prompts[4:10]) == expected[4:10]
    pd.wait_until_idle(60)
    pd.check_integrity()
