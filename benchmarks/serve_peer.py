"""The peer of `benchmarks.router_streams`: tokens over Ray Serve's own handles, as its LLM layer streams them.

    python -m benchmarks.serve_peer STEP_MS

HTTP proxy → FastAPI ingress → handle of an engine that yields a token per request and step. A process that starts a
Ray of its own; prints the HTTP port and the ids of the processes that serve, as JSON, and ends with its input.
"""

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
os.environ.pop("RAY_ADDRESS", None)

import ray
from fastapi import FastAPI, Request
from ray import serve
from starlette.responses import StreamingResponse

PORT = int(os.environ.get("SERRIED_PEER_PORT", "18431"))
EVENT = b'data: {"choices": [{"index": 0, "text": "h", "finish_reason": null}]}\n\n'
app = FastAPI()


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=4096)
class Engine:
    """A token per running request and step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._queues: dict[int, tuple[list[int], asyncio.Queue[bool]]] = {}
        self._next = 0
        self._stepping: asyncio.Task[None] | None = None

    def pid(self) -> int:
        return os.getpid()

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            at = max(at + self._step_s, loop.time())
            await asyncio.sleep(at - loop.time())
            for request, (left, queue) in list(self._queues.items()):
                left[0] -= 1
                queue.put_nowait(left[0] == 0)
                if left[0] == 0:
                    del self._queues[request]

    async def generate(self, num_tokens: int) -> AsyncIterator[str]:
        if self._stepping is None:
            self._stepping = asyncio.get_running_loop().create_task(self._steps())
        queue: asyncio.Queue[bool] = asyncio.Queue()
        self._next += 1
        self._queues[self._next] = ([num_tokens], queue)
        is_last = False
        while not is_last:
            is_last = await queue.get()
            yield "h"


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=4096)
@serve.ingress(app)
class Ingress:
    def __init__(self, engine: Any) -> None:
        self._engine = engine.options(stream=True)

    @app.get("/pid")
    def pid(self) -> int:
        return os.getpid()

    @app.post("/v1/completions")
    async def complete(self, request: Request) -> StreamingResponse:
        body = await request.json()

        async def events() -> AsyncIterator[bytes]:
            async for _ in self._engine.generate.remote(body["max_tokens"]):
                yield EVENT
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


def _application(step_s: float) -> Any:
    ingress: Any = Ingress
    engine: Any = Engine
    return ingress.bind(engine.bind(step_s))


def proxy_pids() -> list[int]:
    """Of this session's HTTP proxies: they are this process's descendants."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                    parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    names[int(entry)] = file.read().decode(errors="replace")
            except OSError:
                continue
    found = []
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and "ProxyActor" in names.get(pid, ""):
            found.append(pid)
    return found


def main(step_s: float) -> None:
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=200 << 20,
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(_application(step_s), name="peer", route_prefix="/")
    engine_pid = serve.get_deployment_handle("Engine", "peer").pid.remote().result()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/pid") as answer:
        ingress_pid = int(answer.read())
    print(json.dumps({"port": PORT, "pids": [engine_pid, ingress_pid, *proxy_pids()]}), flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(float(sys.argv[1]) / 1e3)
