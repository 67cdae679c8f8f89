"""A step's result: tokens, verified drafts, stops, and the ledger's settlement."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kv_transfer.params import KvParams
from rank_scheduler.messages import FinishReason, PromptLogprobs, TokenLogprobs
from rank_scheduler.ngram import NgramIndex
from rank_scheduler.plan import BoolArray, Int32Array, StepPlan, StepResult
from rank_scheduler.rank_state import Flight, RankState
from rank_scheduler.repetition import is_repeating
from rank_scheduler.sequence import RequestEvent, Sequence
from rank_scheduler.sessions import Sessions
from rank_scheduler.steady_batch import SteadyBatch
from rank_scheduler.structured_output import GrammarMatcher

MAX_NUM_INDEXED = 2048
"""Tokens that one step adds to the n-gram indexes of sequences that lag behind, all together: about 4 ms."""


@dataclass(slots=True)
class OwnerTokens:
    """What one owner gets in a frame."""

    ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    first_token_ids: list[int] = field(default_factory=list)
    computed: dict[int, int] = field(default_factory=dict)
    tickets: dict[int, KvParams] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    shares_ids: bool = False
    """`ids` is the list that all steady steps of a batch use: `own_ids` copies it before the first change."""

    def own_ids(self) -> list[int]:
        if self.shares_ids:
            self.ids, self.shares_ids = self.ids.copy(), False
        return self.ids

    def add(self, wire_id: int, token: int, logprobs: TokenLogprobs | None, is_first: bool) -> None:
        if logprobs is not None:
            self.logprobs[len(self.tokens)] = logprobs
        self.own_ids().append(wire_id)
        self.tokens.append(token)
        if is_first:
            self.first_token_ids.append(wire_id)


class ResultIntake:
    """Works on a rank's state; its own are the tokens for frames not made yet."""

    def __init__(self, state: RankState, sessions: Sessions, steady: SteadyBatch) -> None:
        self._state = state
        self._steady = steady
        self._sessions = sessions
        self._is_async = state.setup.async_scheduling
        self._eos = sorted(state.setup.eos_token_ids)
        self._tokens: dict[int, OwnerTokens] = {}
        self._last_update = float("-inf")

    def take_tokens(self) -> dict[int, OwnerTokens]:
        tokens, self._tokens = self._tokens, {}
        return tokens

    def take(self, result: StepResult, now: float) -> None:
        """The result of the oldest step in flight."""
        state, batch = self._state, self._state.batch
        flight = state.flights.popleft()
        self._measure(flight, now)
        problem = self._why_malformed(result, flight)
        if problem is not None:
            self._fail_rows(flight, problem, now)
            return
        slots = flight.slots
        if flight.steady_version == batch.version and self._take_steady(flight, result, now):
            return
        self._steady.forget_figures()
        if result.invalid_blocks:
            state.discard_invalid(result.invalid_blocks, now)
        live = batch.epoch[slots] == flight.epochs
        everybody = bool(live.all())
        self._settle(slots, live, everybody, flight)
        for row, prompt_logprobs in result.prompt_logprobs.items():
            if live[row]:
                owner, wire_id = batch.at(int(slots[row])).key
                self._tokens.setdefault(owner, OwnerTokens()).prompt_logprobs[wire_id] = prompt_logprobs
        sampled = flight.samples & live
        failed = result.failed
        if failed or state.config.runner_type == "pooling":
            sampled = self._end_rows(flight, result, live, sampled, now)
        if not everybody:
            self._drain(flight, result, live, now)
        first = result.tokens[:, 0] if len(slots) else np.zeros(0, np.int32)
        missing = sampled & ((first < 0) | (first >= state.setup.vocab_size))
        if missing.any():
            for row in np.flatnonzero(missing).tolist():
                sequence = batch.at(int(slots[row]))
                state.fail(sequence, f"the model runner returned {int(first[row])} for a token; retry", now)
            sampled &= ~missing
        if flight.num_drafts is not None:
            drafted = sampled & (flight.num_drafts > 0)
            sampled &= ~drafted
            for row in np.flatnonzero(drafted).tolist():
                self._take_drafted(flight, result, row, now)
        self._take_sampled(slots, first, sampled, result, now)
        self._tell_computed(slots[live & ~flight.samples])
        if state.config.speculative is not None:
            self._propose(flight)
        self._hand_out_tickets(flight)
        self._after_step(flight)

    def fail(self, flight: Flight, plan: StepPlan, message: str, now: float) -> None:
        """The step of `flight` was not computed; what its plan carried besides rows goes into the next one."""
        state = self._state
        state.flights.remove(flight)
        self._measure(flight, now)
        state.freed_slots = plan.freed_slots + state.freed_slots
        if state.encoder is not None:
            for identifier in (*flight.encoder_items, *plan.freed_encoder_outputs):
                state.encoder.discard(identifier)
        self._fail_rows(flight, message, now)

    def _take_steady(self, flight: Flight, result: StepResult, now: float) -> bool:
        """A step that nobody has left or joined since it was planned; False, with nothing changed, if not so plain."""
        state, batch = self._state, self._state.batch
        if result.logprobs:
            return False
        rows = self._steady.take(flight.slots, result)
        if rows is None:
            return False
        slots, tokens = flight.slots, result.tokens[:, 0]
        state.stats.num_generated_tokens += len(slots)
        for owner, (mine, ids) in self._steady.ids.items():
            out = self._tokens.get(owner)
            if out is None:
                self._tokens[owner] = OwnerTokens(ids, tokens[mine].tolist(), shares_ids=True)
            else:
                out.own_ids().extend(ids)
                out.tokens += tokens[mine].tolist()
        for row in rows.tolist():
            slot = int(slots[row])
            sequence = batch.at(slot)
            self._check(sequence, int(tokens[row]), int(batch.num_tokens[slot]), int(batch.max_total[slot]), now)
        state.release_passed_fences()
        return True

    # ---- rows ----

    def _fail_rows(self, flight: Flight, message: str, now: float) -> None:
        state, batch = self._state, self._state.batch
        for block in flight.cached:
            state.kv.pool.forget(block)
        for slot, epoch, samples in zip(
            flight.slots.tolist(), flight.epochs.tolist(), flight.samples.tolist(), strict=True
        ):
            if batch.epoch[slot] == epoch:
                state.fail(batch.at(slot), message, now)
            elif samples and epoch in state.draining:
                # Its token is computed again after the preemption, and is the same.
                self._drained_one(epoch, now)
        state.release_passed_fences()

    def _settle(self, slots: Int32Array, live: BoolArray, everybody: bool, flight: Flight) -> None:
        state, batch = self._state, self._state.batch
        num_prompt_tokens = flight.num_prompt_tokens
        if not everybody:
            num_prompt_tokens = num_prompt_tokens[live]
        if self._is_async and everybody:
            batch.num_in_flight[slots] -= flight.num_tokens
        elif self._is_async:
            batch.num_in_flight[slots[live]] -= flight.num_tokens[live]
        state.stats.num_prompt_tokens += int(np.maximum(num_prompt_tokens, 0).sum())

    def _tell_computed(self, slots: Int32Array) -> None:
        """These have got a further part of their prompts, and are not through with them."""
        if not len(slots) or self._state.config.queued_tokens_accounting == "conservative":
            return
        batch = self._state.batch
        num_computed = batch.num_computed[slots] - batch.num_in_flight[slots]
        for slot, num in zip(slots.tolist(), np.minimum(num_computed, batch.num_prompt[slots]).tolist(), strict=True):
            owner, wire_id = batch.at(slot).key
            self._tokens.setdefault(owner, OwnerTokens()).computed[wire_id] = num

    def _end_rows(
        self, flight: Flight, result: StepResult, live: BoolArray, sampled: BoolArray, now: float
    ) -> BoolArray:
        """End rows that failed, and those of a pooling model that are done; returns the rows that remain."""
        state, batch = self._state, self._state.batch
        sampled = sampled.copy()
        for row, message in result.failed.items():
            if not 0 <= row < len(live) or not live[row]:
                continue
            slot = int(flight.slots[row])
            # Whatever broke the logits may lie in its KV, from this step or an earlier one.
            for block in batch.table(slot).ravel().tolist():
                state.kv.pool.forget(block)
            state.fail(batch.at(slot), message, now)
            sampled[row] = live[row] = False
        if state.config.runner_type == "pooling":
            for row in np.flatnonzero(sampled).tolist():
                sequence = batch.at(int(flight.slots[row]))
                pooled = result.pooled.get(row)
                if pooled is None:
                    state.fail(sequence, "the model runner returned no pooled output; retry", now)
                else:
                    state.finish(sequence, FinishReason.STOP, now, pooled=pooled)
            sampled[:] = False
        return sampled

    def _drain(self, flight: Flight, result: StepResult, live: BoolArray, now: float) -> None:
        """Tokens for sequences that were preempted while this step was in flight: valid, and theirs."""
        draining = self._state.draining
        if not draining:
            return
        for row in np.flatnonzero(~live & flight.samples).tolist():
            epoch = int(flight.epochs[row])
            sequence = draining.get(epoch)
            if sequence is None:
                continue
            token = int(result.tokens[row, 0])
            if 0 <= token < self._state.setup.vocab_size and row not in result.failed:
                sequence.token_ids = np.append(sequence.token_ids, np.int32(token))
                num_tokens = len(sequence.token_ids)
                is_first = num_tokens == sequence.num_prompt_tokens + 1
                self._emit(sequence, token, _logprobs_of(result, row, 0), is_first, now)
                max_total = sequence.max_total(self._state.setup.max_model_len)
                if self._check(sequence, token, num_tokens, max_total, now):
                    continue
            self._drained_one(epoch, now)

    def _drained_one(self, epoch: int, now: float) -> None:
        state = self._state
        sequence = state.draining[epoch]
        sequence.num_draining -= 1
        if not sequence.num_draining:
            del state.draining[epoch]
            del state.deferred[sequence.key]
            state.enqueue(sequence)

    def _take_drafted(self, flight: Flight, result: StepResult, row: int, now: float) -> None:
        """One row with drafts: its tokens one by one, each checked for a stop; the ledger forgets wrong drafts."""
        state, batch = self._state, self._state.batch
        assert flight.num_drafts is not None
        slot, num_drafts = int(flight.slots[row]), int(flight.num_drafts[row])
        sequence = batch.at(slot)
        tokens = result.tokens[row]
        tokens = tokens[tokens >= 0][: num_drafts + 1].tolist()
        num_accepted = len(tokens) - 1
        batch.num_computed[slot] -= num_drafts - num_accepted
        stats = state.stats
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafts
        stats.num_accepted_tokens += num_accepted
        places = stats.accepted_per_position
        places += [0] * (state.config.num_speculative_tokens - len(places))
        for place in range(num_accepted):
            places[place] += 1
        for place, token in enumerate(tokens):
            if token >= state.setup.vocab_size:
                state.fail(sequence, f"the model runner returned {token} for a token; retry", now)
                return
            at = int(batch.num_tokens[slot])
            batch.token_ids[slot, at] = token
            batch.num_tokens[slot] = at + 1
            self._emit(sequence, token, _logprobs_of(result, row, place), at == batch.num_prompt[slot], now)
            if self._check(sequence, token, at + 1, int(batch.max_total[slot]), now):
                return

    def _take_sampled(
        self, slots: Int32Array, tokens: Int32Array, sampled: BoolArray, result: StepResult, now: float
    ) -> None:
        """All rows with one token at once; sequences themselves are looked at only where something may end."""
        state, batch = self._state, self._state.batch
        if not sampled.all():
            rows = np.flatnonzero(sampled)
            slots, tokens = slots[rows], tokens[rows]
        else:
            rows = None
        if not len(slots):
            return
        at = batch.num_tokens[slots]
        batch.token_ids[slots, at] = tokens
        totals = at + 1
        batch.num_tokens[slots] = totals
        if self._is_async:
            batch.num_placeholders[slots] -= 1
        state.stats.num_generated_tokens += len(slots)
        is_first = at == batch.num_prompt[slots]
        self._emit_all(slots, tokens, is_first, rows, result, now)

        look = totals >= batch.max_total[slots]
        look |= batch.watched[slots]
        at_eos = None
        for eos in self._eos:
            at_eos = tokens == eos if at_eos is None else at_eos | (tokens == eos)
        if at_eos is not None:
            look |= at_eos & ~batch.ignore_eos[slots]
        for index in np.flatnonzero(look).tolist():
            slot = int(slots[index])
            self._check(batch.at(slot), int(tokens[index]), int(totals[index]), int(batch.max_total[slot]), now)

    def _emit_all(
        self,
        slots: Int32Array,
        tokens: Int32Array,
        is_first: BoolArray,
        rows: np.ndarray[tuple[int], np.dtype[np.intp]] | None,
        result: StepResult,
        now: float,
    ) -> None:
        """`rows`: the plan's row of each slot; None: they are the same."""
        batch = self._state.batch
        if is_first.any():
            for slot in slots[is_first].tolist():
                batch.at(slot).note(RequestEvent.FIRST_TOKEN, now)
        ids = batch.wire_id[slots]
        for owner, mine in batch.by_owner(slots):
            out = self._tokens.setdefault(owner, OwnerTokens())
            if result.logprobs:
                places = (np.arange(len(slots)) if rows is None else rows)[mine].tolist()
                for index, row in enumerate(places, len(out.tokens)):
                    logprobs = _logprobs_of(result, row, 0)
                    if logprobs is not None:
                        out.logprobs[index] = logprobs
            out.own_ids().extend(ids[mine].tolist())
            out.tokens += tokens[mine].tolist()
            firsts = is_first[mine]
            if firsts.any():
                out.first_token_ids += ids[mine][firsts].tolist()

    def _emit(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, is_first: bool, now: float) -> None:
        state = self._state
        state.stats.num_generated_tokens += 1
        if is_first:
            sequence.note(RequestEvent.FIRST_TOKEN, now)
        owner, wire_id = sequence.key
        self._tokens.setdefault(owner, OwnerTokens()).add(wire_id, token, logprobs, is_first)

    # ---- stops ----

    def _check(self, sequence: Sequence, token: int, num_tokens: int, max_total: int, now: float) -> bool:
        """End the sequence, or its turn, if this token does: grammar, EOS, stop token, stop string, length, repetition.

        `num_tokens` are known, the token included. True if it ended.
        """
        sampling = sequence.sampling
        num_generated = num_tokens - sequence.num_prompt_tokens
        is_eos = token in self._state.setup.eos_token_ids
        if sequence.grammar is not None and not self.accept(sequence, sequence.grammar, token, now):
            return True
        if is_eos and (sequence.has_grammar or not sampling.ignore_eos):
            self._sessions.end_turn(sequence, FinishReason.STOP, now)
            return True
        if token in sampling.stop_token_ids:
            self._sessions.end_turn(sequence, FinishReason.STOP, now, stop_reason=token)
            return True
        if sequence.stop_strings is not None:
            matched = sequence.stop_strings.push(token, may_stop=num_generated >= sampling.min_tokens)
            if matched is not None:
                self._sessions.end_turn(sequence, FinishReason.STOP, now, stop_reason=matched)
                return True
        if num_generated >= sequence.max_tokens or num_tokens >= self._state.setup.max_model_len:
            self._sessions.end_turn(sequence, FinishReason.LENGTH, now)
            return True
        if sampling.repetition is not None and num_generated >= max(1, sampling.min_tokens):
            known = self._state.batch.known_tokens(sequence.slot) if sequence.slot >= 0 else sequence.token_ids
            if is_repeating(known[sequence.num_prompt_tokens :], sampling.repetition):
                self._sessions.end_turn(sequence, FinishReason.REPETITION, now)
                return True
        if sequence.hands_off and num_tokens >= max_total:
            self._state.finish(sequence, FinishReason.HANDOFF, now)
            return True
        return False

    def accept(self, sequence: Sequence, grammar: GrammarMatcher, token: int, now: float) -> bool:
        """Let the grammar take the token; False if that ended the sequence."""
        try:
            accepted = grammar.accept(token)
        except Exception as error:  # a third party's engine: whatever it raises is this request's alone
            self._state.fail(sequence, f"the structured-output engine failed: {error}; retry", now)
            return False
        if not accepted:
            self._state.fail(sequence, f"token {token} does not fit the request's grammar; retry", now)
        return accepted

    # ---- after the tokens ----

    def _hand_out_tickets(self, flight: Flight) -> None:
        """For those that still have the blocks which their tickets name."""
        batch = self._state.batch
        for row, ticket in flight.tickets.items():
            slot = int(flight.slots[row])
            if batch.epoch[slot] == flight.epochs[row]:
                owner, wire_id = batch.at(slot).key
                self._tokens.setdefault(owner, OwnerTokens()).tickets[wire_id] = ticket

    def _propose(self, flight: Flight) -> None:
        """Drafts for the next step of those that sampled in this one.

        A sequence gets none until its index has caught up: one that is new, or goes on after its turn's end, is
        indexed in portions, while its prompt is computed and afterwards.
        """
        state, batch = self._state, self._state.batch
        speculative = state.config.speculative
        assert speculative is not None
        budget = MAX_NUM_INDEXED
        for slot, epoch, samples in zip(
            flight.slots.tolist(), flight.epochs.tolist(), flight.samples.tolist(), strict=True
        ):
            if batch.epoch[slot] != epoch:
                continue
            sequence = batch.at(slot)
            if sequence.ngram is None:
                sequence.ngram = NgramIndex(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
            known = batch.known_tokens(slot)
            first = len(sequence.ngram)
            num_missing = len(known) - first
            if num_missing > 1 + speculative.num_speculative_tokens:
                num_indexed = min(num_missing, budget)
                budget -= num_indexed
            else:
                # What a step brings is always taken in, so that nobody falls behind again.
                num_indexed = num_missing
            sequence.ngram.extend(known[first : first + num_indexed])
            if not samples or num_indexed < num_missing:
                batch.num_drafts[slot] = 0
                continue
            drafts = sequence.ngram.propose(speculative.num_speculative_tokens)
            batch.drafts[slot, : len(drafts)] = drafts
            batch.num_drafts[slot] = len(drafts)

    def _after_step(self, flight: Flight) -> None:
        """Give up what no position to come needs: blocks out of every window, encoder outputs that were read."""
        state, batch = self._state, self._state.batch
        if state.kv.has_windows or batch.num_with_encoder_inputs:
            for slot, epoch in zip(flight.slots.tolist(), flight.epochs.tolist(), strict=True):
                if batch.epoch[slot] != epoch:
                    continue
                executed = int(batch.num_computed[slot] - batch.num_in_flight[slot])
                if state.kv.has_windows:
                    state.kv.slide(batch.table(slot), executed)
                sequence = batch.at(slot)
                if state.encoder is not None and sequence.encoder_inputs:
                    state.encoder.release_executed(
                        sequence.key,
                        sequence.encoder_inputs,
                        executed,
                        is_encoder_decoder=state.setup.is_encoder_decoder,
                    )
        state.release_passed_fences()

    def _measure(self, flight: Flight, now: float) -> None:
        """Count the step; time that steps share counts once."""
        state, stats = self._state, self._state.stats
        duration = max(0.0, now - max(flight.planned_at, self._last_update))
        self._last_update = now
        stats.num_steps += 1
        stats.busy_s += duration
        if flight.cost is not None:
            stats.estimated_flops += flight.cost.flops
            stats.estimated_bytes += flight.cost.size_bytes
            assert state.setup.performance is not None
            stats.utilisation = state.setup.performance.utilisation(flight.cost, duration)

    def _why_malformed(self, result: StepResult, flight: Flight) -> str | None:
        tokens = result.tokens
        width = 1 + (int(flight.num_drafts.max()) if flight.num_drafts is not None else 0)
        num_rows = len(flight.slots)
        if tokens.ndim != 2 or tokens.shape[0] != num_rows or (num_rows and tokens.shape[1] < width):
            return f"the model runner returned tokens of shape {tokens.shape} for {num_rows} rows; retry"
        if tokens.dtype != np.int32:
            return f"the model runner returned tokens of type {tokens.dtype}, not int32; retry"
        return None


def _logprobs_of(result: StepResult, row: int, place: int) -> TokenLogprobs | None:
    """None: it did not ask, or the runner left it out."""
    logprobs = result.logprobs.get(row, [])
    return logprobs[place] if place < len(logprobs) else None
