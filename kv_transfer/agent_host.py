"""A rank's agent as a process: started, watched, killed, and started anew; see `kv_transfer.agent_transport`.

Everything happens on one event loop, which never waits for the process: its end is told by a pidfd, and what it does
not read is kept. The loop's thread must live as long as the host, since the kernel ends the agent with the thread
that started it.

The memory file (a descriptor of its own) and the socket that peers' agents connect to belong to the host: a new agent
inherits both, so that the rank's endpoint stays what it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kv_transfer.agent_messages import Broken, Command, Event, Pipe, Start, Started

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
MAX_STARTS = 6
"""Within STARTS_WINDOW_S; after that many the next start waits until the first of them is so long ago."""
STARTS_WINDOW_S = 60.0
_STDERR = 2


class StartBudget:
    """How often an agent may be started; pure."""

    def __init__(self, max_starts: int = MAX_STARTS, window_s: float = STARTS_WINDOW_S) -> None:
        self._starts: deque[float] = deque(maxlen=max_starts)
        self._window_s = window_s

    def take(self, now: float) -> float:
        """Seconds to wait before the next start, which counts from now on."""
        is_full = len(self._starts) == self._starts.maxlen
        start = max(now, self._starts[0] + self._window_s) if is_full else now
        self._starts.append(start)
        return start - now


class AgentHost:
    """Used from its event loop only."""

    def __init__(
        self,
        library: str,
        memory_fd: int,
        listener: socket.socket,
        start: Start,
        *,
        on_started: Callable[[], None],
        on_event: Callable[[Event], None],
        on_ended: Callable[[str], None],
    ) -> None:
        """Takes over both descriptors. `on_ended` is called for every agent that was started, after it is reaped."""
        self._library = library
        self._memory_fd = memory_fd
        self._listener = listener
        self._start = start
        self._on_started = on_started
        self._on_event = on_event
        self._on_ended = on_ended
        self._budget = StartBudget()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe[Event] | None = None
        self._connecting: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Of the start that is due, or of the deadline of the one under way."""
        self._why = ""
        """The agent's last words, or what it was killed for."""
        self._is_closed = False
        self._gone = asyncio.Event()
        """The last agent has been reaped."""
        self.is_ready = False
        """It takes commands."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_resting(self) -> bool:
        """There is no agent, and none is started for a while: too many have ended."""
        return self._process is None

    def spawn(self) -> None:
        """Once; later starts happen by themselves. Raises OSError."""
        self._budget.take(time.monotonic())
        self._spawn()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        fds = {"--rank-fd": theirs.fileno(), "--memory-fd": self._memory_fd, "--listen-fd": self._listener.fileno()}
        command = [sys.executable, "-P", "-m", "kv_transfer.agent_process", "--library", self._library]
        command += ["--rank-pid", str(os.getpid())]
        command += [argument for flag, fd in fds.items() for argument in (flag, str(fd))]
        try:
            # What a library prints belongs to the log; standard output may be somebody's protocol.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=_STDERR, pass_fds=tuple(fds.values()), env=_environment()
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._why = ""
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(pidfd, self._on_exit, pidfd)
        self._pipe = pipe = Pipe(Event, self._on_message, lambda: self.kill("it closed its socket"))
        pipe.send(self._start)
        self._connecting = loop.create_task(loop.create_unix_connection(lambda: pipe, sock=ours))
        self._timer = loop.call_later(START_TIMEOUT_S, self.kill, f"it did not start within {START_TIMEOUT_S:g} s")

    def _on_message(self, event: Event) -> None:
        match event:
            case Started():
                assert self._timer is not None
                self._timer.cancel()
                self.is_ready = True
                self._on_started()
            case Broken():
                self._why = event.message
            case _:
                self._on_event(event)

    def send(self, command: Command) -> None:
        """To the agent that is ready now; never blocks."""
        assert self._pipe is not None
        self._pipe.send(command)

    def kill(self, why: str) -> None:
        """The fence: when `on_ended` is called, nothing of the agent runs any more. Never blocks."""
        if self._process is not None and self._process.poll() is None:
            self._why = self._why or why
            self._process.kill()

    def _on_exit(self, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        # Its last words are readable by now, and are read first.
        loop.call_soon(self._reap)

    def _reap(self) -> None:
        assert self._process is not None
        assert self._pipe is not None
        assert self._timer is not None
        loop = asyncio.get_running_loop()
        status = self._process.wait()
        self._pipe.close()
        self._timer.cancel()
        message = f"the {self._library} agent (process {self._process.pid}, status {status}) ended: "
        message += self._why or "nobody knows why"
        self._process = None
        self.is_ready = False
        if not self._is_closed:
            delay_s = self._budget.take(time.monotonic())
            _log.warning("%s; the next one starts %s", message, f"in {delay_s:.0f} s" if delay_s else "now")
            if delay_s:
                self._timer = loop.call_later(delay_s, self._spawn)
            else:
                self._spawn()
        self._on_ended(message)
        if self._is_closed:
            self._gone.set()

    async def close(self) -> None:
        """End the agent, told by `on_ended` as always, and start no other. Called once."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.kill("the transport was closed")
        self._listener.close()
        os.close(self._memory_fd)
        if self._process is not None:
            await self._gone.wait()


def _environment() -> dict[str, str]:
    """The agent finds this package where this process has found it."""
    root = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
