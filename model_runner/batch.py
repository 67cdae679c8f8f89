"""A runner's persistent batch: what it knows of each slot, as arrays, changed only by a plan's delta."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model_runner.logit_rules import LogitRules
from rank_scheduler.messages import EncoderInput
from rank_scheduler.plan import NO_TOKENS, BoolArray, Extension, Int32Array, Int64Array, NewSequence, StepPlan


@dataclass(frozen=True, slots=True)
class StepRows:
    """A plan's rows, in its order, and their tokens flattened, in the order of computation.

    Tokens that attend alone come first, by their row's rising start (neighbours then pad little, and read the same
    blocks): those of rows that have one token, and of rows whose others are drafts, so that a draft is verified with
    the very arithmetic of a decode step. The chunks of the other rows follow.
    """

    slots: Int64Array
    """Shape [rows]."""
    starts: Int64Array
    """First position that each row computes."""
    context_lens: Int64Array
    """Positions with KV once this step is computed, drafts included."""
    num_drafts: Int64Array
    num_single: int
    """How many leading tokens attend alone."""
    chunk_rows: Int64Array
    """The rows that are chunks, in order of their tokens."""
    token_slots: Int64Array
    """Shape [tokens]."""
    token_ids: Int64Array
    positions: Int64Array
    block_ids: Int64Array
    """Blocks that each token's KV goes to, shape [num_groups, tokens]."""
    block_offsets: Int64Array
    sampled_rows: Int64Array
    """Row of each sampled position, shape [sampled], in the plan's order: a row that samples has 1 + its drafts."""
    sampled_tokens: Int64Array
    """Which of the tokens each sampled position is."""


