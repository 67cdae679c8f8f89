"""One rank's decisions: which sequences compute how many tokens in the next step, and in which blocks.

Pure: events and `now` in, plans, frames and actions out. See `SchedulerInterface` for who calls what when.
"""

from __future__ import annotations

import math

import numpy as np

from kv_transfer.connector import KvRequest, LoadFenced, LoadFinished, SendFinished
from rank_scheduler.config import SchedulerConfig
from rank_scheduler.explanation import explain
from rank_scheduler.interface import PauseState, SchedulerSetup
from rank_scheduler.kv_events import KvEvent
from rank_scheduler.load_pass import LoadPass
from rank_scheduler.messages import End, Explanation, Extend, FinishReason, Prefetch, RankLoad, StepFrame, Submit
from rank_scheduler.needs import Needs
from rank_scheduler.plan import Int32Array, StepPlan, StepResult
from rank_scheduler.plan_builder import PlanBuilder
from rank_scheduler.prefetches import Prefetches
from rank_scheduler.prefix_hash import ExtraKeys
from rank_scheduler.rank_state import RankState
from rank_scheduler.refusals import why_impossible
from rank_scheduler.result_intake import ResultIntake
from rank_scheduler.room import RoomMaker
from rank_scheduler.running_pass import RunningPass, StepDraft
from rank_scheduler.sequence import RequestEvent, Sequence, SequenceState
from rank_scheduler.sessions import Sessions
from rank_scheduler.stats import StepStats
from rank_scheduler.steady_batch import SteadyBatch
from rank_scheduler.stop_strings import StopStringMatcher
from rank_scheduler.structured_output import CompileGrammar, GrammarMatcher
from rank_scheduler.waiting_pass import WaitingPass

# So long after others a lone long prompt is still cut into short pieces, if short ones go first: more may come.
COMPANY_S = 1.0
# Long prompts get a part of every step after so many that short ones have taken from them.
MAX_HELD_STEPS = 3


