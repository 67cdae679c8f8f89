"""The step loop of one rank: inbox → schedule → execute → update → outbox, on a thread of its own.

The scheduler and the runner are touched by this thread only. Others `post` events and read `load`; frames leave
through the `send` callback, which must not block.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from model_runner.runner import ModelRunner
from rank_scheduler.messages import RankLoad, StepFrame, Submit
from rank_scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# A runner that fails this often in a row is broken, not unlucky: the rank gives up and is replaced.
MAX_CONSECUTIVE_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Submitted:
    owner: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class Aborted:
    owner: int
    id: int


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """A router's connection closed: nobody waits for its requests any more."""

    owner: int


@dataclass(frozen=True, slots=True)
class IntegrityCheck:
    """Run the scheduler's invariants between two steps; the loop resolves `done`, also when it has ended."""

    done: Future[None]


Event = Submitted | Aborted | OwnerLost | IntegrityCheck


class RankLoop:
    """Owner of the step thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        send: Callable[[dict[int, StepFrame]], None],
        on_crash: Callable[[str], None],
    ) -> None:
        """`on_crash` is called, from the step thread, once and as the thread's last act."""
        self._scheduler = scheduler
        self._runner = runner
        self._send = send
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rank-steps", daemon=True)
        self._stopping = False
        self._ended = False
        self._num_failures = 0
        self._busy_since: float | None = None
        self.load: RankLoad = scheduler.load()
        """Figures after the latest step; replaced as a whole, so any thread may read it."""
        self.num_ignored_messages = 0
        """The scheduler's, after the latest step."""
        self.crash: str | None = None

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Event) -> None:
        """Hand over an event; safe from any thread. What comes after the end has no effect."""
        self._inbox.put(event)
        if self._ended:
            self._refuse_checks()

    def stop(self, timeout_s: float) -> bool:
        """Let the current step end, then end the thread; False if it has not ended in time."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stalled_for(self) -> float:
        """Seconds that the current step has taken so far; 0 when idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_in()
                self._busy_since = time.monotonic()
                self._step()
                self._busy_since = None
        except Exception as error:
            logger.exception("step loop ended")
            self.crash = f"{type(error).__name__}: {error}"
        # First the mark, then the inbox: a check that is posted meanwhile is refused here or by its poster.
        self._ended = True
        self._refuse_checks()
        if self.crash is not None:
            self._on_crash(self.crash)

    def _refuse_checks(self) -> None:
        """Nobody will run what is left in the inbox; who waits for a check must hear that."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._inbox.get_nowait()
                if isinstance(event, IntegrityCheck):
                    event.done.set_exception(RuntimeError(f"the step loop ended: {self.crash or 'it was stopped'}"))

    def _take_in(self) -> None:
        """Apply everything that has arrived; with nothing to compute, wait for the next event."""
        event = None if self._scheduler.has_work() else self._inbox.get()
        while True:
            if event is not None:
                self._apply(event)
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _apply(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case Submitted(owner, submit):
                self._scheduler.add(owner, submit, now)
            case Aborted(owner, request_id):
                self._scheduler.abort(owner, request_id, now)
            case OwnerLost(owner):
                self._scheduler.drop_owner(owner, now)
            case IntegrityCheck(done):
                try:
                    self._scheduler.check_integrity()
                    done.set_result(None)
                except AssertionError as error:
                    done.set_exception(error)

    def _step(self) -> None:
        plan = self._scheduler.schedule(time.monotonic())
        if plan is None:
            frames = self._scheduler.take_frames()
        else:
            try:
                result = self._runner.execute(plan)
            except Exception as error:
                self._num_failures += 1
                logger.exception("step %d failed (%d in a row)", plan.step, self._num_failures)
                frames = self._scheduler.fail(plan, f"the model step failed: {error}; retry", time.monotonic())
                if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
                    self._send(frames)
                    raise
            else:
                self._num_failures = 0
                frames = self._scheduler.update(plan, result, time.monotonic())
        self.load = self._scheduler.load()
        self.num_ignored_messages = self._scheduler.num_ignored_messages
        if frames:
            self._send(frames)
