"""What a start looks like on the terminal: one line when a stage begins, one with its seconds when it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

# A stage that takes longer says that it is still at it, so that nobody takes it for dead.
REMINDER_INTERVAL_S = 10.0


class Progress:
    """Prints lines with the seconds since the start. May be used from several threads."""

    def __init__(self, console: Console, started_at: float | None = None) -> None:
        self._console = console
        self._started_at = time.monotonic() if started_at is None else started_at

    def line(self, text: str, style: str = "") -> None:
        elapsed = f"{time.monotonic() - self._started_at:6.1f} s"
        self._console.print(f"[dim]{elapsed}[/dim]  {escape(text)}", style=style, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Report `name` as begun, as still going on, and as done."""
        began = time.monotonic()
        over = threading.Event()

        def remind() -> None:
            while not over.wait(REMINDER_INTERVAL_S):
                self.line(f"{name}: still at it after {time.monotonic() - began:.0f} s")

        self.line(f"{name} …")
        reminder = threading.Thread(target=remind, name="progress", daemon=True)
        reminder.start()
        try:
            yield
        finally:
            over.set()
        self.line(f"{name}: done in {time.monotonic() - began:.1f} s")
