"""Execution of step plans: in order, one at a time, on the caller's thread or on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from model_runner.runner import ModelRunner
from rank_scheduler.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


class ConnectorWorker(Protocol):
    """The half of a KV connector that moves data."""

    def start(self, metadata: object) -> None:
        """Begin what the scheduler half asked for, and return: the end of it is told by events.

        Called once for each plan that has metadata, in order, on the thread that executes them and before the plan
        is executed; also for plans that will not be, since what they ask for is remembered as asked for.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepEnded:
    plan: StepPlan
    outcome: StepResult | Exception
    was_executed: bool = True
    """False: it was dropped, because the step before it failed (with this exception)."""


class StepExecutor:
    """Runner and connector worker as one; touched by the thread that executes only."""

    def __init__(self, runner: ModelRunner, connector_worker: ConnectorWorker | None = None) -> None:
        self._runner = runner
        self._connector_worker = connector_worker
        self.busy_since: float | None = None
        """When the step began that is being computed, on the monotonic clock; any thread may read it."""

    def execute(self, plan: StepPlan) -> StepEnded:
        """Never raises: an exception is an outcome."""
        self.busy_since = time.monotonic()
        try:
            self._start_transfers(plan)
            return StepEnded(plan, self._runner.execute(plan))
        except Exception as error:
            return StepEnded(plan, error)
        finally:
            self.busy_since = None

    def drop(self, plan: StepPlan, failure: Exception) -> StepEnded:
        """Compute nothing, because of the `failure` of the step before. Never raises."""
        try:
            self._start_transfers(plan)
        except Exception:
            logger.exception("the transfers of step %d could not be started", plan.step)
        return StepEnded(plan, failure, was_executed=False)

    def _start_transfers(self, plan: StepPlan) -> None:
        if plan.connector_metadata is not None and self._connector_worker is not None:
            self._connector_worker.start(plan.connector_metadata)


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
