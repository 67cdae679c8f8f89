"""One model, many ways to schedule the same request: the tokens must be the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model_runner.torch_runner import TorchRunner
from rank_scheduler.config import CacheConfig
from rank_scheduler.messages import SamplingParams
from tests.model_runner.conftest import load_runner
from tests.model_runner.driver import GREEDY, generate, generate_with_drafts, proposer, sequence, step, tokens_of

PROMPT = np.random.default_rng(3).integers(3, 97, 41).tolist()
OTHERS = [np.random.default_rng(10 + n).integers(3, 97, n).tolist() for n in (1, 17, 32, 90)]
BLOCKS = [7, 30, 2, 19, 40]
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def alone(runner: TorchRunner) -> tuple[list[int], list[float]]:
    return generate(runner, PROMPT, NUM_TOKENS, BLOCKS)


@pytest.mark.parametrize("cuts", [[1], [16], [17, 18], [5, 40], list(range(20, 41))])
def test_prompt_cut_anywhere(runner: TorchRunner, alone: tuple[list[int], list[float]], cuts: list[int]) -> None:
    tokens, logprobs = generate(runner, PROMPT, NUM_TOKENS, BLOCKS, cuts=cuts)
    assert tokens == alone[0]
    assert logprobs == pytest.approx(alone[1], abs=1e-4)


def test_other_blocks_and_slot(runner: TorchRunner, alone: tuple[list[int], list[float]]) -> None:
    assert generate(runner, PROMPT, NUM_TOKENS, [1, 63, 62, 3, 4], slot=9) == alone


def test_batch_of_mixed_lengths(runner: TorchRunner, alone: tuple[list[int], list[float]]) -> None:
    """Decode rows of several groups, and chunks beside them."""
    prompts = [*OTHERS, PROMPT]
    tables = np.arange(1, 1 + 8 * len(prompts)).reshape(-1, 8).tolist()
    new = [sequence(slot, prompt, tables[slot]) for slot, prompt in enumerate(prompts)]
    last = len(prompts) - 1
    first = step(
        runner, [(slot, len(prompts[slot]), True) for slot in (2, 0, 1, last)], [new[i] for i in (2, 0, 1, last)]
    )
    tokens = [int(first.tokens[3, 0])]
    # The long one arrives while the others decode, in three chunks.
    for index in range(NUM_TOKENS - 1):
        rows = [(last, 1, True), (0, 1, True), (2, 1, True), (1, 1, True)]
        arrived = [new[3]] if index == 2 else []
        rows += [(3, 30, index == 4)] if 2 <= index <= 4 else []
        rows += [(3, 1, True)] if index > 4 else []
        tokens.append(int(step(runner, rows, arrived).tokens[0, 0]))
    step(runner, [], freed=list(range(len(prompts))))
    assert tokens == alone[0]


def test_batch_changes_no_bit_of_a_decode_step(runner: TorchRunner) -> None:
    def logprobs(num_others: int) -> list[tuple[float, ...]]:
        tables = np.arange(1, 49).reshape(-1, 4).tolist()
        slots = list(range(num_others + 1))
        new = [sequence(slot, PROMPT[slot:], tables[slot]) for slot in slots]
        for slot in slots:
            step(runner, [(slot, len(PROMPT) - slot, True)], [new[slot]])
        results = [step(runner, [(slot, 1, True) for slot in slots]) for _ in range(4)]
        step(runner, [], freed=slots)
        return [result.logprobs[0][0].top_logprobs for result in results]

    assert logprobs(0) == logprobs(4) == logprobs(11)


SEEDED = SamplingParams(seed=5, max_tokens=1, temperature=0.9, top_p=0.95, num_logprobs=0)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("quality", ["good", "bad", "mixed"])
def test_drafts_change_no_bit(runner: TorchRunner, quality: str, sampling: SamplingParams) -> None:
    expected = generate(runner, PROMPT, 20, BLOCKS, sampling=sampling)
    propose = proposer(expected[0], quality)
    tokens, num_steps, logprobs = generate_with_drafts(runner, PROMPT, 20, BLOCKS, propose, sampling=sampling)
    assert (tokens, logprobs) == expected
    assert num_steps == {"good": 6, "bad": 20, "mixed": 7}[quality]


def test_prefix_blocks_of_another_sequence(runner: TorchRunner, alone: tuple[list[int], list[float]]) -> None:
    """Both rows in one step: the second reads blocks that the first writes in this very step."""
    first = sequence(0, PROMPT, BLOCKS)
    second = sequence(1, PROMPT, [*BLOCKS[:2], 50, 51], computed=32)
    # The reader first, so that nothing but the order "all writes, then attention" helps.
    result = step(runner, [(1, len(PROMPT) - 32, True), (0, len(PROMPT), True)], [first, second])
    tokens = [tokens_of(result)]
    for _ in range(5):
        tokens.append(tokens_of(step(runner, [(1, 1, True), (0, 1, True)])))
    step(runner, [], freed=[0, 1])
    assert tokens == [[token, token] for token in alone[0][:6]]


def test_fully_cached_prompt_recomputes_one_token(runner: TorchRunner) -> None:
    prompt = PROMPT[:32]
    expected, _ = generate(runner, prompt, 4, BLOCKS)
    step(runner, [(0, 32, True)], [sequence(0, prompt, BLOCKS[:2])])
    copied = sequence(1, prompt, [BLOCKS[0], 33, 34], computed=31)
    tokens = tokens_of(step(runner, [(1, 1, True)], [copied], copies=[(BLOCKS[1], 33)]))
    for _ in range(3):
        tokens += tokens_of(step(runner, [(1, 1, True)]))
    step(runner, [], freed=[0, 1])
    assert tokens == expected


def test_block_copies_happen_one_after_another(runner: TorchRunner, alone: tuple[list[int], list[float]]) -> None:
    step(runner, [(0, 41, False)], [sequence(0, [*PROMPT, 5], [10, 11, 12])])
    moved = sequence(1, PROMPT, [20, 21, 22, 23], computed=40)
    copies = [(10, 30), (30, 20), (11, 21), (12, 22), (21, 30)]
    tokens = tokens_of(step(runner, [(1, 1, True)], [moved], freed=[0], copies=copies))
    tokens += tokens_of(step(runner, [(1, 1, True)]))
    step(runner, [], freed=[1])
    assert tokens == alone[0][:2]


def test_blocks_appended_while_decoding(runner: TorchRunner, alone: tuple[list[int], list[float]]) -> None:
    tokens = tokens_of(step(runner, [(0, 41, True)], [sequence(0, PROMPT, [5, 6, 7])]))
    for index in range(1, NUM_TOKENS):
        appended = [(0, 8)] if index == 8 else []
        tokens += tokens_of(step(runner, [(0, 1, True)], appended=appended))
    step(runner, [], freed=[0])
    assert tokens == alone[0]


@pytest.mark.parametrize("preempted_after", [1, 8])
def test_preempted_request_goes_on(
    runner: TorchRunner, alone: tuple[list[int], list[float]], preempted_after: int
) -> None:
    known = [*PROMPT, *alone[0][:preempted_after]]
    tokens, _ = generate(runner, known, NUM_TOKENS - preempted_after, [9, 8, 45, 44], cuts=[20])
    assert tokens == alone[0][preempted_after:]


def test_sampled_request_goes_on_elsewhere_with_the_same_tokens(runner: TorchRunner) -> None:
    sampling = SamplingParams(seed=2**64 - 3, max_tokens=1, temperature=0.9, top_p=0.9, num_logprobs=0)
    tokens, _ = generate(runner, PROMPT, NUM_TOKENS, BLOCKS, sampling=sampling)
    moved, _ = generate(runner, [*PROMPT, *tokens[:5]], NUM_TOKENS - 5, [3, 4, 5, 6], slot=2, sampling=sampling)
    assert moved == tokens[5:]


def test_kv_that_is_not_finite_ends_one_request_only(runner: TorchRunner) -> None:
    expected, _ = generate(runner, PROMPT, 4, BLOCKS)
    healthy = sequence(1, PROMPT, BLOCKS)
    first = step(runner, [(0, 41, True), (1, 41, True)], [sequence(0, PROMPT, [1, 4, 3]), healthy])
    runner.pool.blocks[4].fill_(float("nan"))
    result = step(runner, [(0, 1, True), (1, 1, True)])
    assert list(result.failed) == [0]
    assert "finite" in result.failed[0]
    assert tokens_of(result) == [-1, expected[1]]
    assert tokens_of(first) == [expected[0]] * 2
    step(runner, [], freed=[0, 1])
    # Whoever gets the poisoned block next is not harmed by what it held: here as the padded end of a decode group.
    again = step(runner, [(0, 33, True), (1, 41, True)], [sequence(0, PROMPT[:33], [1, 3, 4]), healthy])
    more = step(runner, [(0, 1, True), (1, 1, True)])
    step(runner, [], freed=[0, 1])
    assert not again.failed
    assert not more.failed
    assert more.tokens[1, 0] == expected[1]


def test_plan_that_contradicts_the_batch_is_refused(runner: TorchRunner) -> None:
    step(runner, [(0, 20, False)], [sequence(0, PROMPT, [1, 2, 3])])
    with pytest.raises(RuntimeError, match="computes 22 tokens of slot 0 up to 42"):
        step(runner, [(0, 22, True)])
    with pytest.raises(RuntimeError, match=r"computes 20 tokens of slot 0 up to 40 \(samples: True, drafts: 0\)"):
        step(runner, [(0, 20, True)])
    with pytest.raises(RuntimeError, match="installs 41 tokens, 41 of them computed"):
        step(runner, [], [sequence(1, PROMPT, [4, 5, 6], computed=41)])
    # After a failed step the scheduler frees what it planned, whether or not it got here.
    step(runner, [], freed=[0, 1])


def test_small_pool_and_long_model(tiny_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"max_model_len is 257.*set max_model_len to 1\.\.256"):
        load_runner(tiny_dir, max_model_len=257)
    runner = load_runner(tiny_dir, cache=CacheConfig(num_blocks=2), max_model_len=100)
    assert generate(runner, PROMPT[:3], 2, [1])[0]
    runner.close()
    with pytest.raises(RuntimeError, match="call load"):
        step(runner, [])


def test_bfloat16(tiny_dir: Path) -> None:
    runner = load_runner(tiny_dir, dtype="bfloat16")
    assert runner.pool.blocks.dtype == torch.bfloat16
    exact = load_runner(tiny_dir)
    _, expected = generate(exact, PROMPT, 1, BLOCKS)
    _, logprobs = generate(runner, PROMPT, 1, BLOCKS)
    assert logprobs == pytest.approx(expected, abs=0.3)
