"""A Ray cluster of several nodes on this machine, each with a loopback address of its own, as an operator starts it."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any, Self

from cluster.processes import RUN_ID_VARIABLE, kill_run
from tests.e2e.system import free_port, wait_for

START_TIMEOUT_S = 120.0
# Like every client of it: a token would have to be given to all of them.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
HOSTS = ("127.0.0.2", "127.0.0.3")


class RayCluster:
    """One `ray start --block` a node; each node has `num_cpus` CPUs for Ray to give."""

    def __init__(self, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._run_id = uuid.uuid4().hex
        # Ray's sockets have long names, and the system's limit is short.
        self._dir = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
        self._port = free_port()
        self.address = f"{HOSTS[0]}:{self._port}"
        self._nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        head = ("--head", f"--port={self._port}", f"--temp-dir={self._dir}", "--include-dashboard=false")
        self._start(HOSTS[0], *head, f"--ray-client-server-port={free_port()}")
        wait_for(self._listens, START_TIMEOUT_S, self._output)
        for host in HOSTS[1:]:
            self._start(host, f"--address={self.address}")
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.kill()
            node.wait()
        kill_run(self._run_id, timeout_s=10)
        shutil.rmtree(self._dir, ignore_errors=True)

    def ask(self, expression: str) -> Any:
        """The value of a Python expression over `ray`, in a process that is connected to the cluster."""
        connect = f"ray.init({self.address!r}, logging_level='ERROR', log_to_driver=False)"
        finished = subprocess.run(
            [sys.executable, "-c", f"import ray; {connect}; print(repr(({expression})))"],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | ENVIRONMENT,
        )
        assert finished.returncode == 0, finished.stderr
        return ast.literal_eval(finished.stdout.splitlines()[-1])

    def _start(self, host: str, *options: str) -> None:
        options = (
            "--block",
            "--disable-usage-stats",
            "--object-store-memory=100000000",
            f"--node-ip-address={host}",
            f"--num-cpus={self._num_cpus}",
            *options,
        )
        # Ray's processes change their titles, by default in the memory where the system shows their environment.
        environment = {**ENVIRONMENT, RUN_ID_VARIABLE: self._run_id, "SPT_NOENV": "1"}
        with (self._dir / "start.log").open("ab") as log:
            node = subprocess.Popen(
                [Path(sys.executable).with_name("ray"), "start", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | environment,
            )
        self._nodes.append(node)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((HOSTS[0], self._port), timeout=1):
            return True
        return False

    def _output(self) -> str:
        return (self._dir / "start.log").read_text()
