"""Store connectors in a rank's own loop: steps on one thread, decisions on another, messages from many."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.rank_loop import Aborted, IntegrityCheck, RankLoop, Submitted
from kv_transfer.registry import find_connector
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.interface import SchedulerSetup
from rank_scheduler.messages import FinishReason, SamplingParams, StepFrame, Submit
from rank_scheduler.scheduler import Scheduler
from tests.kv_transfer.redis_rig import RedisProcess, needs_redis
from tests.kv_transfer.store_rig import (
    BLOCK_SIZE,
    EOS,
    PATIENCE_S,
    VOCAB_SIZE,
    Connector,
    Resources,
    SharedSimulatedRunner,
    context_of,
    expected,
    geometry,
    prompt_of,
    until,
)

NUM_BLOCKS = 40
NUM_REQUESTS = 24
NUM_THREADS = 3


class LoopRig:
    def __init__(self, connector: Connector, *, is_async: bool) -> None:
        config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24)
        context = context_of(connector, geometry())
        factory = find_connector(context.config)
        runner = SharedSimulatedRunner(
            NUM_BLOCKS,
            scheduler=config,
            cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
            max_model_len=64,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
        )
        self.runner = runner
        setup = SchedulerSetup(
            max_model_len=64,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            async_scheduling=is_async,
            connector=factory.make_scheduler_half(context),
        )
        self.worker: Any = factory.make_worker_half(context)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, FinishReason] = {}
        self.crashes: list[str] = []
        self.loop = RankLoop(
            Scheduler(config, setup), runner, self._take, self.crashes.append, connector_worker=self.worker
        )
        self.worker.start(runner.kv_memory(), self.loop.post)
        self.loop.start()

    def _take(self, messages: Mapping[int, Any]) -> None:
        for frame in messages.values():
            assert isinstance(frame, StepFrame)
            for number, token in zip(frame.ids, frame.tokens, strict=True):
                self.tokens[number].append(token)
            self.ends.update({end.id: end.reason for end in frame.ends})

    def submit(self, number: int, prompt: list[int]) -> None:
        sampling = SamplingParams(seed=1, max_tokens=4, temperature=0.0, ignore_eos=True)
        message = Submit(number, np.array(prompt, "<i4").tobytes(), sampling, request_id=f"r{number}")
        self.loop.post(Submitted(0, message))

    def serve(self, first: int, prompts: list[list[int]]) -> None:
        """From several threads at once; every fourth is given up by its client at some time."""

        def send(thread: int) -> None:
            for index in range(thread, len(prompts), NUM_THREADS):
                self.submit(first + index, prompts[index])
                if index % 4 == 3:
                    self.loop.post(Aborted(0, first + index))

        threads = [threading.Thread(target=send, args=(thread,)) for thread in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        until(lambda: self.crashes or len(self.ends) == first + len(prompts), "all requests end")
        assert self.crashes == []
        for index, prompt in enumerate(prompts):
            tokens, reason = self.tokens[first + index], self.ends[first + index]
            assert reason is FinishReason.LENGTH or index % 4 == 3
            assert tokens == expected(prompt, 4)[: len(tokens)]

    def close(self) -> None:
        until(lambda: self.loop.load.num_free_blocks == self.loop.load.num_blocks, "all blocks are free")
        done: Future[None] = Future()
        self.loop.post(IntegrityCheck(done))
        done.result(PATIENCE_S)
        assert self.loop.stop(PATIENCE_S)
        self.worker.close(PATIENCE_S)
        self.runner.close()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["memory", "files", pytest.param("redis", marks=needs_redis), "together"])
def test_many_clients_and_little_room(tmp_path: Path, kind: str, is_async: bool) -> None:
    resources = Resources()
    server = RedisProcess(tmp_path) if kind == "redis" else None
    files = {"shared_storage_path": str(tmp_path / "kv"), "scan_interval_s": 0.05}
    connectors: dict[str, Connector] = {
        "memory": ("OffloadConnector", {}),
        "files": ("SharedStorageConnector", files),
        "redis": ("RedisConnector", {"url": server.url if server else "", "lookup_timeout_s": 10.0}),
    }
    children = [
        {"kv_connector": connectors[name][0], "kv_connector_extra_config": connectors[name][1]}
        for name in ("memory", "files")
    ]
    connectors["together"] = ("MultiConnector", {"connectors": children})
    rig = LoopRig(connectors[kind], is_async=is_async)
    prompts = [[*prompt_of(40, 1 + number % 7), number % 50] for number in range(NUM_REQUESTS)]
    try:
        rig.serve(0, prompts)
        rig.serve(NUM_REQUESTS, prompts)
        assert rig.worker.stats().num_loads >= 1
    finally:
        rig.close()
        if server is not None:
            server.kill()
    del rig
    resources.assert_as_before()