class PersistentBatch:
    """Arrays over `max_num_seqs` slots; a slot with no tokens is free."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        num_groups: int = 1,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        # One column more than the model's length: the token sampled at the last position is known, never computed.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.block_table = np.zeros((num_groups, max_num_seqs, -(-(max_model_len + 1) // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        """Columns of the block tables in use."""
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seeds = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)
        """-1: none asked."""
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.min_length = np.zeros(max_num_seqs, np.int64)
        """Prompt and `min_tokens`: shorter sequences may not end."""
        self.ending_token_ids: list[tuple[int, ...]] = [()] * max_num_seqs
        """End-of-sequence and stop tokens of the slot; empty without `min_tokens`."""
        self.prompt_logprobs: dict[int, tuple[int, int]] = {}
        """Slot → (how many most likely tokens, tokens of the prompt), where the prompt's logprobs are asked for."""
        self.logit_rules: dict[int, LogitRules] = {}
        """By slot; of few, as a rule."""
        self.cross_block_ids: list[Int32Array] = [NO_TOKENS] * max_num_seqs
        self.encoder_inputs: list[tuple[EncoderInput, ...]] = [()] * max_num_seqs

    @property
    def num_groups(self) -> int:
        return len(self.block_table)

    def free(self, slots: list[int]) -> None:
        # A slot may be free already: the step that should have filled it may have failed before.
        for slot in slots:
            self.num_tokens[slot] = self.num_computed[slot] = self.num_blocks[slot] = 0
            self.logit_rules.pop(slot, None)
            self.prompt_logprobs.pop(slot, None)

    def install(self, sequence: NewSequence) -> Int32Array:
        """Put a sequence into its slot; returns the blocks that hold nothing computed yet, shape [k]."""
        slot, n = sequence.slot, len(sequence.token_ids)
        groups, columns = sequence.block_ids.shape
        if groups != self.num_groups:
            raise ValueError(
                f"the plan installs a sequence with {groups} block tables into slot {slot}, and the model has "
                f"{self.num_groups} KV groups: give the scheduler the runner's kv_groups"
            )
        if not 0 <= sequence.num_computed_tokens < n <= self.max_model_len:
            raise RuntimeError(
                f"the plan installs {n} tokens, {sequence.num_computed_tokens} of them computed, into slot {slot}; "
                f"the model's length is {self.max_model_len}"
            )
        self.token_ids[slot, :n] = sequence.token_ids
        self.num_tokens[slot] = n
        self.num_computed[slot] = sequence.num_computed_tokens
        self.block_table[:, slot, :columns] = sequence.block_ids
        # Padding must not read what is another's now.
        self.block_table[:, slot, columns:] = 0
        self.num_blocks[slot] = columns
        sampling = sequence.sampling
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.min_p[slot] = sampling.min_p
        self.seeds[slot] = sampling.seed
        self.num_logprobs[slot] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self.min_tokens[slot] = sampling.min_tokens
        self.min_length[slot] = sequence.num_prompt_tokens + sampling.min_tokens
        self.ending_token_ids[slot] = ()
        if sampling.min_tokens:
            ending = self._eos_token_ids.union(sampling.stop_token_ids)
            self.ending_token_ids[slot] = tuple(token for token in ending if 0 <= token < self._vocab_size)
        self.prompt_logprobs.pop(slot, None)
        if sampling.num_prompt_logprobs is not None:
            self.prompt_logprobs[slot] = (sampling.num_prompt_logprobs, sequence.num_prompt_tokens)
        self.logit_rules.pop(slot, None)
        if (rules := LogitRules.of(sampling, sequence.num_prompt_tokens, self._vocab_size)) is not None:
            self.logit_rules[slot] = rules
        self.cross_block_ids[slot] = sequence.cross_block_ids
        self.encoder_inputs[slot] = sequence.encoder_inputs
        return sequence.block_ids[:, -(-sequence.num_computed_tokens // self.block_size) :].reshape(-1)

    def extend(self, extension: Extension) -> None:
        slot, first = extension.slot, extension.first
        n = first + len(extension.token_ids)
        if not 0 < first <= self.num_tokens[slot] or not first < n <= self.max_model_len:
            raise RuntimeError(
                f"the plan extends slot {slot} from token {first} to {n}; it has {self.num_tokens[slot]} known "
                f"tokens, and the model's length is {self.max_model_len}"
            )
        self.token_ids[slot, first:n] = extension.token_ids
        self.num_tokens[slot] = n
        # A step that was planned before the turn's end was known may have computed beyond it.
        self.num_computed[slot] = min(self.num_computed[slot], first)
        self.min_length[slot] = n + self.min_tokens[slot]

    def append_blocks(self, slots: Int32Array, blocks: Int32Array) -> None:
        """`slots` has shape [k], `blocks` [k, num_groups]; a slot may occur more than once, its blocks in order."""
        if not len(slots):
            return
        order = np.argsort(slots, kind="stable")
        slots, blocks = slots[order], blocks[order]
        # How often each slot came before.
        occurrences = np.arange(len(slots)) - np.searchsorted(slots, slots)
        self.block_table[:, slots, self.num_blocks[slots] + occurrences] = blocks.T
        np.add.at(self.num_blocks, slots, 1)

    def rows(self, plan: StepPlan) -> StepRows:
        """The plan's rows, ready to compute. Raises RuntimeError if the plan contradicts what is known."""
        slots, num_tokens = plan.slots.astype(np.int64), plan.num_tokens.astype(np.int64)
        num_drafts = _num_drafts(plan)
        starts = self.num_computed[slots]
        context_lens = starts + num_tokens
        known = self.num_tokens[slots]
        without_drafts = context_lens - num_drafts
        wrong = (without_drafts > known) | (plan.samples & (without_drafts != known)) | (num_drafts >= num_tokens)
        wrong |= ~plan.samples & (num_drafts > 0)
        wrong |= context_lens > np.minimum(self.num_blocks[slots] * self.block_size, self.max_model_len)
        if wrong.any():
            row = int(wrong.argmax())
            raise RuntimeError(
                f"step {plan.step} computes {num_tokens[row]} tokens of slot {slots[row]} up to {context_lens[row]} "
                f"(samples: {plan.samples[row]}, drafts: {num_drafts[row]}), which has {known[row]} known tokens and "
                f"{self.num_blocks[slots[row]]} blocks of {self.block_size}; the model's length is {self.max_model_len}"
            )
        if num_drafts.sum() != len(plan.draft_tokens):
            raise RuntimeError(f"step {plan.step} has {len(plan.draft_tokens)} drafts, its rows {num_drafts.sum()}")
        # Drafts stand where the sampled tokens will be put.
        self.token_ids[np.repeat(slots, num_drafts), _spread(known, num_drafts)] = plan.draft_tokens

        positions = _spread(starts, num_tokens)
        token_slots = np.repeat(slots, num_tokens)
        alone = num_tokens == 1 + num_drafts
        token_alone = np.repeat(alone, num_tokens)
        single = np.flatnonzero(token_alone)
        single = single[np.argsort(np.repeat(starts, num_tokens)[single], kind="stable")]
        order = np.concatenate((single, np.flatnonzero(~token_alone)))
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        num_sampled = np.where(plan.samples, 1 + num_drafts, 0)
        positions, token_slots = positions[order], token_slots[order]
        return StepRows(
            slots=slots,
            starts=starts,
            context_lens=context_lens,
            num_drafts=num_drafts,
            num_single=len(single),
            chunk_rows=np.flatnonzero(~alone),
            token_slots=token_slots,
            token_ids=self.token_ids[token_slots, positions].astype(np.int64),
            positions=positions,
            block_ids=self.block_table[:, token_slots, positions // self.block_size].astype(np.int64),
            block_offsets=positions % self.block_size,
            sampled_rows=np.repeat(np.arange(len(slots)), num_sampled),
            sampled_tokens=place[_spread(np.cumsum(num_tokens) - num_sampled, num_sampled)],
        )

    def verify(self, rows: StepRows, sampled: Int32Array) -> Int32Array:
        """Sampled tokens per row as in `StepResult.tokens`, from those of each sampled position, or -1.

        A row keeps its tokens up to and including the first that differs from the draft at its place.
        """
        width = 1 + int(rows.num_drafts.max(initial=0))
        tokens = np.full((len(rows.slots), width), -1, np.int32)
        counts = np.bincount(rows.sampled_rows, minlength=len(rows.slots))
        columns = _spread(np.zeros(len(counts), np.int64), counts)
        tokens[rows.sampled_rows, columns] = sampled
        if width > 1:
            known = self.num_tokens[rows.slots]
            column = np.arange(width - 1)
            places = np.minimum(known[:, None] + column, self.max_model_len)
            right = tokens[:, :-1] == self.token_ids[rows.slots[:, None], places]
            right &= column < rows.num_drafts[:, None]
            tokens[:, 1:][~np.logical_and.accumulate(right, axis=1)] = -1
        return tokens

    def advance(self, plan: StepPlan, tokens: Int32Array) -> None:
        """Take in a computed step: `tokens` as in `StepResult`."""
        count = (tokens >= 0).sum(axis=1)
        # The next step may be planned already, and count on a token: a row that failed gets one nobody will see.
        failed = plan.samples & (count == 0)
        if failed.any():
            tokens = tokens.copy()
            tokens[failed, 0] = 0
            count[failed] = 1
        slots = plan.slots.astype(np.int64)
        known = self.num_tokens[slots]
        self.token_ids[np.repeat(slots, count), _spread(known, count)] = tokens[tokens >= 0]
        self.num_computed[slots] += plan.num_tokens - np.where(plan.samples, 1 + _num_drafts(plan) - count, 0)
        self.num_tokens[slots] += count

    def may_not_end(self, slots: Int64Array, lengths: Int64Array) -> BoolArray:
        """Whether the token after `lengths` known ones may not be one that ends the sequence (`min_tokens`)."""
        return lengths < self.min_length[slots]


def _num_drafts(plan: StepPlan) -> Int64Array:
    if plan.num_drafts is None:
        return np.zeros(len(plan.slots), np.int64)
    return plan.num_drafts.astype(np.int64)


def _spread(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """starts[0], starts[0] + 1, … (counts[0] of them), then those of the next, and so on."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - ends + counts, counts)
