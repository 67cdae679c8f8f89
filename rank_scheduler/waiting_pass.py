"""The second part of a step: which waiting sequences start to run, and which KV loads begin."""

from __future__ import annotations

from itertools import chain, islice

import numpy as np

from kv_transfer.connector import LoadFinished
from rank_scheduler.encoder_cache import fit_chunk
from rank_scheduler.interface import PauseState
from rank_scheduler.kv_cache_manager import PrefixHit
from rank_scheduler.plan import NO_TOKENS, Int32Array, NewSequence
from rank_scheduler.prefix_hash import extend_block_hashes
from rank_scheduler.rank_state import RankState
from rank_scheduler.running_pass import StepDraft
from rank_scheduler.sequence import Obstacle, RequestEvent, Sequence, SequenceState, WaitReason

# With these, nothing behind could be admitted either.
_ENDS_PASS = frozenset({WaitReason.SLOTS, WaitReason.BUDGET, WaitReason.CADENCE})


class WaitingPass:
    """Works on a rank's state. After `run`: what entered, and which blocks must be copied first."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._caches = state.caches
        self._block_size = state.setup.block_size
        self.entered: list[NewSequence] = []
        self.copies: list[tuple[int, int]] = []
        self.must_ask_again = False
        """A connector did not know yet: another pass may go further, though nothing else has happened."""
        self.is_capacity_bound = False
        """Requests were left over that only a later turn can serve: prefill is the bottleneck."""

    def begin(self) -> None:
        self.entered, self.copies = [], []
        self.must_ask_again = False

    def make_room_for_priority(self, now: float) -> int | None:
        """Preempt running sequences for waiting ones of strictly higher priority that could not be admitted.

        Worst first, only if that makes room now, no more than needed. Returns the priority of the first in line.
        """
        state, batch = self._state, self._state.batch
        if state.config.policy != "priority" or not state.waiting or state.pause is not PauseState.UNPAUSED:
            return None
        pool = state.kv.pool
        slots_free = state.config.active_seqs_limit - state.num_active
        # Running sequences grow before anybody is admitted.
        num_needed = state.watermark_blocks + self._num_promised_blocks()
        for sequence in list(islice(state.waiting, state.config.active_seqs_limit)):
            victims = self._lower_priority(sequence.priority)
            if not victims:
                break
            slots_free -= 1
            num_needed += self._num_blocks_to_admit(sequence)
            lacks_blocks = num_needed > pool.num_free_blocks
            chosen: list[int] = []
            gained = 0
            for slot in victims:
                if slots_free + len(chosen) >= 0 and pool.num_free_blocks + gained >= num_needed:
                    break
                chosen.append(slot)
                gained += state.kv.num_freed_by(batch.table(slot)) + self._num_lacking(slot)
            if slots_free + len(chosen) < 0 or pool.num_free_blocks + gained < num_needed:
                break
            if chosen and lacks_blocks and state.setup.connector is not None and state.flights:
                break
            for slot in chosen:
                num_needed -= self._num_lacking(slot)
                state.preempt(slot, now, f"priority {sequence.priority} waits for a slot or blocks")
            slots_free += len(chosen)
        return state.waiting.first.priority

    def run(self, draft: StepDraft, now: float) -> None:
        state = self._state
        state.pass_number += 1
        if state.pause is PauseState.UNPAUSED:
            self._take_from_idle(now)
            self._start_loads(now)
        state.pass_obstacle = self._admit(draft, now)
        if not draft.defer_prefills:
            self.is_capacity_bound = bool(state.waiting)

    def _take_from_idle(self, now: float) -> None:
        """Where nobody runs, and so nobody will make room, sessions between two turns give way to the first in line."""
        state, batch = self._state, self._state.batch
        first = next(chain(state.loaded, state.waiting, state.load_candidates), None)
        if first is None or batch.num_idle < len(batch) or state.num_loading or state.flights:
            return
        while len(batch) and self._lacks_room(first):
            slot = min(batch.order.tolist(), key=lambda slot: int(batch.num_computed[slot]))
            state.preempt(slot, now, "it waits for input, and another request for its slot or blocks")

    def _lacks_room(self, sequence: Sequence) -> bool:
        """Whether a sequence, were it the first in line, could not be admitted now for want of a slot or of blocks."""
        state = self._state
        if state.num_active >= state.config.active_seqs_limit:
            return True
        if sequence.blocks is not None:
            return False
        return self._num_blocks_to_admit(sequence) + state.watermark_blocks > state.kv.pool.num_free_blocks

    # ---- KV loads ----

    def _start_loads(self, now: float) -> None:
        """Start asynchronous loads, under both caps; they cost no tokens, and no slot where the cap is set."""
        state = self._state
        num_started = 0
        for sequence in list(state.load_candidates):
            obstacle = self._load_cap(num_started)
            if obstacle is None:
                obstacle = self._start_load(sequence, now)
                num_started += sequence.state is SequenceState.WAITING_FOR_KV_LOAD
            if obstacle is not None:
                state.remember_obstacle(sequence, obstacle)
                if obstacle.reason is not WaitReason.CONNECTOR:
                    state.load_obstacle = obstacle
                    break

    def _load_cap(self, num_started: int) -> Obstacle | None:
        state, config = self._state, self._state.config
        figures = {"num_loads": state.num_loads, "num_started": num_started}
        per_step, in_flight = config.max_async_kv_loads_per_step, config.max_num_inflight_kv_loads
        if per_step is not None and num_started >= per_step:
            return Obstacle(WaitReason.LOAD_CAP, figures | {"max_async_kv_loads_per_step": per_step})
        if in_flight is not None and state.num_loads >= in_flight:
            return Obstacle(WaitReason.LOAD_CAP, figures | {"max_num_inflight_kv_loads": in_flight})
        if in_flight is None and state.num_active + state.num_loads >= config.active_seqs_limit:
            return Obstacle(
                WaitReason.SLOTS, figures | {"num_active": state.num_active, "limit": config.active_seqs_limit}
            )
        return None

    def _start_load(self, sequence: Sequence, now: float) -> Obstacle | None:
        """Take blocks for the whole prompt and have the connector fill them; None: started, or nothing to load."""
        state, connector, request = self._state, self._state.setup.connector, sequence.kv_request
        assert connector is not None
        assert request is not None
        hit = self._probe(sequence)
        num_local = min(hit.num_columns * self._block_size, len(sequence.token_ids))
        match = connector.get_num_new_matched_tokens(request, num_local)
        if match is None:
            self.must_ask_again = True
            return Obstacle(WaitReason.CONNECTOR)
        if not match.is_async or match.num_tokens <= 0:
            state.load_candidates.remove(sequence)
            state.waiting.push(sequence)
            return None
        num_columns = state.kv.num_columns(len(sequence.token_ids))
        num_needed = state.kv.num_needed(hit, num_columns)
        reserved = self._num_promised_blocks() + state.watermark_blocks
        if num_needed + reserved > state.kv.pool.num_free_blocks:
            return self._lacks_blocks(num_needed, reserved)
        state.load_candidates.remove(sequence)
        sequence.blocks = state.kv.take(hit, num_columns)
        sequence.num_computed = num_local
        sequence.num_external_tokens = match.num_tokens
        sequence.move(SequenceState.WAITING_FOR_KV_LOAD)
        sequence.note(RequestEvent.LOAD_STARTED, now, f"{match.num_tokens} tokens")
        state.deferred[sequence.key] = sequence
        state.num_loading += 1
        connector.update_state_after_alloc(request, sequence.blocks, match.num_tokens)
        return None

    def take_loaded(self, sequence: Sequence, event: LoadFinished, now: float) -> None:
        """A load has ended: what of it is valid is kept, the rest is loaded again, computed here, or fails the request.

        The sequence is WAITING_FOR_KV_LOAD.
        """
        state = self._state
        num_tokens = len(sequence.token_ids)
        num_expected = min(sequence.num_computed + sequence.num_external_tokens, num_tokens)
        num_valid = num_expected if event.num_valid_tokens is None else min(event.num_valid_tokens, num_expected)
        has_failed = num_valid < num_expected or bool(event.cause)
        del state.deferred[sequence.key]
        state.num_loading -= 1
        sequence.move(SequenceState.WAITING)
        # What was found here was never part of the load.
        num_valid = max(num_valid, sequence.num_computed)
        if has_failed:
            cause = event.cause or f"{num_valid} of {num_expected} tokens are valid"
            sequence.num_load_failures += 1
            state.stats.num_failed_loads += 1
            sequence.note(RequestEvent.LOAD_FAILED, now, cause)
            if state.config.kv_load_failure_policy == "fail":
                state.loaded.append(sequence)
                state.fail(sequence, f"its KV could not be loaded ({cause}); send the request again", now)
                return
        else:
            sequence.note(RequestEvent.LOAD_FINISHED, now)
        if has_failed and num_valid == 0:
            sequence.num_external_tokens = 0
            state.drop_blocks(sequence)
        else:
            assert sequence.blocks is not None
            sequence.num_external_tokens = num_valid - sequence.num_computed
            sequence.num_computed = min(num_valid, num_tokens - 1)
            if self._caches:
                num_full = num_valid // self._block_size
                state.kv.cache(sequence.blocks, sequence.block_hashes, 0, num_full, sequence.token_ids)
        state.enqueue(sequence)

    def _num_promised_blocks(self) -> int:
        """What running sequences will still need for the tokens that are known: a load must not take it."""
        batch = self._state.batch
        order = batch.order
        lacking = -(-batch.num_tokens[order] // self._block_size) - batch.num_columns[order]
        return int(np.maximum(lacking, 0).sum()) * self._state.kv.num_groups

    def _num_lacking(self, slot: int) -> int:
        """The slot's part of `_num_promised_blocks`."""
        kv, batch = self._state.kv, self._state.batch
        return max(0, kv.num_columns(int(batch.num_tokens[slot])) - int(batch.num_columns[slot])) * kv.num_groups

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
        self._cached_columns: list[int] = []
        for sequence in self._in_line():
            found = self._no_room(draft)
            if found is None:
                found = self._try_admit(sequence, draft, now, slots, counts)
            if found is None:
                if passed:
                    passed[0].num_bypasses += 1
                    if passed[0].num_bypasses >= limit:
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

        Nothing moves past a sequence that was preempted, or one that had arrived before and still waits for an event.
        """
        state, config = self._state, self._state.config
        used = 1 - state.kv.pool.num_free_blocks / state.kv.pool.num_usable_blocks
        if (
            not config.cache_aware_admission_window
            or config.policy != "fcfs"
            or not self._caches
            or used < config.cache_aware_admission_threshold
        ):
            return []
        barrier = min((sequence.order for sequence in state.deferred.values()), default=state.num_arrivals)
        window = []
        for sequence in islice(state.waiting, config.cache_aware_admission_window):
            if sequence.is_preempted or sequence.order > barrier:
                break
            window.append(sequence)
        return sorted(window, key=lambda sequence: not self._probe(sequence).num_columns)

    def _no_room(self, draft: StepDraft) -> Obstacle | None:
        state = self._state
        if draft.budget <= 0:
            return Obstacle(WaitReason.BUDGET, {"budget": state.config.num_scheduled_tokens_limit, "left": 0})
        limit = state.config.active_seqs_limit
        if state.num_active >= limit:
            return Obstacle(WaitReason.SLOTS, {"num_active": state.num_active, "limit": limit})
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
            if memo is not None and memo[:2] == (state.kv.pool.version, state.kv.pool.num_free_blocks):
                return memo[2]
            hit = self._probe(sequence)
            num_computed = hit.num_columns * self._block_size
            connector = state.setup.connector
            if connector is not None and sequence.kv_request is not None and state.may_load(sequence):
                match = connector.get_num_new_matched_tokens(sequence.kv_request, num_computed)
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
        count = min(remaining, draft.prefill_cap) if draft.prefill_cap else remaining
        if not config.enable_chunked_prefill and remaining > draft.budget:
            return Obstacle(WaitReason.BUDGET, {"num_tokens": remaining, "left": draft.budget})
        count = min(count, draft.budget)
        fit = None
        if sequence.encoder_inputs and state.encoder is not None:
            fit = fit_chunk(
                sequence.encoder_inputs,
                num_computed,
                count,
                cache=state.encoder,
                budget=draft.encoder_budget,
                disable_chunked_mm_input=config.disable_chunked_mm_input,
                is_encoder_decoder=state.setup.is_encoder_decoder,
            )
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
            num_cross = self._num_cross_blocks(sequence)
            num_free = state.kv.pool.num_free_blocks - state.watermark_blocks
            at_most = num_columns * state.kv.num_groups + num_cross
            if at_most > num_free and (num_needed := state.kv.num_needed(hit, num_columns) + num_cross) > num_free:
                obstacle = self._lacks_blocks(num_needed, state.watermark_blocks)
                sequence.probe_memo = (state.kv.pool.version, state.kv.pool.num_free_blocks, obstacle)
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
            sequence.num_cached_tokens = num_computed
        slot = self._enter(sequence, table, num_computed, now)
        if num_external:
            assert state.setup.connector is not None
            assert sequence.kv_request is not None
            state.setup.connector.update_state_after_alloc(sequence.kv_request, table, num_external)
        if fit is not None and state.encoder is not None:
            draft.encoder_budget = fit.budget_left
            draft.acquire(state.encoder, sequence, slot, fit.items)
        draft.budget -= count
        draft.has_prefill |= remaining > 1
        slots.append(slot)
        counts.append(count)
        if self._caches:
            # Already now: every layer writes a step's KV before it reads any, so the next one may share it.
            self._cache_admitted(sequence, table, hit.num_columns, num_computed + count, is_new=not was_loaded)
        return None

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
        max_total = min(sequence.num_prompt_tokens + sequence.max_tokens, state.setup.max_model_len)
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
                cached = state.kv.cache_next(table[0, num_hit:num_full].tolist(), hashes[num_hit:num_full])
            else:
                cached = state.kv.cache(table, hashes, num_hit, num_full, sequence.token_ids)
            state.cached_in_step.update(cached)
        self._cached_columns.append(num_full)

    def _probe(self, sequence: Sequence) -> PrefixHit:
        """Cached prefix of a waiting sequence. No side effects but that its hashes are known from now on."""
        if not self._caches:
            return PrefixHit(0, [[] for _ in range(self._state.kv.num_groups)])
        extend_block_hashes(
            sequence.block_hashes,
            sequence.token_ids,
            self._block_size,
            sequence.extra_keys,
            self._state.hash_memo,
        )
        if not sequence.reads_prefix_cache:
            return PrefixHit(0, [[] for _ in range(self._state.kv.num_groups)])
        hashes = sequence.block_hashes
        if self._state.kv.has_windows:
            # The last token, computed anew after a full hit, would see columns that the hit has left out.
            hashes = hashes[: (len(sequence.token_ids) - 1) // self._block_size]
        return self._state.kv.probe(hashes)

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
            self._state.num_prefix_queries += num_tokens
            self._state.num_prefix_hits += num_hit

    # ---- arithmetic ----

    def _num_cross_blocks(self, sequence: Sequence) -> int:
        """Blocks for the encoder's positions of an encoder-decoder model."""
        if not self._state.setup.is_encoder_decoder:
            return 0
        return sum(self._state.kv.num_columns(item.length) for item in sequence.encoder_inputs)

    def _num_blocks_to_admit(self, sequence: Sequence) -> int:
        num_tokens = len(sequence.token_ids)
        hit = self._probe(sequence)
        if hit.num_columns * self._block_size == num_tokens:
            # Its last block is copied, or computed again.
            hit.drop_last()
        num_columns = self._state.kv.num_columns(num_tokens)
        return self._state.kv.num_needed(hit, num_columns) + self._num_cross_blocks(sequence)

    def _lower_priority(self, priority: int) -> list[int]:
        """Slots of strictly lower priority, the worst first; of equals the one that loses least, or came last."""
        batch = self._state.batch
        order = batch.order
        slots = order[(batch.priority[order] > priority) & ~batch.is_idle[order]][::-1].tolist()
        last = self._state.config.preemption_policy == "last"
        return sorted(
            slots, key=lambda slot: (-int(batch.priority[slot]), 0 if last else int(batch.num_computed[slot]))
        )

    def _lacks_blocks(self, num_needed: int, num_kept_free: int) -> Obstacle:
        return Obstacle(
            WaitReason.BLOCKS,
            {
                "num_needed": num_needed,
                "num_free": self._state.kv.pool.num_free_blocks,
                "num_kept_free": num_kept_free,
            },
        )
