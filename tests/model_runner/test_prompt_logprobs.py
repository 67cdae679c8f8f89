"""Logprobs of prompts, against `transformers`, however a prompt is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from rank_scheduler.config import SchedulerConfig
from rank_scheduler.messages import TokenLogprobs
from tests.engine import Engine
from tests.model_runner.conftest import load_runner

PROMPTS = [np.random.default_rng(n).integers(3, 97, n).tolist() for n in (1, 2, 37, 90)]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> list[torch.Tensor]:
    """Of each prompt, log-probabilities [tokens, vocab_size] of what follows each position."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    with torch.inference_mode():
        return [torch.log_softmax(model(torch.tensor([prompt])).logits[0], dim=-1) for prompt in PROMPTS]


def check(found: dict[int, TokenLogprobs], prompt: list[int], expected: torch.Tensor, num_top: int) -> None:
    assert sorted(found) == list(range(1, len(prompt)))
    for index, entry in found.items():
        row = expected[index - 1]
        assert entry.logprob == pytest.approx(row[prompt[index]].item(), abs=TOLERANCE)
        top = row.topk(num_top)
        assert list(entry.top_logprobs) == pytest.approx(top.values.tolist(), abs=TOLERANCE)
        # Near ties may change places.
        assert entry.rank == pytest.approx((row > row[prompt[index]]).sum().item() + 1, abs=1)
        assert len(set(entry.top_ids) ^ set(top.indices.tolist())) <= 2


@pytest.mark.parametrize("budget", [16, 512])
def test_prompts_in_chunks_beside_others(tiny_dir: Path, expected: list[torch.Tensor], budget: int) -> None:
    runner = load_runner(tiny_dir)
    engine = Engine(runner, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget), enable_prefix_caching=True)
    # Their prompts are in the cache when they are asked for again.
    for number, prompt in enumerate(PROMPTS):
        engine.submit(number, prompt)
    engine.run()
    for number, prompt in enumerate(PROMPTS):
        engine.submit(10 + number, prompt, max_tokens=1 + 3 * (number % 2), num_prompt_logprobs=number)
        engine.submit(20 + number, prompt[::-1], num_logprobs=1)
    engine.run()
    for number, prompt in enumerate(PROMPTS):
        check(engine.prompt_logprobs[10 + number], prompt, expected[number], number)
        assert engine.ends[10 + number].num_cached_tokens == 0
        n = len(engine.tokens[10 + number])
        assert engine.tokens[10 + number] == engine.tokens[number][:n]
        assert number not in engine.prompt_logprobs
        assert 20 + number not in engine.prompt_logprobs
    runner.close()


def test_prompts_that_are_preempted(tiny_dir: Path, expected: list[torch.Tensor]) -> None:
    runner = load_runner(tiny_dir)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
    engine = Engine(runner, config, num_blocks=9, max_model_len=96, enable_prefix_caching=False)
    for number in range(6):
        engine.submit(number, PROMPTS[2], max_tokens=40, num_prompt_logprobs=2, num_logprobs=0)
    engine.run()
    assert engine.scheduler.take_stats().num_preemptions > 0
    for number in range(6):
        check(engine.prompt_logprobs[number], PROMPTS[2], expected[2], 2)
        assert len(engine.tokens[number]) == 40
    runner.close()
