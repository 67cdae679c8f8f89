"""A model without weights: deterministic, without torch, and strict about its KV.

Each position's KV is a hash of its token, its position and **all KV before it**, kept in a pool of blocks, and the
next token is a hash of all KV of the sequence, read back through the block table. So a wrong block table, prefix
hit, block copy or computed count gives other tokens than `expected_tokens`, as it would with a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_runner.batch import PersistentBatch
from model_runner.runner import Capacity
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.messages import TokenLogprobs
from rank_scheduler.plan import StepPlan, StepResult

DEFAULT_NUM_BLOCKS = 1024
DEFAULT_VOCAB_SIZE = 32000

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a step takes: `base_s` + `token_s` per computed token."""

    base_s: float = 0.02
    token_s: float = 0.0005

    def step_time_s(self, plan: StepPlan) -> float:
        return self.base_s + self.token_s * plan.total_tokens


class SimulatedRunner:
    """See `ModelRunner`. Always greedy: sampling parameters change nothing but which logprobs are reported."""

    def __init__(
        self,
        *,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        max_model_len: int = 4096,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        eos_token_ids: frozenset[int] = frozenset(),
        cost: CostModel | None = None,
    ) -> None:
        self._num_blocks = cache.num_blocks or DEFAULT_NUM_BLOCKS
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._cost = cost or CostModel()
        self._block_size = cache.block_size
        self._max_model_len = max_model_len
        self._batch = PersistentBatch(scheduler.max_num_seqs, max_model_len, cache.block_size)
        self._kv = np.zeros((self._num_blocks, cache.block_size), np.uint64)

    def load(self) -> Capacity:
        return Capacity(
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            block_size_bytes=self._kv[0].nbytes,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            dtype="uint64",
            device="none",
            backend="simulated",
        )

    def step_time_s(self, plan: StepPlan) -> float:
        """Seconds of virtual time that `execute(plan)` would take."""
        return self._cost.step_time_s(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        batch = self._batch
        batch.free(plan.freed_slots)
        for source, destination in plan.block_copies:
            self._kv[destination] = self._kv[source]
        for sequence in plan.new_sequences:
            self._kv[batch.install(sequence)] = 0
        batch.append_blocks(plan.appended_slots, plan.appended_blocks)
        self._kv[plan.appended_blocks] = 0

        rows = batch.rows(plan)
        result = StepResult(tokens=np.full(len(plan.slots), -1, np.int32))
        starts = rows.context_lens - rows.num_tokens
        # By start: a sequence may read blocks that another fills in this very step, always at lower positions.
        for row in np.argsort(starts, kind="stable").tolist():
            digest = self._compute(int(rows.slots[row]), int(starts[row]), int(rows.context_lens[row]))
            plan_row = int(rows.plan_rows[row])
            if plan.samples[plan_row]:
                token = digest % self._vocab_size
                result.tokens[plan_row] = token
                num_logprobs = int(batch.num_logprobs[rows.slots[row]])
                if num_logprobs >= 0:
                    top = (token,) if num_logprobs else ()
                    result.logprobs[plan_row] = TokenLogprobs(0.0, top, (0.0,) * len(top))
        batch.advance(plan, result.tokens)
        return result

    def close(self) -> None:
        pass

    def _compute(self, slot: int, start: int, end: int) -> int:
        """Write KV of positions [start, end) of a slot; returns the hash of all its KV up to `end`."""
        table = self._batch.block_table[slot, : -(-end // self._block_size)]
        kv = self._kv[table].reshape(-1)
        tokens = self._batch.token_ids[slot, start:end].tolist()
        total = int((kv[:start] * (2 * np.arange(start, dtype=np.uint64) + np.uint64(1))).sum(dtype=np.uint64))
        for position, token in enumerate(tokens, start):
            value = _position_kv(total, position, token)
            kv[position] = value
            total = _added(total, position, value)
        written = np.arange(start, end)
        self._kv[table[written // self._block_size], written % self._block_size] = kv[start:end]
        return _mix(total)


def expected_tokens(prompt: Sequence[int], num_tokens: int, vocab_size: int = DEFAULT_VOCAB_SIZE) -> list[int]:
    """What a `SimulatedRunner` generates after `prompt` if every step reads the right KV."""
    total, position = 0, 0
    generated: list[int] = []
    for token in prompt:
        total = _added(total, position, _position_kv(total, position, token))
        position += 1
    while len(generated) < num_tokens:
        token = _mix(total) % vocab_size
        generated.append(token)
        total = _added(total, position, _position_kv(total, position, token))
        position += 1
    return generated


def _added(total: int, position: int, value: int) -> int:
    """Weighted by position, so that blocks in another order give another sum."""
    return (total + value * (2 * position + 1)) & _MASK


def _position_kv(total_before: int, position: int, token: int) -> int:
    return _mix(total_before ^ _mix((position << 32) | token))


def _mix(x: int) -> int:
    """SplitMix64's finalizer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
