"""Joining a Ray cluster: what is refused and told, without one."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cluster.config import load_config
from cluster.environment import client_environment, free_ports, run_environment
from cluster.existing_ray import ExistingRay
from cluster.node_survey import HA_PROXY_VARIABLE, THROUGHPUT_VARIABLE, NodeFacts
from cluster.progress import Progress
from cluster.start_errors import StartError


def existing(address: str = "auto", **overrides: object) -> ExistingRay:
    settings = {key.replace("__", "."): value for key, value in overrides.items()}
    return ExistingRay(load_config(None, {"ray.address": address, **settings}), Progress(Console(width=300)))


def facts(*switches: str) -> NodeFacts:
    return NodeFacts("0.1.0", 2, 1 << 30, frozenset(switches))


def test_an_address_that_nobody_listens_on_is_told_at_once() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(StartError, match=rf"ray\.address: the cluster at {address} is not reachable .*ray start"):
        existing(address).connect()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError("Version mismatch: The cluster was started with:\n Ray: 2.59.0\n Python: 3.11.7"), "versions of"),
        (ConnectionError("Could not find any running Ray instance."), "start Ray on this machine"),
        (RuntimeError("Invalid authentication token"), "the cluster's token"),
        (RuntimeError("This node has an IP address of 10.0.0.9, and Ray expects"), "on a node of that cluster"),
        (SystemExit(15), "15; run serried on a node"),
    ],
)
def test_why_ray_does_not_let_us_in_comes_with_a_remedy(error: BaseException, remedy: str) -> None:
    message = existing()._why_not_connected(error)
    assert remedy in message
    assert " ".join(str(error).split()) in message


@pytest.mark.parametrize(
    ("wanted", "switches", "said"),
    [
        ("auto", [], "without HAProxy, through Serve's own, slower proxy: set RAY_SERVE_ENABLE_HA_PROXY=1"),
        ("auto", [HA_PROXY_VARIABLE, THROUGHPUT_VARIABLE], ""),
        ("auto", [HA_PROXY_VARIABLE], "streams cost less with RAY_SERVE_THROUGHPUT_OPTIMIZED=1"),
        ("off", [HA_PROXY_VARIABLE, THROUGHPUT_VARIABLE], "off has no effect"),
        ("off", [THROUGHPUT_VARIABLE], ""),
        ("on", [HA_PROXY_VARIABLE, THROUGHPUT_VARIABLE], ""),
    ],
)
def test_how_the_cluster_s_serve_is_set_is_told(
    wanted: str, switches: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    joined = existing(router__ha_proxy=wanted)
    joined._facts = {"n": facts(*switches), "m": facts(*switches)}
    joined._report_switches()
    output = capsys.readouterr().out
    assert said in output if said else not output


def test_ha_proxy_that_has_to_be_and_is_not_on_every_node_is_refused() -> None:
    joined = existing(router__ha_proxy="on")
    joined._facts = {"n": facts(HA_PROXY_VARIABLE), "m": facts()}
    with pytest.raises(StartError, match=r"router\.ha_proxy: on, .*on every node"):
        joined._report_switches()


@pytest.mark.parametrize(
    ("host", "proxies", "addresses"),
    [
        ("127.0.0.1", ["head"], [("127.0.0.1", 8000)]),
        ("0.0.0.0", ["head", "own"], [("10.0.0.2", 8000), ("10.0.0.1", 8000)]),
        ("0.0.0.0", ["head", "lost"], [("10.0.0.1", 8000)]),
        ("0.0.0.0", [], []),
        ("127.0.0.1", [], []),
    ],
)
def test_ready_is_asked_where_a_proxy_is(
    host: str, proxies: list[str], addresses: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        {"NodeID": name, "NodeManagerAddress": address, "Alive": name != "lost"}
        for name, address in (("head", "10.0.0.1"), ("own", "10.0.0.2"), ("lost", "10.0.0.3"))
    ]
    serve = SimpleNamespace(status=lambda: SimpleNamespace(proxies=dict.fromkeys(proxies)))
    context = SimpleNamespace(get_node_id=lambda: "own")
    ray: Any = SimpleNamespace(serve=serve, nodes=lambda: nodes, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert existing(router__host=host).http_addresses() == addresses


def test_a_port_that_is_taken_is_told_before_serve_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = SimpleNamespace(status=lambda: SimpleNamespace(proxies={}, applications={}))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        joined = existing(router__port=server.getsockname()[1])
        with pytest.raises(StartError, match=r"router\.port: .* is in use"):
            joined.start_serve()
    assert not joined._started_serve


def test_another_s_cluster_decides_how_ray_and_serve_are_set(tmp_path: Any) -> None:
    base = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": "auto"}
    joined = client_environment(base, run_id="i")
    assert joined["RAY_AUTH_MODE"] == "token"
    assert "RAY_ADDRESS" not in joined
    assert not [name for name in joined if name.startswith("RAY_SERVE_HAPROXY")]
    own = run_environment(base, run_id="i", run_dir=tmp_path, ha_proxy=True, num_cores=2)
    assert "RAY_ADDRESS" not in own
