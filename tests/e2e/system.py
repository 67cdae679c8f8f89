"""The whole system for tests: `serried serve` as a process of its own, and what a test may ask of it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import httpx

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
# All zero when nothing is going on; the routers learn of it within about two seconds.
IDLE_METRICS = re.compile(
    r"^serried_(?:num_requests_running|num_requests_waiting|num_requests_deferred|num_kv_loads|kv_blocks_used"
    r"|num_requests_in_flight|queued_requests|queued_tokens)(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def metric(text: str, name: str) -> dict[str, float]:
    """Label text → value of one metric."""
    return {m[1]: float(m[2]) for m in re.finditer(rf"^{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)}


def wait_for(condition: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    """Real processes cannot be given a virtual clock, so this polls; fails with `what()`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what()}"
        time.sleep(0.1)


class ServeProcess:
    """`serried serve` with the given flags. Its output goes to a file, so that it never blocks on a pipe."""

    def __init__(self, *flags: str, port: int | None = None, env: Mapping[str, str] | None = None) -> None:
        """`env`: besides this process's."""
        self.port = port or free_port()
        self._output = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from cluster.cli import main; main()", "serve", "--port", str(self.port), *flags],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            # Tests start a Ray of their own unless they say otherwise.
            env={**os.environ, "RAY_ADDRESS": "", **(env or {})},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._output.close()

    def output(self) -> str:
        return Path(self._output.name).read_text()

    def run_dir(self) -> Path | None:
        return next(Path(tempfile.gettempdir()).glob(f"serried-{self.process.pid}-*"), None)

    def wait_until_ready(self) -> dict[str, Any]:
        """What the launcher wrote into run.json, once it has."""

        def ready() -> bool:
            assert self.process.poll() is None, f"serve ended with {self.process.returncode}:\n{self.output()}"
            run_dir = self.run_dir()
            return run_dir is not None and (run_dir / "run.json").exists()

        wait_for(ready, START_TIMEOUT_S, self.output)
        run_dir = self.run_dir()
        assert run_dir is not None
        run: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
        return run


class Served:
    """The running system, shared by all end-to-end tests of a session."""

    def __init__(
        self, run: dict[str, Any], max_num_queued_reqs: int | None = None, pools: tuple[str, ...] = ("mixed",)
    ) -> None:
        """`run` is what `run.json` holds."""
        self.base_url: str = run["url"]
        self.model: str = run["model"]
        self.max_num_queued_reqs = max_num_queued_reqs
        self._probe = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.probe", run["ray_address"], *pools],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        )

    def close(self) -> None:
        self._probe.kill()
        self._probe.communicate()

    def ranks(self) -> list[dict[str, Any]]:
        """Identity and live figures of every rank."""
        ranks: list[dict[str, Any]] = self._ask("ranks")
        return sorted(ranks, key=lambda rank: rank["rank_id"])

    def control_pid(self) -> int:
        """The process of the control actor."""
        pid: int = self._ask("control_pid")
        return pid

    def stop_a_rank(self) -> str:
        """Have one rank leave as Serve does; returns when it has, before Serve replaces it."""
        name: str = self._ask("stop_a_rank")
        return name

    def num_running(self) -> int:
        """Sequences that run now, on all ranks."""
        return sum(rank["load"]["num_running"] for rank in self.ranks())

    def check_integrity(self) -> None:
        """The invariants of the control actor and of every rank's scheduler hold."""
        self._ask("check_integrity")

    def wait_until_idle(self, timeout_s: float) -> None:
        """Until no request is counted, runs or holds a block, and the metrics say so."""

        def values() -> list[str]:
            return IDLE_METRICS.findall(httpx.get(f"{self.base_url}/metrics", timeout=10).text)

        wait_for(
            lambda: set(map(float, values())) == {0.0} and self.num_running() == 0,
            timeout_s,
            lambda: f"idle; /metrics has {values()}",
        )

    def wait_for_ranks(self, count: int, timeout_s: float) -> None:
        """Until so many ranks are members, answer Serve's calls, and are connected with the router."""

        def members() -> int:
            return len(self._ask("members"))

        def answering() -> int:
            try:
                return len(self.ranks())
            except AssertionError:
                return 0

        def connected() -> int:
            answer: int = httpx.get(f"{self.base_url}/ready", timeout=10).json()["num_ranks_connected"]
            return answer

        wait_for(
            lambda: members() == answering() == connected() == count,
            timeout_s,
            lambda: f"{count} ranks; {members()} members, {answering()} answer, {connected()} connected",
        )

    def _ask(self, question: str) -> Any:
        assert self._probe.stdin is not None
        assert self._probe.stdout is not None
        self._probe.stdin.write(question + "\n")
        self._probe.stdin.flush()
        line = self._probe.stdout.readline()
        assert line, "the probe has ended"
        reply = json.loads(line)
        assert "error" not in reply, f"{question}: {reply['error']}"
        return reply["answer"]
