"""The first part of a step: what running sequences compute, and the blocks that they grow into."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rank_scheduler.encoder_cache import ChunkFit, fit_chunk
from rank_scheduler.plan import BoolArray, EncoderRun, Int32Array, Int64Array
from rank_scheduler.rank_state import RankState
from rank_scheduler.sequence import Sequence


@dataclass(slots=True)
class StepDraft:
    """A plan in the making, and what is left to give."""

    budget: int
    prefill_cap: int
    """Most tokens of one sequence; 0: no cap."""
    defer_prefills: bool
    encoder_budget: int
    yields_to: int | None = None
    """A waiting sequence of this priority goes before prompt chunks of running ones with a larger value."""
    short_tokens: int = 0
    """Prompts that lack at most so many when they begin are not cut by `prefill_cap`."""
    shorter_first: bool = False
    """Running prompts that lack more than `prefill_cap` come last, and get nothing if a short one begins."""
    begins_shorter: bool = False
    has_longer: bool = False
    """There are such running prompts."""
    running: tuple[Int32Array, Int64Array] | None = None
    """Slots and epochs of what ran when the step began."""
    slots: list[Int32Array] = field(default_factory=list)
    counts: list[Int32Array] = field(default_factory=list)
    appended_slots: list[Int32Array] = field(default_factory=list)
    appended_columns: list[Int32Array] = field(default_factory=list)
    encoder_runs: list[EncoderRun] = field(default_factory=list)
    has_prefill: bool = False
    num_preempted: int = 0

    @property
    def has_yielding(self) -> bool:
        """Some running sequences are passed over at first."""
        return self.yields_to is not None or self.shorter_first

    def fit_encoder_inputs(self, state: RankState, sequence: Sequence, num_computed: int, num_new: int) -> ChunkFit:
        """How much of a chunk the encoder budget and cache allow. Changes nothing."""
        assert state.encoder is not None
        return fit_chunk(
            sequence.encoder_inputs,
            num_computed,
            num_new,
            cache=state.encoder,
            budget=self.encoder_budget,
            disable_chunked_mm_input=state.config.disable_chunked_mm_input,
            is_encoder_decoder=state.setup.is_encoder_decoder,
        )

    def acquire(self, state: RankState, sequence: Sequence, slot: int, fit: ChunkFit) -> None:
        """Let the sequence hold the chunk's encoder items, and have those run that are new."""
        assert state.encoder is not None
        self.encoder_budget = fit.budget_left
        for item in fit.items:
            # An encoder-decoder model's item also fills this stay's cross-attention blocks.
            if state.encoder.acquire(sequence.key, item) or sequence.cross_blocks:
                self.encoder_runs.append(EncoderRun(slot, item))


