"""A rank small enough to count its blocks by hand: the real scheduler and the simulated runner, four tokens a block."""

from __future__ import annotations

import random
from typing import Any

from kv_transfer.connector import LoadFinished
from model_runner.simulated import SimulatedRunner, expected_tokens
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.interface import KvGroup
from rank_scheduler.messages import EncoderInput, RankLoad
from rank_scheduler.plan import StepPlan, StepResult
from tests.engine import Engine
from tests.rank_scheduler.simulated_connector import SimulatedConnector

VOCAB_SIZE = 50
EOS = 7
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * index) % VOCAB_SIZE for index in range(length)]


def tokens_after(prompt: list[int], num_tokens: int, **model: Any) -> list[int]:
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE, **model)


def item(offset: int, length: int, number: int = 0) -> EncoderInput:
    return EncoderInput(f"item {number}".encode(), offset, length, bytes([number]))


class SmallEngine(Engine):
    """`fields` are those of `SchedulerConfig`, `setup` those of `SchedulerSetup`."""

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        max_model_len: int = MAX_MODEL_LEN,
        kv_groups: tuple[KvGroup, ...] = (KvGroup(),),
        is_encoder_decoder: bool = False,
        with_connector: bool = False,
        setup: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        config = SchedulerConfig(**({"max_num_batched_tokens": 64, "max_num_seqs": 8} | fields))
        runner = SimulatedRunner(
            scheduler=config,
            cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
            kv_groups=kv_groups,
            is_encoder_decoder=is_encoder_decoder,
        )
        self.connector = SimulatedConnector() if with_connector else None
        if self.connector is not None:
            connector = self.connector
            runner.start_connector = lambda metadata: connector.start(metadata, runner)
        super().__init__(
            runner,
            config,
            kv_groups=kv_groups,
            is_encoder_decoder=is_encoder_decoder,
            connector=self.connector,
            **(setup or {}),
        )
        self.shares: list[dict[int, int]] = []
        """Of every executed plan: request → tokens."""

    def execute(self, plan: StepPlan) -> StepResult:
        wire_ids = self.scheduler._state.batch.wire_id[plan.slots].tolist()
        self.shares.append(dict(zip(wire_ids, plan.num_tokens.tolist(), strict=True)))
        return super().execute(plan)

    def step_shares(self) -> dict[int, int]:
        """Take a step (without async scheduling); request → tokens that it computed."""
        return self.shares[-1] if self.step() is not None else {}

    def steps(self, count: int) -> list[dict[int, int]]:
        return [self.step_shares() for _ in range(count)]

    def end_load(self, request_id: int, num_valid_tokens: int | None = None, cause: str = "") -> None:
        """The load of a request (owner 0) ends; `num_valid_tokens` None: well."""
        assert self.connector is not None
        load = self.connector.loading.pop((0, request_id))
        self.connector._fill(load, load[3] if num_valid_tokens is None else num_valid_tokens, self.runner)
        self.scheduler.load_finished(LoadFinished((0, request_id), num_valid_tokens, cause), self.now)
        self.scheduler.check_integrity()

    def end_loads(self) -> None:
        assert self.connector is not None
        while (event := self.connector.complete(random.Random(0), self.runner)) is not None:
            self.scheduler.load_finished(event, self.now)

    def drain(self) -> None:
        """Run until nothing is left, ending every load at once, and check that nothing is held."""
        for _ in range(1_000):
            if not self.in_flight and not self.scheduler.has_work():
                break
            self.step()
            if self.connector is not None:
                self.end_loads()
        self.check_empty()

    def check_empty(self) -> None:
        load = self.load
        assert (load.num_running, load.num_waiting, load.num_deferred, load.num_loads) == (0, 0, 0, 0), load
        assert load.num_waiting_tokens == 0
        assert load.num_free_blocks == load.num_blocks, "blocks leaked"
        self.scheduler.check_integrity()

    @property
    def load(self) -> RankLoad:
        return self.scheduler.load()

    @property
    def running(self) -> list[int]:
        """Requests in slots, in order of admission."""
        batch = self.scheduler._state.batch
        return batch.wire_id[batch.order].tolist()

    @property
    def queued(self) -> list[int]:
        """Requests that wait for their turn, in order."""
        return [sequence.key[1] for sequence in self.scheduler._state.waiting]

    def preempted(self) -> list[int]:
        """Requests that were preempted, in the order of its happening."""
        state = self.scheduler._state
        found = [
            (entry.at, sequence.key[1])
            for sequence in (*state.sequences.values(), *state.ended.values())
            for entry in sequence.timeline()
            if entry.event == "preempted"
        ]
        return [request_id for _, request_id in sorted(found)]
