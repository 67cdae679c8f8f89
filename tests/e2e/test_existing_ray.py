"""`serried serve` on a Ray cluster of two nodes that somebody else has started: prefill on one, decode on the other."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from model_runner.embedded import embedded_model_dir
from model_runner.torch_runner import TorchRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from router.tokenizer import ChatTokenizer
from tests.e2e.ray_cluster import ENVIRONMENT, HOSTS, RayCluster
from tests.e2e.system import Served, ServeProcess, metric, wait_for
from tests.engine import Engine

pytestmark = [pytest.mark.ray, pytest.mark.model]

NUM_TOKENS = 8
PROMPT = [504, 3575, 282, 4649, 314] * 9
CONFIG = """
pools: {prefill: {role: prefill, num_ranks: 1}, decode: {role: decode, num_ranks: 1}}
kv_transfer: {kv_connector: PullConnector}
router: {remote_prefill_min_tokens: 32}
cache: {memory_gib: 0.2}
model: {dtype: float32, max_model_len: 512}
"""
EXIT_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    # Each has room for one rank.
    with RayCluster(num_cpus=1) as cluster:
        yield cluster


def serve(cluster: RayCluster, *flags: str) -> ServeProcess:
    return ServeProcess("--ray-address", cluster.address, *flags, env=ENVIRONMENT)


def expected_text() -> str:
    """What one rank answers."""
    model_dir = embedded_model_dir(lambda message: None)
    config = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=8)
    runner = TorchRunner(model_dir, scheduler=config, cache=CacheConfig(), dtype="float32", max_model_len=512)
    engine = Engine(runner, config)
    engine.submit(0, PROMPT, NUM_TOKENS)
    engine.run()
    runner.close()
    tokenizer = ChatTokenizer(model_dir)
    text: str = tokenizer.tokenizer.decode(engine.tokens[0])
    tokenizer.close()
    return text


def streamed_text(system: Served) -> str:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{system.base_url}/v1/completions", json=body, timeout=60) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    chunks = [httpx.Response(200, text=event).json() for event in events]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def listens_on(port: int) -> set[str]:
    """Addresses that somebody on this machine listens on, at this port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [fields[1].split(":") for fields in lines if fields[3] == "0A"]
    return {socket.inet_ntoa(bytes.fromhex(host)[::-1]) for host, at in listening if int(at, 16) == port}


def test_ranks_on_two_nodes_serve_and_leave_the_cluster_as_it_was(ray_cluster: RayCluster, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(CONFIG)
    expected = expected_text()
    with serve(ray_cluster, "--config", str(config)) as process:
        run = process.wait_until_ready()
        system = Served(run, pools=("prefill", "decode"))
        try:
            ranks = system.ranks()
            assert {rank["host"] for rank in ranks} == set(HOSTS)
            assert len({rank["node_id"] for rank in ranks}) == 2
            assert [listens_on(rank["port"]) for rank in ranks] == [{rank["host"]} for rank in ranks]
            assert streamed_text(system) == expected
            routed = metric(httpx.get(f"{system.base_url}/metrics").text, "serried_routed_total")
            assert routed['{leg="prefill",role="prefill"}'] == 1
            [decode] = [rank for rank in system.ranks() if rank["role"] == "decode"]
            assert decode["kv_transfer"]["num_loaded_bytes"] > 0
            assert decode["kv_transfer"]["load_failures"] == {}

            with serve(ray_cluster) as second:
                assert second.process.wait(60) == 1
                assert "has a serried already" in second.output()
                assert f"process {run['driver_pid']} on" in second.output()

            control_pid = system.control_pid()
            assert control_pid > 0
        finally:
            system.close()
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(EXIT_TIMEOUT_S) == 0
        assert "Traceback" not in process.output()
        assert "goes on removing" not in process.output()
    pids = [control_pid, *run["ranks"].values()]
    wait_for(lambda: not any(map(is_alive, pids)), 10, lambda: f"{pids} end")
    nodes, actors, free = ray_cluster.ask(
        "[node['Alive'] for node in ray.nodes()], ray.util.list_named_actors(all_namespaces=True), "
        "ray.available_resources()['CPU']"
    )
    assert nodes == [True, True]
    assert actors == []
    assert free == 2


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
