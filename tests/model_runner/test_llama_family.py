"""The forward, against `transformers`' own classes for each architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from model_runner.torch_runner import TorchRunner
from rank_scheduler.messages import SamplingParams
from tests.model_runner.conftest import TINY, load_runner, write_tiny_checkpoint
from tests.model_runner.driver import generate, sequence, step

EVERY_LOGPROB = SamplingParams(seed=0, max_tokens=1, temperature=0.0, num_logprobs=TINY["vocab_size"])
PROMPT = np.random.default_rng(5).integers(0, 97, 50).tolist()

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-3.1": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}


def reference(model_dir: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocab_size]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tiny_checkpoint(name: str, tmp_path: Path) -> None:
    architecture, fields = CHECKPOINTS[name]
    model_dir = write_tiny_checkpoint(tmp_path, architecture, **fields)
    expected = reference(model_dir, PROMPT)
    runner = load_runner(model_dir)
    # A chunk from the start, a chunk with context, then single tokens.
    for first, cuts in ((50, []), (50, [23]), (40, [])):
        result = prefill(runner, PROMPT[:first], cuts)
        assert_equal(result, expected[first - 1])
    new = [sequence(0, PROMPT, [9, 3, 5, 1])]
    for end in range(20, 51):
        result = step(runner, [(0, 20 if end == 20 else 1, end == 50)], new)
        new = []
    assert_equal(result.logprobs[0][0], expected[-1])
    runner.close()


@pytest.mark.model
def test_embedded_model(embedded_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(embedded_dir / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded_dir, dtype=torch.float32)
    runner = load_runner(embedded_dir)
    for text in (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
        "Le café est à 3,50 €. 東京は",
        "a",
    ):
        prompt = tokenizer.encode(text).ids
        sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, num_logprobs=100)
        tokens, _ = generate(runner, prompt, 12, range(1, 9), sampling=sampling)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(dim=-1).tolist()
        assert_equal(prefill(runner, prompt, [], sampling), torch.log_softmax(logits[0], dim=-1))


def prefill(runner: TorchRunner, prompt: list[int], cuts: list[int], sampling: SamplingParams = EVERY_LOGPROB) -> Any:
    new = [sequence(0, prompt, range(4, 12), sampling=sampling)]
    for start, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        result = step(runner, [(0, end - start, end == len(prompt))], new)
        new = []
    step(runner, [], freed=[0])
    return result.logprobs[0][0]


def assert_equal(logprobs: Any, expected: torch.Tensor) -> None:
    top = torch.tensor(logprobs.top_ids)
    assert logprobs.top_ids[0] == int(expected.argmax())
    torch.testing.assert_close(torch.tensor(logprobs.top_logprobs), expected[top], atol=1e-3, rtol=0)
