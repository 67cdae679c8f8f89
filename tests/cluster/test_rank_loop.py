"""The step loop by itself, with a scheduler and a runner that the test scripts: order, waiting, failures, the end."""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest

from cluster import rank_loop
from cluster.rank_loop import (
    MAX_CONSECUTIVE_FAILURES,
    Aborted,
    Announced,
    Asked,
    Event,
    Extended,
    GrammarCompiled,
    IntegrityCheck,
    OwnerLost,
    PauseRequested,
    PrefixesAsked,
    RankLoop,
    StatsDue,
    Submitted,
)
from cluster.step_executor import StepEnded
from kv_transfer.connector import ConnectorEvent, ConnectorStats, LoadFenced, LoadFinished, SendFinished
from kv_transfer.memory import KvMemory
from model_runner.runner import Capacity, KvHooks
from rank_scheduler.config import SchedulerConfig
from rank_scheduler.interface import PauseState, SchedulerInterface, SchedulerSetup
from rank_scheduler.kv_events import KvEvent
from rank_scheduler.messages import (
    Explain,
    Explained,
    Explanation,
    Extend,
    Grammar,
    GrammarKind,
    Prefetch,
    PrefixEvents,
    PrefixSnapshot,
    RankLoad,
    RankToRouter,
    SamplingParams,
    StepFrame,
    Submit,
)
from rank_scheduler.plan import NO_TOKENS, StepPlan, StepResult
from rank_scheduler.prefix_chain import pack
from rank_scheduler.stats import StepStats
from rank_scheduler.structured_output import CompileGrammar, GrammarMatcher

TIMEOUT_S = 20.0
OWNER = 3


class ScriptedScheduler:
    """One token per plan to `OWNER`; `submit.sampling.max_tokens` plans in all. Writes down what is asked of it.

    A plan that nothing is wrong with comes from `schedule` and goes into exactly one `update` or `fail`, in order:
    that is checked here.
    """

    def __init__(self, config: SchedulerConfig, setup: SchedulerSetup) -> None:
        self.max_num_steps_in_flight = 2 if setup.async_scheduling else 1
        self.num_ignored_messages = 0
        self.prefix_changes = (b"", b"")
        self.findable: list[bytes] = []
        self.calls: list[str] = []
        self.wanted = 0
        self.asks_again = 0
        """So many times `schedule` has nothing although there is work, as with a connector that does not know yet."""
        self.metadata: object | None = None
        """For the next plan."""
        self.breaks: Exception | None = None
        """Raised by the next `update`."""
        self.grammars: list[CompileGrammar] = []
        self._step = 0
        self._out: deque[StepPlan] = deque()
        self._frames: dict[int, StepFrame] = {}
        self._threads: set[int] = set()

    def _note(self, call: str) -> None:
        self._threads.add(threading.get_ident())
        assert len(self._threads) == 1, "more than one thread calls the scheduler"
        self.calls.append(call)

    def _frame(self, tokens: list[int]) -> dict[int, StepFrame]:
        return {OWNER: StepFrame(load=self.load(), ids=[1] * len(tokens), tokens=tokens)}

    def add(self, owner: int, submit: Submit, now: float) -> None:
        self._note(f"add {owner}/{submit.id}")
        if submit.grammar is not None:
            self.grammars.append(CompileGrammar(owner, submit.id, submit.grammar))
        else:
            self.wanted += submit.sampling.max_tokens

    def extend(self, owner: int, extend: Extend, now: float) -> None:
        self._note(f"extend {owner}/{extend.id}")

    def abort(self, owner: int, request_id: int, now: float) -> None:
        self._note(f"abort {owner}/{request_id}")
        self.wanted = 0
        self._frames = self._frame([-request_id])

    def drop_owner(self, owner: int, now: float) -> None:
        self._note(f"drop {owner}")

    def prefetch(self, owner: int, prefetch: Prefetch, now: float) -> None:
        self._note(f"prefetch {owner}: {prefetch.request_id}")

    def take_compile_actions(self) -> list[CompileGrammar]:
        actions, self.grammars = self.grammars, []
        return actions

    def grammar_compiled(
        self,
        owner: int,
        request_id: int,
        matcher: GrammarMatcher | None,
        error: str,
        now: float,
        *,
        is_request_fault: bool = True,
    ) -> None:
        whose = "" if is_request_fault else " (not its fault)"
        self._note(f"compiled {owner}/{request_id}: {error or 'well'}{whose}")

    def load_finished(self, event: LoadFinished, now: float) -> None:
        self._note(f"loaded {event.key}")

    def load_fenced(self, event: LoadFenced, now: float) -> None:
        self._note(f"fenced {event.key}")

    def send_finished(self, event: SendFinished, now: float) -> None:
        self._note(f"sent {event.key}")

    def set_pause(self, state: PauseState, now: float) -> None:
        self._note(state)
        if state is PauseState.PAUSED_ALL:
            self.wanted = 0

    def reset_prefix_cache(self) -> bool:
        raise AssertionError("nobody asked for it")

    def has_work(self) -> bool:
        return self.wanted > 0 or bool(self.asks_again) or self.metadata is not None

    def schedule(self, now: float) -> StepPlan | None:
        assert len(self._out) < self.max_num_steps_in_flight
        if self.asks_again:
            self.asks_again -= 1
            self._note("asks again")
            return None
        num_rows = min(self.wanted, 1)
        metadata, self.metadata = self.metadata, None
        if not num_rows and metadata is None:
            return None
        self.wanted -= num_rows
        self._step += 1
        self._note(f"plan {self._step}")
        slots = np.zeros(num_rows, np.int32)
        plan = StepPlan(self._step, slots, slots + 1, np.ones(num_rows, np.bool_), connector_metadata=metadata)
        self._out.append(plan)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> dict[int, StepFrame]:
        assert plan is self._out.popleft()
        self._note(f"update {plan.step}")
        if self.breaks is not None:
            raise self.breaks
        return self._frame([plan.step]) if len(plan.slots) else {}

    def fail(self, plan: StepPlan, message: str, now: float) -> dict[int, StepFrame]:
        assert plan is self._out.popleft()
        self._note(f"fail {plan.step}: {message}")
        return self._frame([])

    def take_frames(self) -> dict[int, StepFrame]:
        frames, self._frames = self._frames, {}
        return frames

    def load(self) -> RankLoad:
        return RankLoad(num_steps=self._step)

    def explain(self, request_id: str) -> list[Explanation]:
        self._note(f"explain {request_id}")
        return [Explanation(state=f"{len(self._out)} in flight", timeline=[])]

    def take_stats(self) -> StepStats:
        return StepStats(num_steps=self._step, utilisation=0.5)

    def take_kv_events(self) -> list[KvEvent]:
        raise AssertionError("nobody asked for them")

    def take_prefix_changes(self) -> tuple[bytes, bytes]:
        changes, self.prefix_changes = self.prefix_changes, (b"", b"")
        return changes

    def findable_prefixes(self) -> list[bytes]:
        return self.findable

    def check_integrity(self) -> None:
        self._note("check")
        assert self.num_ignored_messages >= 0, "ignored messages miscounted"


