"""The processes of one run, found by the id that each of them carries in its environment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

RUN_ID_VARIABLE = "SERRIED_RUN_ID"


def find_run(run_id: str, proc: Path = Path("/proc")) -> list[int]:
    """Pids of live processes, this one excepted, that were started with this run id in their environment."""
    marker = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            # A process may end, or belong to someone else, between the listing and the reading. What has ended but
            # was not yet waited for has an empty environment.
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marker in variables:
            found.append(int(entry.name))
    return sorted(found)


def kill_run(run_id: str, timeout_s: float) -> list[int]:
    """Kill every process of the run; returns those that were alive. Also gets what is being started meanwhile."""
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while (alive := find_run(run_id)) and time.monotonic() < deadline:
        for pid in alive:
            killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    return sorted(killed)
