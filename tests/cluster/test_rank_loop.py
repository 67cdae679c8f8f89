"""The step thread by itself: how it ends, and what it reports."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from cluster.rank_loop import IntegrityCheck, OwnerLost, RankLoop, Submitted
from model_runner.simulated import SimulatedRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.messages import FinishReason, SamplingParams, StepFrame, Submit
from rank_scheduler.plan import StepPlan, StepResult
from rank_scheduler.scheduler import Scheduler
from tests.engine import NoText

TIMEOUT_S = 20.0


class Runner(SimulatedRunner):
    """Waits in each step until `go` is set."""

    def __init__(self) -> None:
        super().__init__(scheduler=SchedulerConfig(), cache=CacheConfig(num_blocks=33), max_model_len=64)
        self.entered = threading.Event()
        self.go = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.go.wait(TIMEOUT_S)
        return super().execute(plan)


class Harness:
    def __init__(self) -> None:
        self.runner = Runner()
        capacity = self.runner.load()
        self.scheduler = Scheduler(
            SchedulerConfig(),
            max_model_len=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
            eos_token_ids=frozenset(),
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            enable_prefix_caching=True,
            make_text_decoder=NoText,
        )
        self.frames: queue.SimpleQueue[dict[int, StepFrame]] = queue.SimpleQueue()
        self.crashes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.loop = RankLoop(self.scheduler, self.runner, self.frames.put, self.crashes.put)
        self.loop.start()

    def submit(self, owner: int = 0, stop: tuple[str, ...] = ()) -> None:
        params = SamplingParams(seed=0, max_tokens=1, stop=stop)
        self.loop.post(Submitted(owner, Submit(1, b"\1\0\0\0", params)))

    def check_integrity(self) -> None:
        done: Future[None] = Future()
        self.loop.post(IntegrityCheck(done))
        done.result(TIMEOUT_S)


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.runner.go.set()
    assert harness.loop.stop(TIMEOUT_S)


def test_stop_lets_the_current_step_end(harness: Harness) -> None:
    harness.submit()
    assert harness.runner.entered.wait(TIMEOUT_S)
    assert not harness.loop.stop(0.01)
    assert harness.loop.stalled_for() > 0
    harness.runner.go.set()
    assert harness.loop.stop(TIMEOUT_S)
    (frame,) = harness.frames.get(timeout=TIMEOUT_S).values()
    assert [end.reason for end in frame.ends] == [FinishReason.LENGTH]
    assert harness.loop.stalled_for() == 0
    assert harness.loop.crash is None
    assert harness.loop.load.num_steps == 1


def test_an_idle_loop_answers_and_stops(harness: Harness) -> None:
    harness.loop.post(OwnerLost(5))
    harness.check_integrity()
    assert harness.loop.stop(TIMEOUT_S)
    assert harness.loop.stalled_for() == 0


def test_a_check_of_a_stopped_loop_fails_at_once(harness: Harness) -> None:
    harness.submit()
    assert harness.runner.entered.wait(TIMEOUT_S)
    waiting: Future[None] = Future()
    harness.loop.post(IntegrityCheck(waiting))
    assert not harness.loop.stop(0.01)
    harness.runner.go.set()
    for check in (lambda: waiting.result(TIMEOUT_S), harness.check_integrity):
        with pytest.raises(RuntimeError, match="the step loop ended: it was stopped"):
            check()


def test_integrity_check_tells_what_is_wrong_and_the_loop_goes_on(harness: Harness) -> None:
    harness.runner.go.set()
    harness.check_integrity()
    harness.scheduler._num_waiting_tokens += 1
    with pytest.raises(AssertionError, match="waiting tokens miscounted"):
        harness.check_integrity()
    harness.scheduler._num_waiting_tokens -= 1
    harness.submit(owner=7)
    assert harness.frames.get(timeout=TIMEOUT_S).keys() == {7}


def test_a_broken_scheduler_ends_the_loop_with_a_reason(harness: Harness) -> None:
    """The text decoder of this test raises when it is asked for text."""
    harness.runner.go.set()
    harness.submit(stop=("x",))
    reason = harness.crashes.get(timeout=TIMEOUT_S)
    assert reason == harness.loop.crash == "AssertionError: no request of this test has stop strings"
    with pytest.raises(RuntimeError, match="the step loop ended: AssertionError: no request of this test"):
        harness.check_integrity()
    assert harness.loop.stop(TIMEOUT_S)
    assert harness.crashes.empty()
