from __future__ import annotations

import subprocess
import sys

import pytest

from model_runner.simulated import CostModel, SimulatedRunner, expected_tokens
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.messages import SamplingParams
from tests.model_runner.driver import generate, generate_with_drafts, proposer, sequence, step, tokens_of

PROMPT = [5, 6, 7, 8, 9, 10, 11, 0, 3]
BLOCKS = [3, 4, 9, 7, 1]


@pytest.fixture
def runner() -> SimulatedRunner:
    runner = SimulatedRunner(scheduler=SchedulerConfig(), cache=CacheConfig(block_size=4, num_blocks=32))
    runner.load()
    return runner


@pytest.mark.parametrize("cuts", [[], [4], [1, 2, 7]])
def test_generates_what_the_oracle_expects(runner: SimulatedRunner, cuts: list[int]) -> None:
    assert generate(runner, PROMPT, 10, BLOCKS, cuts=cuts)[0] == expected_tokens(PROMPT, 10)


def test_goes_on_after_preemption(runner: SimulatedRunner) -> None:
    expected = expected_tokens(PROMPT, 6)
    assert generate(runner, [*PROMPT, *expected[:4]], 2, BLOCKS)[0] == expected[4:]


def test_shared_and_copied_blocks(runner: SimulatedRunner) -> None:
    """The second reads a block that the first fills in the same step; the third a copy of both."""
    new = [sequence(1, PROMPT, [3, 5, 6], computed=4), sequence(0, PROMPT, BLOCKS)]
    result = step(runner, [(1, 5, True), (0, 9, True)], new)
    assert tokens_of(result) == expected_tokens(PROMPT, 1) * 2
    copied = sequence(2, PROMPT, [20, 21, 22], computed=8)
    result = step(runner, [(2, 1, True)], [copied], copies=[(3, 20), (5, 21)])
    assert tokens_of(result) == expected_tokens(PROMPT, 1)


@pytest.mark.parametrize(("quality", "num_steps"), [("good", 4), ("bad", 13), ("mixed", 5)])
def test_drafts_change_steps_and_not_tokens(runner: SimulatedRunner, quality: str, num_steps: int) -> None:
    expected = expected_tokens(PROMPT, 13)
    tokens, steps, _ = generate_with_drafts(runner, PROMPT, 13, [*BLOCKS, 2], proposer(expected, quality))
    assert tokens == expected
    assert steps == num_steps


@pytest.mark.parametrize("blocks", [[3, 3, 6], [4, 3, 6], [3, 9, 6], [12, 4, 6]])
def test_wrong_blocks_give_other_tokens(runner: SimulatedRunner, blocks: list[int]) -> None:
    step(runner, [(0, 9, True)], [sequence(0, PROMPT, BLOCKS)])
    result = step(runner, [(1, 1, True)], [sequence(1, PROMPT, blocks, computed=8)])
    assert tokens_of(result) != expected_tokens(PROMPT, 1)


def test_equal_block_after_another_prefix_gives_other_tokens(runner: SimulatedRunner) -> None:
    step(runner, [(0, 9, True)], [sequence(0, [1, 1, 1, 1, *PROMPT[4:]], BLOCKS)])
    step(runner, [(1, 9, True)], [sequence(1, PROMPT, [10, 11, 12])])
    result = step(runner, [(2, 1, True)], [sequence(2, PROMPT, [10, 4, 6], computed=8)])
    assert tokens_of(result) != expected_tokens(PROMPT, 1)


def test_step_time() -> None:
    runner = SimulatedRunner(scheduler=SchedulerConfig(), cache=CacheConfig(), cost=CostModel(base_s=1.0, token_s=0.5))
    times: list[float] = []
    runner.execute = lambda plan: times.append(runner.step_time_s(plan))  # type: ignore[method-assign,assignment,func-returns-value]
    step(runner, [(0, 3, True), (1, 1, True)])
    assert times == [3.0]


def test_logprobs_where_asked(runner: SimulatedRunner) -> None:
    silent = SamplingParams(seed=0, max_tokens=1)
    result = step(runner, [(0, 9, True)], [sequence(0, PROMPT, BLOCKS, sampling=silent)])
    assert not result.logprobs
    result = step(runner, [(1, 9, True)], [sequence(1, PROMPT, [10, 11, 12])])
    assert result.logprobs[0][0].top_ids == tuple(expected_tokens(PROMPT, 1))


def test_quick_imports_bring_no_torch() -> None:
    modules = "model_runner.simulated, model_runner.embedded, model_runner.model_config, model_runner.runner"
    heavy = "{'torch', 'transformers', 'tokenizers', 'gguf'}"
    program = f"import sys, {modules}; assert not {heavy} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_rank_process_needs_no_transformers() -> None:
    program = "import sys, model_runner.torch_runner; assert 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