class Scheduler:
    """Owner of a rank's sequences, slots and blocks. Raises only on misuse by its own process, never on messages."""

    def __init__(self, config: SchedulerConfig, setup: SchedulerSetup) -> None:
        """Raises ValueError if the two do not fit, or the pool cannot hold one longest sequence."""
        config.check(setup.max_model_len, setup.is_encoder_decoder)
        columns = -(-setup.max_model_len // setup.block_size)
        num_groups = len(setup.kv_groups)
        if setup.num_blocks - 1 < columns * num_groups:
            raise ValueError(
                f"num_blocks is {setup.num_blocks}: {setup.num_blocks - 1} usable blocks of {setup.block_size} tokens, "
                f"{num_groups} of them for each {setup.block_size} tokens, hold less than max_model_len "
                f"({setup.max_model_len}); raise num_blocks to at least {columns * num_groups + 1} or lower "
                "max_model_len"
            )
        if setup.async_scheduling and config.speculative is not None:
            raise ValueError("async_scheduling does not work with speculative: leave one of them out")
        self.config = config
        self.setup = setup
        self.num_ignored_messages = 0
        self._state = RankState(config, setup)
        self._running = RunningPass(self._state)
        needs = Needs(self._state)
        self._loads = LoadPass(self._state, needs)
        self._room = RoomMaker(self._state, needs)
        self._prefetches = Prefetches(self._state, needs)
        self._waiting = WaitingPass(self._state, needs, self._loads, self._prefetches, self._room)
        self._builder = PlanBuilder(self._state)
        self._sessions = Sessions(self._state)
        self._steady = SteadyBatch(self._state, self._builder)
        self._intake = ResultIntake(self._state, self._sessions, self._steady)
        self._taken_stats = StepStats()
        """As they were when somebody last took them."""
        self._early: dict[int, StepResult] = {}
        """Results that came before those of earlier steps."""
        self._compile_actions: list[CompileGrammar] = []
        self._is_stuck = False
        """Nothing could be planned, and nothing has happened since that could change it."""
        self._last_prefill_step = -config.prefill_schedule_interval
        self._num_held_steps = 0
        """The last so many have given longer prompts nothing."""
        self._last_company_at = -math.inf
        """When there was last more than one request."""

    # ---- messages of routers ----

    def add(self, owner: int, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it (its `End` is in the owner's next frame) if it could never run."""
        state = self._state
        key = (owner, submit.id)
        if key in state.sequences or key in state.quarantine or key in state.sending:
            self.num_ignored_messages += 1
            return
        self._is_stuck = False
        refusal = why_impossible(submit, self.config, self.setup)
        if refusal is not None:
            state.ends.append((owner, End(submit.id, FinishReason.ERROR, message=refusal, is_request_fault=True)))
            return
        sampling = submit.sampling
        matcher = StopStringMatcher(sampling.stop, self.setup.make_text_decoder()) if sampling.stop else None
        extra = None
        if submit.cache_salt or submit.encoder_inputs:
            items = tuple((item.identifier, item.offset, item.length) for item in submit.encoder_inputs)
            extra = ExtraKeys(submit.cache_salt, items)
        token_ids: Int32Array = np.frombuffer(submit.token_ids, "<i4")
        sequence = Sequence(key, submit, token_ids, matcher, extra, state.num_arrivals, now)
        state.num_arrivals += 1
        if matcher is not None:
            for token in token_ids[sequence.num_prompt_tokens :].tolist():
                matcher.push(token, may_stop=False)
        if self.setup.connector is not None:
            sequence.kv_request = KvRequest(key, token_ids, (), submit.kv_transfer_params or {})
            self.setup.connector.on_new_request(sequence.kv_request)
        state.sequences[key] = sequence
        if submit.grammar is not None:
            state.deferred[key] = sequence
            self._compile_actions.append(CompileGrammar(owner, submit.id, submit.grammar))
        else:
            state.enqueue(sequence)

    def extend(self, owner: int, extend: Extend, now: float) -> None:
        """The next input of a streaming session; ignored if there is no such session."""
        sequence = self._state.sequences.get((owner, extend.id))
        if sequence is None or not sequence.is_session:
            self.num_ignored_messages += 1
            return
        self._is_stuck = False
        self._sessions.take(sequence, extend, now)

    def prefetch(self, owner: int, prefetch: Prefetch, now: float) -> None:
        """Load KV of a request that is still to come, if there is room to spare; else nothing comes of it."""
        self._is_stuck = False
        if self._state.pause is not PauseState.UNPAUSED or not self._prefetches.add(owner, prefetch, now):
            self._state.stats.num_dropped_prefetches += 1

    def abort(self, owner: int, request_id: int, now: float) -> None:
        """End a request whose client is gone, or let go of what is kept of one that was handed off.

        Unknown and finished ones are ignored.
        """
        self._end(owner, request_id, FinishReason.ABORT, now)

    def hand_off(self, owner: int, request_id: int, now: float) -> None:
        """End a request with which another rank goes on; unknown and finished ones are ignored.

        Tokens of steps in flight are lost with it: the other computes them again.
        """
        self._end(owner, request_id, FinishReason.HANDOFF, now)

    def keep(self, owner: int, request_ids: list[int]) -> None:
        """What is kept of these, which were handed off, is wanted still; others are ignored."""
        for request_id in request_ids:
            if (key := (owner, request_id)) in self._state.sending:
                assert self.setup.connector is not None
                self._is_stuck = False
                self.setup.connector.still_wanted(key)

    def drop_owner(self, owner: int, now: float) -> None:
        """End everything of an owner that is gone; nobody is left to be told."""
        state = self._state
        self._is_stuck = False
        for sequence in [s for s in state.sequences.values() if s.key[0] == owner]:
            state.finish(sequence, FinishReason.ABORT, now, message="its router is gone")
        state.ends = [(to, end) for to, end in state.ends if to != owner]
        state.turn_ends = [(to, end) for to, end in state.turn_ends if to != owner]
        self._compile_actions = [action for action in self._compile_actions if action.owner != owner]

    # ---- events from the rank's edge ----

    def take_compile_actions(self) -> list[CompileGrammar]:
        actions, self._compile_actions = self._compile_actions, []
        return actions

    def grammar_compiled(
        self,
        owner: int,
        request_id: int,
        matcher: GrammarMatcher | None,
        error: str,
        now: float,
        *,
        is_request_fault: bool = True,
    ) -> None:
        """A grammar is ready, or (`matcher` None) is not for the reason `error`, which ends this request only."""
        sequence = self._state.sequences.get((owner, request_id))
        if sequence is None or sequence.state is not SequenceState.WAITING_FOR_GRAMMAR:
            self.num_ignored_messages += 1
            return
        self._is_stuck = False
        if matcher is None:
            message = error or "the grammar could not be compiled"
            self._state.fail(sequence, message, now, is_request_fault=is_request_fault)
            return
        generated = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
        if not all(self._intake.accept(sequence, matcher, token, now) for token in generated):
            return
        del self._state.deferred[sequence.key]
        sequence.grammar = matcher
        sequence.move(SequenceState.WAITING)
        sequence.note(RequestEvent.GRAMMAR_READY, now)
        self._state.enqueue(sequence)

    def load_finished(self, event: LoadFinished, now: float) -> None:
        """A KV load has ended, well or not; late, doubled and unknown ones are ignored."""
        self._is_stuck = False
        if event.key in self._state.quarantine:
            if event.is_fenced:
                self._state.release_held(self._state.quarantine, event.key)
            return
        if event.key in self._state.prefetching:
            self._prefetches.take(event)
            return
        sequence = self._state.sequences.get(event.key)
        if sequence is None or sequence.state is not SequenceState.WAITING_FOR_KV_LOAD:
            self.num_ignored_messages += 1
            return
        self._loads.take(sequence, event, now)

    def load_fenced(self, event: LoadFenced, now: float) -> None:
        """Nothing writes any more into the blocks of a load that had failed without a fence."""
        self._is_stuck = False
        if not self._state.release_held(self._state.quarantine, event.key):
            self.num_ignored_messages += 1

    def send_finished(self, event: SendFinished, now: float) -> None:
        """Nobody reads the blocks of this ended request any more."""
        self._is_stuck = False
        if not self._state.release_held(self._state.sending, event.key):
            self.num_ignored_messages += 1

    # ---- operation ----

    def set_pause(self, state: PauseState, now: float) -> None:
        self._is_stuck = False
        self._state.pause = state

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, with nothing changed, while any block is in use."""
        return self._state.kv.pool.clear()

    # ---- steps ----

    @property
    def max_num_steps_in_flight(self) -> int:
        return 2 if self.setup.async_scheduling else 1

    def has_work(self) -> bool:
        """Whether `schedule` may return a plan, or `take_frames` a frame, without anything else happening first."""
        state = self._state
        if state.ends or state.turn_ends:
            return True
        if self._is_stuck or state.pause is PauseState.PAUSED_ALL:
            return False
        connector = self.setup.connector
        return bool(
            len(state.batch) > state.batch.num_idle
            or state.waiting
            or state.loaded
            or state.load_candidates
            or self._prefetches
            or (connector is not None and connector.has_pending_work())
        )

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; None if there is nothing to compute now.

        Running sequences come first, in order of admission; what is left of the token budget admits waiting ones,
        unless somebody had to give up blocks for the running ones.
        """
        state = self._state
        if len(state.flights) >= self.max_num_steps_in_flight:
            return None
        state.cached_in_step = set()
        plan = None if self._prefetches else self._steady.plan(now)
        if plan is not None:
            return plan
        self._waiting.begin()
        self._room.begin()
        num_preemptions = state.stats.num_preemptions
        draft = self._begin(now)
        if self._room.must_drain:
            # Else those that must give way would go on for as long as there is always a step in flight.
            return None
        if state.pause is not PauseState.PAUSED_ALL:
            self._running.run(draft, now)
        if state.waiting:
            self._builder.cache_running(draft)
        self._waiting.run(draft, now)
        if draft.has_yielding:
            self._running.run(draft, now, yielding=True)
        plan = self._builder.build(draft, self._waiting.entered, self._waiting.copies, now)
        if plan is None:
            # A preemption has made room that the next turn may give away.
            has_changed = state.stats.num_preemptions != num_preemptions
            must_ask_again = self._loads.must_ask_again or self._prefetches.must_ask_again
            self._is_stuck = not (has_changed or self._waiting.must_ask_again or must_ask_again)
            return None
        if draft.has_prefill:
            self._last_prefill_step = state.num_steps
        self._num_held_steps = self._num_held_steps + 1 if draft.has_longer and draft.begins_shorter else 0
        self._steady.note(plan)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> dict[int, StepFrame]:
        """Take in a step's result; returns the frame of each owner that has something to hear."""
        state = self._state
        self._is_stuck = False
        if not state.flights or state.flights[0].step != plan.step:
            self.num_ignored_messages += 1
            if any(flight.step == plan.step for flight in state.flights):
                self._early[plan.step] = result
            return self.take_frames()
        self._intake.take(result, now)
        self._take_early(now)
        return self._frames()

    def fail(self, plan: StepPlan, message: str, now: float) -> dict[int, StepFrame]:
        """A step raised, or was not executed: its KV is undefined, so its sequences end.

        Nothing that the step promised stays in the prefix cache; the delta that it carried goes into the next plan.
        """
        state = self._state
        self._is_stuck = False
        flight = next((flight for flight in state.flights if flight.step == plan.step), None)
        if flight is None:
            self.num_ignored_messages += 1
            return self.take_frames()
        self._early.pop(plan.step, None)
        self._intake.fail(flight, plan, message, now)
        self._take_early(now)
        return self._frames()

    def take_frames(self) -> dict[int, StepFrame]:
        """Frames for what came about outside of a step (aborts, refusals)."""
        return self._frames() if self._state.ends or self._state.turn_ends else {}

    # ---- figures ----

    def load(self) -> RankLoad:
        state, stats = self._state, self._state.stats
        return RankLoad(
            num_running=len(state.batch) - state.batch.num_idle,
            num_waiting=len(state.waiting) + len(state.load_candidates) + len(state.loaded),
            num_waiting_tokens=self._num_waiting_tokens(),
            num_free_blocks=state.kv.pool.num_free_blocks,
            num_blocks=state.kv.pool.num_usable_blocks,
            num_steps=state.num_steps,
            num_generated_tokens=stats.num_generated_tokens,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_preemptions=stats.num_preemptions,
            num_prefix_queries=stats.num_prefix_queries,
            num_prefix_hits=stats.num_prefix_hits,
            num_deferred=len(state.deferred) + state.batch.num_idle,
            num_loads=state.num_loads,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            estimated_flops=stats.estimated_flops,
            estimated_bytes=stats.estimated_bytes,
            busy_s=stats.busy_s,
            num_prefetched_tokens=stats.num_prefetched_tokens,
            num_step_tokens=self._num_step_tokens(),
        )

    def explain(self, request_id: str) -> list[Explanation]:
        """Every sequence of the request that lives here, or ended lately, in order of arrival."""
        state = self._state
        found = [s for s in (*state.ended.values(), *state.sequences.values()) if s.request_id == request_id]
        return [explain(sequence, state) for sequence in sorted(found, key=lambda sequence: sequence.order)]

    def take_stats(self) -> StepStats:
        """Sums since the last call."""
        stats = self._state.stats
        interval, self._taken_stats = stats.since(self._taken_stats), stats.copy()
        return interval

    def take_kv_events(self) -> list[KvEvent]:
        """What happened to the prefix cache since the last call; always empty unless `SchedulerSetup` asks for it."""
        return self._state.kv.take_events()

    def take_prefix_changes(self) -> tuple[bytes, bytes]:
        """See `SchedulerInterface`; always empty unless `SchedulerSetup` asks for it."""
        return self._state.kv.take_changes()

    def findable_prefixes(self) -> list[bytes]:
        return self._state.kv.pool.findable()

    def check_integrity(self) -> None:
        """Assert that no sequence, slot, block or count is lost or held twice."""
        self._state.check_integrity()

    # ---- inside ----

    def _end(self, owner: int, request_id: int, reason: FinishReason, now: float) -> None:
        key = (owner, request_id)
        sequence = self._state.sequences.get(key)
        if sequence is None:
            if reason is FinishReason.ABORT and key in self._state.sending:
                assert self.setup.connector is not None
                self._is_stuck = False
                self.setup.connector.abandoned(key)
            else:
                self.num_ignored_messages += 1
            return
        self._is_stuck = False
        self._compile_actions = [action for action in self._compile_actions if (action.owner, action.id) != key]
        self._state.finish(sequence, reason, now)

    def _begin(self, now: float) -> StepDraft:
        state, config = self._state, self.config
        cap = 0
        num_waiting = len(state.waiting) + len(state.load_candidates) + len(state.loaded) + len(state.deferred)
        num_requests = len(state.batch) + num_waiting
        if num_requests > 1:
            self._last_company_at = now
        are_many = num_requests > 1 or (config.short_prefill_tokens > 0 and now - self._last_company_at < COMPANY_S)
        if config.long_prefill_token_threshold and config.enable_chunked_prefill and are_many:
            cap = config.long_prefill_token_threshold
            if config.long_prefill_token_threshold_adaptive:
                cap = max(cap, config.max_num_batched_tokens // num_requests)
        budget, defers_prefills = config.num_scheduled_tokens_limit, self._defers_prefills()
        yields_to = None
        if config.policy == "priority" and not defers_prefills:
            yields_to = self._room.make_for_priority(budget, now)
        return StepDraft(
            budget=budget,
            prefill_cap=cap,
            defer_prefills=defers_prefills,
            encoder_budget=config.encoder_budget,
            yields_to=yields_to,
            short_tokens=config.short_prefill_tokens,
            shorter_first=config.short_prefill_tokens > 0 and cap > 0 and self._num_held_steps < MAX_HELD_STEPS,
        )

    def _defers_prefills(self) -> bool:
        """Prompts are computed in every n-th step only, while some sequence decodes and they do not pile up."""
        interval = self.config.prefill_schedule_interval
        if interval == 1 or self._waiting.is_capacity_bound:
            return False
        state, batch = self._state, self._state.batch
        if state.num_steps + 1 - self._last_prefill_step >= interval:
            return False
        order = batch.order
        known = batch.num_tokens[order] + batch.num_placeholders[order]
        decodes = (known - batch.num_computed[order] <= 1) & ~batch.is_chunk[order] & ~batch.is_idle[order]
        return bool(decodes.any())

    def _take_early(self, now: float) -> None:
        """Results that came before those of earlier steps, as far as it is their turn now."""
        flights = self._state.flights
        while flights and flights[0].step in self._early:
            self._intake.take(self._early.pop(flights[0].step), now)

    def _num_waiting_tokens(self) -> int:
        """Prompt tokens still to be computed."""
        state, batch = self._state, self._state.batch
        total = state.waiting.num_tokens + state.load_candidates.num_tokens
        for sequence in (*state.loaded, *state.deferred.values()):
            total += len(sequence.token_ids) - sequence.num_computed
        if state.may_have_prefills:
            order = batch.order
            total += int(np.maximum(batch.num_prompt[order] - batch.num_computed[order], 0).sum())
        return total

    def _num_step_tokens(self) -> int:
        """Of the next step, with one more sequence."""
        state, batch, config = self._state, self._state.batch, self.config
        most = config.long_prefill_token_threshold if config.enable_chunked_prefill else 0
        most = most or config.num_scheduled_tokens_limit
        most_of_new = max(most, config.short_prefill_tokens)
        total = min(state.waiting.num_tokens, len(state.waiting) * most_of_new) + len(batch) - batch.num_idle
        if state.may_have_prefills:
            remaining = np.maximum(batch.num_prompt[batch.order] - batch.num_computed[batch.order], 1)
            total += int(np.minimum(remaining, most).sum()) - len(remaining)
        return min(total, config.num_scheduled_tokens_limit)

    def _frames(self) -> dict[int, StepFrame]:
        """One frame per owner out of the tokens taken in and all ends."""
        state = self._state
        frames = self._intake.take_tokens()
        load = self.load()
        result: dict[int, StepFrame] = {}
        ends, state.ends = state.ends, []
        turn_ends, state.turn_ends = state.turn_ends, []
        owners = set(frames) | {owner for owner, _ in ends} | {owner for owner, _ in turn_ends}
        for owner in sorted(owners):
            tokens = frames.get(owner)
            mine = [end for to, end in ends if to == owner] if ends else []
            turns = [end for to, end in turn_ends if to == owner] if turn_ends else []
            if tokens is None:
                result[owner] = StepFrame(load=load, ends=mine, turn_ends=turns)
            else:
                result[owner] = StepFrame(
                    load,
                    tokens.ids,
                    tokens.tokens,
                    tokens.logprobs,
                    mine,
                    turns,
                    tokens.first_token_ids,
                    tokens.computed,
                    tickets=tokens.tickets,
                    prompt_logprobs=tokens.prompt_logprobs,
                )
        return result
