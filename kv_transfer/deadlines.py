"""Calls that are made at a time, unless they are called off before: what ends waits whose own thread may hang."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Deadlines:
    """May be used from any thread. Its one thread makes the calls, which must not block."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int]] = []
        self._calls: dict[int, Callable[[], None]] = {}
        self._num_calls = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call_in(self, seconds: float, call: Callable[[], None]) -> int:
        """Returns what `call_off` takes."""
        with self._changed:
            self._num_calls += 1
            self._calls[self._num_calls] = call
            heapq.heappush(self._heap, (time.monotonic() + seconds, self._num_calls))
            if self._heap[0][1] == self._num_calls:
                self._changed.notify()
            return self._num_calls

    def call_off(self, token: int) -> None:
        """It may be under way, or made already."""
        with self._changed:
            self._calls.pop(token, None)

    def close(self, timeout_s: float) -> None:
        """Idempotent. No call is made after it."""
        with self._changed:
            self._is_closed = True
            self._calls.clear()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                while self._heap and self._heap[0][1] not in self._calls:
                    heapq.heappop(self._heap)
                left = self._heap[0][0] - time.monotonic() if self._heap else None
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                call = self._calls.pop(heapq.heappop(self._heap)[1])
            try:
                call()
            except Exception:
                _log.exception("What was due at a deadline has failed")
