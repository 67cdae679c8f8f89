"""KV out of stores on a real model: no token changes, and fewer are computed."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer.memory import KvMemory
from model_runner.runner import Capacity, KvHooks
from model_runner.torch_runner import TorchRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.messages import FinishReason
from rank_scheduler.plan import StepPlan, StepResult
from router.tokenizer import ChatTokenizer
from tests.engine import Engine
from tests.kv_transfer.redis_rig import RedisProcess, needs_redis
from tests.kv_transfer.store_rig import ConnectedEngine, Connector, Resources, settle_stores

pytestmark = pytest.mark.model

MAX_NUM_SEQS = 16
NUM_BLOCKS = 120
BLOCK_SIZE = 16
NUM_TOKENS = 8
STORY = (
    "The history of the bicycle began when a forester from Karlsruhe, who was short of horses after a year without a "
    "summer, put two wheels one behind the other and ran. Nobody had thought that a man could keep his balance on it. "
)
QUESTIONS = (
    "Who invented it, and why?",
    "Where was he from?",
    "What was the summer like in that year?",
)


class SharedRunner:
    """A loaded runner that one engine after the other uses; each finds a pool full of what is not its own."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._capacity = runner.load()

    @property
    def kv_hooks(self) -> KvHooks | None:
        return self._runner.kv_hooks

    @kv_hooks.setter
    def kv_hooks(self, hooks: KvHooks | None) -> None:
        self._runner.kv_hooks = hooks

    def load(self) -> Capacity:
        self._runner.kv_hooks = None
        self._runner.pool.blocks[1:] = 1000.0
        memory = self._runner.kv_memory()
        assert memory.is_mirror == self._capacity.is_kv_mirrored
        if memory.is_mirror:
            memory.blocks.view(np.float32)[:] = 2000.0
        return self._capacity

    def execute(self, plan: StepPlan) -> StepResult:
        return self._runner.execute(plan)

    def kv_memory(self) -> KvMemory:
        return self._runner.kv_memory()

    def close(self) -> None:
        self._runner.close()


def load_runner(model_dir: Path, *, mirrored: bool = False) -> SharedRunner:
    return SharedRunner(
        TorchRunner(
            model_dir,
            scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
            cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
            dtype="float32",
            num_threads=1,
            max_model_len=256,
            shared_kv=True,
            mirrored_kv=mirrored,
        )
    )


@pytest.fixture(scope="module")
def runner(embedded_dir: Path) -> Iterator[SharedRunner]:
    runner = load_runner(embedded_dir)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def tiny(tiny_dir: Path) -> Iterator[SharedRunner]:
    runner = load_runner(tiny_dir)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def mirrored(embedded_dir: Path) -> Iterator[SharedRunner]:
    """Computes elsewhere than in the memory that connectors read and write."""
    runner = load_runner(embedded_dir, mirrored=True)
    yield runner
    runner.close()


@pytest.fixture
def where(request: pytest.FixtureRequest) -> SharedRunner:
    """`runner` or `mirrored`."""
    runner: SharedRunner = request.getfixturevalue(request.param)
    return runner


