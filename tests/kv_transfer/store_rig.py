"""Ranks whose KV lies in memory that connectors read and write: real scheduler, simulated model, real connector.

Each position's KV is a hash of all that it sees, so whatever is loaded into the wrong place, too late, or from what
was stored wrongly, shows as a wrong token. Blocks have two "layers", so that loads by layer have something to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cluster.step_executor import StepExecutor
from kv_transfer.config import KvRole, KVTransferConfig
from kv_transfer.connector import ConnectorContext, ConnectorEvent, LoadFenced, LoadFinished, SendFinished
from kv_transfer.geometry import Geometry
from kv_transfer.memory import KvMemory
from kv_transfer.registry import find_connector
from model_runner.batch import StepRows
from model_runner.runner import Capacity, ModelRunner
from model_runner.simulated import SimulatedRunner, expected_tokens
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.messages import FinishReason
from rank_scheduler.plan import StepPlan, StepResult
from rank_scheduler.prefix_hash import extend_block_hashes
from tests.engine import Engine

VOCAB_SIZE = 50
EOS = 7
BLOCK_SIZE = 4
NUM_LAYERS = 2
BLOCK_BYTES = 8 * BLOCK_SIZE
PATIENCE_S = 30.0

Connector = tuple[str, dict[str, Any]]
"""Name, and its settings."""


def until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.002)
    return result


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [(start + 11 * index + index * index * start) % VOCAB_SIZE for index in range(length)]


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE)


class MirroredMemory(KvMemory):
    """As of a pool on a device: what the runner computes in is `device`, and what lies here at first is garbage."""

    is_mirror = True

    def __init__(self, num_blocks: int, block_size_bytes: int) -> None:
        super().__init__(num_blocks, block_size_bytes)
        self.device = np.zeros_like(self.blocks)
        self.blocks[:] = 0xEE

    def to_host(self, block_ids: npt.NDArray[np.int32]) -> None:
        self.blocks[block_ids] = self.device[block_ids]

    def to_device(self, block_ids: npt.NDArray[np.int32]) -> None:
        self.device[block_ids] = self.blocks[block_ids]


class SharedSimulatedRunner(SimulatedRunner):
    """Its KV lies in a `KvMemory`, and it calls the hooks for each layer, as a runner that computes does."""

    def __init__(self, num_blocks: int, *, mirrored: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._memory: KvMemory
        if mirrored:
            self._memory = mirror = MirroredMemory(num_blocks, BLOCK_BYTES)
            self._kv = mirror.device.view(np.uint64)
        else:
            self._memory = KvMemory(num_blocks, BLOCK_BYTES)
            self._kv = self._memory.blocks.view(np.uint64)

    def load(self) -> Capacity:
        return dataclasses.replace(super().load(), geometry=geometry(), is_kv_mirrored=self._memory.is_mirror)

    def kv_memory(self) -> KvMemory:
        return self._memory

    def close(self) -> None:
        self._memory.close()

    def _compute_rows(self, rows: StepRows) -> list[list[int]]:
        if self.kv_hooks is not None and len(rows.slots):
            for layer in range(NUM_LAYERS):
                self.kv_hooks.wait_for_layer_load(layer)
        digests = super()._compute_rows(rows)
        if self.kv_hooks is not None and len(rows.slots):
            for layer in range(NUM_LAYERS):
                self.kv_hooks.save_kv_layer(layer)
        return digests


def geometry(**changes: Any) -> Geometry:
    plain = Geometry(
        model="simulated",
        dtype="uint64",
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_dim=1,
        block_size=BLOCK_SIZE,
        num_groups=1,
        block_size_bytes=BLOCK_BYTES,
    )
    return msgspec.structs.replace(plain, **changes)


def context_of(
    connector: Connector, shape: Geometry, role: KvRole = KvRole.BOTH, *, mirrored: bool = False
) -> ConnectorContext:
    config = KVTransferConfig(kv_connector=connector[0], kv_connector_extra_config=connector[1])
    return ConnectorContext(
        config=config,
        role=role,
        engine_id="e",
        host="127.0.0.1",
        secret=b"the cluster's",
        geometry=shape,
        pool_is_mirrored=mirrored,
    )


class ConnectedEngine(Engine):
    """A rank with its connector; its clock counts steps, its connector's threads live in real time."""

    def __init__(
        self,
        runner: ModelRunner,
        connector: Connector,
        config: SchedulerConfig,
        *,
        role: KvRole = KvRole.BOTH,
        **setup: Any,
    ) -> None:
        capacity = runner.load()
        assert capacity.geometry is not None
        context = context_of(connector, capacity.geometry, role, mirrored=capacity.is_kv_mirrored)
        factory = find_connector(context.config)
        self.connector: Any = factory.make_scheduler_half(context)
        self.worker: Any = factory.make_worker_half(context)
        self.events: queue.SimpleQueue[ConnectorEvent] = queue.SimpleQueue()
        super().__init__(runner, config, connector=self.connector, **setup)
        self.executor = StepExecutor(runner, self.worker)
        self.worker.start(runner.kv_memory(), self.events.put)
        self.failing_steps: set[int] = set()
        self._has_failed = False

    def finish_step(self) -> None:
        plan = self.in_flight.popleft()
        if self._has_failed:
            outcome: Any = self.executor.drop(plan, RuntimeError("the step before has failed")).outcome
        elif plan.step in self.failing_steps:
            self._execute(plan)
            self._has_failed = True
            outcome = RuntimeError("broken on purpose")
        else:
            outcome = self.executor.execute(plan).outcome
        if isinstance(outcome, StepResult):
            self.take(self.scheduler.update(plan, outcome, self.now))
        else:
            assert self._has_failed, outcome
            self.take(self.scheduler.fail(plan, str(outcome), self.now))
        if not self.in_flight:
            self._has_failed = False
        self.scheduler.check_integrity()

    def _execute(self, plan: StepPlan) -> None:
        """Computed, with an error at the end: what it wrote is there, and nobody may rely on it."""
        real, self.runner.execute = self.runner.execute, _raising(self.runner.execute)  # type: ignore[method-assign]
        self.executor.execute(plan)
        self.runner.execute = real  # type: ignore[method-assign]

    def step(self) -> StepPlan | None:
        self.take_events()
        plan = super().step()
        if (check := getattr(self.connector, "check_integrity", None)) is not None:
            check()
        return plan

    def take_events(self) -> None:
        while not self.events.empty():
            match event := self.events.get():
                case LoadFinished():
                    self.scheduler.load_finished(event, self.now)
                case LoadFenced():
                    self.scheduler.load_fenced(event, self.now)
                case SendFinished():
                    self.scheduler.send_finished(event, self.now)
            self.scheduler.check_integrity()

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left; where only an event can help, wait for it."""
        deadline = time.monotonic() + PATIENCE_S
        while self.in_flight or self.scheduler.has_work() or self._is_owed_events():
            if self.step() is None and not self.in_flight:
                time.sleep(0.001)
            assert time.monotonic() < deadline, f"not drained: {self.scheduler.load()}"

    def _is_owed_events(self) -> bool:
        load = self.scheduler.load()
        return bool(not self.events.empty() or load.num_deferred or load.num_free_blocks != load.num_blocks)

    def num_computed_tokens(self) -> int:
        return sum(plan.total_tokens for plan in self.plans)

    def assert_nothing_held(self) -> None:
        self.scheduler.check_integrity()
        load = self.scheduler.load()
        assert load.num_free_blocks == load.num_blocks
        assert load.num_running == load.num_waiting == load.num_deferred == load.num_loads == 0, load

    def close(self) -> None:
        self.worker.close(PATIENCE_S)


def _raising(execute: Callable[[StepPlan], StepResult]) -> Callable[[StepPlan], StepResult]:
    def raising(plan: StepPlan) -> StepResult:
        execute(plan)
        raise RuntimeError("broken on purpose")

    return raising


def make_engine(
    connector: Connector,
    *,
    num_blocks: int = 64,
    max_model_len: int = 64,
    role: KvRole = KvRole.BOTH,
    setup: dict[str, Any] | None = None,
    mirrored: bool = False,
    **config: Any,
) -> ConnectedEngine:
    settings = SchedulerConfig(**({"max_num_batched_tokens": 32, "max_num_seqs": 8} | config))
    runner = SharedSimulatedRunner(
        num_blocks,
        mirrored=mirrored,
        scheduler=settings,
        cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
    )
    return ConnectedEngine(runner, connector, settings, role=role, **(setup or {}))


@contextlib.contextmanager
def making_engines() -> Iterator[Callable[..., ConnectedEngine]]:
    """`make_engine`; at the end all are closed, and nothing of them is left."""
    resources = Resources()
    engines: list[ConnectedEngine] = []

    def make(connector: Connector, **options: Any) -> ConnectedEngine:
        engines.append(make_engine(connector, **options))
        return engines[-1]

    yield make
    while engines:
        # No name for it: a frame that knows it would keep its memory.
        engines[-1].close()
        engines.pop().runner.close()
    resources.assert_as_before()


def settle_stores(engine: ConnectedEngine) -> None:
    """Until everything that was staged has been written, or dropped."""
    workers = getattr(engine.worker, "_children", [engine.worker])
    for worker in workers:
        if (writer := getattr(worker, "_writer", None)) is not None:
            until(lambda writer=writer: writer._num_staged == 0, "everything is stored")  # type: ignore[misc]


def damage_block(directory: Path, prompt: list[int], column: int) -> None:
    """The last byte of the file that has this block of the prompt is another now."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, np.array(prompt, np.int32), BLOCK_SIZE)
    (path,) = directory.rglob(f"{hashes[column].hex()}.kv")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def serve(engine: ConnectedEngine, prompts: list[list[int]], num_tokens: int = 4, first_id: int = 0) -> None:
    """All at once; every token is checked."""
    for number, prompt in enumerate(prompts, first_id):
        engine.submit(number, prompt, num_tokens)
    engine.run()
    for number, prompt in enumerate(prompts, first_id):
        assert engine.ends[number].reason is FinishReason.LENGTH, engine.ends[number]
        assert engine.tokens[number] == expected(prompt, num_tokens), f"request {number} read wrong KV"
    engine.assert_nothing_held()


class Resources:
    """Threads, descriptors and shared memory of this process, to compare."""

    def __init__(self) -> None:
        self.before = self._now()

    @staticmethod
    def _now() -> tuple[list[str], int, list[str]]:
        threads = sorted(thread.name for thread in threading.enumerate())
        return threads, len(os.listdir("/proc/self/fd")), sorted(path.name for path in Path("/dev/shm").iterdir())

    def assert_as_before(self) -> None:
        def is_as_before() -> bool:
            gc.collect()
            threads, num_fds, shared = self._now()
            before = self.before
            return threads == before[0] and num_fds <= before[1] and set(shared) <= set(before[2])

        try:
            until(is_as_before, "everything is given back", 5.0)
        except AssertionError:
            raise AssertionError(f"before {self.before}, now {self._now()}") from None
