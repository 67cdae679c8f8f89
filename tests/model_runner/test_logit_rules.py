"""Penalties, biases and refused tokens, against their definitions and on the runner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model_runner.logit_rules import LogitRules
from model_runner.torch_runner import TorchRunner
from rank_scheduler.messages import SamplingParams
from tests.model_runner.driver import GREEDY, generate, sequence, step, tokens_of

VOCAB_SIZE = 12
LOGITS = [2.0, -1.0, 0.5, 1.9, -3.0, 0.5, 0.0, -40.0, 1.0, -0.3, 4.0, -4.0]
PROMPT, GENERATED = [10, 1, 1], [3, 1, 3, 3]


def after(**fields: Any) -> list[float]:
    """The logits of the token behind PROMPT and GENERATED."""
    rules = LogitRules.of(SamplingParams(0, 9, **fields), len(PROMPT), VOCAB_SIZE)
    assert rules is not None
    logits = torch.tensor(LOGITS)
    rules.apply(logits, np.array(PROMPT + GENERATED, np.int32))
    return logits.tolist()


def differences(found: list[float]) -> dict[int, float]:
    """Token → its logit, of those that have another one than before."""
    pairs = enumerate(zip(found, LOGITS, strict=True))
    return {token: value for token, (value, before) in pairs if value != pytest.approx(before)}


def test_nothing_asked_changes_nothing() -> None:
    assert LogitRules.of(SamplingParams(0, 9, temperature=0.5, top_k=3), 3, VOCAB_SIZE) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Prompt and output, once each: divided where positive, else multiplied.
        ({"repetition_penalty": 2.0}, {10: 2.0, 1: -2.0, 3: 0.95}),
        ({"repetition_penalty": 0.5}, {10: 8.0, 1: -0.5, 3: 3.8}),
        # The output only, by count or once.
        ({"frequency_penalty": 0.5}, {1: -1.5, 3: 0.4}),
        ({"presence_penalty": 1.5}, {1: -2.5, 3: 0.4}),
        ({"presence_penalty": -1.0, "frequency_penalty": 1.0}, {3: -0.1}),
        ({"logit_bias": ((0, -100.0), (11, 7.0))}, {0: -98.0, 11: 3.0}),
        # First the bias, then the penalties.
        ({"logit_bias": ((1, 2.0),), "repetition_penalty": 2.0}, {10: 2.0, 1: 0.5, 3: 0.95}),
    ],
)
def test_what_the_definition_says(fields: dict[str, Any], expected: dict[int, float]) -> None:
    assert differences(after(**fields)) == pytest.approx(expected)


def test_only_allowed_tokens() -> None:
    found = after(allowed_token_ids=(4, 7), logit_bias=((0, 100.0),))
    assert {token for token, value in enumerate(found) if value > float("-inf")} == {4, 7}


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (((5,),), {5}),
        (((3, 3, 6),), {6}),
        # Across the end of the prompt; longer than all that there is; one that has not begun.
        (((1, 3, 1, 3, 3, 0),), {0}),
        (((9,) * 9,), set()),
        (((1, 6), (3, 3, 3, 8)), set()),
        (((3, 2), (3, 4), (8, 8)), {2, 4}),
    ],
)
def test_bad_words_are_not_completed(words: tuple[tuple[int, ...], ...], refused: set[int]) -> None:
    found = after(bad_words=words)
    assert {token for token, value in enumerate(found) if value == float("-inf")} == refused


def test_rows_of_one_step_change_apart(runner: TorchRunner) -> None:
    """Beside others, and after a preemption, a sequence's tokens are those that it has alone."""
    prompt = np.random.default_rng(3).integers(3, 97, 21).tolist()
    tables = np.arange(1, 33).reshape(4, 8).tolist()
    plain = generate(runner, prompt, 10, tables[0], sampling=GREEDY)[0]
    wanted = [
        GREEDY,
        SamplingParams(0, 10, temperature=0, num_logprobs=0, bad_words=((plain[0],),)),
        SamplingParams(0, 10, temperature=0, num_logprobs=0, repetition_penalty=3.0, frequency_penalty=1.0),
        SamplingParams(7, 10, temperature=0.8, allowed_token_ids=(5, 6, 7), num_logprobs=1),
    ]
    alone = [generate(runner, prompt, 10, tables[0], sampling=sampling)[0] for sampling in wanted]
    assert alone[0] == plain
    assert plain[0] not in alone[1]
    assert alone[2] != plain
    assert set(alone[3]) <= {5, 6, 7}
    new = [sequence(slot, prompt, tables[slot], sampling=sampling) for slot, sampling in enumerate(wanted)]
    tokens = [tokens_of(step(runner, [(slot, len(prompt), True) for slot in range(4)], new))]
    tokens += [tokens_of(step(runner, [(slot, 1, True) for slot in range(4)])) for _ in range(4)]
    step(runner, [], freed=[0, 1, 2, 3])
    together = [list(column) for column in zip(*tokens, strict=True)]
    assert together == [each[:5] for each in alone]
    again = [
        sequence(slot, prompt + together[slot], tables[slot], sampling=wanted[slot], num_prompt=len(prompt))
        for slot in range(4)
    ]
    resumed = [tokens_of(step(runner, [(slot, len(prompt) + 5, True) for slot in range(4)], again))]
    resumed += [tokens_of(step(runner, [(slot, 1, True) for slot in range(4)])) for _ in range(4)]
    step(runner, [], freed=[0, 1, 2, 3])
    assert [list(column) for column in zip(*resumed, strict=True)] == [each[5:] for each in alone]


def test_drafts_count_as_tokens_so_far(runner: TorchRunner) -> None:
    prompt = np.random.default_rng(3).integers(3, 97, 21).tolist()
    table = list(range(1, 9))
    sampling = SamplingParams(0, 10, temperature=0, num_logprobs=0, frequency_penalty=2.0, repetition_penalty=1.5)
    expected = generate(runner, prompt, 5, table, sampling=sampling)[0]
    first = tokens_of(step(runner, [(0, len(prompt), True)], [sequence(0, prompt, table, sampling=sampling)]))
    drafts = [*expected[1:4]]
    verified = step(runner, [(0, 1 + len(drafts), True)], drafts=[drafts])
    step(runner, [], freed=[0])
    assert [*first, *[token for token in verified.tokens[0].tolist() if token >= 0]] == expected
