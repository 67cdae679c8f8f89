import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from cluster import launcher
from cluster.config import ClusterConfig, load_config
from cluster.driver import EXIT_FAILED, EXIT_NO_HA_PROXY, EXIT_STOPPED
from cluster.environment import check_port, free_ports, run_environment, why_no_ha_proxy, write_ha_proxy_script
from cluster.launcher import SignalWatch, serve
from cluster.processes import RUN_ID_VARIABLE, find_run, kill_run


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_free_port_is_fine() -> None:
    assert check_port("127.0.0.1", free_ports(1)[0]) is None


def test_a_busy_port_is_named_with_the_remedy(listening: int) -> None:
    problem = check_port("127.0.0.1", listening)
    assert problem is not None
    for part in ("router.port", str(listening), "in use", "--port"):
        assert part in problem


def test_an_address_that_is_not_here_is_named() -> None:
    problem = check_port("192.0.2.77", free_ports(1)[0])
    assert problem is not None
    assert "192.0.2.77" in problem
    assert "--host" in problem


def test_serve_refuses_a_busy_port_before_starting_anything(
    listening: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    status = serve(load_config(None, {"router.port": listening}), Console(width=200))
    assert status == 1
    assert f"{listening} on 127.0.0.1 is in use" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wanted", "obstacle", "statuses", "starts", "status", "said"),
    [
        ("auto", None, [EXIT_STOPPED], [True], EXIT_STOPPED, ""),
        ("auto", "it is broken", [EXIT_STOPPED], [False], EXIT_STOPPED, "without HAProxy.*it is broken"),
        ("auto", None, [EXIT_NO_HA_PROXY, EXIT_STOPPED], [True, False], EXIT_STOPPED, "starting again.*own proxy"),
        ("auto", None, [EXIT_NO_HA_PROXY, EXIT_FAILED], [True, False], EXIT_FAILED, "starting again.*own proxy"),
        ("auto", None, [EXIT_FAILED], [True], EXIT_FAILED, ""),
        ("on", None, [EXIT_STOPPED], [True], EXIT_STOPPED, ""),
        ("on", "it is broken", [], [], EXIT_FAILED, r"router\.ha_proxy: on, but it is broken; set it to auto or off"),
        ("on", None, [EXIT_NO_HA_PROXY], [True], EXIT_FAILED, r"router\.ha_proxy: on, but HAProxy does not answer"),
        ("off", "it is broken", [EXIT_STOPPED], [False], EXIT_STOPPED, ""),
    ],
)
def test_what_happens_without_ha_proxy(
    wanted: str,
    obstacle: str | None,
    statuses: list[int],
    starts: list[bool],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`statuses`: how the driver ends, start by start; `starts`: with HAProxy or without, start by start."""
    seen: list[bool] = []
    outcomes = iter(statuses)

    def run_once(config: ClusterConfig, ha_proxy: bool, *_: object) -> int:
        seen.append(ha_proxy)
        return next(outcomes)

    monkeypatch.setattr(launcher, "_run_once", run_once)
    monkeypatch.setattr(launcher, "why_no_ha_proxy", lambda _: obstacle)
    config = load_config(None, {"router.port": free_ports(1)[0], "router.ha_proxy": wanted})
    assert serve(config, Console(width=200)) == status
    assert seen == starts
    output = capsys.readouterr().out
    assert re.search(said, output) if said else not output


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


def test_ha_proxy_ships_with_the_dependencies_but_not_for_every_host() -> None:
    assert why_no_ha_proxy("127.0.0.1") is None
    assert "10.1.2.3" in (why_no_ha_proxy("10.1.2.3") or "")


def test_without_ha_proxy_the_routers_do_not_listen_themselves(tmp_path: Path) -> None:
    variables = run_environment({"KEPT": "1"}, run_id="i", run_dir=tmp_path, ha_proxy=False, num_cores=2)
    assert variables["KEPT"] == "1"
    assert variables[RUN_ID_VARIABLE] == "i"
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert variables["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"


def test_ha_proxy_listens_nowhere_but_where_it_is_told_and_does_not_splice(tmp_path: Path) -> None:
    shown = tmp_path / "a real one"
    shown.write_text('#!/bin/sh\necho "$@"; cat "$4"\n')
    shown.chmod(0o700)
    config = tmp_path / "cfg"
    config.write_text(
        "defaults\n    option splice-request\n    option splice-response\n    option abortonclose\n"
        "listen stats\n  bind *:8404\nfrontend p\n    bind :9101\n    bind 0.0.0.0:80\n    server *:1\n"
    )
    write_ha_proxy_script(tmp_path / "haproxy", str(shown))
    for _ in range(2):
        output = subprocess.check_output([tmp_path / "haproxy", "-db", "-x", "-f", config], text=True)
        assert output == (
            f"-db -x -f {config}\ndefaults\n    option abortonclose\n"
            "listen stats\n  bind 127.0.0.1:8404\nfrontend p\n    bind 127.0.0.1:9101\n"
            "    bind 0.0.0.0:80\n    server *:1\n"
        )


def test_two_runs_share_no_ports_or_files(tmp_path: Path) -> None:
    one, two = (
        run_environment({}, run_id=name, run_dir=tmp_path / name, ha_proxy=True, num_cores=2) for name in ("1", "2")
    )
    own = [name for name in one if name.endswith("_PORT") or str(tmp_path) in one[name]]
    assert len(own) == 9
    assert not [name for name in own if one[name] == two[name]]


SLEEPER = "import sys, time; print('up', flush=True); time.sleep(600)"
# Ends at once, leaving a child of its own in another session.
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True)"


def test_every_process_of_a_run_is_found_and_killed_and_no_other() -> None:
    run_id, other_id = uuid.uuid4().hex, uuid.uuid4().hex
    marked, other = os.environ | {RUN_ID_VARIABLE: run_id}, os.environ | {RUN_ID_VARIABLE: other_id}
    with (
        subprocess.Popen([sys.executable, "-c", PARENT], env=marked, stdout=subprocess.PIPE) as parent,
        subprocess.Popen([sys.executable, "-c", SLEEPER], env=other, stdout=subprocess.PIPE) as bystander,
    ):
        assert parent.stdout is not None
        assert bystander.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        assert bystander.stdout.readline() == b"up\n"
        parent.wait()
        orphans = find_run(run_id)
        assert len(orphans) == 1
        assert parent.pid not in orphans
        assert find_run(other_id) == [bystander.pid]
        assert kill_run(run_id, timeout_s=10) == orphans
        assert find_run(run_id) == []
        assert bystander.poll() is None
        bystander.kill()


def test_signals_and_exits_become_events() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        SignalWatch() as watch,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
    ):
        watch.follow(child.pid)
        assert watch.wait(0) == "timeout"
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.wait(10) == "signal"
        assert watch.wait(10) == "signal"
        assert watch.wait(0) == "timeout"
        child.communicate(b"\n")
        assert watch.wait(10) == "exit"
    assert signal.getsignal(signal.SIGTERM) is before
