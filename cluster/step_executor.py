"""Execution of step plans: in order, one at a time, on the caller's thread or on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kv_transfer.connector import WorkerConnector
from model_runner.runner import ModelRunner
from rank_scheduler.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepEnded:
    plan: StepPlan
    outcome: StepResult | Exception
    was_executed: bool = True
    """False: it was dropped, because the step before it failed (with this exception)."""


class StepExecutor:
    """Runner and connector worker as one; touched by the thread that executes only."""

    def __init__(self, runner: ModelRunner, connector_worker: WorkerConnector | None = None) -> None:
        self._runner = runner
        self._worker = connector_worker
        self._has_started_load = False
        """The connector worker has taken the metadata of the present plan."""
        if connector_worker is not None:
            runner.kv_hooks = self
        self.busy_since: float | None = None
        """When the step began that is being computed, on the monotonic clock; any thread may read it."""

    def execute(self, plan: StepPlan) -> StepEnded:
        """Never raises: an exception is an outcome."""
        self.busy_since = time.monotonic()
        self._has_started_load = False
        outcome: StepResult | Exception
        try:
            self._handle_preemptions(plan)
            outcome = self._runner.execute(plan)
        except Exception as error:
            outcome = error
        if self._worker is not None:
            outcome = self._finish(plan, outcome)
        self.busy_since = None
        return StepEnded(plan, outcome)

    def drop(self, plan: StepPlan, failure: Exception) -> StepEnded:
        """Compute nothing, because of the `failure` of the step before. Never raises."""
        self._has_started_load = False
        if self._worker is not None:
            try:
                self._handle_preemptions(plan)
            except Exception:
                logger.exception("the KV connector failed in step %d", plan.step)
            self._finish(plan, failure)
        return StepEnded(plan, failure, was_executed=False)

    def start_load_kv(self, metadata: object) -> None:
        """Called by the runner, within `execute`: see `KvHooks`."""
        assert self._worker is not None
        self._has_started_load = True
        self._worker.start_load_kv(metadata)

    def wait_for_layer_load(self, layer: int) -> None:
        assert self._worker is not None
        self._worker.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        assert self._worker is not None
        self._worker.save_kv_layer(layer)

    def _handle_preemptions(self, plan: StepPlan) -> None:
        """First of all: what follows may write into blocks that somebody relies on."""
        if self._worker is not None and plan.connector_metadata is not None:
            self._worker.handle_preemptions(plan.connector_metadata)

    def _finish(self, plan: StepPlan, outcome: StepResult | Exception) -> StepResult | Exception:
        """The connector's part of a step's end; the outcome with what the connector adds to it."""
        assert self._worker is not None
        was_computed = isinstance(outcome, StepResult)
        try:
            if plan.connector_metadata is not None and not self._has_started_load:
                # The runner has failed before, or the plan was dropped: what it asks for is remembered as asked for.
                self._worker.start_load_kv(plan.connector_metadata)
            invalid = self._worker.finish_step(plan.connector_metadata, was_computed=was_computed)
        except Exception as error:
            logger.exception("the KV connector failed in step %d", plan.step)
            return error if was_computed else outcome
        if invalid and isinstance(outcome, StepResult):
            return msgspec.structs.replace(outcome, invalid_blocks=invalid)
        return outcome


class ExecutorThread:
    """Takes plans ahead of time, so that a step begins the moment the one before it ends.

    Each submitted plan comes back through `on_ended` (called on this thread) exactly once, in order. What was planned
    on top of a failed step must not be computed: from a failure on, plans come back unexecuted, until `resume`.
    """

    def __init__(self, executor: StepExecutor, on_ended: Callable[[StepEnded], None]) -> None:
        self._executor = executor
        self._on_ended = on_ended
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        # Written by the thread while a plan is out, by `resume` while none is.
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="rank-executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def resume(self) -> None:
        """Execute again. Only when every submitted plan has come back."""
        self._failure = None

    def end(self) -> None:
        """Let the thread end once it has come to the end of what was submitted."""
        self._plans.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if it has not come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            if self._failure is not None:
                ended = self._executor.drop(plan, self._failure)
            else:
                ended = self._executor.execute(plan)
                if isinstance(ended.outcome, Exception):
                    self._failure = ended.outcome
            self._on_ended(ended)