class Runner:
    """Each step waits for the test's permission, and then fails if the test gave it an error."""

    def __init__(self) -> None:
        self.kv_hooks: KvHooks | None = None
        self.entered: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def load(self) -> Capacity:
        raise AssertionError("the loop loads nothing")

    def kv_memory(self) -> KvMemory:
        raise AssertionError("nobody asked for it")

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.connector_metadata is not None and self.kv_hooks is not None:
            self.kv_hooks.start_load_kv(plan.connector_metadata)
        self.entered.put(plan.step)
        error = self._orders.get(timeout=TIMEOUT_S)
        if error is not None:
            raise error
        return StepResult(np.zeros((len(plan.slots), 1), np.int32) if len(plan.slots) else NO_TOKENS)

    def close(self) -> None:
        raise AssertionError("the loop closes nothing")

    def let_go(self, *outcomes: Exception | None) -> None:
        for outcome in outcomes:
            self._orders.put(outcome)


@dataclass
class ConnectorWorker:
    """Says in `started` what it was to start, and which steps had begun by then; in `finished` which were computed."""

    runner: Runner
    known: list[tuple[object, int, int]] = field(default_factory=list)
    """What it was told of preemptions, and how often it had been asked to start loads, and steps had begun, by then."""
    started: list[tuple[object, int]] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)
    invalid: frozenset[int] = frozenset()
    error: Exception | None = None
    refusal: Exception | None = None

    def start(self, memory: KvMemory, post: Callable[[ConnectorEvent], None]) -> None:
        raise AssertionError("the loop starts no connector")

    def handle_preemptions(self, metadata: object) -> None:
        self.known.append((metadata, len(self.started), self.runner.entered.qsize()))
        if self.refusal is not None:
            raise self.refusal

    def start_load_kv(self, metadata: object) -> None:
        self.started.append((metadata, self.runner.entered.qsize()))
        if self.error is not None:
            raise self.error

    def wait_for_layer_load(self, layer: int) -> None:
        raise AssertionError("the loop knows of no layers")

    save_kv_layer = wait_for_layer_load

    def finish_step(self, metadata: object | None, *, was_computed: bool) -> frozenset[int]:
        self.finished.append(was_computed)
        return self.invalid

    def stats(self) -> ConnectorStats:
        raise AssertionError("the loop wants no figures")

    def close(self, timeout_s: float) -> None:
        raise AssertionError("the loop closes nothing")


