"""Two routers with HTTP servers of their own on one port, over TLS; one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
from pathlib import Path

import httpx
import pytest

from tests.cluster.test_own_http import certificate
from tests.e2e.system import ServeProcess, wait_for

pytestmark = pytest.mark.ray
SETTINGS = """
router:
  num_routers: 2
  http_server: own
  tls_cert_file: {cert}
  tls_key_file: {key}
  access_log: {log}
pools:
  mixed: {{num_ranks: 1}}
"""


def test_a_router_that_is_killed_takes_only_its_own_connections_with_it(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    log = tmp_path / "access.log"
    file = tmp_path / "serve.yaml"
    file.write_text(SETTINGS.format(cert=cert, key=key, log=log))
    context = ssl.create_default_context(cafile=cert)
    with ServeProcess("--config", str(file)) as serve:
        run = serve.wait_until_ready()
        assert run["url"] == f"https://127.0.0.1:{serve.port}"
        assert not run["ha_proxy"]

        def ask() -> dict[str, object]:
            """Over a connection of its own."""
            with httpx.Client(base_url=run["url"], verify=context, timeout=60) as client:
                body = {"model": run["model"], "prompt": "The sky is", "max_tokens": 4}
                response = client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                answer: dict[str, object] = response.json()
                return answer

        ask()
        listeners = listening_on(serve.port)
        assert len(listeners) == 2
        os.kill(min(listeners), signal.SIGKILL)
        wait_for(lambda: min(listeners) not in listening_on(serve.port), 10, lambda: "the killed one still listens")
        began_at = time.monotonic()
        num_answers = 0
        while time.monotonic() < began_at + 5:
            ask()
            num_answers += 1
        assert num_answers > 0
        wait_for(lambda: len(listening_on(serve.port)) == 2, 60, serve.output)
        ask()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert sum(line["path"] == "/v1/completions" and line["status"] == 200 for line in lines) == num_answers + 2


def listening_on(port: int) -> set[int]:
    """The processes that do."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    found = set()
    for directory in Path("/proc").glob("[0-9]*/fd"):
        try:
            links = {os.readlink(link) for link in directory.iterdir()}
        except OSError:
            continue
        if links & inodes:
            found.add(int(directory.parent.name))
    return found
