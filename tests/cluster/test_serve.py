"""The whole thing as a user starts and stops it."""

import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from cluster.processes import find_run
from tests.e2e.system import ServeProcess

pytestmark = pytest.mark.ray

EXIT_TIMEOUT_S = 10.0


def listening_addresses(pids: set[int]) -> set[str]:
    """Local addresses (hex, as /proc has them) of the listening TCP sockets of these processes."""
    inodes = {
        link.readlink().name.removeprefix("socket:[").removesuffix("]")
        for pid in pids
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink() and str(link.readlink()).startswith("socket:[")
    }
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1])
    return found


def ports_beyond_the_loopback(addresses: set[str]) -> set[int]:
    loopback = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
    pairs = (address.split(":") for address in addresses)
    return {int(port, 16) for host, port in pairs if host not in loopback}


def test_start_chat_and_ctrl_c() -> None:
    with ServeProcess() as served:
        run = served.wait_until_ready()
        run_dir = served.run_dir()
        assert f"serving on {run['url']}" in served.output()

        body = {
            "model": run["model"],
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = httpx.post(f"{run['url']}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]

        pids = set(find_run(run["run_id"]))
        assert pids >= {run["driver_pid"], *run["ranks"].values()}
        assert "haproxy" in {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}, served.output()
        assert ports_beyond_the_loopback(listening_addresses(pids)) == set()

        events: list[str] = []
        streaming = threading.Event()

        def stream() -> None:
            endless = body | {"max_tokens": 4000, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", f"{run['url']}/v1/chat/completions", json=endless, timeout=60) as response:
                for line in response.iter_lines():
                    events.append(line)
                    if len(events) > 4:
                        streaming.set()

        client = threading.Thread(target=stream)
        client.start()
        assert streaming.wait(60)
        stopped_at = time.monotonic()
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(2 * EXIT_TIMEOUT_S) == 0
        assert time.monotonic() - stopped_at < EXIT_TIMEOUT_S, served.output()
        client.join(10)

        said = [event for event in events if event]
        assert said[-1] == "data: [DONE]"
        assert "error" in said[-2]
        assert find_run(run["run_id"]) == []
        assert run_dir is not None
        assert not run_dir.exists()
        assert "Traceback" not in served.output()


def test_a_model_that_cannot_be_loaded_is_reported_and_nothing_stays(tmp_path: Path) -> None:
    with ServeProcess(str(tmp_path / "nowhere")) as served:
        assert served.process.wait(60) == 1
        assert "nowhere" in served.output()
        assert "does not exist" in served.output()
        assert served.run_dir() is None


def test_a_rank_that_lacks_memory_says_so_instead_of_hanging(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("cache: {memory_gib: 100000}\npools: {mixed: {num_ranks: 1}}\n")
    with ServeProcess("--config", str(config)) as served:
        assert served.process.wait(180) == 1
        assert "memory_gib" in served.output()
        assert served.run_dir() is None