class Compiler:
    """Writes down what it is told; the test answers."""

    def __init__(self) -> None:
        self.actions: queue.SimpleQueue[CompileGrammar] = queue.SimpleQueue()
        self.cancelled: list[tuple[int, int | None]] = []

    def compile(self, action: CompileGrammar) -> None:
        self.actions.put(action)

    def cancel(self, owner: int, request_id: int) -> None:
        self.cancelled.append((owner, request_id))

    def cancel_owner(self, owner: int) -> None:
        self.cancelled.append((owner, None))


class Harness:
    def __init__(self, *, is_async: bool, compiles: bool = True) -> None:
        setup = SchedulerSetup(
            max_model_len=64,
            vocab_size=256,
            eos_token_ids=frozenset(),
            num_blocks=33,
            block_size=4,
            async_scheduling=is_async,
        )
        self.scheduler = ScriptedScheduler(SchedulerConfig(), setup)
        self.runner = Runner()
        self.worker = ConnectorWorker(self.runner)
        self.messages: queue.SimpleQueue[Mapping[int, RankToRouter]] = queue.SimpleQueue()
        self.crashes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.compiler = Compiler()
        self.loop = RankLoop(
            self._conforming(),
            self.runner,
            self.messages.put,
            self.crashes.put,
            grammar_compiler=self.compiler if compiles else None,
            connector_worker=self.worker,
        )
        self.loop.start()

    def _conforming(self) -> SchedulerInterface:
        return self.scheduler

    def run_steps(self, num_steps: int) -> None:
        sampling = SamplingParams(seed=0, max_tokens=num_steps)
        self.loop.post(Submitted(OWNER, Submit(1, b"\1\0\0\0", sampling)))

    def message(self) -> RankToRouter:
        (message,) = self.messages.get(timeout=TIMEOUT_S).values()
        return message

    def tokens(self) -> list[int]:
        message = self.message()
        assert isinstance(message, StepFrame)
        return message.tokens

    def entered(self) -> int:
        return self.runner.entered.get(timeout=TIMEOUT_S)

    def ask(self, make_event: Callable[[Future[None]], Event]) -> Future[None]:
        done: Future[None] = Future()
        self.loop.post(make_event(done))
        return done

    def settle(self) -> None:
        """Until the loop has applied all that was posted. Only while no step runs on the loop's thread."""
        self.ask(IntegrityCheck).result(TIMEOUT_S)

    def until_in_flight(self, num_steps: int) -> None:
        """Until the loop has planned so many steps that have not ended."""
        for _ in range(num_steps + 1):
            self.settle()
        self.loop.post(Asked(OWNER, Explain(0, "r")))
        answer = self.message()
        assert isinstance(answer, Explained)
        assert answer.explanations[0].state == f"{num_steps} in flight"

    def on_step_ended(self, callback: Callable[[StepEnded], None]) -> None:
        """Called on the executor's thread instead of `RankLoop.post`."""
        assert self.loop._executor_thread is not None
        self.loop._executor_thread._on_ended = callback

    def calls(self) -> list[str]:
        """Without the harness's own."""
        return [call for call in self.scheduler.calls if call not in ("check", "explain r")]


@pytest.fixture(params=["sync", "async"])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    yield from _running(Harness(is_async=request.param == "async"))


@pytest.fixture
def pipelined() -> Iterator[Harness]:
    yield from _running(Harness(is_async=True))


def _running(harness: Harness) -> Iterator[Harness]:
    threads = [t for t in threading.enumerate() if t.name.startswith("rank-")]
    assert threads
    yield harness
    harness.runner.let_go(*[None] * 100)
    assert harness.loop.stop(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)


# ---- steps ----


def test_steps_come_in_order(harness: Harness) -> None:
    harness.runner.let_go(*[None] * 5)
    harness.run_steps(5)
    assert [harness.tokens() for _ in range(5)] == [[1], [2], [3], [4], [5]]
    harness.settle()
    assert [call for call in harness.calls() if call.startswith("plan")] == [f"plan {n}" for n in range(1, 6)]
    assert [call for call in harness.calls() if call.startswith("update")] == [f"update {n}" for n in range(1, 6)]
    assert harness.loop.load.num_steps == 5


def test_one_step_in_flight_means_no_plan_ahead() -> None:
    for harness in _running(Harness(is_async=False)):
        harness.runner.let_go(None, None)
        harness.run_steps(2)
        assert [harness.tokens(), harness.tokens()] == [[1], [2]]
        assert harness.calls() == ["add 3/1", "plan 1", "update 1", "plan 2", "update 2"]


