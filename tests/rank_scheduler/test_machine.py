"""The whole scheduler under any order of calls: what must hold after every one of them, and when all have ended."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.connector import LoadFinished
from rank_scheduler.config import SpeculativeConfig
from rank_scheduler.interface import KvGroup, PauseState
from rank_scheduler.messages import EncoderInput, FinishReason, Grammar, GrammarKind
from rank_scheduler.plan import StepResult
from rank_scheduler.sequence import SequenceState
from tests.rank_scheduler.scenario import EOS, VOCAB_SIZE, Rank, expected
from tests.rank_scheduler.simulated_connector import SimulatedConnector
from tests.rank_scheduler.soak import EveryThird

MAX_MODEL_LEN = 32
MAX_BYPASSES = 1
MAX_STEPS_AT_HEAD = 120
"""Steps that the head may have to wait while nothing blocks it: those that run must end, or give way."""

GROUPS = [(KvGroup(),), (KvGroup(), KvGroup(sliding_window=6))]
GRAMMAR = Grammar(GrammarKind.LARK, "every third")


class Matcher(EveryThird):
    """As `EveryThird`, for this vocabulary."""

    def fill_mask(self, mask):
        allowed = np.array([self.allows(token) for token in range(VOCAB_SIZE)])
        packed = np.packbits(np.pad(allowed, (0, len(mask) * 32 - VOCAB_SIZE)), bitorder="little")
        mask[:] = packed.view("<u4")


def allowed_after(generated):
    matcher = Matcher()
    matcher.num_taken = len(generated)
    return np.array([matcher.allows(token) for token in range(VOCAB_SIZE)])


class Turns:
    """A request as its router sees it: what its tokens continue, turn by turn."""

    def __init__(self, prompt, max_tokens, items, *, has_grammar, is_session):
        self.context = prompt
        self.max_tokens = max_tokens
        self.items = items
        self.has_grammar = has_grammar
        self.is_session = is_session
        self.extensions = []
        self.has_last = False

    def check(self, tokens, groups):
        """All tokens that came, over all turns."""
        context, max_tokens, extensions = self.context, self.max_tokens, self.extensions[:]
        while tokens:
            longest = min(max_tokens, MAX_MODEL_LEN - len(context))
            right = expected(
                context,
                min(longest, len(tokens)),
                kv_groups=groups,
                encoder_inputs=self.items,
                allowed=allowed_after if self.has_grammar else None,
            )
            assert tokens[: len(right)] == right
            tokens = tokens[len(right) :]
            if tokens:
                assert extensions, "tokens after the turn's end"
                more, max_tokens = extensions.pop(0)
                context = context + right[:-1] + more


class SchedulerMachine(RuleBasedStateMachine):
    """A rank with a runner that raises if a plan makes no sense, and whose tokens are wrong if any KV is."""

    @initialize(
        seed=st.integers(0, 2**16),
        mode=st.sampled_from(["plain", "async", "speculative", "encoder", "loads", "async loads"]),
        groups=st.sampled_from(GROUPS),
        policy=st.sampled_from(["fcfs", "priority"]),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(6, 24),
        num_spare_blocks=st.integers(0, 8),
        caching=st.booleans(),
        reserves=st.booleans(),
        load_cap=st.sampled_from([None, 1, 2]),
        failure_policy=st.sampled_from(["recompute", "fail"]),
    )
    def start(
        self,
        seed,
        mode,
        groups,
        policy,
        max_num_seqs,
        budget,
        num_spare_blocks,
        caching,
        reserves,
        load_cap,
        failure_policy,
    ):
        self.rng = random.Random(seed)
        self.mode, self.groups = mode, groups
        config = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": budget,
            "policy": policy,
            "scheduler_reserve_full_isl": reserves,
            "max_head_bypasses": MAX_BYPASSES,
            "max_num_inflight_kv_loads": load_cap,
            "kv_load_failure_policy": failure_policy,
        }
        if mode == "speculative":
            config["speculative"] = SpeculativeConfig(
                num_speculative_tokens=2, prompt_lookup_min=1, prompt_lookup_max=2
            )
        if mode == "encoder":
            config |= {"is_multimodal_model": True, "encoder_cache_size": 8, "max_num_encoder_input_tokens": 6}
        self.rank = Rank(
            connector=SimulatedConnector() if "loads" in mode else None,
            num_blocks=1 + MAX_MODEL_LEN // 4 * len(groups) + num_spare_blocks,
            max_model_len=MAX_MODEL_LEN,
            kv_groups=groups,
            setup={"async_scheduling": "async" in mode, "enable_prefix_caching": caching},
            **config,
        )
        self.requests = {}
        self.grammars = []
        self.may_err = set()
        """Requests that something was done to which may end them with an error."""
        self.aborted = set()
        self.head = (None, 0)
        self.num_passed = {}
        """How often others behind it in the queue were admitted while a sequence was not."""
        self.last_plan = None

    # ---- routers ----

    @rule(
        length=st.integers(1, 24),
        prefix=st.integers(0, 2),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        kind=st.sampled_from(["plain", "plain", "grammar", "session", "items", "load", "load", "keep", "sync"]),
        reads_prefix_cache=st.booleans(),
    )
    def add(self, length, prefix, max_tokens, priority, kind, reads_prefix_cache):
        request_id = len(self.requests)
        prompt = [(prefix + 7 * index) % VOCAB_SIZE for index in range(length)]
        prompt[-1] = self.rng.randrange(VOCAB_SIZE) if self.rng.random() < 0.5 else prompt[-1]
        fields = {"priority": priority, "reads_prefix_cache": reads_prefix_cache}
        items = ()
        if kind == "grammar":
            fields["grammar"] = GRAMMAR
        elif kind == "session":
            fields["is_session"] = True
        elif kind == "items" and self.mode == "encoder" and length > 6:
            items = (EncoderInput(b"x%d" % prefix, 1, 3), EncoderInput(b"y%d" % max_tokens, 5, 2))
            fields["encoder_inputs"] = items
        elif kind in ("load", "keep", "sync") and self.rank.connector is not None:
            fields["kv_transfer_params"] = {
                "external": self.rng.randint(0, length),
                "is_async": int(kind != "sync"),
                "keep": int(kind == "keep"),
                "unknown": self.rng.choice([0, 0, 1]),
            }
        self.requests[request_id] = Turns(
            prompt, max_tokens, items, has_grammar=kind == "grammar", is_session=kind == "session"
        )
        self.rank.submit(request_id, prompt, max_tokens, fields=fields)

    def draw(self, data, request_ids):
        return data.draw(st.sampled_from(sorted(request_ids)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def add_again(self, data):
        """A number that is in use is not taken twice; one whose request has ended would be: that is the router's."""
        living = [key[1] for key in self.rank.scheduler._state.sequences]
        if not living:
            return
        ignored = self.rank.scheduler.num_ignored_messages
        self.rank.submit(self.draw(data, living), [1], 1)
        assert self.rank.scheduler.num_ignored_messages == ignored + 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = self.draw(data, self.requests)
        self.aborted.add(request_id)
        self.rank.abort(request_id)
        assert request_id in self.rank.ends

    @precondition(lambda self: any(request.is_session for request in self.requests.values()))
    @rule(
        data=st.data(),
        token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5),
        max_tokens=st.integers(1, 6),
        is_last=st.booleans(),
    )
    def extend(self, data, token_ids, max_tokens, is_last):
        sessions = [request_id for request_id, request in self.requests.items() if request.is_session]
        request_id = self.draw(data, sessions)
        request = self.requests[request_id]
        if request.has_last:
            return
        request.has_last = is_last
        if token_ids:
            request.extensions.append((token_ids, max_tokens))
        # It may be empty, or grow longer than the model.
        self.may_err.add(request_id)
        self.rank.extend(request_id, token_ids, max_tokens, is_last=is_last)

    # ---- the rank's edge ----

    @rule(data=st.data(), fails=st.booleans())
    def compile_grammar(self, data, fails):
        self.grammars += [action.id for action in self.rank.scheduler.take_compile_actions()]
        if self.grammars:
            request_id = self.draw(data, self.grammars)
            self.grammars.remove(request_id)
            self.compiled(request_id, fails=fails and data.draw(st.booleans()))

    def compiled(self, request_id, *, fails=False):
        if fails:
            self.may_err.add(request_id)
        self.rank.scheduler.grammar_compiled(0, request_id, None if fails else Matcher(), "", self.rank.now)

    @precondition(lambda self: self.rank.connector is not None and self.rank.connector.loading)
    @rule(data=st.data(), how=st.sampled_from(["well", "well", "in part", "not at all", "twice"]))
    def end_load(self, data, how):
        _, request_id = self.draw(data, self.rank.connector.loading)
        _, _, first, last = self.rank.connector.loading[0, request_id]
        if how in ("in part", "not at all"):
            if self.rank.scheduler.setup.kv_load_failure_policy == "fail":
                self.may_err.add(request_id)
            self.rank.end_load(request_id, 0 if how == "not at all" else (first + last) // 2, "peer lost")
        else:
            self.rank.end_load(request_id)
        if how == "twice":
            self.rank.tell_load_ended(request_id, 0, "late")

    @rule(request_id=st.integers(0, 40))
    def late_events(self, request_id):
        """Nobody waits for any of them."""
        if self.rank.connector is not None and (0, request_id) in self.rank.connector.loading:
            return
        scheduler = self.rank.scheduler
        sequence = scheduler._state.sequences.get((0, request_id))
        if sequence is not None and sequence.state is SequenceState.WAITING_FOR_KV_LOAD:
            return
        scheduler.load_finished(LoadFinished((0, request_id), 0, "late"), self.rank.now)
        if sequence is None or sequence.state is not SequenceState.WAITING_FOR_GRAMMAR:
            scheduler.grammar_compiled(0, request_id, None, "late", self.rank.now)

    @precondition(lambda self: self.rank.connector is not None and self.rank.connector.kept)
    @rule(data=st.data())
    def end_send(self, data):
        _, request_id = self.draw(data, self.rank.connector.kept)
        self.rank.connector.kept.discard((0, request_id))
        self.rank.end_send(request_id)

    @rule(state=st.sampled_from([*PauseState, PauseState.UNPAUSED]))
    def pause(self, state):
        self.rank.scheduler.set_pause(state, self.rank.now)

    @rule()
    def reset_prefix_cache(self):
        was_reset = self.rank.scheduler.reset_prefix_cache()
        assert was_reset == (self.rank.num_held_blocks() == 0)

    # ---- steps ----

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.one_step()

    def one_step(self):
        scheduler, state = self.rank.scheduler, self.rank.scheduler._state
        paused, has_work, line = state.pause, scheduler.has_work(), list(state.waiting)
        plan = self.rank.plan()
        self.count_passed(line)
        if plan is not None:
            self.last_plan = plan
            assert has_work, "a plan was made that nobody would have asked for"
            assert plan.total_tokens <= self.rank.scheduler.config.num_scheduled_tokens_limit
            assert len(set(plan.slots.tolist())) == len(plan.slots)
            assert (plan.num_tokens > 0).all()
            if paused is PauseState.PAUSED_ALL:
                assert not len(plan.slots)
            if paused is not PauseState.UNPAUSED:
                assert all(entered.num_computed_tokens for entered in plan.new_sequences), "a new one was admitted"
        self.watch_head(plan)
        if self.rank.in_flight and (plan is None or len(self.rank.in_flight) == scheduler.max_num_steps_in_flight):
            self.rank.finish_step()

    def count_passed(self, line):
        """`line` waited before the step. One that a connector is asked for keeps nobody behind."""
        for sequence in line:
            if sequence.slot >= 0:
                self.num_passed.pop(sequence.order, None)
        left = [
            place
            for place, sequence in enumerate(line)
            if sequence.slot < 0 and not (sequence.kv_request and sequence.kv_request.params)
        ]
        if left:
            first = line[left[0]].order
            admitted = sum(sequence.slot >= 0 for sequence in line[left[0] :])
            self.num_passed[first] = self.num_passed.get(first, 0) + admitted
            assert self.num_passed[first] <= MAX_BYPASSES, "a head was passed too often"

    def watch_head(self, plan):
        """The first in line may wait long only for what somebody else must do."""
        scheduler = self.rank.scheduler
        state = scheduler._state
        if (
            not state.waiting
            or state.pause is not PauseState.UNPAUSED
            or state.num_loads
            or state.quarantine
            or state.sending
        ):
            self.head = (None, 0)
            return
        first, (before, count) = state.waiting.first, self.head
        self.head = (first, count + 1 if first is before else 0)
        assert self.head[1] < MAX_STEPS_AT_HEAD, self.rank.explain(first.key[1])
        assert plan is not None or scheduler.has_work() or state.flights, (
            f"nobody runs, and {first.key} waits: {self.rank.explain(first.key[1])}"
        )

    @precondition(lambda self: self.rank.in_flight)
    @rule()
    def fail_steps(self):
        """The runner has lost what is in flight; it has seen nothing of it."""
        while self.rank.in_flight:
            plan = self.rank.in_flight.popleft()
            self.may_err |= {key[1] for key in self.rank.scheduler._state.sequences}
            self.rank.take(self.rank.scheduler.fail(plan, "out of memory", self.rank.now))
            if plan.connector_metadata is not None:
                self.rank.connector.start_load_kv(plan.connector_metadata)
            self.rank.scheduler.check_integrity()

    @precondition(lambda self: self.last_plan is not None and self.last_plan not in self.rank.in_flight)
    @rule()
    def late_result(self):
        ignored = self.rank.scheduler.num_ignored_messages
        nothing = StepResult(np.zeros((0, 1), np.int32))
        self.rank.take(self.rank.scheduler.update(self.last_plan, nothing, self.rank.now))
        self.rank.take(self.rank.scheduler.fail(self.last_plan, "late", self.rank.now))
        assert self.rank.scheduler.num_ignored_messages == ignored + 2

    # ---- what always holds ----

    @invariant()
    def holds(self):
        if not hasattr(self, "rank"):
            return
        scheduler = self.rank.scheduler
        scheduler.check_integrity()
        state, config = scheduler._state, scheduler.config
        assert len(state.batch) <= config.active_seqs_limit
        if config.max_num_inflight_kv_loads is not None:
            assert state.num_loads <= config.max_num_inflight_kv_loads
        assert len(state.flights) <= scheduler.max_num_steps_in_flight
        for request_id in self.requests.keys() - self.rank.ends.keys():
            if (0, request_id) in state.sequences:
                assert self.rank.explain(request_id).timeline

    def end_transfers(self):
        for _, request_id in sorted(self.rank.connector.loading):
            self.rank.end_load(request_id)
        for _, request_id in sorted(self.rank.connector.kept):
            self.rank.end_send(request_id)
        self.rank.connector.kept.clear()

    def teardown(self):
        if not hasattr(self, "rank"):
            return
        rank, scheduler = self.rank, self.rank.scheduler
        scheduler.set_pause(PauseState.UNPAUSED, rank.now)
        for request_id, request in self.requests.items():
            if request.is_session and not request.has_last:
                rank.extend(request_id, [], is_last=True)
                request.has_last = True
        for _ in range(2_000):
            self.grammars += [action.id for action in scheduler.take_compile_actions()]
            while self.grammars:
                self.compiled(self.grammars.pop())
            if rank.connector is not None:
                self.end_transfers()
            if not (rank.in_flight or scheduler.has_work() or scheduler._state.sequences):
                break
            self.one_step()
        if rank.connector is not None:
            self.end_transfers()
        rank.take(scheduler.take_frames())
        assert rank.ends.keys() == self.requests.keys(), "a request has no end"
        rank.assert_nothing_held()
        for request_id, request in self.requests.items():
            end, tokens = rank.ends[request_id], rank.tokens[request_id]
            request.check(tokens, self.groups)
            if end.reason is FinishReason.ABORT:
                assert request_id in self.aborted
            elif end.reason is FinishReason.ERROR:
                assert request_id in self.may_err, end.message
            elif not request.is_session:
                is_whole = len(tokens) == min(request.max_tokens, MAX_MODEL_LEN - len(request.context))
                assert is_whole if end.reason is FinishReason.LENGTH else request.has_grammar and tokens[-1] == EOS


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)
TestSchedulerMachine = SchedulerMachine.TestCase
