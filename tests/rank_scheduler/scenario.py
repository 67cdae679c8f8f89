"""Small ranks for scenarios: an engine with its runner, and a connector whose loads end when the test says so."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.connector import LoadFinished, SendFinished
from model_runner import simulated
from model_runner.simulated import SimulatedRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.interface import KvGroup
from rank_scheduler.messages import Extend
from rank_scheduler.plan import StepPlan
from rank_scheduler.sequence import Sequence
from tests.engine import Engine
from tests.rank_scheduler.simulated_connector import SimulatedConnector

VOCAB_SIZE = 50
EOS = 7
BLOCK_SIZE = 4


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [(start + 11 * index + index * index * start) % VOCAB_SIZE for index in range(length)]


def expected(prompt: list[int], num_tokens: int, **options: object) -> list[int]:
    return simulated.expected_tokens(prompt, num_tokens, VOCAB_SIZE, **options)


class Rank(Engine):
    """`config` are fields of `SchedulerConfig`; owner 0 owns every request."""

    def __init__(
        self,
        *,
        connector: SimulatedConnector | None = None,
        num_blocks: int = 64,
        max_model_len: int = 64,
        kv_groups: tuple[KvGroup, ...] = (KvGroup(),),
        is_encoder_decoder: bool = False,
        setup: dict[str, object] | None = None,
        **config: object,
    ) -> None:
        setup = dict(setup or {})
        if "kv_load_failure_policy" in config:
            setup["kv_load_failure_policy"] = config.pop("kv_load_failure_policy")
        settings = SchedulerConfig(**({"max_num_batched_tokens": 32, "max_num_seqs": 8} | config))
        runner = SimulatedRunner(
            scheduler=settings,
            cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
            kv_groups=kv_groups,
            is_encoder_decoder=is_encoder_decoder,
        )
        self.connector = connector
        if connector is not None:
            connector.runner = runner
            runner.kv_hooks = connector
        super().__init__(
            runner,
            settings,
            kv_groups=kv_groups,
            is_encoder_decoder=is_encoder_decoder,
            connector=connector,
            **setup,
        )

    def sequence(self, request_id: int) -> Sequence:
        return self.scheduler._state.sequences[0, request_id]

    def state_of(self, request_id: int) -> str:
        return str(self.sequence(request_id).state)

    def running(self) -> list[int]:
        """Requests with a slot, in order of admission."""
        batch = self.scheduler._state.batch
        return batch.wire_id[batch.order].tolist()

    def plan(self) -> StepPlan | None:
        """The first half of a step: its plan goes out, and no result comes in."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(plan)
        self.take(self.scheduler.take_frames())
        self.scheduler.check_integrity()
        return plan

    def step_until(self, holds: Callable[[], bool], max_steps: int = 200) -> None:
        for _ in range(max_steps):
            if holds():
                return
            self.step()
        raise AssertionError(f"it did not come about in {max_steps} steps: {self.scheduler.load()}")

    def extend(self, request_id: int, token_ids: list[int], max_tokens: int = 4, *, is_last: bool = False) -> None:
        data = b"".join(token.to_bytes(4, "little", signed=True) for token in token_ids)
        self.scheduler.extend(0, Extend(request_id, data, max_tokens, is_last), self.now)

    def abort(self, request_id: int) -> None:
        self.scheduler.abort(0, request_id, self.now)
        self.take(self.scheduler.take_frames())
        self.scheduler.check_integrity()

    def hand_off(self, request_id: int) -> None:
        self.scheduler.hand_off(0, request_id, self.now)
        self.take(self.scheduler.take_frames())
        self.scheduler.check_integrity()

    def end_load(self, request_id: int, num_valid: int | None = None, cause: str = "") -> None:
        """The load has brought `num_valid` tokens (None: all of them)."""
        assert self.connector is not None
        load = self.connector.loading.pop((0, request_id))
        self.connector._fill(load, load[3] if num_valid is None else num_valid, self.runner)
        self.tell_load_ended(request_id, num_valid, cause)

    def tell_load_ended(self, request_id: int, num_valid: int | None = None, cause: str = "") -> None:
        self.scheduler.load_finished(LoadFinished((0, request_id), num_valid, cause), self.now)
        self.scheduler.check_integrity()

    def end_send(self, request_id: int) -> None:
        self.scheduler.send_finished(SendFinished((0, request_id)), self.now)
        self.scheduler.check_integrity()

    def num_held_blocks(self) -> int:
        load = self.scheduler.load()
        return load.num_blocks - load.num_free_blocks

    def assert_nothing_held(self) -> None:
        self.scheduler.check_integrity()
        load = self.scheduler.load()
        assert load.num_free_blocks == load.num_blocks
        assert load.num_running == load.num_waiting == load.num_deferred == load.num_loads == 0, load
        assert load.num_waiting_tokens == 0, load
