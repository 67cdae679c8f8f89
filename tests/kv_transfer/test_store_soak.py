"""Random days of ranks that live off stores: every feature of the scheduler, with stores that lose, break and forget.

The days are the scheduler's own (`tests.rank_scheduler.soak`): sessions, grammars, speculation, priorities, aborts,
pauses, small pools. Here its connector is a real one, with real threads; each rank is followed by another, with a pool
of its own, over the same store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rank_scheduler.config import CacheConfig
from rank_scheduler.interface import PauseState
from tests.kv_transfer.redis_rig import RedisProcess, needs_redis
from tests.kv_transfer.store_rig import (
    BLOCK_BYTES,
    ConnectedEngine,
    Connector,
    Resources,
    SharedSimulatedRunner,
    settle_stores,
)
from tests.rank_scheduler import soak

NUM_STEPS = 120


class StoreSoak(soak.Soak):
    """One seed; `trouble` is called now and then."""

    def __init__(self, seed: int, connector: Connector, trouble: Callable[[random.Random], None]) -> None:
        super().__init__(seed)
        self.fits = not self.has_encoder and len(self.groups) == 1 and self.groups[0].sliding_window is None
        self.connector = None
        self.fails_steps = False
        if not self.fits:
            return
        self.trouble = trouble
        rng = self.rng
        num_blocks = 1 + -(-soak.MAX_MODEL_LEN // soak.BLOCK_SIZE) + rng.randint(0, 30)
        self.runner = SharedSimulatedRunner(
            num_blocks,
            mirrored=seed % 2 == 1,
            scheduler=self.config,
            cache=CacheConfig(num_blocks=num_blocks, block_size=soak.BLOCK_SIZE),
            max_model_len=soak.MAX_MODEL_LEN,
            vocab_size=soak.VOCAB_SIZE,
            eos_token_ids=frozenset({soak.EOS}),
        )
        drawn = self.engine.scheduler.setup
        options = {field.name: getattr(drawn, field.name) for field in dataclasses.fields(drawn)}
        for name in ("max_model_len", "vocab_size", "eos_token_ids", "num_blocks", "block_size", "connector"):
            del options[name]
        self.engine: ConnectedEngine = ConnectedEngine(
            self.runner, connector, self.config, **(options | {"enable_prefix_caching": True})
        )
        if rng.random() < 0.3:
            self.engine.failing_steps = set(rng.sample(range(1, NUM_STEPS), 6))

    def happen(self) -> None:
        super().happen()
        if self.rng.random() < 0.05:
            self.trouble(self.rng)

    def answer(self) -> None:
        super().answer()
        if not self.engine.in_flight and self.engine.events.empty():
            # Only a thread of the connector's can go on.
            time.sleep(0.0005)
        self.engine.take_events()

    def drain(self) -> None:
        self.is_draining = True
        self.engine.scheduler.set_pause(PauseState.UNPAUSED, self.engine.now)
        deadline = time.monotonic() + 60
        while self.engine.in_flight or self.engine.scheduler.has_work() or self.engine._is_owed_events():
            self.step()
            self.answer()
            assert time.monotonic() < deadline, f"nothing moves: {self.engine.scheduler.load()}"
        self.engine.connector.check_integrity()
        super().drain()

    def close(self) -> None:
        self.engine.close()
        self.runner.close()


def live(connector: Connector, seed: int, trouble: Callable[[random.Random], None]) -> dict[str, int]:
    """Two ranks, one after the other, over one store; returns figures of both."""
    figures = {"loads": 0, "failures": 0, "stored": 0}
    seeds = iter(range(1000 * seed, 1000 * seed + 1000))
    num_ranks = 0
    while num_ranks < 2:
        day = StoreSoak(next(seeds), connector, trouble)
        if not day.fits:
            continue
        num_ranks += 1
        # The same prefixes on both, else there would be nothing to share.
        shared = random.Random(seed)
        day.prefixes = [[shared.randrange(soak.VOCAB_SIZE) for _ in range(20)] for _ in range(3)]
        try:
            day.run(NUM_STEPS)
            settle_stores(day.engine)
            stats = day.engine.worker.stats()
        finally:
            day.close()
        figures["loads"] += stats.num_loads
        figures["failures"] += sum(stats.load_failures.values())
        figures["stored"] += stats.num_stored_blocks
    return figures


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    resources = Resources()
    yield
    resources.assert_as_before()


def damage_files(directory: Path) -> Callable[[random.Random], None]:
    def trouble(rng: random.Random) -> None:
        files = sorted(directory.rglob("*.kv"))
        for path in rng.sample(files, min(len(files), 5)):
            with contextlib.suppress(FileNotFoundError):
                content = path.read_bytes()
                change = rng.choice(["gone", "truncated", "flipped"])
                if change == "gone":
                    path.unlink()
                elif change == "truncated":
                    path.write_bytes(content[: rng.randrange(len(content) or 1)])
                elif content:
                    place = rng.randrange(len(content))
                    path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])

    return trouble


def files(directory: Path, **extra: Any) -> Connector:
    settings = {"shared_storage_path": str(directory), "scan_interval_s": 0.05}
    return "SharedStorageConnector", settings | extra


def nothing(rng: random.Random) -> None:
    """A day without trouble."""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_places", [4, 200])
def test_host_memory(seed: int, num_places: int) -> None:
    figures = live(("OffloadConnector", {"cpu_bytes_to_use": num_places * BLOCK_BYTES}), seed, nothing)
    assert figures["stored"] > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_damaged", [False, True])
def test_files(tmp_path: Path, seed: int, is_damaged: bool) -> None:
    figures = live(files(tmp_path), seed, damage_files(tmp_path) if is_damaged else nothing)
    assert figures["loads"] > 0
    assert (figures["failures"] > 0) <= is_damaged


@pytest.mark.parametrize("seed", range(2))
def test_files_with_little_room(tmp_path: Path, seed: int) -> None:
    assert live(files(tmp_path, max_size_bytes=3000), seed, nothing)["stored"] > 0


@needs_redis
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_troubled", [False, True])
def test_redis(tmp_path: Path, seed: int, is_troubled: bool) -> None:
    server = RedisProcess(tmp_path)

    def trouble(rng: random.Random) -> None:
        if rng.random() < 0.3:
            server.kill()
            server.start()
        with contextlib.closing(server.client()) as client:
            # Once: ranks write, and keys go, all the time.
            keys = server.all_keys()
            for key in rng.sample(keys, min(len(keys), 5)):
                client.set(key, rng.randbytes(36)) if rng.random() < 0.5 else client.delete(key)

    try:
        extra = {"url": server.url, "timeout_s": 2.0, "lookup_timeout_s": 5.0}
        figures = live(("RedisConnector", extra), seed, trouble if is_troubled else nothing)
        assert figures["stored"] > 0
        assert figures["loads"] > 0 or is_troubled
    finally:
        server.kill()


@pytest.mark.parametrize("seed", range(2))
def test_files_and_host_memory_together(tmp_path: Path, seed: int) -> None:
    name, extra = files(tmp_path)
    children = [
        {"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 20 * BLOCK_BYTES}},
        {"kv_connector": name, "kv_connector_extra_config": extra},
    ]
    if seed % 2:
        children.reverse()
    assert live(("MultiConnector", {"connectors": children}), seed, damage_files(tmp_path))["stored"] > 0