@pytest.fixture(scope="module")
def prompts(embedded_dir: Path) -> list[list[int]]:
    tokenizer = ChatTokenizer(embedded_dir)
    try:
        # Numbered, so that none begins like another.
        texts = [f"{number}. {STORY}{question}" for number, question in enumerate(QUESTIONS)]
        return [asyncio.run(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    finally:
        tokenizer.close()


def answers(engine: Engine, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, num_tokens)
    engine.run()
    load = engine.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_deferred) == (0, 0, 0)
    assert load.num_free_blocks == load.num_blocks
    assert all(end.reason is FinishReason.LENGTH for end in engine.ends.values()), engine.ends
    return [engine.tokens[number] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def right(runner: SharedRunner, prompts: list[list[int]]) -> list[list[int]]:
    """What is answered without any store."""
    return answers(Engine(runner, SchedulerConfig(max_num_seqs=MAX_NUM_SEQS)), prompts)


MakeEngine = Callable[..., ConnectedEngine]


@pytest.fixture
def make() -> Iterator[MakeEngine]:
    """One after the other: the one before is closed."""
    resources = Resources()
    engines: list[ConnectedEngine] = []

    def make(runner: SharedRunner, connector: Connector, **options: Any) -> ConnectedEngine:
        if engines:
            settle_stores(engines[-1])
            engines.pop().close()
        setup = {
            name: options.pop(name) for name in ("num_blocks", "async_scheduling", "max_model_len") if name in options
        }
        config = SchedulerConfig(**({"max_num_seqs": MAX_NUM_SEQS} | options))
        engines.append(ConnectedEngine(runner, connector, config, **setup))
        return engines[-1]

    yield make
    while engines:
        engines.pop().close()
    resources.assert_as_before()


@pytest.fixture(params=["files", pytest.param("redis", marks=needs_redis), "together"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connector]:
    """A store that outlives the engine."""
    files = {"shared_storage_path": str(tmp_path / "kv"), "scan_interval_s": 0.1}
    if request.param == "redis":
        server = RedisProcess(tmp_path)
        yield "RedisConnector", {"url": server.url, "timeout_s": 10.0, "lookup_timeout_s": 30.0, "load_timeout_s": 30.0}
        server.kill()
    elif request.param == "files":
        yield "SharedStorageConnector", files
    else:
        children = [
            {"kv_connector": "OffloadConnector"},
            {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": files},
        ]
        yield "MultiConnector", {"connectors": children}


@pytest.mark.parametrize(
    ("where", "store", "async_scheduling"),
    [
        ("runner", "files", False),
        ("runner", "files", True),
        pytest.param("runner", "redis", True, marks=needs_redis),
        ("runner", "together", True),
        ("mirrored", "files", True),
        pytest.param("mirrored", "redis", False, marks=needs_redis),
        ("mirrored", "together", True),
    ],
    indirect=["where", "store"],
)
def test_a_second_engine_answers_from_the_store(
    where: SharedRunner,
    make: MakeEngine,
    store: Connector,
    prompts: list[list[int]],
    right: list[list[int]],
    async_scheduling: bool,
) -> None:
    first = make(where, store, async_scheduling=async_scheduling, max_num_batched_tokens=48)
    assert answers(first, prompts) == right
    second = make(where, store, async_scheduling=async_scheduling)
    assert answers(second, prompts) == right
    assert second.num_computed_tokens() <= sum(len(prompt) % BLOCK_SIZE + NUM_TOKENS for prompt in prompts)
    assert second.worker.stats().num_loads == len(prompts)
    assert second.worker.stats().load_failures == {}


@pytest.mark.parametrize(
    ("where", "async_scheduling"), [("runner", False), ("runner", True), ("mirrored", True)], indirect=["where"]
)
def test_with_damaged_and_missing_blocks_the_answers_are_the_same(
    where: SharedRunner,
    make: MakeEngine,
    tmp_path: Path,
    prompts: list[list[int]],
    right: list[list[int]],
    async_scheduling: bool,
) -> None:
    store = "SharedStorageConnector", {"shared_storage_path": str(tmp_path), "scan_interval_s": 600.0}
    assert answers(make(where, store), prompts) == right
    second = make(where, store, async_scheduling=async_scheduling)
    for number, path in enumerate(sorted(tmp_path.rglob("*.kv"))):
        if number % 3 == 0:
            path.unlink()
        elif number % 3 == 1:
            with path.open("r+b") as file:
                file.seek(os.path.getsize(path) // 2)
                file.write(b"damaged in the middle")
    assert answers(second, prompts) == right
    assert sum(second.worker.stats().load_failures.values()) >= 1
    # What it has repaired, others can rely on.
    third = make(where, store)
    assert answers(third, prompts) == right
    assert third.worker.stats().load_failures == {}


def test_in_a_pool_for_few_the_host_s_memory_remembers_for_many(
    runner: SharedRunner, make: MakeEngine, prompts: list[list[int]], right: list[list[int]]
) -> None:
    engine = make(runner, ("OffloadConnector", {}), num_blocks=20, max_num_seqs=2, max_model_len=160)
    longest = max(len(prompt) for prompt in prompts)
    assert longest + NUM_TOKENS <= 160
    assert answers(engine, prompts) == right
    others = [list(reversed(prompt)) for prompt in prompts]
    for number, prompt in enumerate(others, 50):
        engine.submit(number, prompt, 2)
    engine.run()
    before = engine.num_computed_tokens()
    for number, prompt in enumerate(prompts, 100):
        engine.submit(number, prompt, NUM_TOKENS)
    engine.run()
    assert [engine.tokens[100 + number] for number in range(len(prompts))] == right
    assert engine.worker.stats().num_loads >= 1
    assert engine.num_computed_tokens() - before <= sum(len(prompt) for prompt in prompts) // 2 + NUM_TOKENS * len(
        prompts
    )


@pytest.fixture(scope="module")
def many(tiny: SharedRunner) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts with many prefixes, and what is answered without any store."""
    rng = random.Random(3)
    prefixes = [[rng.randrange(90) for _ in range(48)] for _ in range(10)]
    prompts = [[*rng.choice(prefixes), *(rng.randrange(90) for _ in range(rng.randint(1, 20)))] for _ in range(100)]
    return prompts, answers(Engine(tiny, SchedulerConfig(max_num_seqs=MAX_NUM_SEQS)), prompts, 6)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_hundred_requests_in_a_pool_for_five(
    tiny: SharedRunner,
    make: MakeEngine,
    store: Connector,
    many: tuple[list[list[int]], list[list[int]]],
    async_scheduling: bool,
) -> None:
    """Many prefixes, all stored and loaded at the same time, preempted and aborted."""
    prompts, expected = many
    options = {"num_blocks": 27, "max_model_len": 96, "async_scheduling": async_scheduling}
    computed = []
    for _ in range(2):
        engine = make(tiny, store, **options)
        for number, prompt in enumerate(prompts):
            engine.submit(number, prompt, 6)
            if number % 10 == 9:
                engine.submit(1000 + number, prompt, 6)
                engine.step()
                engine.scheduler.abort(0, 1000 + number, engine.now)
        engine.run()
        assert [engine.tokens[number] for number in range(100)] == expected
        engine.assert_nothing_held()
        computed.append(engine.num_computed_tokens())
    assert computed[1] < computed[0]
