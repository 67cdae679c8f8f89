"""Several routers around a real control endpoint, with a fake rank, all over real sockets in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn

from cluster.control import ControlEndpoint
from kv_transfer.connection import connect
from rank_scheduler.config import SchedulerConfig
from router.amounts import NOTHING
from router.control_messages import Register
from router.http_api import build_app
from router.service import RouterService, RouterSettings
from tests.router.fake_cluster import HOST, MODEL, SECRET, TIMEOUT_S, FakeRank, QuietServer, until
from tests.router.small_tokenizer import byte_tokenizer, write_model_dir


@dataclass
class Router:
    service: RouterService
    client: httpx.AsyncClient
    port: int

    def is_idle(self) -> bool:
        control = self.service.control
        return control.taken == NOTHING and control.num_holdings == self.service.pool.num_live == 0

    async def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "hi", **fields}
        return await self.client.post("/v1/completions", json=body, headers=headers)


@dataclass
class Routers:
    control: ControlEndpoint
    rank: FakeRank
    routers: list[Router]


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, num_routers: int, *, reply: str = "Hello, world!", **settings: Any
) -> AsyncIterator[Routers]:
    """Checks at the end that nothing is held any more, anywhere."""
    control = ControlEndpoint(SchedulerConfig(), SECRET)
    port = await control.start(HOST)
    rank = FakeRank(0, byte_tokenizer().encode(reply).ids)
    record = msgspec.structs.replace(await rank.start(), rank_id="")
    registration = await connect(HOST, port, secret=SECRET, role="rank", name="rank")
    registration.start(lambda _: None)
    registration.send(msgspec.msgpack.encode(Register(record)))
    model_dir = write_model_dir(tmp_path)

    async def address() -> tuple[str, int]:
        return HOST, port

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(_let_go)
        stack.push_async_callback(control.stop)
        stack.push_async_callback(rank.stop)
        stack.callback(registration.close)
        routers = []
        for index in range(num_routers):
            service = RouterService(
                RouterSettings(**{"model_name": MODEL, "model_dir": model_dir, "max_model_len": 256, **settings})
            )
            await service.start(address, SECRET, f"router-{index}")
            stack.push_async_callback(service.stop)
            config = uvicorn.Config(build_app(service), host=HOST, port=0, log_level="warning", lifespan="off")
            server = QuietServer(config)
            serving = asyncio.create_task(server.serve())
            stack.push_async_callback(_stop, server, serving)
            await until(lambda server=server: server.started)  # type: ignore[misc]
            http_port = server.servers[0].sockets[0].getsockname()[1]
            client = httpx.AsyncClient(base_url=f"http://{HOST}:{http_port}", timeout=TIMEOUT_S, verify=False)
            await stack.enter_async_context(client)
            routers.append(Router(service, client, http_port))
        await until(lambda: all(len(router.service.pool.links) == 1 for router in routers))
        yield Routers(control, rank, routers)
        await until(lambda: all(router.is_idle() for router in routers))
        await until(lambda: control.ledger.counts().num_requests == 0)
        for router in routers:
            router.service.check_integrity()
        control.check_integrity()


async def _stop(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    server.should_exit = True
    await serving


async def _let_go() -> None:
    for _ in range(5):  # transports say goodbye in callbacks
        await asyncio.sleep(0)
