"""The second part of a step: which waiting sequences start to run."""

from __future__ import annotations

from itertools import islice

import numpy as np

from rank_scheduler.interface import PauseState
from rank_scheduler.kv_cache_manager import PrefixHit
from rank_scheduler.load_pass import LoadPass
from rank_scheduler.needs import Needs
from rank_scheduler.plan import NO_TOKENS, Int32Array, NewSequence
from rank_scheduler.prefetches import Prefetches
from rank_scheduler.rank_state import RankState
from rank_scheduler.room import RoomMaker
from rank_scheduler.running_pass import StepDraft
from rank_scheduler.sequence import Obstacle, RequestEvent, Sequence, SequenceState, WaitReason

# With these, nothing behind could be admitted either.
_ENDS_PASS = frozenset({WaitReason.SLOTS, WaitReason.BUDGET, WaitReason.CADENCE})


class WaitingPass:
    """Works on a rank's state. After `run`: what entered, and which blocks must be copied first."""

    def __init__(
        self, state: RankState, needs: Needs, loads: LoadPass, prefetches: Prefetches, room: RoomMaker
    ) -> None:
        self._state = state
        self._needs = needs
        self._loads = loads
        self._prefetches = prefetches
        self._room = room
        self._caches = state.caches
        self._block_size = state.setup.block_size
        self._max_num_active = state.config.active_seqs_limit
        self.entered: list[NewSequence] = []
        self.copies: list[tuple[int, int]] = []
        self.must_ask_again = False
        """A connector did not know yet: another pass may go further, though nothing else has happened."""
        self._cached_columns: list[int] = []
        """Of those that entered: columns that the prefix cache knows."""
        self._overtaking: frozenset[int] = frozenset()
        """Numbers of arrival of those that go before an earlier one, as their prefix is cached."""
        self.is_capacity_bound = False
        """Requests were left over that only a later turn can serve: prefill is the bottleneck."""

    def begin(self) -> None:
        self.entered, self.copies = [], []
        self.must_ask_again = False

    def run(self, draft: StepDraft, now: float) -> None:
        state = self._state
        state.pass_number += 1
        if state.pause is PauseState.UNPAUSED:
            self._room.take_from_idle(now)
            self._prefetches.start(self._loads.start(now))
        else:
            self._prefetches.clear()
        state.pass_obstacle = self._admit(draft, now)
        if not draft.defer_prefills:
            self.is_capacity_bound = bool(state.waiting)

    # ---- admission ----

    def _admit(self, draft: StepDraft, now: float) -> Obstacle:
        """Move sequences into free slots while budget, slots and blocks last; returns what ended that.

        A head that does not fit may be passed by later ones, `max_head_bypasses` times, then nothing passes it.
        """
        state, limit = self._state, self._state.config.max_head_bypasses
        if state.pause is PauseState.PAUSED_ALL:
            return Obstacle(WaitReason.PAUSED, {"num_paused": len(state.waiting) + len(state.load_candidates)})
        if draft.num_preempted:
            return Obstacle(WaitReason.PREEMPTION, {"num_preempted_in_step": draft.num_preempted})
        obstacle = self._no_room(draft)
        if obstacle is not None:
            return obstacle
        obstacle = Obstacle(WaitReason.BEHIND)
        passed: list[Sequence] = []
        slots: list[int] = []
        counts: list[int] = []
        self._cached_columns = []
        for sequence in self._in_line():
            found = self._no_room(draft)
            if found is None and (passed or self._loads.starved is not None):
                found = self._must_not_pass(sequence, passed)
            takes_blocks = sequence.blocks is None
            if found is None:
                found = self._try_admit(sequence, draft, now, slots, counts)
            if found is None:
                if self._count_bypass(sequence, passed, takes_blocks) >= limit:
                    break
                continue
            state.remember_obstacle(sequence, found)
            if found.reason is WaitReason.CONNECTOR:
                continue
            obstacle = found
            if found.reason in _ENDS_PASS:
                break
            passed.append(sequence)
            if max(passed[0].num_bypasses, len(passed) - 1) >= limit:
                break
        state.batch.settle()
        if slots:
            if self._cached_columns:
                state.batch.num_cached_columns[slots] = self._cached_columns
            draft.slots.append(np.array(slots, np.int32))
            draft.counts.append(np.array(counts, np.int32))
        return obstacle

    def _must_not_pass(self, sequence: Sequence, passed: list[Sequence]) -> Obstacle | None:
        """Why the sequence, whatever it needs, may not go before those that have been passed."""
        starved = self._loads.starved
        if starved is not None and starved.num_bypasses >= self._state.config.max_head_bypasses:
            # Blocks that become free are for the load, unless the sequence holds its own already.
            if sequence.blocks is None:
                return starved.obstacle
        elif passed and sequence.is_preempted and sequence.priority > passed[0].priority:
            # It would take back what it was made to give up, over and over.
            return Obstacle(WaitReason.BEHIND, {"position": len(passed)})
        return None

    def _count_bypass(self, sequence: Sequence, passed: list[Sequence], takes_blocks: bool) -> int:
        """The sequence was admitted before those that have been passed; how often the first of them was by now."""
        starved = self._loads.starved
        if starved is not None and takes_blocks:
            starved.num_bypasses += 1
        if sequence.order in self._overtaking and self._state.waiting:
            self._state.waiting.first.num_bypasses += 1
        if not passed:
            return -1
        if not (sequence.order in self._overtaking and passed[0] is self._state.waiting.first):
            passed[0].num_bypasses += 1
        return passed[0].num_bypasses

    def _in_line(self) -> list[Sequence]:
        """Who may be admitted, in order: done loads as they were completed, then those that wait."""
        state, config = self._state, self._state.config
        line = list(state.loaded)
        if state.pause is not PauseState.UNPAUSED or not state.waiting:
            return line
        first = self._cache_aware()
        # No pass admits more, or passes over more; a connector may have any number of them wait.
        longest = config.active_seqs_limit - state.num_active + config.max_head_bypasses + 1
        rest = list(state.waiting if state.setup.connector is not None else islice(state.waiting, longest))
        if first:
            known = {sequence.order for sequence in first}
            rest = [sequence for sequence in rest if sequence.order not in known]
        return line + first + rest

    def _cache_aware(self) -> list[Sequence]:
        """The first `cache_aware_admission_window` of the queue, those with a cached prefix first.

        Nothing moves past a sequence that was preempted, or one that had arrived before and waits for its grammar, a
        load or tokens in flight; and the first in the queue is passed `max_head_bypasses` times at most.
        """
        state, config = self._state, self._state.config
        self._overtaking = frozenset()
        used = 1 - state.kv.pool.num_free_blocks / state.kv.pool.num_usable_blocks
        if (
            not config.cache_aware_admission_window
            or config.policy != "fcfs"
            or not self._caches
            or used < config.cache_aware_admission_threshold
        ):
            return []
        barrier = min(
            (s.order for s in state.deferred.values() if s.state is not SequenceState.WAITING_FOR_INPUT),
            default=state.num_arrivals,
        )
        window = []
        for sequence in islice(state.waiting, config.cache_aware_admission_window):
            if sequence.is_preempted or sequence.order > barrier:
                break
            window.append(sequence)
        if not window:
            return []
        warm = [sequence for sequence in window if self._needs.probe(sequence).num_columns]
        if window[0] not in warm:
            warm = warm[: max(0, config.max_head_bypasses - window[0].num_bypasses)]
            self._overtaking = frozenset(sequence.order for sequence in warm)
        return warm + [sequence for sequence in window if sequence not in warm]

    def _no_room(self, draft: StepDraft) -> Obstacle | None:
        state = self._state
        if draft.budget <= 0:
            return Obstacle(WaitReason.BUDGET, {"budget": state.config.num_scheduled_tokens_limit, "left": 0})
        if len(state.batch) >= self._max_num_active:
            return Obstacle(WaitReason.SLOTS, {"num_active": state.num_active, "limit": self._max_num_active})
        return None

    def _try_admit(
        self, sequence: Sequence, draft: StepDraft, now: float, slots: list[int], counts: list[int]
    ) -> Obstacle | None:
        """Take blocks and a slot, and tokens of the budget; else the obstacle, with nothing changed."""
        state, config = self._state, self._state.config
        num_tokens = len(sequence.token_ids)
        copied: list[int] = []
        num_external = 0
        if sequence.blocks is None:
            memo = sequence.probe_memo
            if memo is not None and memo[0] == self._memo_key():
                return memo[1]
            hit = self._needs.probe(sequence)
            num_computed = hit.num_columns * self._block_size
            connector = state.setup.connector
            if connector is not None and state.may_load(sequence):
                match = connector.get_num_new_matched_tokens(self._needs.kv_request(sequence), num_computed)
                if match is None:
                    self.must_ask_again = True
                    return Obstacle(WaitReason.CONNECTOR)
                if match.is_async and match.num_tokens > 0:
                    # The local hit that had made a load needless is gone.
                    state.waiting.remove(sequence)
                    state.load_candidates.push(sequence)
                    self.must_ask_again = True
                    return Obstacle(WaitReason.CONNECTOR)
                num_external = max(0, min(match.num_tokens, num_tokens - 1 - num_computed))
            if num_computed == num_tokens:
                # One token must be computed to have logits, and it writes into the last block: that one is copied,
                # unless this very step computes it (copies come first), then it is computed twice.
                last = hit.drop_last()
                copied = [] if state.cached_in_step.intersection(last) else last
                num_computed = num_tokens - (1 if copied else self._block_size)
            num_hit = num_computed
            num_computed += num_external
        else:
            hit = PrefixHit(0, [])
            num_computed = sequence.num_computed
            num_hit = num_computed - sequence.num_external_tokens
        remaining = num_tokens - num_computed
        if draft.defer_prefills and remaining > 1:
            return Obstacle(WaitReason.CADENCE, {"prefill_schedule_interval": config.prefill_schedule_interval})
        is_cut = draft.prefill_cap and remaining > draft.short_tokens
        count = min(remaining, draft.prefill_cap) if is_cut else remaining
        if not config.enable_chunked_prefill and remaining > draft.budget:
            return Obstacle(WaitReason.BUDGET, {"num_tokens": remaining, "left": draft.budget})
        count = min(count, draft.budget)
        fit = None
        if sequence.encoder_inputs and state.encoder is not None:
            fit = draft.fit_encoder_inputs(state, sequence, num_computed, count)
            count = fit.num_new
            if not count:
                return Obstacle(
                    WaitReason.ENCODER,
                    {"budget_left": draft.encoder_budget, "cache_held": state.encoder.held_size},
                )
        table = sequence.blocks
        was_loaded = table is not None
        if table is None:
            reached = num_tokens if config.scheduler_reserve_full_isl else num_computed + count
            num_columns = state.kv.num_columns(reached)
            num_cross = self._needs.num_cross_blocks(sequence)
            num_free = state.kv.pool.num_free_blocks - state.watermark_blocks
            at_most = num_columns * state.kv.num_groups + num_cross
            if at_most > num_free and (num_needed := state.kv.num_needed(hit, num_columns) + num_cross) > num_free:
                obstacle = self._needs.lacks_blocks(num_needed, state.watermark_blocks)
                if config.scheduler_reserve_full_isl:
                    sequence.probe_memo = (self._memo_key(), obstacle)
                return obstacle
            table = state.kv.take(hit, num_columns)
            if num_cross:
                sequence.cross_blocks = state.kv.pool.allocate(num_cross)
            if copied:
                # A source may just have been handed out again, even as this very destination: copies come before
                # writes, one after another, so it still holds its content.
                self.copies += zip(copied, table[:, hit.num_columns].tolist(), strict=True)
            state.waiting.remove(sequence)
        else:
            state.loaded.remove(sequence)
            sequence.blocks = None
        self._count_prefix(sequence, num_tokens, max(0, num_hit), num_computed - max(0, num_hit))
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = min(num_computed, sequence.num_prompt_tokens)
        slot = self._enter(sequence, table, num_computed, now)
        if sequence.kv_request is not None:
            assert state.setup.connector is not None
            # A copy: the slot's row is the batch's own, and changes.
            request = self._needs.kv_request(sequence)
            state.setup.connector.update_state_after_alloc(request, table.copy(), num_external)
        if fit is not None:
            draft.acquire(state, sequence, slot, fit)
        draft.budget -= count
        draft.has_prefill |= remaining > 1
        draft.begins_shorter |= remaining <= draft.short_tokens
        slots.append(slot)
        counts.append(count)
        if self._caches:
            # Already now: every layer writes a step's KV before it reads any, so the next one may share it.
            self._cache_admitted(sequence, table, hit.num_columns, num_computed + count, is_new=not was_loaded)
        return None

    def _memo_key(self) -> tuple[int, int, int]:
        """What decides whether a sequence that lacked blocks still does."""
        state = self._state
        return state.kv.pool.version, state.kv.pool.num_free_blocks, state.watermark_blocks

    def _enter(self, sequence: Sequence, table: Int32Array, num_computed: int, now: float) -> int:
        """The sequence, whose blocks have been taken, gets its slot."""
        state = self._state
        num_tokens = len(sequence.token_ids)
        event = RequestEvent.RESUMED if sequence.is_preempted else RequestEvent.SCHEDULED
        sequence.move(SequenceState.RUNNING)
        sequence.note(event, now, f"{num_computed} of {num_tokens} tokens computed before")
        sequence.is_preempted = False
        sequence.num_bypasses = 0
        sequence.probe_memo = None
        sequence.num_computed = 0
        max_total = sequence.max_total(state.setup.max_model_len)
        slot = state.batch.insert(sequence, table, num_computed, max_total)
        self.entered.append(
            NewSequence(
                slot,
                sequence.token_ids,
                num_computed,
                table,
                sequence.num_prompt_tokens,
                sequence.sampling,
                np.array(sequence.cross_blocks, np.int32) if sequence.cross_blocks else NO_TOKENS,
                sequence.encoder_inputs,
            )
        )
        return slot

    # ---- prefix cache ----

    def _cache_admitted(
        self, sequence: Sequence, table: Int32Array, num_hit: int, num_computed: int, *, is_new: bool
    ) -> None:
        """Make its full columns findable that were no hit; others may share them in this very step.

        `is_new`: nothing behind the hit has been cached, as it may be after a load.
        """
        state = self._state
        num_full = num_computed // self._block_size
        if num_full > num_hit:
            hashes = sequence.block_hashes
            if is_new and state.kv.caches_in_bulk:
                cached = state.kv.cache_next(table[0, num_hit:num_full], hashes[num_hit:num_full])
            else:
                cached = state.kv.cache(table, hashes, num_hit, num_full, sequence.token_ids)
            state.cached_in_step.update(cached)
        self._cached_columns.append(num_full)

    def _count_prefix(self, sequence: Sequence, num_tokens: int, num_hit: int, num_external: int) -> None:
        stats = self._state.stats
        stats.num_external_hits += num_external
        if not self._caches or not sequence.reads_prefix_cache:
            return
        if sequence.num_preemptions:
            stats.num_preempted_prefix_queries += num_tokens
            stats.num_preempted_prefix_hits += num_hit
        else:
            stats.num_prefix_queries += num_tokens
            stats.num_prefix_hits += num_hit