class RunningPass:
    """Works on a rank's state; keeps nothing of its own."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._block_size = state.setup.block_size
        self._is_async = state.setup.async_scheduling
        self._max_drafts = state.config.num_speculative_tokens
        self._has_cadence = state.config.prefill_schedule_interval > 1
        self._by_priority = state.config.policy == "priority"

    def run(self, draft: StepDraft, now: float, *, yielding: bool = False) -> None:
        """Give tokens to running sequences, in order of admission, as far as the budget goes.

        With `yielding`, a second run in the same step: only to those that the first passed over.
        """
        batch = self._state.batch
        if yielding and draft.running is not None:
            slots, epochs = draft.running
            slots = slots[batch.epoch[slots] == epochs]
        else:
            slots = batch.order.copy()
            if draft.has_yielding:
                draft.running = (slots, batch.epoch[slots])
        if not len(slots) or draft.budget <= 0:
            return
        counts = self._share(slots, draft, yielding)
        # Where nobody else has a part of this step, nobody loses one.
        self._grow(slots, counts, draft, now, may_preempt=not yielding or not draft.slots)
        if batch.num_with_encoder_inputs:
            # Last: an item that is planned must not lose the row that it is for.
            self._fit_encoder_inputs(slots, counts, draft)
        scheduled = counts > 0
        if not scheduled.all():
            slots, counts = slots[scheduled], counts[scheduled]
        if len(slots):
            draft.slots.append(slots)
            draft.counts.append(counts)
            draft.budget -= int(counts.sum())

    def _share(self, slots: Int32Array, draft: StepDraft, yielding: bool) -> Int32Array:
        """Tokens per slot within the budget; 0 for those that have nothing to compute, or must wait."""
        batch = self._state.batch
        known = batch.num_tokens[slots]
        if self._is_async:
            known += batch.num_placeholders[slots]
        wanted = known - batch.num_computed[slots]
        is_prefill = None
        if self._has_cadence or draft.has_yielding:
            is_prefill = (wanted > 1) | batch.is_chunk[slots]
        held = self._held(slots, known, is_prefill, draft)
        if is_prefill is not None and draft.has_yielding:
            held = _either(held, self._passed_over(slots, wanted, is_prefill, draft, yielding))
        if self._max_drafts:
            # Drafts beyond the sequence's last token would be thrown away.
            room = batch.max_total[slots] - known - 1
            wanted += np.where(wanted == 1, np.minimum(batch.num_drafts[slots], room), 0)
        if held is not None:
            wanted[held] = 0
        if draft.prefill_cap:
            np.minimum(wanted, draft.prefill_cap, out=wanted)
        shares: Int32Array = wanted
        if int(wanted.sum()) > draft.budget:
            before = np.cumsum(wanted) - wanted
            shares = np.clip(draft.budget - before, 0, wanted).astype(np.int32)
            if not self._state.config.enable_chunked_prefill:
                # The next input of a session, which is computed in one step or not at all.
                shares[(shares < wanted) & (known - batch.num_computed[slots] > 1)] = 0
        if self._has_cadence and is_prefill is not None:
            draft.has_prefill |= bool(shares[is_prefill].any())
        return shares

    def _passed_over(
        self, slots: Int32Array, wanted: Int32Array, is_prefill: BoolArray, draft: StepDraft, yielding: bool
    ) -> BoolArray:
        """Prompts that may have to give way to others that come; when those have come, who else has had its turn."""
        yields = np.zeros_like(is_prefill)
        is_longer = is_prefill & (wanted > draft.prefill_cap) if draft.shorter_first else yields
        draft.has_longer |= bool(is_longer.any())
        if draft.yields_to is not None:
            yields = is_prefill & (self._state.batch.priority[slots] > draft.yields_to)
        if not yielding:
            return yields | is_longer
        return ~yields & ~is_longer if not draft.begins_shorter else ~yields | is_longer

    def _held(
        self, slots: Int32Array, known: Int32Array, is_prefill: BoolArray | None, draft: StepDraft
    ) -> BoolArray | None:
        """Which slots get nothing; None: all may."""
        batch = self._state.batch
        held: BoolArray | None = None
        if self._is_async:
            # What is in flight already brings the last token.
            held = known >= batch.max_total[slots]
            if batch.num_with_grammar:
                # The next mask depends on the token in flight.
                held |= batch.has_grammar[slots] & (batch.num_placeholders[slots] > 0)
        if batch.num_idle:
            held = _either(held, batch.is_idle[slots])
        if is_prefill is not None and draft.defer_prefills:
            held = _either(held, is_prefill)
        return held

    def _fit_encoder_inputs(self, slots: Int32Array, counts: Int32Array, draft: StepDraft) -> None:
        """Shorten chunks whose encoder items do not fit into this step; plan those that do."""
        state, batch = self._state, self._state.batch
        for index in np.flatnonzero((counts > 0) & batch.has_encoder_inputs[slots]).tolist():
            slot = int(slots[index])
            sequence = batch.at(slot)
            fit = draft.fit_encoder_inputs(state, sequence, int(batch.num_computed[slot]), int(counts[index]))
            counts[index] = fit.num_new
            if fit.num_new:
                draft.acquire(state, sequence, slot, fit)

    def _grow(self, slots: Int32Array, counts: Int32Array, draft: StepDraft, now: float, *, may_preempt: bool) -> None:
        """Give blocks to each sequence that outgrows its own, preempting if none are free.

        Sets the count to 0 of every sequence that was preempted, or cannot grow now.
        """
        state, batch = self._state, self._state.batch
        ends = batch.num_computed[slots] + counts
        lacking = np.flatnonzero((ends > batch.num_columns[slots] * self._block_size) & (counts > 0))
        if not len(lacking):
            return
        growing = slots[lacking]
        num_new = -(-ends[lacking] // self._block_size) - batch.num_columns[growing]
        if int(num_new.sum()) * state.kv.num_groups <= state.kv.pool.num_free_blocks:
            self._append(np.repeat(growing, num_new), draft, once=int(num_new.max()) == 1)
            return
        if self._max_drafts and self._drop_drafts(slots, counts):
            self._grow(slots, counts, draft, now, may_preempt=may_preempt)
            return
        if not may_preempt:
            # All others have their part of this step already.
            counts[lacking] = 0
            return
        for index, count in zip(lacking.tolist(), num_new.tolist(), strict=True):
            if self._make_room(index, count * state.kv.num_groups, slots, counts, draft, now):
                self._append(np.full(count, slots[index], np.int32), draft)

    def _drop_drafts(self, slots: Int32Array, counts: Int32Array) -> bool:
        """Nobody gives up blocks for what may prove wrong; False if there are no drafts."""
        batch = self._state.batch
        known = batch.num_tokens[slots] - batch.num_computed[slots]
        has_drafts = counts > known
        counts[has_drafts] = known[has_drafts]
        return bool(has_drafts.any())

    def _append(self, slots: Int32Array, draft: StepDraft, *, once: bool = False) -> None:
        """A new column for each of `slots`, which may occur more than once unless `once`."""
        batch, columns = self._state.batch, self._state.kv.take_columns(len(slots))
        (batch.append_column if once else batch.append_columns)(slots, columns)
        draft.appended_slots.append(slots)
        draft.appended_columns.append(columns)

    def _make_room(
        self, index: int, num_needed: int, slots: Int32Array, counts: Int32Array, draft: StepDraft, now: float
    ) -> bool:
        """Preempt until `num_needed` blocks are free for the sequence at `index`; False if it cannot grow."""
        state = self._state
        while counts[index] and state.kv.pool.num_free_blocks < num_needed:
            victim = self._pick_victim(int(slots[index]))
            if victim is None:
                counts[index] = 0
                break
            position = int(np.flatnonzero(slots == victim)[0])
            counts[position] = 0
            self._withdraw(victim, draft)
            state.preempt(victim, now, f"{num_needed} blocks needed, {state.kv.pool.num_free_blocks} free")
            draft.num_preempted += 1
        return bool(counts[index])

    def _withdraw(self, slot: int, draft: StepDraft) -> None:
        """Take the slot's new columns out of the plan. Its encoder items stay in: others may rely on them."""
        for at, appended in enumerate(draft.appended_slots):
            kept = appended != slot
            if not kept.all():
                draft.appended_slots[at] = appended[kept]
                draft.appended_columns[at] = draft.appended_columns[at][kept]

    def _pick_victim(self, requester: int) -> int | None:
        """Who gives up its blocks for `requester`, perhaps that one itself; None: nobody's would be usable now.

        The lowest priority first, then (`preemption_policy`) who loses least computed work or was admitted last.
        A session between two turns goes only if nobody else can.
        """
        state, batch = self._state, self._state.batch
        if state.setup.connector is not None and state.flights:
            return None
        candidates = [
            slot
            for slot in reversed(batch.order.tolist())
            if not self._by_priority or batch.priority[slot] >= batch.priority[requester]
        ]
        # Where only the requester runs, giving up its own blocks would help nobody.
        is_alone = all(slot == requester or batch.is_idle[slot] for slot in candidates)
        candidates.sort(
            key=lambda slot: (
                bool(batch.is_idle[slot]) is not is_alone,
                -int(batch.priority[slot]) if self._by_priority else 0,
                state.num_lost(slot),
            )
        )
        return next((slot for slot in candidates if state.kv.num_freed_by(batch.table(slot))), None)


def _either(held: BoolArray | None, more: BoolArray) -> BoolArray:
    return more if held is None else held | more
