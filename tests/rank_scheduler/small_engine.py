"""A rank small enough to count its blocks by hand: the real scheduler and the simulated runner, four tokens a block."""

from __future__ import annotations

import random
from typing import Any

from rank_scheduler.messages import EncoderInput, RankLoad
from rank_scheduler.plan import StepPlan, StepResult
from tests.rank_scheduler.scenario import BLOCK_SIZE, EOS, VOCAB_SIZE, Rank
from tests.rank_scheduler.scenario import expected as tokens_after
from tests.rank_scheduler.simulated_connector import SimulatedConnector

__all__ = ["BLOCK_SIZE", "EOS", "MAX_MODEL_LEN", "VOCAB_SIZE", "SmallEngine", "item", "prompt_of", "tokens_after"]

MAX_MODEL_LEN = 64


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * index) % VOCAB_SIZE for index in range(length)]


def item(offset: int, length: int, number: int = 0) -> EncoderInput:
    return EncoderInput(f"item {number}".encode(), offset, length, bytes([number]))


class SmallEngine(Rank):
    """`fields` are those of `SchedulerConfig`, `setup` those of `SchedulerSetup`."""

    def __init__(self, *, num_blocks: int = 65, with_connector: bool = False, **fields: Any) -> None:
        connector = SimulatedConnector() if with_connector else None
        super().__init__(connector=connector, num_blocks=num_blocks, **({"max_num_batched_tokens": 64} | fields))
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
