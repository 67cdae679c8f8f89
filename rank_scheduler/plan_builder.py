"""The last part of scheduling: a draft becomes a plan, and the ledger and the prefix cache take note of it."""

from __future__ import annotations

import logging

import numpy as np

from kv_transfer.connector import SchedulerConnector
from kv_transfer.params import KvParams
from rank_scheduler.performance import StepCost
from rank_scheduler.plan import (
    NO_BLOCKS,
    NO_TOKENS,
    BoolArray,
    Extension,
    Int32Array,
    NewSequence,
    StepPlan,
    UInt32Array,
)
from rank_scheduler.prefix_hash import ROOT_HASH, hash_blocks
from rank_scheduler.rank_state import Flight, RankState
from rank_scheduler.running_pass import StepDraft
from rank_scheduler.sequence import Sequence
from rank_scheduler.structured_output import GrammarMatcher

logger = logging.getLogger(__name__)


class PlanBuilder:
    """Works on a rank's state; keeps nothing of its own."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._block_size = state.setup.block_size
        self._caches = state.caches
        self._is_async = state.setup.async_scheduling
        self._speculates = state.config.num_speculative_tokens > 0
        self._num_mask_words = -(-state.setup.vocab_size // 32)
        self._offsets = np.arange(state.setup.block_size)

    def build(
        self, draft: StepDraft, entered: list[NewSequence], copies: list[tuple[int, int]], now: float
    ) -> StepPlan | None:
        """The plan of everything in `draft`; None if there is nothing to do."""
        state, batch = self._state, self._state.batch
        connector = state.setup.connector
        if not draft.slots and (connector is None or not connector.has_pending_work()):
            return None
        slots = _joined(draft.slots)
        counts = _joined(draft.counts)
        before = batch.num_computed[slots]
        after = before + counts
        known = batch.num_tokens[slots]
        total = known + batch.num_placeholders[slots] if self._is_async else known
        num_drafts = None
        if self._speculates:
            num_drafts = np.maximum(after - total, 0).astype(np.int32)
            if not num_drafts.any():
                num_drafts = None
        samples = after >= total
        masked, masks = NO_TOKENS, None
        if batch.num_with_grammar:
            counts, after, num_drafts, masked, masks = self._mask(slots, counts, samples, num_drafts)
        if state.config.prefill_schedule_interval > 1:
            batch.is_chunk[slots] = ~samples
        num_prompt_tokens = np.minimum(after, batch.num_prompt[slots]) - before
        batch.num_computed[slots] = after
        if self._is_async:
            batch.num_in_flight[slots] += counts
            batch.num_placeholders[slots] += samples
        if self._caches and len(slots):
            self.cache(slots, np.minimum(after, known))
        metadata, tickets = None, {}
        if connector is not None:
            # All steps of a request that hands off are such: it ends with the first token that it samples.
            may_hand_off = known + 1 == batch.max_total[slots]
            tickets = self._tell_computed(connector, slots, after, num_prompt_tokens > 0, may_hand_off, samples)
            metadata = connector.build_connector_meta()
        # Where every row computes one token, and nobody was left out, no prompt is left in the middle.
        state.may_have_prefills = len(slots) < len(batch) - batch.num_idle or bool((after < total).any())
        state.num_steps += 1
        plan = StepPlan(
            step=state.num_steps,
            slots=slots,
            num_tokens=counts,
            samples=samples,
            num_drafts=num_drafts,
            draft_tokens=self._draft_tokens(slots, num_drafts),
            masked=masked,
            masks=masks,
            freed_slots=state.freed_slots,
            freed_encoder_outputs=state.encoder.take_freed() if state.encoder is not None else [],
            block_copies=copies,
            new_sequences=entered,
            extensions=self._take_extensions(slots),
            appended_slots=_joined(draft.appended_slots),
            appended_blocks=np.concatenate(draft.appended_columns) if draft.appended_columns else NO_BLOCKS,
            encoder_runs=draft.encoder_runs,
            connector_metadata=metadata,
        )
        state.freed_slots = []
        state.flights.append(
            Flight(
                step=plan.step,
                slots=slots,
                epochs=batch.epoch[slots],
                num_tokens=counts,
                samples=samples,
                num_drafts=num_drafts,
                planned_at=now,
                num_prompt_tokens=num_prompt_tokens,
                cost=self._cost(before, counts, samples),
                encoder_items=[run.item.identifier for run in draft.encoder_runs],
                cached=list(state.cached_in_step),
                tickets=tickets,
            )
        )
        return plan

    def _tell_computed(
        self,
        connector: SchedulerConnector,
        slots: Int32Array,
        after: Int32Array,
        in_prompt: BoolArray,
        may_hand_off: BoolArray,
        samples: BoolArray,
    ) -> dict[int, KvParams]:
        """Tell the connector how far prompts come in this step; returns the partial tickets, by row.

        Of a request that hands off, what another rank has generated goes with its prompt.
        """
        batch, has_windows = self._state.batch, self._state.kv.has_windows
        tickets = {}
        for row in np.flatnonzero(in_prompt | may_hand_off).tolist():
            slot, num_computed = int(slots[row]), int(after[row])
            sequence = batch.at(slot)
            if not in_prompt[row] and not sequence.hands_off:
                continue
            table = batch.table(slot)
            connector.request_computed(sequence.key, num_computed, table)
            # Blocks that slide out of a window are used anew while the request goes on.
            if sequence.hands_off and sequence.reads_prefix_cache and not samples[row] and not has_windows:
                ticket = connector.partial_ticket(sequence.key, num_computed, table)
                if ticket is not None:
                    tickets[row] = ticket
        return tickets

    def cache_running(self, draft: StepDraft) -> None:
        """Make findable what the draft's rows fill: those admitted in the same step may share it."""
        if not self._caches:
            return
        batch = self._state.batch
        for slots, counts in zip(draft.slots, draft.counts, strict=True):
            self.cache(slots, np.minimum(batch.num_computed[slots] + counts, batch.num_tokens[slots]))

    def cache(self, slots: Int32Array, num_settled: Int32Array) -> None:
        """Make columns findable that are full of known tokens, and computed by now or in this step."""
        state, batch = self._state, self._state.batch
        num_full = num_settled // self._block_size
        fresh = np.flatnonzero(num_full > batch.num_cached_columns[slots])
        if not len(fresh):
            return
        filled, columns = slots[fresh], num_full[fresh] - 1
        sequences = [batch.at(slot) for slot in filled.tolist()]
        if not state.kv.caches_in_bulk or not all(map(_grows_by_one, sequences, columns.tolist())):
            for slot, count in zip(filled.tolist(), num_settled[fresh].tolist(), strict=True):
                state.cache_full_columns(slot, count)
            return
        rows = batch.token_ids[filled[:, None], columns[:, None] * self._block_size + self._offsets]
        parents = [sequence.block_hashes[-1] if sequence.block_hashes else ROOT_HASH for sequence in sequences]
        hashes = hash_blocks(parents, rows)
        for sequence, block_hash in zip(sequences, hashes, strict=True):
            sequence.block_hashes.append(block_hash)
        state.cached_in_step.update(state.kv.cache_next(batch.block_table[0, filled, columns], hashes))
        batch.num_cached_columns[filled] = columns + 1

    def _mask(
        self, slots: Int32Array, counts: Int32Array, samples: BoolArray, num_drafts: Int32Array | None
    ) -> tuple[Int32Array, Int32Array, Int32Array | None, Int32Array, UInt32Array | None]:
        """Masks of the positions that sample under a grammar; drafts that the grammar refuses are dropped.

        Returns counts, computed counts after the step, drafts, which sampled positions are masked, and the masks.
        """
        batch = self._state.batch
        rows = np.flatnonzero(samples & batch.has_grammar[slots]).tolist()
        counts = counts.copy()
        drafts_of: dict[int, list[int]] = {}
        for row in rows:
            slot = int(slots[row])
            count = int(num_drafts[row]) if num_drafts is not None else 0
            drafts = batch.drafts[slot, :count].tolist()
            matcher = batch.at(slot).grammar
            assert matcher is not None
            if drafts and num_drafts is not None:
                drafts = drafts[: _num_valid(matcher, drafts)]
                counts[row] -= count - len(drafts)
                num_drafts[row] = len(drafts)
            drafts_of[row] = drafts
        widths = samples * (1 + (num_drafts if num_drafts is not None else 0))
        firsts = np.cumsum(widths) - widths
        masked = [int(firsts[row]) + at for row in rows for at in range(len(drafts_of[row]) + 1)]
        masks = np.zeros((len(masked), self._num_mask_words), np.uint32)
        at = 0
        for row in rows:
            matcher = batch.at(int(slots[row])).grammar
            assert matcher is not None
            drafts = drafts_of[row]
            _fill_masks(matcher, drafts, masks[at : at + len(drafts) + 1])
            at += len(drafts) + 1
        after = batch.num_computed[slots] + counts
        if num_drafts is not None and not num_drafts.any():
            num_drafts = None
        return counts, after, num_drafts, np.array(masked, np.int32), masks if masked else None

    def _draft_tokens(self, slots: Int32Array, num_drafts: Int32Array | None) -> Int32Array:
        if num_drafts is None:
            return NO_TOKENS
        drafts = self._state.batch.drafts[slots]
        taken: Int32Array = drafts[np.arange(drafts.shape[1]) < num_drafts[:, None]]
        return taken

    def _take_extensions(self, slots: Int32Array) -> list[Extension]:
        """Of the slots in this plan: one whose plan fails ends with it, so none is lost."""
        pending = self._state.extensions
        if not pending:
            return []
        return [pending.pop(slot) for slot in slots.tolist() if slot in pending]

    def _cost(self, before: Int32Array, counts: Int32Array, samples: BoolArray) -> StepCost | None:
        model = self._state.setup.performance
        if model is None:
            return None
        wide = counts.astype(np.int64)
        return model.estimate(
            num_tokens=int(wide.sum()),
            num_sampled=int(samples.sum()),
            num_attended=int((wide * before + wide * (wide + 1) // 2).sum()),
            num_context_tokens=int(before.sum(dtype=np.int64)),
        )


def _joined(arrays: list[Int32Array]) -> Int32Array:
    if not arrays:
        return NO_TOKENS
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _grows_by_one(sequence: Sequence, column: int) -> bool:
    return len(sequence.block_hashes) == column and sequence.extra_keys is None


def _num_valid(matcher: GrammarMatcher, drafts: list[int]) -> int:
    try:
        return matcher.num_valid(drafts)
    except Exception:  # a third party's engine: without drafts the row goes on, and its mask tells what is wrong
        logger.exception("the structured-output engine failed to look at drafts")
        return 0


def _fill_masks(matcher: GrammarMatcher, drafts: list[int], masks: UInt32Array) -> None:
    """Masks [1 + drafts, words] of a row. An engine that raises leaves one that allows nothing: its row alone fails."""
    try:
        for draft, mask in zip(drafts, masks, strict=False):
            matcher.fill_mask(mask)
            matcher.accept(draft)
        matcher.fill_mask(masks[-1])
        if drafts:
            matcher.rollback(len(drafts))
    except Exception:
        logger.exception("the structured-output engine failed to fill a mask")
        masks[:] = 0
