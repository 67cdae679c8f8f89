"""When something that has failed may be tried again; pure."""

from __future__ import annotations


class Backoff:
    """From `first_s` on, doubled with every failure in a row, up to `most_s`. While it waits, one trial at a time."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._wait_s = 0.0
        """0: the last trial went well."""
        self._next_at = 0.0
        self._is_on_trial = False

    @property
    def has_failed(self) -> bool:
        return self._wait_s > 0

    def would_try(self, now: float) -> bool:
        return not self._wait_s or now >= self._next_at

    def may_try(self, now: float) -> bool:
        """Whoever is told so after a failure is the only one for a while, and tells what comes of it."""
        if not self.would_try(now):
            return False
        if self._wait_s:
            self._is_on_trial = True
            self._next_at = now + self._wait_s
        return True

    def failed(self, now: float) -> bool:
        """True if it is the first failure in a row. Those that had begun before it change nothing."""
        is_first = not self._wait_s
        if is_first:
            self._wait_s = self._first_s
        elif self._is_on_trial:
            self._wait_s = min(2 * self._wait_s, self._most_s)
        else:
            return False
        self._is_on_trial = False
        self._next_at = now + self._wait_s
        return is_first

    def succeeded(self) -> bool:
        """True if that is news."""
        was_failing = self._wait_s > 0
        self._wait_s, self._is_on_trial = 0.0, False
        return was_failing
