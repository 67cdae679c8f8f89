"""A runner's persistent batch: what it knows of each slot, as arrays, changed only by a plan's delta."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rank_scheduler.plan import Int32Array, NewSequence, StepPlan

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """A plan's rows in the order of computation, and their tokens flattened.

    Rows with one token come first, by rising context length (neighbours then pad little); chunks follow in plan order.
    """

    plan_rows: Int64Array
    """Row of the plan at each place, shape [rows]."""
    slots: Int64Array
    num_tokens: Int64Array
    context_lens: Int64Array
    """Positions with KV once this step is computed, shape [rows]."""
    num_single: int
    """How many leading rows have one token."""
    token_ids: Int64Array
    """Shape [tokens]."""
    positions: Int64Array
    block_ids: Int64Array
    """Block that each token's KV goes to, shape [tokens]."""
    block_offsets: Int64Array

    @property
    def last_tokens(self) -> Int64Array:
        """Index of each row's last token, shape [rows]."""
        return np.cumsum(self.num_tokens) - 1


class PersistentBatch:
    """Arrays over `max_num_seqs` slots; a slot with no tokens is free."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        # One column more than the model's length: the token sampled at the last position is known, never computed.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.block_table = np.zeros((max_num_seqs, -(-(max_model_len + 1) // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seeds = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)
        """-1: none asked."""

    def free(self, slots: list[int]) -> None:
        # A slot may be free already: the step that should have filled it may have failed before.
        for slot in slots:
            self.num_tokens[slot] = self.num_computed[slot] = self.num_blocks[slot] = 0

    def install(self, sequence: NewSequence) -> Int32Array:
        """Put a sequence into its slot; returns the blocks that hold nothing computed yet."""
        slot, n, blocks = sequence.slot, len(sequence.token_ids), len(sequence.block_ids)
        if not 0 <= sequence.num_computed_tokens < n <= self.max_model_len:
            raise RuntimeError(
                f"the plan installs {n} tokens, {sequence.num_computed_tokens} of them computed, into slot {slot}; "
                f"the model's length is {self.max_model_len}"
            )
        self.token_ids[slot, :n] = sequence.token_ids
        self.num_tokens[slot] = n
        self.num_computed[slot] = sequence.num_computed_tokens
        self.block_table[slot, :blocks] = sequence.block_ids
        self.num_blocks[slot] = blocks
        sampling = sequence.sampling
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.min_p[slot] = sampling.min_p
        self.seeds[slot] = sampling.seed
        self.num_logprobs[slot] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        return sequence.block_ids[-(-sequence.num_computed_tokens // self.block_size) :]

    def append_blocks(self, slots: list[int], blocks: list[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            self.block_table[slot, self.num_blocks[slot]] = block
            self.num_blocks[slot] += 1

    def rows(self, plan: StepPlan) -> StepRows:
        """The plan's rows, ready to compute. Raises RuntimeError if the plan contradicts what is known."""
        slots, num_tokens = plan.slots.astype(np.int64), plan.num_tokens.astype(np.int64)
        context_lens = self.num_computed[slots] + num_tokens
        known = self.num_tokens[slots]
        wrong = (context_lens > known) | (plan.samples & (context_lens != known))
        wrong |= (num_tokens < 1) | (context_lens > self.num_blocks[slots] * self.block_size)
        if wrong.any():
            row = int(wrong.argmax())
            raise RuntimeError(
                f"step {plan.step} computes {num_tokens[row]} tokens of slot {slots[row]} up to {context_lens[row]} "
                f"(samples: {plan.samples[row]}), which has {known[row]} known tokens and "
                f"{self.num_blocks[slots[row]]} blocks of {self.block_size}"
            )
        single = num_tokens == 1
        order = np.lexsort((np.where(single, context_lens, 0), ~single))
        slots, num_tokens, context_lens = slots[order], num_tokens[order], context_lens[order]
        ends = np.cumsum(num_tokens)
        token_slots = np.repeat(slots, num_tokens)
        positions = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(context_lens - ends, num_tokens)
        return StepRows(
            plan_rows=order,
            slots=slots,
            num_tokens=num_tokens,
            context_lens=context_lens,
            num_single=int(single.sum()),
            token_ids=self.token_ids[token_slots, positions].astype(np.int64),
            positions=positions,
            block_ids=self.block_table[token_slots, positions // self.block_size].astype(np.int64),
            block_offsets=positions % self.block_size,
        )

    def advance(self, plan: StepPlan, tokens: Int32Array) -> None:
        """Take in a computed step: `tokens` has the sampled token per plan row, or -1."""
        self.num_computed[plan.slots] += plan.num_tokens
        sampled = tokens >= 0
        slots = plan.slots[sampled]
        self.token_ids[slots, self.num_tokens[slots]] = tokens[sampled]
        self.num_tokens[slots] += 1
