"""The step loop of one rank: inbox → schedule → execute → update → outbox, on a thread of its own.

The scheduler is touched by this thread only. Others `post` events and read `load` and `stats`; messages leave through
the `send` callback, which must not block.

A scheduler with one step in flight has its steps executed right here. With more of them, an `ExecutorThread` executes,
and the loop makes the next plan and takes in events while a step is computed; that a step has ended is an event too.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from cluster.prefix_feed import PrefixFeed
from cluster.step_executor import ExecutorThread, StepEnded, StepExecutor
from kv_transfer.connector import LoadFenced, LoadFinished, SendFinished, WorkerConnector
from model_runner.runner import ModelRunner
from rank_scheduler.interface import PauseState, SchedulerInterface
from rank_scheduler.messages import Explain, Explained, Extend, Prefetch, RankLoad, RankToRouter, StepFrame, Submit
from rank_scheduler.plan import StepPlan, StepResult
from rank_scheduler.stats import StepStats
from rank_scheduler.structured_output import CompileGrammar, GrammarMatcher

logger = logging.getLogger(__name__)

# A runner that fails this often in a row is broken, not unlucky: the rank gives up and is replaced.
MAX_CONSECUTIVE_FAILURES = 3
# The scheduler has work, could plan nothing, and no step is in flight: a connector that did not know must be asked
# again, and no event will tell when.
RETRY_INTERVAL_S = 0.01


class GrammarCompiler(Protocol):
    """Compiles off the step loop. None of its methods blocks."""

    def compile(self, action: CompileGrammar) -> None:
        """Answered by `GrammarCompiled`, once, from any thread."""
        ...

    def cancel(self, owner: int, request_id: int) -> None:
        """Nobody waits for the answer any more; ignored if there is nothing to cancel."""
        ...

    def cancel_owner(self, owner: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Submitted:
    owner: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class Extended:
    owner: int
    extend: Extend


@dataclass(frozen=True, slots=True)
class Announced:
    """A request will come whose KV can partly be fetched by now."""

    owner: int
    prefetch: Prefetch


@dataclass(frozen=True, slots=True)
class Aborted:
    owner: int
    id: int


@dataclass(frozen=True, slots=True)
class HandedOff:
    """Another rank goes on with it."""

    owner: int
    id: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Nobody can go on with these yet, which were handed off."""

    owner: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """A router's connection closed: nobody waits for its requests any more."""

    owner: int


@dataclass(frozen=True, slots=True)
class Asked:
    """Answered by an `Explained` to the owner."""

    owner: int
    explain: Explain


@dataclass(frozen=True, slots=True)
class PrefixesAsked:
    """Answered by a snapshot, and by changes from then on."""

    owner: int


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """What a `CompileGrammar` came to: a matcher, or else why there is none."""

    owner: int
    id: int
    matcher: GrammarMatcher | None
    error: str = ""
    is_request_fault: bool = True
    """Of the error; else another attempt may do."""


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """The loop resolves `done` when every step that was planned before has ended, also when it has ended itself."""

    state: PauseState
    done: Future[None]


@dataclass(frozen=True, slots=True)
class IntegrityCheck:
    """Run the scheduler's invariants between two of its calls; the loop resolves `done`, also when it has ended."""

    done: Future[None]


@dataclass(frozen=True, slots=True)
class IdlenessAsked:
    """The loop resolves `done`: whether no request lives here, and no block is kept for anybody; so after its end."""

    done: Future[bool]


@dataclass(frozen=True, slots=True)
class StatsDue:
    """Replace `RankLoop.stats`."""


Event = (
    Submitted
    | Extended
    | Announced
    | Aborted
    | Kept
    | HandedOff
    | OwnerLost
    | Asked
    | PrefixesAsked
    | GrammarCompiled
    | LoadFinished
    | LoadFenced
    | SendFinished
    | PauseRequested
    | IntegrityCheck
    | IdlenessAsked
    | StatsDue
    | StepEnded
)


