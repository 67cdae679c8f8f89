"""The control endpoint dies and comes back elsewhere, while real ranks and their routers go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cluster import rank_server
from cluster.control import ControlEndpoint
from cluster.rank_server import RankServer
from kv_transfer.connection import connect
from model_runner.simulated import SimulatedRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.messages import StepFrame
from tests.router.small_tokenizer import byte_tokenizer

HOST = "127.0.0.1"
SECRET = b"s" * 32
TIMEOUT_S = 20.0


async def settle(condition: Callable[[], bool]) -> None:
    """Until the ranks' threads have brought about `condition`, of which nobody is told."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Ranks:
    """Two ranks that ask this object where the control endpoint is."""

    def __init__(self, tokenizer_path: Path) -> None:
        self.endpoint = ControlEndpoint(SchedulerConfig(), SECRET, tick_interval_s=1000)
        self._port = 0
        self.may_find = [True, True]
        self.servers = [self._server(index, tokenizer_path) for index in range(2)]

    def _server(self, index: int, tokenizer_path: Path) -> RankServer:
        cache = CacheConfig(block_size=4, num_blocks=65)
        runner = SimulatedRunner(scheduler=SchedulerConfig(), cache=cache, max_model_len=256, vocab_size=256)

        async def control_address() -> tuple[str, int]:
            if not self.may_find[index]:
                raise LookupError("not yet")
            return HOST, self._port

        return RankServer(
            runner,
            runner.load(),
            config=SchedulerConfig(),
            cache=cache,
            pool="mixed",
            secret=SECRET,
            control_address=control_address,
            advertise_host=HOST,
            node_id="node",
            tokenizer_path=tokenizer_path,
        )

    async def start_control(self) -> None:
        self._port = await self.endpoint.start(HOST)

    async def restart_control(self) -> None:
        self.may_find = [False, False]
        await self.endpoint.stop()
        self.endpoint = ControlEndpoint(SchedulerConfig(), SECRET, tick_interval_s=1000)
        await self.start_control()

    def members(self) -> dict[str, str]:
        """Boot ids by rank id, as the control endpoint has them."""
        return {record.rank_id: record.boot_id for record in self.endpoint.membership.records()}


def test_ranks_register_again_under_the_ids_they_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_server, "RECONNECT_DELAY_S", 0.05)
    path = tmp_path / "tokenizer.json"
    byte_tokenizer().save(str(path))

    async def test() -> None:
        ranks = Ranks(path)
        await ranks.start_control()
        try:
            for index, server in enumerate(ranks.servers):
                assert await asyncio.to_thread(server.start) == f"mixed/{index}"
            before = ranks.members()
            frames: asyncio.Queue[StepFrame] = asyncio.Queue()
            router = await connect(HOST, ranks.servers[0].stats()["port"], secret=SECRET, role="router", name="r")
            router.start(lambda payload: frames.put_nowait(msgspec.msgpack.decode(payload, type=StepFrame)))

            await ranks.restart_control()
            assert ranks.members() == {}
            # The second comes first: the lowest free id would be the other one's.
            ranks.may_find[1] = True
            await settle(lambda: len(ranks.members()) == 1)
            ranks.may_find[0] = True
            await settle(lambda: len(ranks.members()) == 2)
            assert ranks.members() == before
            assert ranks.endpoint.num_malformed == 0
            await settle(lambda: [s.stats()["rank_id"] for s in ranks.servers] == ["mixed/0", "mixed/1"])
            ranks.endpoint.check_integrity()
            assert not router.closed.done()
            assert await asyncio.wait_for(frames.get(), TIMEOUT_S)
            router.close()
            await router.closed
        finally:
            for server in ranks.servers:
                await asyncio.to_thread(server.stop)
            await ranks.endpoint.stop()

    asyncio.run(asyncio.wait_for(test(), 3 * TIMEOUT_S))
