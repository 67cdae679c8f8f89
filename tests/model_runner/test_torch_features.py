"""Drafts beside other rows, masks, minimum lengths and sessions: what they change, and what they must not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model_runner.torch_runner import TorchRunner
from rank_scheduler.messages import EncoderInput, SamplingParams
from rank_scheduler.plan import EncoderRun, Extension, StepResult
from tests.model_runner.conftest import load_runner
from tests.model_runner.driver import GREEDY, generate, int32, sequence, step, tokens_of

PROMPT = np.random.default_rng(3).integers(3, 97, 41).tolist()
BLOCKS = [7, 30, 2, 19, 40]
SEEDED = SamplingParams(seed=5, max_tokens=1, temperature=0.9, top_p=0.95, num_logprobs=3)

both = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])


@pytest.fixture(scope="module")
def vocab_size(runner: TorchRunner) -> int:
    assert runner._model is not None
    return runner._model.config.vocab_size


def row_of(result: StepResult, row: int) -> list[int]:
    return [token for token in result.tokens[row].tolist() if token >= 0]


@both
def test_drafts_beside_other_rows(runner: TorchRunner, sampling: SamplingParams) -> None:
    """Rows with as many drafts, fewer, none, and chunks; each sequence goes on as if it were alone."""
    prompts = [PROMPT[start:] for start in (0, 3, 20, 35)]
    tables = np.arange(1, 33).reshape(4, 8).tolist()
    expected = [generate(runner, prompt, 14, tables[0], sampling=sampling)[0] for prompt in prompts]
    new = [sequence(slot, prompt, tables[slot], sampling=sampling) for slot, prompt in enumerate(prompts)]
    first = step(runner, [(slot, len(prompts[slot]), True) for slot in range(3)], new[:3])
    tokens = [[token] for token in tokens_of(first)] + [[]]
    for index in range(4):
        rows, drafts = [], []
        for slot, count in ((2, 3), (0, index), (1, 0)):
            right = expected[slot][len(tokens[slot]) :][:count]
            drafts.append([*right[:-1], (right[-1] + 1) % 97] if right and index % 2 else right)
            rows.append((slot, 1 + len(right), True))
        if index < 2:
            rows.append((3, 3, index == 1))
            drafts.append([])
        result = step(runner, rows, [new[3]] if index == 0 else [], drafts=drafts)
        for row, (slot, _, _) in enumerate(rows):
            tokens[slot] += row_of(result, row)
            assert len(result.logprobs.get(row, [])) == len(row_of(result, row))
    step(runner, [], freed=[0, 1, 2, 3])
    assert [len(each) for each in tokens] == [9, 5, 14, 1]
    for slot in range(4):
        assert tokens[slot] == expected[slot][: len(tokens[slot])]


@both
def test_masks(runner: TorchRunner, vocab_size: int, sampling: SamplingParams) -> None:
    """A mask that allows what would come anyway changes nothing, drafts or not; logprobs do not see it."""
    expected, logprobs = generate(runner, PROMPT, 4, BLOCKS, sampling=sampling)
    step(runner, [(0, 41, True)], [sequence(0, PROMPT, BLOCKS, sampling=sampling)])
    masks = {0: range(vocab_size), 2: (expected[3],)}
    result = step(runner, [(0, 3, True)], drafts=[expected[1:3]], masks=masks, vocab_size=vocab_size)
    assert row_of(result, 0) == expected[1:]
    assert [entry.logprob for entry in result.logprobs[0]] == pytest.approx(logprobs[1:], abs=1e-5)
    allowed = sorted({3, 31, 32, 64, 96} - {expected[1]})
    step(runner, [(1, 41, True)], [sequence(1, PROMPT, [41, 42, 43], sampling=sampling)])
    result = step(runner, [(1, 2, True)], drafts=[[expected[1]]], masks={0: allowed}, vocab_size=vocab_size)
    assert len(row_of(result, 0)) == 1
    assert row_of(result, 0)[0] in allowed
    assert result.logprobs[0][0].top_logprobs[0] > result.logprobs[0][0].logprob
    step(runner, [], freed=[0, 1])


def test_a_mask_that_allows_nothing_ends_one_request_and_no_step_after_it(runner: TorchRunner, vocab_size: int) -> None:
    expected, _ = generate(runner, PROMPT, 2, BLOCKS)
    new = [sequence(0, PROMPT, BLOCKS), sequence(1, PROMPT, [41, 42, 43])]
    result = step(runner, [(1, 41, True), (0, 41, True)], new, masks={0: ()}, vocab_size=vocab_size)
    assert list(result.failed) == [0]
    assert "grammar" in result.failed[0]
    assert tokens_of(result) == [-1, expected[0]]
    # Planned before the failure was known.
    assert tokens_of(step(runner, [(1, 1, True), (0, 1, True)]))[1] == expected[1]
    step(runner, [], freed=[0, 1])


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_min_tokens(runner: TorchRunner, num_drafts: int) -> None:
    """Each token that would come is a stop token: none of them comes before the fourth, and it may then."""
    free, _ = generate(runner, PROMPT, 6, BLOCKS)
    sampling = SamplingParams(
        seed=0, max_tokens=9, temperature=0.0, min_tokens=3, stop_token_ids=(*free, 10**8), num_logprobs=0
    )
    expected, _ = generate(runner, PROMPT, 6, BLOCKS, sampling=sampling)
    assert not set(expected[:3]) & set(free)
    unbound, _ = generate(runner, [*PROMPT, *expected[:3]], 3, BLOCKS)
    assert expected[3:] == unbound
    # After a preemption the count goes on.
    new = sequence(0, [*PROMPT, expected[0]], BLOCKS, num_prompt=41, sampling=sampling)
    tokens = [expected[0], *tokens_of(step(runner, [(0, 42, True)], [new]))]
    while len(tokens) < 6:
        drafts = expected[len(tokens) : len(tokens) + num_drafts]
        tokens += row_of(step(runner, [(0, 1 + len(drafts), True)], drafts=[drafts]), 0)
    step(runner, [], freed=[0])
    assert tokens[:6] == expected


def test_session_goes_on_with_its_kv(runner: TorchRunner) -> None:
    turn, _ = generate(runner, PROMPT, 3, BLOCKS)
    more = [50, 51, 52]
    expected, _ = generate(runner, [*PROMPT, *turn[:2], *more], 4, BLOCKS)
    step(runner, [(0, 41, True)], [sequence(0, PROMPT, BLOCKS)])
    # The last of these steps was planned before it was known that the third token ends the turn.
    for _ in range(3):
        step(runner, [(0, 1, True)])
    tokens = tokens_of(step(runner, [(0, 3, True)], extensions=[Extension(0, 43, int32(more))]))
    for _ in range(3):
        tokens += tokens_of(step(runner, [(0, 1, True)]))
    step(runner, [], freed=[0])
    assert tokens == expected


def test_plans_without_rows(runner: TorchRunner) -> None:
    expected, _ = generate(runner, PROMPT, 1, BLOCKS)
    assert step(runner, [], [sequence(0, PROMPT, BLOCKS[:2])]).tokens.shape[0] == 0
    step(runner, [], appended=[(0, BLOCKS[2])])
    assert tokens_of(step(runner, [(0, 41, True)])) == expected
    step(runner, [], freed=[0])


def test_padding_does_not_read_what_is_another_s_now(tiny_dir: Path) -> None:
    """Slot 0 had block 4 before; its new owner's KV is not finite."""
    runner = load_runner(tiny_dir)
    expected, _ = generate(runner, PROMPT[:31], 2, [1, 2])
    step(runner, [(0, 41, True)], [sequence(0, PROMPT, [5, 6, 4])])
    new = [sequence(0, PROMPT[:31], [1, 2]), sequence(1, PROMPT[:33], [3, 7, 10]), sequence(2, PROMPT, [4, 8, 9])]
    step(runner, [(0, 31, True), (1, 33, True), (2, 41, True)], new, freed=[0])
    runner.pool.blocks[4].fill_(float("nan"))
    result = step(runner, [(0, 1, True), (1, 1, True), (2, 1, True)])
    assert list(result.failed) == [2]
    assert int(result.tokens[0, 0]) == expected[1]
    runner.close()


def test_what_this_model_has_not_is_refused(runner: TorchRunner) -> None:
    item = EncoderInput(b"a", 0, 2)
    with pytest.raises(ValueError, match=r"encoder_inputs for slots \[3\], and this model has no encoder"):
        step(runner, [], [sequence(3, PROMPT, BLOCKS, encoder_inputs=(item,))])
    with pytest.raises(ValueError, match=r"encoder_inputs for slots \[4\]"):
        step(runner, [], [sequence(4, PROMPT, BLOCKS, cross_block_ids=int32([1]))])
    with pytest.raises(ValueError, match=r"encoder_inputs for slots \[5\]"):
        step(runner, [], encoder_runs=[EncoderRun(5, item)])
    with pytest.raises(ValueError, match="2 block tables into slot 3, and the model has 1 KV groups"):
        step(runner, [], [sequence(3, PROMPT, [BLOCKS, BLOCKS])])