class RankLoop:
    """Owner of the loop's thread, and of the executor's if there is one.

    A plan belongs to the scheduler until `schedule` returns it, then to `_in_flight` (in order), and is given back by
    exactly one `update` or `fail`, in that order. When a step fails, the plans in flight behind it fail as well,
    unexecuted, and nothing is planned until the last of them is back.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        runner: ModelRunner,
        send: Callable[[Mapping[int, RankToRouter]], None],
        on_crash: Callable[[str], None],
        *,
        grammar_compiler: GrammarCompiler | None = None,
        connector_worker: WorkerConnector | None = None,
    ) -> None:
        """`on_crash` is called, from the loop's thread, once and as the thread's last act."""
        self._scheduler = scheduler
        self._send = send
        self._on_crash = on_crash
        self._grammar_compiler = grammar_compiler
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rank-steps", daemon=True)
        self._executor = StepExecutor(runner, connector_worker)
        self._max_in_flight = scheduler.max_num_steps_in_flight
        self._executor_thread = ExecutorThread(self._executor, self._inbox.put) if self._max_in_flight > 1 else None
        self._in_flight: deque[StepPlan] = deque()
        self._pauses: deque[tuple[StepPlan, Future[None]]] = deque()
        """Requested pauses, each with the last plan that was in flight then."""
        self._idleness: list[Future[bool]] = []
        """Asked for; answered behind the frames that are due."""
        self._prefixes = PrefixFeed()
        self._found_nothing = False
        """The latest `schedule` had nothing to compute."""
        self._is_failing = False
        """A step failed, and plans that were made on top of it are still in flight."""
        self._num_failures = 0
        self._stopping = False
        self._ended = False
        self._busy_since: float | None = None
        self.load: RankLoad = scheduler.load()
        """Figures after the latest step; replaced as a whole, so any thread may read it."""
        self.stats = StepStats()
        """What the steps between the latest two `StatsDue` brought; replaced as a whole."""
        self.num_ignored_messages = 0
        """The scheduler's, after the latest step."""
        self.crash: str | None = None

    # ---- any thread ----

    def start(self) -> None:
        if self._executor_thread is not None:
            self._executor_thread.start()
        self._thread.start()

    def post(self, event: Event) -> None:
        """Hand over an event. What comes after the end has no effect."""
        self._inbox.put(event)
        if self._ended:
            self._refuse_rest()

    def stop(self, timeout_s: float) -> bool:
        """Let the steps in flight end, then end the threads; False if they have not ended in time."""
        deadline = time.monotonic() + timeout_s
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_s)
        if self._executor_thread is not None and not self._executor_thread.join(deadline - time.monotonic()):
            return False
        return not self._thread.is_alive()

    def stalled_for(self) -> float:
        """Seconds that the current step, or what the loop does beside it, has taken so far; 0 when idle."""
        beginnings = [since for since in (self._busy_since, self._executor.busy_since) if since is not None]
        return time.monotonic() - min(beginnings) if beginnings else 0.0

    # ---- the loop's thread ----

    def _run(self) -> None:
        try:
            while not self._stopping or self._in_flight:
                self._take_in()
                plan = self._schedule() if self._may_plan() else None
                self._compile_grammars()
                if plan is not None:
                    self._start(plan)
                # What a plan has changed goes with its step's frame, if that is still to come.
                self._tell(self._scheduler.take_frames(), with_prefixes=not self._in_flight)
                self.load = self._scheduler.load()
                self._answer_idleness()
                self.num_ignored_messages = self._scheduler.num_ignored_messages
        except Exception as error:
            logger.exception("step loop ended")
            self.crash = f"{type(error).__name__}: {error}"
        self._busy_since = None
        if self._executor_thread is not None:
            self._executor_thread.end()
        # First the mark, then the inbox: what is posted meanwhile is refused here or by its poster.
        self._ended = True
        self._refuse_rest()
        for _, done in self._pauses:
            done.set_exception(self._end_error())
        for idle in self._idleness:
            idle.set_result(True)
        if self.crash is not None:
            self._on_crash(self.crash)

    def _take_in(self) -> None:
        """Apply everything that has arrived; with nothing to plan, wait for the next event."""
        self._busy_since = None
        event = self._next_event(self._patience_s())
        self._busy_since = time.monotonic()
        while event is not None:
            self._apply(event)
            event = self._next_event(0.0)

    def _next_event(self, timeout_s: float | None) -> Event | None:
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _patience_s(self) -> float | None:
        """How long to wait for an event; None: until one comes, be it the end of a step in flight."""
        if not self._may_plan() or not self._scheduler.has_work():
            return None
        if not self._found_nothing:
            return 0.0
        return None if self._in_flight else RETRY_INTERVAL_S

    def _may_plan(self) -> bool:
        return not (self._stopping or self._is_failing) and len(self._in_flight) < self._max_in_flight

    def _schedule(self) -> StepPlan | None:
        plan = self._scheduler.schedule(time.monotonic())
        self._found_nothing = plan is None
        return plan

    def _start(self, plan: StepPlan) -> None:
        self._in_flight.append(plan)
        if self._executor_thread is not None:
            self._executor_thread.submit(plan)
        else:
            self._end_step(self._executor.execute(plan))

    def _end_step(self, ended: StepEnded) -> None:
        """Give the oldest plan in flight back to the scheduler."""
        plan, outcome = self._in_flight.popleft(), ended.outcome
        assert plan is ended.plan, f"step {ended.plan.step} ended before step {plan.step}"
        if isinstance(outcome, StepResult):
            self._num_failures = 0
            self._tell(self._scheduler.update(plan, outcome, time.monotonic()))
        else:
            self._is_failing = True
            if ended.was_executed:
                self._num_failures += 1
                logger.error("step %d failed (%d in a row)", plan.step, self._num_failures, exc_info=outcome)
            self._tell(self._scheduler.fail(plan, f"the model step failed: {outcome}; retry", time.monotonic()))
        while self._pauses and self._pauses[0][0] is plan:
            self._pauses.popleft()[1].set_result(None)
        if not self._in_flight and isinstance(outcome, Exception):
            if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
                raise outcome
            self._is_failing = False
            if self._executor_thread is not None:
                self._executor_thread.resume()

    def _tell(self, frames: Mapping[int, StepFrame], *, with_prefixes: bool = True) -> None:
        if with_prefixes:
            frames = self._prefixes.add_to(frames, self._scheduler.take_prefix_changes(), self.load)
        if frames:
            self._send(frames)

    def _answer_idleness(self) -> None:
        load = self.load
        is_idle = not (load.num_running or load.num_waiting or load.num_deferred)
        while self._idleness:
            self._idleness.pop().set_result(is_idle and load.num_free_blocks == load.num_blocks)

    def _compile_grammars(self) -> None:
        for action in self._scheduler.take_compile_actions():
            if self._grammar_compiler is not None:
                self._grammar_compiler.compile(action)
            else:
                error = "this rank has no structured output; send the request without a grammar"
                self._scheduler.grammar_compiled(action.owner, action.id, None, error, time.monotonic())

    def _apply(self, event: Event) -> None:
        scheduler, now = self._scheduler, time.monotonic()
        match event:
            case StepEnded():
                self._end_step(event)
            case Submitted(owner, submit):
                scheduler.add(owner, submit, now)
            case Extended(owner, extend):
                scheduler.extend(owner, extend, now)
            case Announced(owner, prefetch):
                scheduler.prefetch(owner, prefetch, now)
            case Aborted(owner, request_id):
                scheduler.abort(owner, request_id, now)
                if self._grammar_compiler is not None:
                    self._grammar_compiler.cancel(owner, request_id)
            case HandedOff(owner, request_id):
                scheduler.hand_off(owner, request_id, now)
                if self._grammar_compiler is not None:
                    self._grammar_compiler.cancel(owner, request_id)
            case Kept(owner, ids):
                scheduler.keep(owner, ids)
            case OwnerLost(owner):
                scheduler.drop_owner(owner, now)
                self._prefixes.drop(owner)
                if self._grammar_compiler is not None:
                    self._grammar_compiler.cancel_owner(owner)
            case Asked(owner, explain):
                self._send({owner: Explained(explain.query, now, scheduler.explain(explain.request_id))})
            case PrefixesAsked(owner):
                for part in self._prefixes.watch(owner, scheduler.findable_prefixes()):
                    self._send({owner: part})
            case GrammarCompiled(owner, request_id, matcher, error, is_request_fault):
                scheduler.grammar_compiled(owner, request_id, matcher, error, now, is_request_fault=is_request_fault)
            case LoadFinished():
                scheduler.load_finished(event, now)
            case LoadFenced():
                scheduler.load_fenced(event, now)
            case SendFinished():
                scheduler.send_finished(event, now)
            case PauseRequested(state, done):
                scheduler.set_pause(state, now)
                if self._in_flight:
                    self._pauses.append((self._in_flight[-1], done))
                else:
                    done.set_result(None)
            case IntegrityCheck(done):
                try:
                    scheduler.check_integrity()
                    done.set_result(None)
                except AssertionError as error:
                    done.set_exception(error)
            case IdlenessAsked(done):
                self._idleness.append(done)
            case StatsDue():
                self.stats = scheduler.take_stats()

    # ---- after the end: the loop's thread, and whoever posts ----

    def _refuse_rest(self) -> None:
        """Nobody will take in what is left in the inbox; who waits for an answer must hear that."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._inbox.get_nowait()
                if isinstance(event, IntegrityCheck | PauseRequested):
                    event.done.set_exception(self._end_error())
                elif isinstance(event, IdlenessAsked):
                    event.done.set_result(True)

    def _end_error(self) -> RuntimeError:
        return RuntimeError(f"the step loop ended: {self.crash or 'it was stopped'}")