def test_the_next_step_is_planned_while_one_is_computed(pipelined: Harness) -> None:
    pipelined.run_steps(3)
    assert pipelined.entered() == 1
    pipelined.until_in_flight(2)
    assert pipelined.calls() == ["add 3/1", "plan 1", "plan 2"]
    assert pipelined.runner.entered.empty(), "one step at a time"
    pipelined.runner.let_go(None)
    assert pipelined.entered() == 2
    assert pipelined.tokens() == [1]
    pipelined.until_in_flight(2)
    assert pipelined.calls()[3:] == ["update 1", "plan 3"]
    pipelined.runner.let_go(None, None)
    assert [pipelined.tokens(), pipelined.tokens()] == [[2], [3]]


def test_the_next_step_begins_before_the_last_is_taken_in(pipelined: Harness) -> None:
    """The loop is held up in `explain` while the first step ends."""
    inside, go_on = threading.Event(), threading.Event()

    def explain(request_id: str) -> list[Explanation]:
        inside.set()
        assert go_on.wait(TIMEOUT_S)
        return []

    pipelined.run_steps(2)
    assert pipelined.entered() == 1
    pipelined.until_in_flight(2)
    pipelined.scheduler.explain = explain  # type: ignore[method-assign]
    pipelined.loop.post(Asked(OWNER, Explain(1, "held up")))
    assert inside.wait(TIMEOUT_S)
    pipelined.runner.let_go(None)
    assert pipelined.entered() == 2
    assert "update 1" not in pipelined.calls()
    go_on.set()
    assert isinstance(pipelined.message(), Explained)
    assert pipelined.tokens() == [1]


def test_requests_that_arrive_during_a_step_are_in_the_next_plan(pipelined: Harness) -> None:
    """With one step in flight that leaves room, an event lets the loop plan again at once."""
    pipelined.run_steps(1)
    assert pipelined.entered() == 1
    pipelined.until_in_flight(1)
    pipelined.run_steps(1)
    pipelined.until_in_flight(2)
    pipelined.runner.let_go(None, None)
    assert [pipelined.tokens(), pipelined.tokens()] == [[1], [2]]


def test_frames_do_not_wait_for_the_step_that_runs(pipelined: Harness) -> None:
    pipelined.run_steps(9)
    assert pipelined.entered() == 1
    pipelined.until_in_flight(2)
    pipelined.loop.post(Aborted(OWNER, 7))
    assert pipelined.tokens() == [-7]
    assert pipelined.loop.stalled_for() > 0
    pipelined.runner.let_go(None, None)
    assert [pipelined.tokens(), pipelined.tokens()] == [[1], [2]]
    pipelined.settle()
    assert pipelined.runner.entered.get(timeout=TIMEOUT_S) == 2
    assert pipelined.runner.entered.empty()


def test_a_plan_without_rows_goes_to_connector_and_runner(harness: Harness) -> None:
    harness.runner.let_go(None, None, None)
    harness.scheduler.metadata = "load these"
    harness.loop.post(LoadFinished((OWNER, 1)))
    assert harness.entered() == 1
    harness.run_steps(1)
    assert harness.entered() == 2
    assert harness.tokens() == [2]
    assert harness.worker.known == [("load these", 0, 0)]
    assert harness.worker.started == [("load these", 0)]
    assert "update 1" in harness.calls()


def test_an_idle_loop_waits(harness: Harness) -> None:
    harness.settle()
    assert harness.loop.stalled_for() == 0
    num_calls = len(harness.scheduler.calls)
    harness.loop.post(OwnerLost(5))
    harness.settle()
    assert harness.scheduler.calls[num_calls:] == ["drop 5", "check"]


def test_who_does_not_know_yet_is_asked_again_without_an_event(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_loop, "RETRY_INTERVAL_S", 0.001)
    harness.runner.let_go(None)
    harness.scheduler.asks_again = 3
    harness.run_steps(1)
    assert harness.tokens() == [1]
    assert harness.calls()[1:5] == ["asks again"] * 3 + ["plan 1"]


