"""`serried serve`, the supervisor: checks, environment, signals, and the certainty that nothing is left behind.

It never imports Ray. The driver, its child, starts and stops the cluster in order; the supervisor passes the wish to
stop on, and when the driver is gone, or too slow, kills whatever carries the run's id and removes the run's directory.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from rich.console import Console

from cluster.config import ClusterConfig
from cluster.control_actor import LEASE_S
from cluster.driver import (
    EXIT_FAILED,
    EXIT_NO_HA_PROXY,
    EXIT_STOPPED,
    RUN_FILE,
    DriverRequest,
    shutdown_timeout_s,
)
from cluster.environment import (
    HA_PROXY_SCRIPT,
    check_port,
    client_environment,
    ha_proxy_binary,
    num_cores,
    run_environment,
    why_no_ha_proxy,
    write_ha_proxy_script,
)
from cluster.processes import kill_run
from cluster.progress import Progress

# The driver's own deadline comes first; then there is time left for its exit.
STOP_MARGIN_S = 1.0
KILL_TIMEOUT_S = 5.0
# Ray and HAProxy put unix sockets up to 90 characters below the run's directory; the system allows 107 in all.
MAX_TEMP_DIR_LENGTH = 20
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Event = Literal["signal", "exit", "timeout"]


def serve(config: ClusterConfig, console: Console) -> int:
    """Run a cluster until it is told to stop; returns the exit status of the command."""
    progress = Progress(console)
    started_at = time.monotonic()
    if not config.ray.is_own:
        with SignalWatch() as watch:
            return _run_once(config, False, progress, started_at, watch)
    if problem := check_port(config.router.host, config.router.port):
        progress.line(problem, style="red")
        return EXIT_FAILED
    ha_proxy = config.router.http_server == "serve" and config.router.ha_proxy != "off"
    if ha_proxy and (reason := why_no_ha_proxy(config.router.host)):
        if config.router.ha_proxy == "on":
            progress.line(f"router.ha_proxy: on, but {reason}; set it to auto or off", style="red")
            return EXIT_FAILED
        progress.line(f"without HAProxy, through Serve's own proxy: {reason}", style="yellow")
        ha_proxy = False
    with SignalWatch() as watch:
        status = _run_once(config, ha_proxy, progress, started_at, watch)
        if status == EXIT_NO_HA_PROXY and config.router.ha_proxy == "auto":
            progress.line("HAProxy does not answer; starting again through Serve's own proxy", style="yellow")
            status = _run_once(config, False, progress, started_at, watch)
    if status == EXIT_NO_HA_PROXY:
        progress.line("router.ha_proxy: on, but HAProxy does not answer; set it to auto or off", style="red")
        return EXIT_FAILED
    return status


def _run_once(config: ClusterConfig, ha_proxy: bool, progress: Progress, started_at: float, watch: SignalWatch) -> int:
    run_id = uuid.uuid4().hex
    temp_dir = tempfile.gettempdir()
    run_dir = Path(
        tempfile.mkdtemp(
            prefix=f"serried-{os.getpid()}-", dir=temp_dir if len(temp_dir) <= MAX_TEMP_DIR_LENGTH else "/tmp"
        )
    )
    driver = None
    try:
        if ha_proxy:
            write_ha_proxy_script(run_dir / HA_PROXY_SCRIPT, ha_proxy_binary())
        environment = (
            run_environment(os.environ, run_id=run_id, run_dir=run_dir, ha_proxy=ha_proxy, num_cores=num_cores())
            if config.ray.is_own
            else client_environment(os.environ, run_id=run_id)
        )
        driver = subprocess.Popen(
            [sys.executable, "-m", "cluster.driver"], stdin=subprocess.PIPE, env=environment, start_new_session=True
        )
        request = DriverRequest(
            config=config, run_dir=run_dir, ha_proxy=ha_proxy, elapsed_s=time.monotonic() - started_at
        )
        assert driver.stdin is not None
        driver.stdin.write(request.model_dump_json().encode() + b"\n")
        driver.stdin.flush()
        return _supervise(config, driver, run_dir, progress, watch)
    finally:
        if driver is not None and driver.poll() is None:
            driver.kill()
        kill_run(run_id, KILL_TIMEOUT_S)
        if driver is not None:
            driver.wait()
        shutil.rmtree(run_dir, ignore_errors=True)


def _supervise(
    config: ClusterConfig, driver: subprocess.Popen[bytes], run_dir: Path, progress: Progress, watch: SignalWatch
) -> int:
    """Wait for the driver's end. After a return it may still live: in a hurry, or because it was too slow."""
    watch.follow(driver.pid)
    if watch.wait(None) == "exit":
        status = driver.wait()
        if status not in (EXIT_STOPPED, EXIT_FAILED, EXIT_NO_HA_PROXY):
            fate = "everything was stopped" if config.ray.is_own else f"what it started is removed in {LEASE_S:.0f} s"
            progress.line(f"the driver process ended unexpectedly (status {status}); {fate}", style="red")
            return EXIT_FAILED
        return status
    if config.ray.is_own and not (run_dir / RUN_FILE).exists():
        progress.line("stopped while starting")
        return EXIT_STOPPED
    driver.terminate()
    stop_timeout_s = shutdown_timeout_s(config) + STOP_MARGIN_S
    match watch.wait(stop_timeout_s):
        case "exit":
            progress.line("stopped")
        case "signal":
            progress.line("stopped in a hurry" + ("" if config.ray.is_own else f"; the rest goes in {LEASE_S:.0f} s"))
        case "timeout":
            progress.line(f"not stopped within {stop_timeout_s:.0f} s; killing what is left", style="yellow")
    return EXIT_STOPPED


class SignalWatch:
    """Turns the signals that ask for a stop, and a child's exit, into events to wait for."""

    def __init__(self) -> None:
        self._child: int | None = None

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._write)
        # The wake-up byte is what counts; the handler only keeps the default action from happening.
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        if self._child is not None:
            os.close(self._child)

    def follow(self, pid: int) -> None:
        """Watch this child from now on."""
        if self._child is not None:
            os.close(self._child)
        self._child = os.pidfd_open(pid)

    def wait(self, timeout_s: float | None) -> Event:
        """The next event; a signal that came earlier is not lost."""
        watched = [self._read] if self._child is None else [self._read, self._child]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if self._read in ready:
            os.read(self._read, 1)
            return "signal"
        return "exit" if ready else "timeout"
