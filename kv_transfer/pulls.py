"""All pulls of a transport: who works on each, that each ends once and in time, and what they add up to.

A pull is **queued** until a thread of the transport takes it (`begin`), then **running** until that thread tells its
end (`finish`). `stop` (cancelled, out of time, peer closed) is asked for by anybody: a running pull's thread is
interrupted and finishes with the reason that was asked for first; a queued one is ended by the keeper, the one
thread here, which also watches the deadlines. Callbacks run on those threads, without the lock. A pull that takes no
time may be done by its caller instead, and has no states (`do_at_once`).

Shared state: everything of a pull but its constants, under the one lock of its `Pulls`.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from enum import Enum, auto

from kv_transfer.transport import FailureReason, OnEnd, TransferEnd, TransferError, TransportStats

_log = logging.getLogger(__name__)

_INTERRUPTED = TransferEnd(FailureReason.BACKEND, "interrupted")


class _State(Enum):
    QUEUED = auto()
    RUNNING = auto()
    ENDED = auto()


class Pull:
    """One pull, as its caller holds it (a `Transfer`) and as the thread does that works on it."""

    def __init__(self, pulls: Pulls, owner: object, num_blocks: int, num_bytes: int, timeout_s: float, on_end: OnEnd):
        self.num_blocks = num_blocks
        self.num_bytes = num_bytes
        self.started_at = time.monotonic()
        self.timeout_s = timeout_s
        self.deadline = self.started_at + timeout_s
        self._pulls = pulls
        self._owner: object | None = owner
        self._on_end: OnEnd | None = on_end
        self._state = _State.QUEUED
        self._failure: TransferEnd | None = None
        self._interrupt: Callable[[], None] | None = None

    @property
    def failure(self) -> TransferEnd | None:
        """What it must end with, if somebody asked to stop it."""
        return self._failure

    def begin(self, interrupt: Callable[[], None] | None = None) -> bool:
        """Take it; False if it is not to be had any more. `interrupt` makes the caller look at `failure`.

        `interrupt` is called from any thread, at most once and not after `finish`; it must not block.
        """
        with self._pulls._lock:
            if self._state is not _State.QUEUED or self._failure is not None:
                return False
            self._state = _State.RUNNING
            self._interrupt = interrupt
            return True

    def finish(self, end: TransferEnd) -> TransferEnd:
        """Tell its end, once nothing more is written; by the thread that has begun it. Returns what was told."""
        return self._pulls.finish(self, end)

    def cancel(self) -> None:
        self._pulls.stop(self, FailureReason.TIMEOUT, "cancelled")


class EndedTransfer:
    """One that had ended when its caller got it."""

    def cancel(self) -> None:
        pass


_ENDED = EndedTransfer()


class Pulls:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._live: set[Pull] = set()
        self._num_at_once = 0
        self._stats = TransportStats()
        self._keeper: threading.Thread | None = None
        self._wakes_at = float("inf")
        self._is_closed = False

    def add(self, owner: object, num_blocks: int, num_bytes: int, timeout_s: float, on_end: OnEnd) -> Pull:
        """A queued pull, `owner`'s (`stop_all`). Raises TransferError (`backend`) after `close`."""
        pull = Pull(self, owner, num_blocks, num_bytes, timeout_s, on_end)
        with self._lock:
            self._check_open()
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name=f"kv-{self._name}-keeper", daemon=True)
                self._keeper.start()
            self._live.add(pull)
            if pull.deadline < self._wakes_at:
                self._changed.notify_all()
        return pull

    def do_at_once(
        self, num_blocks: int, num_bytes: int, work: Callable[[], TransferEnd], on_end: OnEnd
    ) -> EndedTransfer:
        """A pull that its caller does now, by `work`, which must be short: it is not stopped, and `close` waits for it.

        Raises TransferError (`backend`) after `close`.
        """
        started_at = time.monotonic()
        with self._lock:
            self._check_open()
            self._num_at_once += 1
        end = _INTERRUPTED
        try:
            end = work()
        finally:
            with self._lock:
                self._num_at_once -= 1
                self._count(num_blocks, num_bytes, started_at, end)
                if self._is_closed:
                    self._changed.notify_all()
        _tell(on_end, end)
        return _ENDED

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferError(FailureReason.BACKEND, f"the {self._name} transport is closed")

    def stop(self, pull: Pull, reason: FailureReason, message: str) -> None:
        """Ask for its end. Never blocks."""
        with self._lock:
            self._stop(pull, reason, message)

    def stop_all(self, owner: object | None, reason: FailureReason, message: str) -> None:
        """Ask for the end of all pulls, or of `owner`'s."""
        with self._lock:
            for pull in self._live:
                if owner is None or pull._owner is owner:
                    self._stop(pull, reason, message)

    def _stop(self, pull: Pull, reason: FailureReason, message: str) -> None:
        if pull._state is _State.ENDED or pull._failure is not None:
            return
        pull._failure = TransferEnd(reason, message)
        if pull._state is _State.QUEUED:
            self._changed.notify_all()
        elif pull._interrupt is not None:
            pull._interrupt()

    def finish(self, pull: Pull, end: TransferEnd) -> TransferEnd:
        with self._lock:
            end = pull._failure or end
            on_end = pull._on_end
            assert on_end is not None, "a pull ends once"
            pull._state = _State.ENDED
            # The caller may keep the pull for long: it must not keep the peer's mapping alive.
            pull._owner = pull._on_end = pull._interrupt = None
            self._live.discard(pull)
            self._count(pull.num_blocks, pull.num_bytes, pull.started_at, end)
            if self._is_closed:
                self._changed.notify_all()
        _tell(on_end, end)
        return end

    def _count(self, num_blocks: int, num_bytes: int, started_at: float, end: TransferEnd) -> None:
        stats = self._stats
        stats.num_transfers += 1
        stats.busy_s += time.monotonic() - started_at
        if end.reason is None:
            stats.num_blocks += num_blocks
            stats.num_bytes += num_bytes
        else:
            stats.failures[end.reason] = stats.failures.get(end.reason, 0) + 1

    def _keep(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                orphans = []
                for pull in list(self._live):
                    if pull.deadline <= now:
                        self._stop(pull, FailureReason.TIMEOUT, f"not done after {pull.timeout_s:g} s")
                    if pull._failure is not None and pull._state is _State.QUEUED:
                        pull._state = _State.RUNNING
                        orphans.append(pull)
                if not orphans:
                    if self._is_closed and not self._live:
                        return
                    waiting = [pull.deadline for pull in self._live if pull._failure is None]
                    self._wakes_at = min(waiting, default=float("inf"))
                    self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
            for pull in orphans:
                pull.finish(TransferEnd())

    def stats(self) -> TransportStats:
        with self._lock:
            return copy.deepcopy(self._stats)

    def close(self, deadline: float) -> None:
        """Stop all pulls, take no more, and end the keeper; to be called when the working threads have ended."""
        with self._lock:
            self._is_closed = True
            for pull in self._live:
                self._stop(pull, FailureReason.PEER_LOST, "the transport is being closed")
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_at_once, max(deadline - time.monotonic(), 0.0))
            keeper = self._keeper
        if keeper is not None:
            join(keeper, deadline)


def _tell(on_end: OnEnd, end: TransferEnd) -> None:
    try:
        on_end(end)
    except Exception:
        _log.exception("The callback of a pull has failed")


def join(thread: threading.Thread, deadline: float) -> None:
    """Wait for its end until `deadline` (monotonic); a thread does not wait for itself."""
    if thread is not threading.current_thread():
        thread.join(max(deadline - time.monotonic(), 0.0))
        if thread.is_alive():
            _log.warning("Thread %s has not ended in time", thread.name)
