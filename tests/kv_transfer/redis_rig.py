"""A Redis server of the test's own, and servers that only look like one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kv_transfer.store_rig import PATIENCE_S, until

try:
    import redis
except ImportError:
    redis = None  # type: ignore[assignment]

REDIS_SERVER = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    redis is None or REDIS_SERVER is None,
    reason="needs the package redis (pip install redis) and Debian's redis-server: .ci/install-redis.sh",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisProcess:
    def __init__(self, directory: Path, *options: str) -> None:
        self._directory = directory
        self._options = options
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        assert REDIS_SERVER is not None
        fixed = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self._directory))
        self._process = subprocess.Popen(
            [REDIS_SERVER, "--port", str(self.port), *fixed, *self._options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._answers, "redis-server answers")

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def all_keys(self) -> list[bytes]:
        with contextlib.closing(self.client()) as client:
            return sorted(client.keys("*"))

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def _answers(self) -> bool:
        try:
            with contextlib.closing(self.client()) as client:
                return bool(client.ping())
        except redis.exceptions.ConnectionError:
            return False


class FakeServer:
    """Accepts connections, and answers whatever comes with `answer(connection)`; counts how often it is called."""

    def __init__(self, answer: Callable[[socket.socket, threading.Event], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.num_connections = 0
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept, name="fake-redis", daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                self.num_connections += 1
                thread = threading.Thread(target=self._serve, args=(connection,), name="fake-redis", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self._answer(connection, self._ended)

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(5.0)
        self._listener.close()


def garbage(connection: socket.socket, ended: threading.Event) -> None:
    while connection.recv(65536):
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def trickle(connection: socket.socket, ended: threading.Event) -> None:
    """A bulk string that never comes to its end, a byte at a time: no single wait is long."""
    connection.recv(65536)
    connection.sendall(b"$100000\r\n")
    while not ended.wait(0.01):
        connection.sendall(b"x")


def silence(connection: socket.socket, ended: threading.Event) -> None:
    ended.wait(30.0)


def hang_up(connection: socket.socket, ended: threading.Event) -> None:
    connection.recv(65536)


def ends(call: Callable[[], Any]) -> Any:
    """What it returns, if it ever does."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert results, "the call does not come to an end"
    return results[0]
