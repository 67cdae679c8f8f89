"""Drives a runner as a scheduler would, with block tables chosen by the test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from model_runner.runner import ModelRunner
from rank_scheduler.messages import SamplingParams
from rank_scheduler.plan import NO_BLOCKS, Int32Array, NewSequence, StepPlan, StepResult

GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0, num_logprobs=5)

Row = tuple[int, int, bool]
"""Slot, number of tokens, samples."""


def int32(values: Sequence[Any]) -> Int32Array:
    return np.array(values, np.int32)


def sequence(
    slot: int,
    tokens: Sequence[int],
    blocks: Sequence[int] | Sequence[Sequence[int]],
    *,
    computed: int = 0,
    num_prompt: int | None = None,
    sampling: SamplingParams = GREEDY,
    **fields: Any,
) -> NewSequence:
    """`blocks`: of the one group, or per group."""
    prompt = len(tokens) if num_prompt is None else num_prompt
    return NewSequence(slot, int32(tokens), computed, np.atleast_2d(int32(blocks)), prompt, sampling, **fields)


def step(
    runner: ModelRunner,
    rows: Sequence[Row],
    new: Sequence[NewSequence] = (),
    *,
    freed: Sequence[int] = (),
    copies: Sequence[tuple[int, int]] = (),
    appended: Sequence[tuple[int, ...]] = (),
    drafts: Sequence[Sequence[int]] | None = None,
    masks: dict[int, Sequence[int]] | None = None,
    vocab_size: int = 97,
    **fields: Any,
) -> StepResult:
    """One step; `appended` has (slot, block of each group), `drafts` those of each row (counted in the row's number
    of tokens), `masks` the allowed tokens of sampled positions.
    """
    if drafts is not None:
        fields["num_drafts"] = int32([len(each) for each in drafts])
        fields["draft_tokens"] = int32(list(itertools.chain.from_iterable(drafts)))
    if masks is not None:
        fields["masked"] = int32(list(masks))
        fields["masks"] = np.zeros((len(masks), -(-vocab_size // 32)), np.uint32)
        for row, allowed in enumerate(masks.values()):
            for token in allowed:
                fields["masks"][row, token // 32] |= np.uint32(1 << token % 32)
    return runner.execute(
        StepPlan(
            step=0,
            slots=int32([slot for slot, _, _ in rows]),
            num_tokens=int32([count for _, count, _ in rows]),
            samples=np.array([samples for _, _, samples in rows], np.bool_),
            freed_slots=list(freed),
            block_copies=list(copies),
            new_sequences=list(new),
            appended_slots=int32([slot for slot, *_ in appended]),
            appended_blocks=int32([blocks for _, *blocks in appended]) if appended else NO_BLOCKS,
            **fields,
        )
    )


def tokens_of(result: StepResult) -> list[int]:
    """The only token of each row, -1 where there is none."""
    assert result.tokens.shape[1] == 1
    return result.tokens[:, 0].tolist()


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
    tokens, logprobs = tokens_of(result), [result.logprobs[0][0].logprob]
    while len(tokens) < num_tokens:
        result = step(runner, [(slot, 1, True)])
        tokens += tokens_of(result)
        logprobs.append(result.logprobs[0][0].logprob)
    step(runner, [], freed=[slot])
    return tokens, logprobs


def generate_with_drafts(
    runner: ModelRunner,
    prompt: Sequence[int],
    num_tokens: int,
    blocks: Sequence[int],
    propose: Callable[[list[int]], Sequence[int]],
    *,
    slot: int = 0,
    sampling: SamplingParams = GREEDY,
) -> tuple[list[int], int, list[float]]:
    """Tokens of one request alone, the number of steps, and logprobs; `propose` makes drafts of what is generated."""
    result = step(runner, [(slot, len(prompt), True)], [sequence(slot, prompt, blocks, sampling=sampling)])
    tokens, logprobs = tokens_of(result), [entry.logprob for entry in result.logprobs[0]]
    num_steps = 1
    while len(tokens) < num_tokens:
        drafts = propose(tokens)[: num_tokens - len(tokens) - 1]
        result = step(runner, [(slot, 1 + len(drafts), True)], drafts=[drafts])
        assert result.tokens.shape == (1, 1 + len(drafts))
        row = result.tokens[0].tolist()
        count = row.index(-1) if -1 in row else len(row)
        assert row[count:] == [-1] * (len(row) - count)
        assert len(result.logprobs[0]) == count
        tokens += row[:count]
        logprobs += [entry.logprob for entry in result.logprobs[0]]
        num_steps += 1
    step(runner, [], freed=[slot])
    return tokens, num_steps, logprobs


def proposer(known: Sequence[int], quality: str) -> Callable[[list[int]], list[int]]:
    """Three drafts after a part of `known`: all right, all wrong, or right up to a changing place."""

    def propose(tokens: list[int]) -> list[int]:
        n = len(tokens)
        drafts = list(known[n : n + 3])
        num_right = {"good": 3, "bad": 0, "mixed": n % 4}[quality]
        return drafts[:num_right] + [(draft + 1) % 97 for draft in drafts[num_right:]]

    return propose
