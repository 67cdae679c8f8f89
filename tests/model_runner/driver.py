"""Drives a runner as a scheduler would, with block tables chosen by the test."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from model_runner.runner import ModelRunner
from rank_scheduler.messages import SamplingParams
from rank_scheduler.plan import Int32Array, NewSequence, StepPlan, StepResult

GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0, num_logprobs=5)

Row = tuple[int, int, bool]
"""Slot, number of tokens, samples."""


def int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, np.int32)


def sequence(
    slot: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    *,
    computed: int = 0,
    sampling: SamplingParams = GREEDY,
) -> NewSequence:
    return NewSequence(slot, int32(tokens), computed, int32(blocks), sampling)


def step(
    runner: ModelRunner,
    rows: Sequence[Row],
    new: Sequence[NewSequence] = (),
    *,
    freed: Sequence[int] = (),
    copies: Sequence[tuple[int, int]] = (),
    appended: Sequence[tuple[int, int]] = (),
) -> StepResult:
    """One step; `appended` has (slot, block)."""
    return runner.execute(
        StepPlan(
            step=0,
            slots=int32([slot for slot, _, _ in rows]),
            num_tokens=int32([count for _, count, _ in rows]),
            samples=np.array([samples for _, _, samples in rows], np.bool_),
            freed_slots=list(freed),
            block_copies=list(copies),
            new_sequences=list(new),
            appended_slots=[slot for slot, _ in appended],
            appended_blocks=[block for _, block in appended],
        )
    )


def generate(
    runner: ModelRunner,
    prompt: Sequence[int],
    num_tokens: int,
    blocks: Sequence[int],
    *,
    slot: int = 0,
    cuts: Sequence[int] = (),
    sampling: SamplingParams = GREEDY,
) -> tuple[list[int], list[float]]:
    """Tokens of one request alone, and their logprobs; the prompt is cut into chunks at `cuts`."""
    edges = [0, *cuts, len(prompt)]
    new = [sequence(slot, prompt, blocks, sampling=sampling)]
    for start, end in itertools.pairwise(edges):
        result = step(runner, [(slot, end - start, end == len(prompt))], new)
        new = []
    tokens, logprobs = [int(result.tokens[0])], [result.logprobs[0].logprob]
    while len(tokens) < num_tokens:
        result = step(runner, [(slot, 1, True)])
        tokens.append(int(result.tokens[0]))
        logprobs.append(result.logprobs[0].logprob)
    step(runner, [], freed=[slot])
    return tokens, logprobs
