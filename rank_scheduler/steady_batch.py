"""The step that most steps are: everybody decodes one token, nobody comes or goes, and nothing is to be decided.

The general passes would find exactly the same plan, by looking at every running sequence. Here a few figures tell
beforehand how long nothing can happen: until the next column is full, and until the first sequence ends by length.
"""

from __future__ import annotations

import numpy as np

from rank_scheduler.batch import OwnerRows
from rank_scheduler.interface import PauseState
from rank_scheduler.performance import StepCost
from rank_scheduler.plan import NO_BLOCKS, NO_TOKENS, Int32Array, StepPlan, StepResult
from rank_scheduler.plan_builder import PlanBuilder
from rank_scheduler.rank_state import Flight, RankState
from rank_scheduler.sequence import Obstacle, WaitReason

_NOBODY = -1


class SteadyBatch:
    """Works on a rank's state. Its own: figures that hold as long as the batch's version is the one they are of."""

    def __init__(self, state: RankState, builder: PlanBuilder) -> None:
        config = state.config
        self._state = state
        self._builder = builder
        self._block_size = state.setup.block_size
        self._is_async = state.setup.async_scheduling
        self._limit = config.active_seqs_limit
        self._eos = sorted(state.setup.eos_token_ids)
        # What these bring may ask for a decision in any step.
        self._is_possible = config.speculative is None and config.runner_type == "generate" and not state.kv.has_windows
        self._settled_version = _NOBODY
        """The batch's version when the general passes last gave every member one token."""
        self._version = _NOBODY
        self._slots = NO_TOKENS
        self._where: Int32Array | slice = NO_TOKENS
        """The same as an index: a slice where they lie together."""
        self._places = NO_TOKENS.astype(np.int64)
        """Where each member's next token goes in the flat token array."""
        self._flat_tokens = state.batch.token_ids.reshape(-1)
        self._num_until_growth = 0
        """Steps until some member needs a new column."""
        self._num_until_length = 0
        """Tokens until some member ends by length."""
        self._num_context_tokens = 0
        self._ids: dict[int, tuple[OwnerRows, list[int]]] = {}
        """Owner → its rows, and their ids."""

    def note(self, plan: StepPlan) -> None:
        """The general passes made this plan: if everybody decodes in it, the next step may be a steady one."""
        batch = self._state.batch
        everybody = len(plan.slots) == len(batch) == plan.total_tokens
        self._settled_version = batch.version if everybody and plan.samples.all() else _NOBODY
        self.forget_figures()

    def forget_figures(self) -> None:
        """Somebody else moved the ledger on."""
        self._version = _NOBODY

    def plan(self, now: float) -> StepPlan | None:
        """The next step's plan, if it is a steady one; else None, with nothing changed."""
        state, batch = self._state, self._state.batch
        if self._settled_version != batch.version or not self._is_possible or not self._may_go_on():
            return None
        if self._version != batch.version:
            self._look_at()
        if self._num_until_length <= len(state.flights):
            return None
        slots = self._slots
        appended_slots, appended_blocks = NO_TOKENS, NO_BLOCKS
        if self._num_until_growth <= 0:
            grown = self._grow()
            if grown is None:
                return None
            appended_slots, appended_blocks = grown
        where = self._where
        batch.num_computed[where] += 1
        if self._is_async:
            batch.num_in_flight[where] += 1
            batch.num_placeholders[where] += 1
        self._num_until_growth -= 1
        state.num_steps += 1
        plan = StepPlan(
            state.num_steps,
            slots,
            self._ones,
            self._trues,
            freed_slots=state.freed_slots,
            appended_slots=appended_slots,
            appended_blocks=appended_blocks,
        )
        state.freed_slots = []
        state.flights.append(
            Flight(
                plan.step,
                slots,
                self._epochs,
                self._ones,
                self._trues,
                None,
                now,
                self._zeros,
                self._cost(),
                cached=list(state.cached_in_step),
                steady_version=batch.version,
            )
        )
        return plan

    def take(self, slots: Int32Array, result: StepResult) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """Take in a steady step's tokens; returns the rows at which something may end, None if this cannot be used."""
        batch, tokens = self._state.batch, result.tokens[:, 0]
        # Negative numbers are large ones here.
        if tokens.view(np.uint32).max() >= self._state.setup.vocab_size or result.failed:
            return None
        if self._version == batch.version:
            where = self._where
            self._flat_tokens[self._places] = tokens
            self._places += 1
            batch.num_tokens[where] += 1
        else:
            where = slots
            at = batch.num_tokens[slots]
            batch.token_ids[slots, at] = tokens
            batch.num_tokens[slots] = at + 1
        if self._is_async:
            batch.num_in_flight[where] -= 1
            batch.num_placeholders[where] -= 1
        self._num_until_length -= 1
        look = None
        for eos in self._eos:
            found = tokens == eos
            if np.count_nonzero(found):
                look = found if look is None else look | found
        if look is not None:
            look &= ~batch.ignore_eos[slots]
        # Figures that were forgotten do not count what came by other steps meanwhile.
        if self._num_until_length <= 0 or self._version != batch.version:
            ended = batch.num_tokens[slots] >= batch.max_total[slots]
            look = ended if look is None else look | ended
        if batch.num_watched:
            look = batch.watched[slots] if look is None else look | batch.watched[slots]
        return _NO_ROWS if look is None else np.flatnonzero(look)

    @property
    def ids(self) -> dict[int, tuple[OwnerRows, list[int]]]:
        return self._ids

    def _may_go_on(self) -> bool:
        state, batch = self._state, self._state.batch
        connector = state.setup.connector
        if (
            state.loaded
            or state.load_candidates
            or state.extensions
            or batch.num_idle
            or batch.num_with_grammar
            or batch.num_with_encoder_inputs
            or state.pause is not PauseState.UNPAUSED
            or not len(batch)
            or len(batch) > state.config.num_scheduled_tokens_limit
            or (connector is not None and connector.has_pending_work())
        ):
            return False
        if state.waiting:
            if len(batch) < self._limit or state.config.policy != "fcfs":
                return False
            state.pass_number += 1
            state.pass_obstacle = Obstacle(WaitReason.SLOTS, {"num_active": len(batch), "limit": self._limit})
        return True

    def _look_at(self) -> None:
        """Take note of the batch as it is now."""
        batch = self._state.batch
        slots = self._slots = np.sort(batch.order)
        first, last = int(slots[0]), int(slots[-1])
        self._where = slice(first, last + 1) if last - first + 1 == len(slots) else slots
        self._places = slots.astype(np.int64) * batch.token_ids.shape[1] + batch.num_tokens[slots]
        self._ones = np.ones(len(slots), np.int32)
        self._trues = np.ones(len(slots), np.bool_)
        self._zeros = np.zeros(len(slots), np.int32)
        self._epochs = batch.epoch[slots]
        self._num_until_growth = int((batch.num_columns[slots] * self._block_size - batch.num_computed[slots]).min())
        self._num_until_length = int((batch.max_total[slots] - batch.num_tokens[slots]).min())
        self._num_context_tokens = int(batch.num_computed[slots].sum())
        ids = batch.wire_id[slots]
        self._ids = {owner: (rows, ids[rows].tolist()) for owner, rows in batch.by_owner(slots)}
        self._version = batch.version

    def _grow(self) -> tuple[Int32Array, Int32Array] | None:
        """New columns where they are needed, of full ones the prefix cache is told; None: there are too few blocks."""
        state, batch, slots = self._state, self._state.batch, self._slots
        ends = batch.num_columns[slots] * self._block_size
        left = ends - batch.num_computed[slots]
        lacking = np.flatnonzero(left <= 0)
        growing = slots[lacking]
        if len(growing) * state.kv.num_groups > state.kv.pool.num_free_blocks:
            return None
        if state.caches:
            self._builder.cache(growing, ends[lacking])
        columns = state.kv.take_columns(len(growing))
        batch.append_column(growing, columns)
        left[lacking] += self._block_size
        self._num_until_growth = int(left.min())
        return growing, columns

    def _cost(self) -> StepCost | None:
        model = self._state.setup.performance
        if model is None:
            return None
        num_tokens, num_context = len(self._slots), self._num_context_tokens
        self._num_context_tokens += num_tokens
        return model.estimate(
            num_tokens=num_tokens,
            num_sampled=num_tokens,
            num_attended=num_context + num_tokens,
            num_context_tokens=num_context,
        )


_NO_ROWS = np.zeros(0, np.int64)
