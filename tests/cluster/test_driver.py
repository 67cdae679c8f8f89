"""The driver's end, with a Ray that hangs."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import driver
from cluster.config import ClusterConfig
from cluster.driver import Driver, DriverRequest


def test_an_orderly_end_has_one_deadline_however_much_of_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "SHUTDOWN_TIMEOUT_S", 0.9)
    monkeypatch.setattr(driver, "SERVE_SHUTDOWN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(driver, "RAY_SHUTDOWN_TIMEOUT_S", 0.3)
    over = threading.Event()
    begun: dict[str, float] = {}
    threads: list[threading.Thread] = []

    def hang(name: str) -> None:
        begun[name] = time.monotonic()
        threads.append(threading.current_thread())
        over.wait(60)

    class Call:
        def remote(self) -> Call:
            return self

    class Control:
        begin_shutdown = snapshot = Call()

    answers: list[Any] = [1]

    def get(_: Call, timeout: float) -> Any:
        if answers:
            return answers.pop()
        begun["streams"] = time.monotonic()
        time.sleep(timeout)
        raise TimeoutError

    serve = SimpleNamespace(shutdown=lambda: hang("serve"))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, shutdown=lambda: hang("ray"), serve=serve))
    request = DriverRequest(config=ClusterConfig(), run_dir=tmp_path, ha_proxy=True, elapsed_s=0)
    stopping = Driver(request, threading.Event())
    stopping._control = Control()
    started = time.monotonic()
    stopping._shut_down()
    ended = time.monotonic()
    over.set()
    for thread in threads:
        thread.join()
    # Each is given its part: a hanging one takes nothing from the next.
    assert list(begun) == ["streams", "serve", "ray"]
    assert begun["serve"] >= started + 0.3
    assert begun["ray"] >= begun["serve"] + 0.2
    assert 0.9 <= ended - started < 5


def test_serve_and_ray_have_their_part_of_an_orderly_end() -> None:
    for timeout_s, serve_timeout_s in (
        (driver.SHUTDOWN_TIMEOUT_S, driver.SERVE_SHUTDOWN_TIMEOUT_S),
        (driver.EXISTING_SHUTDOWN_TIMEOUT_S, driver.EXISTING_SERVE_SHUTDOWN_TIMEOUT_S),
    ):
        assert timeout_s > serve_timeout_s + driver.RAY_SHUTDOWN_TIMEOUT_S