def test_work_that_cannot_be_planned_does_not_keep_the_loop_busy(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is asked once per event, with a step in flight or without."""
    monkeypatch.setattr(rank_loop, "RETRY_INTERVAL_S", TIMEOUT_S)
    if harness.scheduler.max_num_steps_in_flight > 1:
        harness.run_steps(1)
        assert harness.entered() == 1
        harness.until_in_flight(1)
    harness.scheduler.asks_again = 1000
    for _ in range(5):
        harness.settle()
    assert 1000 - 6 <= harness.scheduler.asks_again <= 1000 - 4
    harness.scheduler.asks_again = 0


# ---- events ----


def test_each_event_reaches_the_scheduler_in_order(harness: Harness) -> None:
    for event in (
        Extended(1, Extend(4, b"\1\0\0\0")),
        Aborted(1, 4),
        OwnerLost(1),
        GrammarCompiled(1, 5, None, "no such grammar"),
        GrammarCompiled(1, 8, None, "too late", is_request_fault=False),
        LoadFinished((1, 6)),
        SendFinished((1, 7)),
    ):
        harness.loop.post(event)
    harness.settle()
    assert harness.calls() == [
        "extend 1/4",
        "abort 1/4",
        "drop 1",
        "compiled 1/5: no such grammar",
        "compiled 1/8: too late (not its fault)",
        "loaded (1, 6)",
        "sent (1, 7)",
    ]


def test_explain_is_answered_to_who_asked(harness: Harness) -> None:
    harness.loop.post(Asked(8, Explain(17, "cmpl-1")))
    message = harness.messages.get(timeout=TIMEOUT_S)
    assert message.keys() == {8}
    answer = message[8]
    assert isinstance(answer, Explained)
    assert (answer.query, [e.state for e in answer.explanations]) == (17, ["0 in flight"])
    assert harness.scheduler.calls == ["explain cmpl-1"]


def test_stats_are_taken_when_due(harness: Harness) -> None:
    assert harness.loop.stats == StepStats()
    harness.loop.post(StatsDue())
    harness.settle()
    assert harness.loop.stats == StepStats(utilisation=0.5)


def grammar_submit() -> Submitted:
    grammar = Grammar(GrammarKind.REGEX, "a+")
    return Submitted(OWNER, Submit(2, b"\1\0\0\0", SamplingParams(seed=0, max_tokens=1), grammar=grammar))


def test_grammars_are_compiled_off_the_loop(harness: Harness) -> None:
    harness.loop.post(grammar_submit())
    assert harness.compiler.actions.get(timeout=TIMEOUT_S) == CompileGrammar(OWNER, 2, Grammar(GrammarKind.REGEX, "a+"))
    harness.loop.post(GrammarCompiled(OWNER, 2, None))
    harness.settle()
    assert harness.calls() == ["add 3/2", "compiled 3/2: well"]
    assert not harness.compiler.cancelled


def test_grammars_that_nobody_waits_for_are_cancelled(harness: Harness) -> None:
    harness.loop.post(Aborted(OWNER, 2))
    harness.loop.post(OwnerLost(4))
    harness.settle()
    assert harness.compiler.cancelled == [(OWNER, 2), (4, None)]


def test_without_a_compiler_a_grammar_is_refused_at_once() -> None:
    for harness in _running(Harness(is_async=False, compiles=False)):
        harness.loop.post(grammar_submit())
        harness.settle()
        assert harness.calls() == [
            "add 3/2",
            "compiled 3/2: this rank has no structured output; send the request without a grammar",
        ]


def test_a_pause_is_done_when_the_steps_planned_before_have_ended(pipelined: Harness) -> None:
    def pause(done: Future[None]) -> Event:
        return PauseRequested(PauseState.PAUSED_ALL, done)

    def resume(done: Future[None]) -> Event:
        return PauseRequested(PauseState.UNPAUSED, done)

    pipelined.run_steps(9)
    assert pipelined.entered() == 1
    pipelined.until_in_flight(2)
    paused, resumed = pipelined.ask(pause), pipelined.ask(resume)
    pipelined.runner.let_go(None)
    assert pipelined.entered() == 2
    pipelined.settle()
    assert not paused.done()
    pipelined.runner.let_go(None)
    paused.result(TIMEOUT_S)
    resumed.result(TIMEOUT_S)
    pipelined.ask(pause).result(TIMEOUT_S)
    assert pipelined.calls()[-5:] == ["paused_all", "unpaused", "update 1", "update 2", "paused_all"]


def test_integrity_check_tells_what_is_wrong_and_the_loop_goes_on(harness: Harness) -> None:
    harness.scheduler.num_ignored_messages = -1
    with pytest.raises(AssertionError, match="ignored messages miscounted"):
        harness.settle()
    harness.scheduler.num_ignored_messages = 4
    harness.runner.let_go(None)
    harness.run_steps(1)
    assert harness.tokens() == [1]
    harness.settle()
    assert harness.loop.num_ignored_messages == 4


# ---- failing steps ----


def test_a_failed_step_is_told_and_the_loop_goes_on(harness: Harness) -> None:
    harness.run_steps(1)
    harness.runner.let_go(RuntimeError("too hot"))
    assert harness.tokens() == []
    harness.runner.let_go(None)
    harness.run_steps(1)
    assert harness.tokens() == [2]
    assert harness.calls()[2] == "fail 1: the model step failed: too hot; retry"
    assert harness.loop.crash is None


def test_what_was_planned_on_a_failed_step_fails_too_unexecuted(pipelined: Harness) -> None:
    pipelined.run_steps(4)
    assert pipelined.entered() == 1
    pipelined.until_in_flight(2)
    pipelined.runner.let_go(RuntimeError("too hot"))
    assert [pipelined.tokens(), pipelined.tokens()] == [[], []]
    assert pipelined.entered() == 3, "the second was executed"
    pipelined.until_in_flight(2)
    failed = "the model step failed: too hot; retry"
    assert pipelined.calls()[1:] == ["plan 1", "plan 2", f"fail 1: {failed}", f"fail 2: {failed}", "plan 3", "plan 4"]
    pipelined.runner.let_go(None, None)
    assert [pipelined.tokens(), pipelined.tokens()] == [[3], [4]]


@pytest.mark.parametrize("worker_breaks", [False, True])
def test_transfers_of_a_dropped_plan_are_started_all_the_same(pipelined: Harness, worker_breaks: bool) -> None:
    """The scheduler half remembers them as asked for."""
    pipelined.run_steps(1)
    assert pipelined.entered() == 1
    pipelined.until_in_flight(1)
    pipelined.scheduler.metadata = "load these"
    if worker_breaks:
        pipelined.worker.error = RuntimeError("no such peer")
    pipelined.until_in_flight(2)
    pipelined.runner.let_go(RuntimeError("too hot"))
    assert [pipelined.tokens(), pipelined.tokens()] == [[], []]
    assert pipelined.worker.known == [("load these", 0, 0)]
    assert pipelined.worker.started == [("load these", 0)]
    assert pipelined.calls()[-1] == "fail 2: the model step failed: too hot; retry"


def test_transfers_that_cannot_be_started_fail_the_step(harness: Harness) -> None:
    harness.worker.error = RuntimeError("no such peer")
    harness.scheduler.metadata = "load these"
    harness.run_steps(1)
    assert harness.tokens() == []
    harness.settle()
    assert "fail 1: the model step failed: no such peer; retry" in harness.calls()
    assert harness.runner.entered.empty()


def test_a_step_is_not_computed_over_blocks_that_somebody_may_rely_on(harness: Harness) -> None:
    harness.worker.refusal = RuntimeError("no such lease")
    harness.scheduler.metadata = "void these"
    harness.run_steps(1)
    assert harness.tokens() == []
    harness.settle()
    assert "fail 1: the model step failed: no such lease; retry" in harness.calls()
    assert harness.runner.entered.empty()
    # What it asks for is remembered as asked for.
    assert harness.worker.started == [("void these", 0)]


def test_a_prefetch_reaches_the_scheduler(harness: Harness) -> None:
    harness.loop.post(Announced(OWNER, Prefetch(b"", {}, "r1")))
    harness.settle()
    assert f"prefetch {OWNER}: r1" in harness.calls()


def test_a_plan_that_is_made_while_the_step_before_it_fails_is_not_executed(pipelined: Harness) -> None:
    """The loop is within `schedule` for the second when the first fails: it hands over what must not be executed."""
    inside, go_on = threading.Event(), threading.Event()
    schedule = pipelined.scheduler.schedule

    def slow_schedule(now: float) -> StepPlan | None:
        plan = schedule(now)
        if plan is not None and plan.step == 2:
            inside.set()
            assert go_on.wait(TIMEOUT_S)
        return plan

    pipelined.scheduler.schedule = slow_schedule  # type: ignore[method-assign]
    pipelined.run_steps(3)
    assert pipelined.entered() == 1
    assert inside.wait(TIMEOUT_S)
    ended = threading.Event()

    def on_ended(event: StepEnded) -> None:
        pipelined.loop.post(event)
        ended.set()

    pipelined.on_step_ended(on_ended)
    pipelined.runner.let_go(RuntimeError("too hot"))
    assert ended.wait(TIMEOUT_S)
    go_on.set()
    assert [pipelined.tokens(), pipelined.tokens()] == [[], []]
    assert pipelined.entered() == 3
    pipelined.runner.let_go(None)
    assert pipelined.tokens() == [3]


def test_nothing_is_planned_until_all_behind_a_failed_step_are_back(pipelined: Harness) -> None:
    pipelined.run_steps(3)
    assert pipelined.entered() == 1
    pipelined.until_in_flight(2)
    go_on = threading.Event()

    def on_ended(event: StepEnded) -> None:
        assert event.was_executed or go_on.wait(TIMEOUT_S)
        pipelined.loop.post(event)

    pipelined.on_step_ended(on_ended)
    pipelined.runner.let_go(RuntimeError("too hot"))
    assert pipelined.tokens() == []
    pipelined.until_in_flight(1)
    assert "plan 3" not in pipelined.calls()
    go_on.set()
    assert pipelined.tokens() == []
    assert pipelined.entered() == 3


def test_dropped_steps_do_not_count_as_failures(pipelined: Harness) -> None:
    pipelined.run_steps(2 * MAX_CONSECUTIVE_FAILURES)
    for step in range(1, 2 * MAX_CONSECUTIVE_FAILURES - 1, 2):
        assert pipelined.entered() == step
        pipelined.until_in_flight(2)
        pipelined.runner.let_go(RuntimeError("too hot"))
        assert [pipelined.tokens(), pipelined.tokens()] == [[], []]
    pipelined.runner.let_go(None, None)
    assert pipelined.tokens() == [2 * MAX_CONSECUTIVE_FAILURES - 1]
    assert pipelined.tokens() == [2 * MAX_CONSECUTIVE_FAILURES]


def test_failures_in_a_row_end_the_loop_when_all_in_flight_have_failed(harness: Harness) -> None:
    for _ in range(MAX_CONSECUTIVE_FAILURES - 1):
        harness.runner.let_go(RuntimeError("too hot"))
        harness.run_steps(1)
        assert harness.tokens() == []
    harness.run_steps(9)
    step = [harness.entered() for _ in range(MAX_CONSECUTIVE_FAILURES)][-1]
    if harness.scheduler.max_num_steps_in_flight > 1:
        harness.until_in_flight(2)
    waiting = harness.ask(lambda done: PauseRequested(PauseState.PAUSED_NEW, done))
    harness.runner.let_go(RuntimeError("molten"))
    reason = harness.crashes.get(timeout=TIMEOUT_S)
    assert reason == harness.loop.crash == "RuntimeError: molten"
    planned = [call for call in harness.calls() if call.startswith("plan")]
    failed = [call for call in harness.calls() if call.startswith("fail")]
    assert len(planned) == len(failed) == step + harness.scheduler.max_num_steps_in_flight - 1
    if harness.scheduler.max_num_steps_in_flight > 1:
        waiting.result(TIMEOUT_S)
    else:
        with pytest.raises(RuntimeError, match="the step loop ended: RuntimeError: molten"):
            waiting.result(TIMEOUT_S)


@pytest.mark.parametrize("step", [1, 2])
def test_a_broken_scheduler_ends_the_loop_with_a_reason(harness: Harness, step: int) -> None:
    """Also while another step is in flight."""
    harness.run_steps(9)
    for _ in range(step):
        assert harness.entered()
        if harness.scheduler.max_num_steps_in_flight > 1:
            harness.until_in_flight(2)
        if _ == step - 1:
            harness.scheduler.breaks = KeyError("slot 3")
        harness.runner.let_go(None)
        if _ < step - 1:
            assert harness.tokens() == [1]
    reason = harness.crashes.get(timeout=TIMEOUT_S)
    assert reason == harness.loop.crash == "KeyError: 'slot 3'"
    with pytest.raises(RuntimeError, match="the step loop ended: KeyError"):
        harness.settle()
    harness.runner.let_go(*[None] * 9)
    assert harness.loop.stop(TIMEOUT_S)
    assert harness.crashes.empty()


class RandomRunner(Runner):
    """Lets many steps fail, never three in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.executed: list[int] = []
        self.failed: list[int] = []
        self._chance = random.Random(1)

    def execute(self, plan: StepPlan) -> StepResult:
        self.executed.append(plan.step)
        if self.failed[-2:] != self.executed[-3:-1] and self._chance.random() < 0.4:
            self.failed.append(plan.step)
            raise RuntimeError("too hot")
        return StepResult(np.zeros((1, 1), np.int32))


def test_random_failures_amid_events_from_several_threads(pipelined: Harness) -> None:
    """Not executed is exactly what was planned on top of a step that failed, before that was known."""
    runner = RandomRunner()
    pipelined.loop._executor._runner = runner

    def post_events(owner: int) -> None:
        chance = random.Random(owner)
        for number in range(300):
            events: list[Event] = [OwnerLost(owner), Extended(owner, Extend(number)), StatsDue()]
            pipelined.loop.post(chance.choice(events))
            if number % 3 == 0:
                pipelined.run_steps(chance.randrange(4))

    threads = [threading.Thread(target=post_events, args=(owner,)) for owner in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while pipelined.scheduler.has_work():
        pipelined.settle()
    assert pipelined.loop.stop(TIMEOUT_S)

    calls = [call for call in pipelined.calls() if call.startswith(("plan", "update", "fail"))]
    steps = [int(call.split()[1].rstrip(":")) for call in calls]
    on_top: set[int] = set()
    for step in runner.failed:
        first, last = calls.index(f"plan {step}"), calls.index(f"fail {step}: the model step failed: too hot; retry")
        on_top |= {steps[i] for i in range(first + 1, last) if calls[i].startswith("plan")}
    assert len(runner.failed) > 20
    assert len(on_top) > 10
    assert runner.executed == sorted(set(steps) - on_top)
    assert [step for call, step in zip(calls, steps, strict=True) if call.startswith("fail")] == sorted(
        {*runner.failed, *on_top}
    )


# ---- the end ----


def test_stop_lets_the_steps_in_flight_end(harness: Harness) -> None:
    depth = harness.scheduler.max_num_steps_in_flight
    harness.run_steps(9)
    assert harness.entered() == 1
    if depth > 1:
        harness.until_in_flight(2)
    assert not harness.loop.stop(0.01)
    assert harness.loop.stalled_for() > 0
    harness.runner.let_go(*[None] * depth)
    assert harness.loop.stop(TIMEOUT_S)
    assert [harness.tokens() for _ in range(depth)] == [[n + 1] for n in range(depth)]
    assert harness.messages.empty()
    assert harness.loop.stalled_for() == 0
    assert harness.loop.crash is None
    assert harness.loop.load.num_steps == depth


def test_stop_of_an_idle_loop(harness: Harness) -> None:
    harness.loop.post(OwnerLost(5))
    assert harness.loop.stop(TIMEOUT_S)
    assert harness.scheduler.calls == ["drop 5"]
    assert harness.loop.stalled_for() == 0


def test_who_waits_for_a_stopped_loop_hears_of_it(harness: Harness) -> None:
    harness.run_steps(1)
    assert harness.entered() == 1
    if harness.scheduler.max_num_steps_in_flight == 1:
        waiting = harness.ask(IntegrityCheck)
        assert not harness.loop.stop(0.01)
        harness.runner.let_go(None)
        with pytest.raises(RuntimeError, match="the step loop ended: it was stopped"):
            waiting.result(TIMEOUT_S)
    else:
        harness.runner.let_go(None)
    assert harness.loop.stop(TIMEOUT_S)
    for make_event in (IntegrityCheck, lambda done: PauseRequested(PauseState.PAUSED_ALL, done)):
        with pytest.raises(RuntimeError, match="the step loop ended: it was stopped"):
            harness.ask(make_event).result(TIMEOUT_S)


def test_a_step_that_hangs_is_noticed_while_the_loop_answers(pipelined: Harness) -> None:
    pipelined.run_steps(2)
    assert pipelined.entered() == 1
    pipelined.until_in_flight(2)
    first = pipelined.loop.stalled_for()
    pipelined.settle()
    assert pipelined.loop.stalled_for() > first > 0


def test_prefix_changes_go_with_the_frame_of_their_step(harness: Harness) -> None:
    a, b, c = (bytes([number]) * 32 for number in (1, 2, 3))
    harness.scheduler.findable = [a]
    harness.loop.post(PrefixesAsked(OWNER))
    harness.loop.post(PrefixesAsked(9))
    for owner in (OWNER, 9):
        assert harness.messages.get(timeout=TIMEOUT_S) == {owner: PrefixSnapshot(0, pack([a]))}
    # As if the plan of the step had brought them about.
    harness.scheduler.prefix_changes = (pack([b]), pack([a]))
    harness.runner.let_go(None)
    harness.run_steps(1)
    frames = harness.messages.get(timeout=TIMEOUT_S)
    assert frames.keys() == {OWNER, 9}
    for frame in frames.values():
        assert isinstance(frame, StepFrame)
        assert frame.prefixes == PrefixEvents(1, pack([b]), pack([a]))
    assert [frame.tokens for frame in frames.values() if isinstance(frame, StepFrame)] == [[1], []]
    # Those that come about outside of a step are told without one, to those that are left.
    harness.loop.post(OwnerLost(OWNER))
    harness.settle()
    harness.scheduler.prefix_changes = (pack([c]), b"")
    harness.settle()
    frames = harness.messages.get(timeout=TIMEOUT_S)
    assert frames.keys() == {9}
    frame = frames[9]
    assert isinstance(frame, StepFrame)
    assert frame.prefixes == PrefixEvents(2, pack([c]))
    harness.settle()
    assert harness.messages.empty(), "an idle rank says nothing"


def test_without_listeners_changes_are_dropped(harness: Harness) -> None:
    harness.scheduler.prefix_changes = (bytes(8), b"")
    harness.settle()
    harness.settle()
    assert harness.scheduler.prefix_changes == (b"", b"")
    assert harness.messages.empty()
