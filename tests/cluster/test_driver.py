"""The driver's end, with a Ray that hangs."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import driver
from cluster.config import ClusterConfig, load_config
from cluster.driver import Driver, DriverRequest
from cluster.node_plan import Node
from cluster.start_errors import StartError


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


def test_a_start_that_takes_too_long_says_what_is_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "START_TIMEOUT_S", -1.0)
    member = {"pool": "a"}
    call = SimpleNamespace(remote=lambda: None)
    snapshot = {"failed_starts": [], "members": [member]}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda _, timeout: snapshot))
    pools = {"a": {"num_ranks": 3, "device": "cuda"}, "b": {"num_ranks": 1}}
    config = load_config(None, {"ray.address": "auto", "pools": pools})
    starting = Driver(DriverRequest(config=config, run_dir=tmp_path, ha_proxy=False, elapsed_s=0), threading.Event())
    starting._control = SimpleNamespace(snapshot=call)
    before, now = Node("n", "10.0.0.1", 4, 1, 4, 1 << 30), Node("n", "10.0.0.1", 0, 0, 4, 1 << 30)
    starting._ray = SimpleNamespace(nodes=lambda: [before], nodes_now=lambda: [now])  # type: ignore[assignment]
    with pytest.raises(StartError) as given_up:
        starting._await_members(Future())
    assert "1 of 4 ranks are ready" in str(given_up.value)
    assert "pool a: 2 ranks lack 1 GPU on one node; pool b: 1 rank lacks 4 CPUs on one node" in str(given_up.value)


def test_serve_and_ray_have_their_part_of_an_orderly_end() -> None:
    for timeout_s, serve_timeout_s in (
        (driver.SHUTDOWN_TIMEOUT_S, driver.SERVE_SHUTDOWN_TIMEOUT_S),
        (driver.EXISTING_SHUTDOWN_TIMEOUT_S, driver.EXISTING_SERVE_SHUTDOWN_TIMEOUT_S),
    ):
        assert timeout_s > serve_timeout_s + driver.RAY_SHUTDOWN_TIMEOUT_S
