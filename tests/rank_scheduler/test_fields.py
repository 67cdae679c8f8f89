"""Every field of `SchedulerConfig` changes what the scheduler does, shown against another value of the same field."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from model_runner.simulated import expected_pooled
from rank_scheduler.config import SchedulerConfig, SpeculativeConfig
from rank_scheduler.interface import KvGroup, SchedulerSetup
from rank_scheduler.messages import Extend, FinishReason, Grammar, GrammarKind
from rank_scheduler.scheduler import COMPANY_S, Scheduler
from tests.rank_scheduler.small_engine import SmallEngine, item, prompt_of, tokens_after

ROOT = Path(__file__).parents[2]
TESTED_BY: dict[str, list[str]] = {}


def of_field(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """This test fails if the scheduler ignores the field."""

    def register(test: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            TESTED_BY.setdefault(name, []).append(test.__name__)
        return test

    return register


TESTED_ELSEWHERE = {
    "max_num_queued_reqs": (
        "tests/router/test_http_api.py",
        "test_requests_beyond_the_limit_are_refused_and_the_rest_is_served",
    ),
    "max_num_queued_tokens": (
        "tests/router/test_http_api.py",
        "test_prompt_tokens_beyond_the_limit_are_refused_until_prefill_is_done",
    ),
    "stream_interval": ("tests/router/test_http_api.py", "test_tokens_are_sent_by_the_stream_interval"),
}


def test_every_field_has_a_test():
    assert TESTED_BY.keys() | TESTED_ELSEWHERE.keys() == SchedulerConfig.model_fields.keys()
    assert not TESTED_BY.keys() & TESTED_ELSEWHERE.keys()


@pytest.mark.parametrize(("path", "name"), TESTED_ELSEWHERE.values(), ids=TESTED_ELSEWHERE.keys())
def test_the_tests_elsewhere_exist(path, name):
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@of_field("queued_tokens_accounting")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_frames_tell_how_much_of_a_prompt_is_computed_unless_all_of_it_counts(async_scheduling):
    told = {}
    for accounting in ("exact", "conservative"):
        engine = SmallEngine(
            queued_tokens_accounting=accounting, max_num_batched_tokens=8, async_scheduling=async_scheduling
        )
        engine.submit(1, prompt_of(20), max_tokens=3)
        engine.drain()
        engine.submit(2, [*prompt_of(12), *prompt_of(14, start=3)], max_tokens=3)  # 12 of them are cached
        engine.drain()
        told[accounting] = engine.computed
    assert told == {"exact": [(1, 8), (1, 16), (2, 20)], "conservative": []}


# ---- sizes of a step ----


@of_field("runner_type")
def test_a_pooling_runner_brings_an_output_and_no_token():
    engine = SmallEngine(runner_type="pooling", max_num_batched_tokens=16)
    engine.submit(1, prompt_of(24))
    engine.submit(2, prompt_of(64, start=2))
    engine.drain()
    assert engine.tokens == {}
    assert engine.ends[1].reason is FinishReason.STOP
    assert engine.ends[1].pooled == expected_pooled(prompt_of(24))
    # Nothing is generated, so a prompt may be as long as the model.
    assert engine.ends[2].pooled == expected_pooled(prompt_of(64, start=2))

    engine = SmallEngine(runner_type="generate")
    engine.submit(1, prompt_of(24), max_tokens=2)
    engine.submit(2, prompt_of(64, start=2))
    engine.drain()
    assert engine.tokens[1] == tokens_after(prompt_of(24), 2)
    assert engine.ends[1].pooled == b""
    assert "max_model_len (64)" in engine.ends[2].message


@of_field("max_num_batched_tokens")
@pytest.mark.parametrize(("budget", "chunks"), [(8, [8, 8, 4]), (16, [16, 4]), (20, [20])])
def test_a_step_computes_at_most_the_batched_tokens(budget, chunks):
    engine = SmallEngine(max_num_batched_tokens=budget)
    engine.submit(1, prompt_of(20), max_tokens=1)
    assert engine.steps(len(chunks)) == [{1: count} for count in chunks]
    assert engine.tokens[1] == tokens_after(prompt_of(20), 1)


@of_field("max_num_batched_tokens")
def test_decodes_and_prompts_share_one_budget():
    engine = SmallEngine(max_num_batched_tokens=10)
    engine.submit(1, prompt_of(8), max_tokens=9)
    engine.step()
    engine.submit(2, prompt_of(20, start=2), max_tokens=9)
    engine.submit(3, prompt_of(2, start=3), max_tokens=9)
    assert engine.steps(4) == [{1: 1, 2: 9}, {1: 1, 2: 9}, {1: 1, 2: 2, 3: 2}, {1: 1, 2: 1, 3: 1}]


@of_field("max_num_scheduled_tokens")
@pytest.mark.parametrize(("scheduled", "first"), [(None, 16), (6, 6), (100, 16)])
def test_fewer_tokens_may_be_handed_out_than_fit(scheduled, first):
    engine = SmallEngine(max_num_batched_tokens=16, max_num_seqs=4, max_num_scheduled_tokens=scheduled)
    engine.submit(1, prompt_of(30), max_tokens=1)
    assert engine.step_shares() == {1: first}


@of_field("max_num_seqs")
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_run_than_there_are_slots(limit):
    engine = SmallEngine(max_num_seqs=limit)
    for request in range(4):
        engine.submit(request, prompt_of(4, start=request), max_tokens=4)
    engine.step()
    assert engine.running == list(range(limit))
    engine.drain()
    assert list(engine.ends) == [0, 1, 2, 3]


@of_field("max_num_active_seqs")
def test_active_seqs_gate_admission_and_never_preempt():
    for limit in (2, None):
        engine = SmallEngine(max_num_seqs=4, max_num_active_seqs=limit)
        for request in range(4):
            engine.submit(request, prompt_of(4, start=request), max_tokens=6)
        engine.step()
        assert engine.running == list(range(limit or 4))
        engine.drain()
        assert engine.load.num_preemptions == 0
        assert list(engine.ends) == [0, 1, 2, 3]


@of_field("max_num_active_seqs")
def test_an_idle_session_counts_as_active():
    engine = SmallEngine(max_num_seqs=4, max_num_active_seqs=2)
    engine.submit(1, prompt_of(4), max_tokens=1, fields={"is_session": True})
    engine.step()
    assert engine.explain(1).state == "waiting_for_input"
    for request in (2, 3):
        engine.submit(request, prompt_of(4, start=request), max_tokens=4)
    engine.step()
    assert engine.running == [1, 2]
    assert engine.explain(3).figures == {"num_active": 2, "limit": 2}
    engine.scheduler.extend(0, Extend(1, is_last=True), engine.now)
    engine.step()
    assert engine.running == [2, 3]
    assert engine.load.num_preemptions == 0


# ---- long prompts ----


@of_field("long_prefill_token_threshold")
@pytest.mark.parametrize(("threshold", "shares"), [(0, {1: 20, 2: 12}), (6, {1: 6, 2: 6}), (15, {1: 15, 2: 15})])
def test_one_long_prompt_does_not_take_the_whole_step_from_another(threshold, shares):
    engine = SmallEngine(max_num_batched_tokens=32, long_prefill_token_threshold=threshold)
    engine.submit(1, prompt_of(20), max_tokens=1)
    engine.submit(2, prompt_of(20, start=2), max_tokens=1)
    assert engine.step_shares() == shares


@of_field("long_prefill_token_threshold")
def test_a_request_alone_is_not_capped_and_running_chunks_are():
    engine = SmallEngine(max_num_batched_tokens=32, long_prefill_token_threshold=6)
    engine.submit(1, prompt_of(60), max_tokens=1)
    assert engine.step_shares() == {1: 32}
    engine.submit(2, prompt_of(20, start=2), max_tokens=1)
    assert engine.step_shares() == {1: 6, 2: 6}
    engine.scheduler.abort(0, 2, engine.now)
    assert engine.step_shares() == {1: 22}


@of_field("long_prefill_token_threshold")
def test_a_request_that_waits_for_its_grammar_counts_as_another():
    engine = SmallEngine(max_num_batched_tokens=32, long_prefill_token_threshold=6)
    engine.submit(1, prompt_of(20), max_tokens=1)
    engine.submit(2, prompt_of(4), fields={"grammar": Grammar(GrammarKind.JSON_OBJECT)})
    assert engine.step_shares() == {1: 6}


@of_field("long_prefill_token_threshold")
def test_prompts_that_may_not_be_cut_are_not_capped():
    engine = SmallEngine(enable_chunked_prefill=False, long_prefill_token_threshold=6)
    engine.submit(1, prompt_of(20), max_tokens=1)
    engine.submit(2, prompt_of(20, start=2), max_tokens=1)
    assert engine.step_shares() == {1: 20, 2: 20}


@of_field("long_prefill_token_threshold_adaptive")
@pytest.mark.parametrize(
    ("adaptive", "num_requests", "cap"), [(False, 2, 6), (True, 2, 16), (True, 4, 8), (True, 8, 6)]
)
def test_an_adaptive_cap_is_the_budget_divided_by_the_requests(adaptive, num_requests, cap):
    engine = SmallEngine(
        max_num_batched_tokens=32,
        max_num_seqs=2,
        long_prefill_token_threshold=6,
        long_prefill_token_threshold_adaptive=adaptive,
    )
    for request in range(num_requests):
        engine.submit(request, prompt_of(30, start=request), max_tokens=1)
    assert engine.step_shares() == {0: cap, 1: cap}


@of_field("long_prefill_token_threshold_adaptive")
def test_an_adaptive_cap_without_a_threshold_is_none():
    engine = SmallEngine(max_num_batched_tokens=32, long_prefill_token_threshold_adaptive=True)
    engine.submit(1, prompt_of(30), max_tokens=1)
    engine.submit(2, prompt_of(30, start=2), max_tokens=1)
    assert engine.step_shares() == {1: 30, 2: 2}


def engine_with_a_long_prompt(**fields):
    engine = SmallEngine(
        max_num_batched_tokens=64, max_num_seqs=16, long_prefill_token_threshold=6, short_prefill_tokens=9, **fields
    )
    engine.submit(1, prompt_of(60), max_tokens=1)
    engine.submit(2, prompt_of(3, start=9), max_tokens=9)
    return engine


@of_field("short_prefill_tokens")
def test_a_long_prompt_gets_no_part_of_a_step_in_which_a_short_one_begins():
    engine = engine_with_a_long_prompt()
    assert engine.step_shares() == {1: 6, 2: 3}, "it begins with it"
    assert engine.step_shares() == {1: 6, 2: 1}
    engine.submit(3, prompt_of(9, start=3), max_tokens=1)
    assert engine.step_shares() == {2: 1, 3: 9}, "which is not cut"
    engine.submit(4, prompt_of(10, start=4), max_tokens=1)
    assert engine.step_shares() == {1: 6, 2: 1, 4: 6}, "that one is long"
    assert engine.step_shares() == {1: 6, 2: 1, 4: 4}


@of_field("short_prefill_tokens")
def test_short_prompts_take_three_steps_of_four_at_most():
    engine = engine_with_a_long_prompt()
    engine.step_shares()
    has_part = []
    for request in range(10, 18):
        engine.submit(request, prompt_of(4, start=request), max_tokens=1)
        has_part.append(1 in engine.step_shares())
    assert has_part == [False, False, False, True] * 2


@of_field("short_prefill_tokens")
def test_the_cap_holds_for_a_while_after_the_last_short_prompt():
    engine = engine_with_a_long_prompt()
    assert engine.step_shares() == {1: 6, 2: 3}
    engine.scheduler.abort(0, 2, engine.now)
    engine.now -= COMPANY_S / 2
    assert engine.step_shares() == {1: 6}
    engine.now += COMPANY_S
    assert engine.step_shares() == {1: 48}


@of_field("short_prefill_tokens")
def test_among_priorities_both_come_after_those_for_whom_they_make_room():
    engine = engine_with_a_long_prompt(policy="priority")
    engine.step_shares()
    engine.submit(3, prompt_of(6, start=3), max_tokens=1, fields={"priority": -1})
    assert engine.step_shares() == {2: 1, 3: 6}
    assert engine.step_shares() == {1: 6, 2: 1}


@of_field("enable_chunked_prefill")
def test_a_prompt_that_may_not_be_cut_waits_and_nothing_passes_it():
    shares = {}
    for chunked in (True, False):
        engine = SmallEngine(max_num_batched_tokens=64, enable_chunked_prefill=chunked)
        engine.submit(1, prompt_of(40, start=1), max_tokens=3)
        engine.submit(2, prompt_of(30, start=2), max_tokens=3)
        engine.submit(3, prompt_of(4, start=3), max_tokens=3)
        shares[chunked] = engine.steps(2)
        engine.drain()
        for request, length in ((1, 40), (2, 30), (3, 4)):
            assert engine.tokens[request] == tokens_after(prompt_of(length, start=request), 3)
    assert shares[True] == [{1: 40, 2: 24}, {1: 1, 2: 6, 3: 4}]
    assert shares[False] == [{1: 40}, {1: 1, 2: 30, 3: 4}]


@of_field("prefill_schedule_interval")
@pytest.mark.parametrize(
    ("interval", "shares"),
    [
        (1, [{1: 1, 2: 15}, {1: 1, 2: 15}, {1: 1, 2: 10}, {1: 1, 2: 1}]),
        (2, [{1: 1}, {1: 1, 2: 15}, {1: 1}, {1: 1, 2: 15}]),
        (3, [{1: 1}, {1: 1}, {1: 1, 2: 15}, {1: 1}]),
    ],
)
def test_prompts_are_computed_in_every_nth_step_while_others_decode(interval, shares):
    engine = SmallEngine(max_num_batched_tokens=16, prefill_schedule_interval=interval)
    engine.submit(1, prompt_of(4), max_tokens=30)
    engine.step()
    engine.submit(2, prompt_of(40, start=2), max_tokens=9)
    assert engine.steps(4) == shares
    engine.drain()
    assert engine.tokens[2] == tokens_after(prompt_of(40, start=2), 9)


@of_field("prefill_schedule_interval")
def test_prompts_are_not_held_back_when_nothing_decodes():
    engine = SmallEngine(max_num_batched_tokens=16, prefill_schedule_interval=5)
    engine.submit(1, prompt_of(40), max_tokens=1)
    engine.submit(2, prompt_of(20, start=2), max_tokens=1)
    assert engine.steps(4) == [{1: 16}, {1: 16}, {1: 8, 2: 8}, {2: 12}]


@of_field("prefill_schedule_interval")
def test_prompts_that_pile_up_are_not_held_back():
    engine = SmallEngine(max_num_batched_tokens=16, prefill_schedule_interval=4)
    engine.submit(1, prompt_of(4), max_tokens=30)
    engine.step()
    for request in range(2, 6):
        engine.submit(request, prompt_of(15, start=request), max_tokens=9)
    # The fifth step is the prompts' turn, and leaves some over: from then on every step is, until none wait.
    shares = engine.steps(6)
    assert shares[:3] == [{1: 1}, {1: 1}, {1: 1}]
    assert shares[3:] == [{1: 1, 2: 15}, {1: 1, 2: 1, 3: 14}, {1: 1, 2: 1, 3: 1, 4: 13}]
    engine.submit(9, prompt_of(4, start=9), max_tokens=2)
    engine.drain()
    assert engine.tokens[9] == tokens_after(prompt_of(4, start=9), 2)


@of_field("prefill_schedule_interval")
def test_a_prompt_that_is_cached_but_for_one_token_is_no_prefill():
    engine = SmallEngine(prefill_schedule_interval=4)
    engine.submit(0, prompt_of(16, start=2), max_tokens=1)
    engine.drain()
    engine.submit(1, prompt_of(4), max_tokens=30)
    engine.step()
    engine.submit(2, prompt_of(16, start=2), max_tokens=2)
    assert engine.step_shares() == {1: 1, 2: 1}


# ---- encoder ----


@of_field("is_multimodal_model")
def test_only_a_model_with_an_encoder_takes_encoder_inputs():
    fields = {"encoder_inputs": (item(2, 6),)}
    engine = SmallEngine(is_multimodal_model=False)
    engine.submit(1, prompt_of(12), fields=fields)
    engine.drain()
    assert engine.ends[1].reason is FinishReason.ERROR
    assert "send text only" in engine.ends[1].message

    engine = SmallEngine(is_multimodal_model=True)
    engine.submit(1, prompt_of(12), fields=fields)
    plan = engine.step()
    assert [run.item for run in plan.encoder_runs] == [item(2, 6)]
    engine.drain()
    assert engine.tokens[1] == tokens_after(prompt_of(12), 8, encoder_inputs=[item(2, 6)])


@of_field("max_num_encoder_input_tokens")
@pytest.mark.parametrize(("budget", "shares"), [(4, {1: 12, 2: 2}), (7, {1: 12, 2: 2}), (8, {1: 12, 2: 12})])
def test_a_chunk_ends_before_an_item_that_the_encoder_budget_has_no_room_for(budget, shares):
    engine = SmallEngine(is_multimodal_model=True, max_num_encoder_input_tokens=budget)
    for request in (1, 2):
        engine.submit(request, prompt_of(12, start=request), fields={"encoder_inputs": (item(2, 4, request),)})
    assert engine.step_shares() == shares
    engine.drain()
    for request in (1, 2):
        expected = tokens_after(prompt_of(12, start=request), 8, encoder_inputs=[item(2, 4, request)])
        assert engine.tokens[request] == expected


@of_field("encoder_cache_size")
@pytest.mark.parametrize(("size", "shares"), [(4, {1: 12, 2: 2}), (8, {1: 12, 2: 12})])
def test_a_chunk_ends_before_an_item_that_the_encoder_cache_has_no_room_for(size, shares):
    engine = SmallEngine(is_multimodal_model=True, encoder_cache_size=size)
    for request in (1, 2):
        engine.submit(request, prompt_of(12, start=request), fields={"encoder_inputs": (item(2, 4, request),)})
    assert engine.step_shares() == shares
    engine.drain()
    for request in (1, 2):
        expected = tokens_after(prompt_of(12, start=request), 8, encoder_inputs=[item(2, 4, request)])
        assert engine.tokens[request] == expected


@of_field("encoder_cache_size")
def test_an_item_that_is_still_in_the_encoder_cache_is_not_encoded_again():
    num_runs = {}
    for size in (4, 8):
        engine = SmallEngine(is_multimodal_model=True, encoder_cache_size=size)
        for number in (1, 2, 1):
            request = len(engine.ends)
            engine.submit(request, prompt_of(12, start=request), fields={"encoder_inputs": (item(2, 4, number),)})
            engine.drain()
        num_runs[size] = sum(len(plan.encoder_runs) for plan in engine.plans)
    assert num_runs == {4: 3, 8: 2}


@of_field("disable_chunked_mm_input")
@pytest.mark.parametrize(("disabled", "chunks"), [(False, [8, 8, 4]), (True, [4, 8, 8])])
def test_an_item_is_cut_only_where_that_is_allowed(disabled, chunks):
    engine = SmallEngine(
        is_multimodal_model=True, disable_chunked_mm_input=disabled, max_num_batched_tokens=8, encoder_cache_size=16
    )
    engine.submit(1, prompt_of(20), max_tokens=1, fields={"encoder_inputs": (item(4, 6), item(12, 8, 1))})
    assert engine.steps(3) == [{1: count} for count in chunks]
    engine.drain()
    assert engine.tokens[1] == tokens_after(prompt_of(20), 1, encoder_inputs=[item(4, 6), item(12, 8, 1)])


# ---- who goes first ----


@of_field("policy")
def test_waiting_requests_go_by_arrival_or_by_priority_then_arrival():
    admitted = {}
    for policy in ("fcfs", "priority"):
        engine = SmallEngine(policy=policy, max_num_seqs=1)
        for request, priority in enumerate((5, 0, 5, -3, 0)):
            engine.submit(request, prompt_of(4, start=request), max_tokens=1, fields={"priority": priority})
        engine.drain()
        admitted[policy] = list(engine.ends)
    assert admitted == {"fcfs": [0, 1, 2, 3, 4], "priority": [3, 1, 4, 0, 2]}


def priority_engine(priorities: list[int], *, length: int = 4, **fields) -> SmallEngine:
    """Requests 0, 1, … of these priorities run; blocks are not shared."""
    engine = SmallEngine(**({"policy": "priority"} | fields), setup={"enable_prefix_caching": False})
    for request, priority in enumerate(priorities):
        engine.submit(request, prompt_of(length, start=request), max_tokens=20, fields={"priority": priority})
        engine.step()
    assert engine.running == list(range(len(priorities)))
    return engine


@of_field("policy")
def test_a_higher_priority_takes_the_slot_of_the_lowest_and_no_more():
    for policy, preempted in (("fcfs", []), ("priority", [1])):
        engine = priority_engine([3, 7, 5], policy=policy, max_num_seqs=3)
        engine.submit(9, prompt_of(4, start=9), max_tokens=2, fields={"priority": 0})
        engine.step()
        assert engine.preempted() == preempted
        assert (9 in engine.running) == (policy == "priority")
        engine.drain()
        for request in range(3):
            assert engine.tokens[request] == tokens_after(prompt_of(4, start=request), 20)


@of_field("policy")
@pytest.mark.parametrize("priority", [5, 6, 100])
def test_equal_and_lower_priorities_preempt_nobody(priority):
    engine = priority_engine([5, 5], max_num_seqs=2)
    engine.submit(9, prompt_of(4, start=9), max_tokens=2, fields={"priority": priority})
    engine.steps(5)
    assert engine.preempted() == []
    assert engine.explain(9).reason == "slots"


@of_field("policy")
def test_as_many_slots_are_taken_as_higher_priorities_wait_for():
    engine = priority_engine([5, 1, 6, 4], max_num_seqs=4)
    for request, priority in ((10, 3), (11, 3), (12, 5)):
        engine.submit(request, prompt_of(4, start=request), max_tokens=2, fields={"priority": priority})
    engine.step()
    # The two of priority 3 take the places of 6 and 5; the third has only equals and better ones before it.
    assert sorted(engine.preempted()) == [0, 2]
    assert engine.running == [1, 3, 10, 11]
    # The head of its class is who was preempted, though request 12 came before.
    assert engine.queued == [0, 12, 2]


@of_field("policy")
@pytest.mark.parametrize(
    ("length", "preempted"), [(12, []), (16, [1]), (28, [1]), (32, [1, 3]), (44, [1, 3]), (60, [0, 1, 3])]
)
def test_a_higher_priority_takes_blocks_of_the_lowest_until_it_fits(length, preempted):
    # Four of 12 tokens, of 4, 4, 4 and 3 blocks out of 19; the fourth needs one more in this step.
    engine = priority_engine([5, 7, 4, 6], length=12, num_blocks=20, max_num_seqs=5)
    assert engine.load.num_free_blocks == 4
    engine.submit(9, prompt_of(length, start=9), max_tokens=1, fields={"priority": 0})
    engine.scheduler.schedule(engine.now + 1)
    assert sorted(engine.preempted()) == preempted
    assert 9 in engine.running


@of_field("policy")
def test_nobody_is_preempted_if_even_all_of_lower_priority_would_not_make_room():
    # 4 free blocks and the 4 of request 2; of them a running one takes one in this step.
    for length, preempted in ((28, [2]), (32, []), (40, [])):
        engine = priority_engine([0, 0, 5, 0], length=12, num_blocks=20, max_num_seqs=5)
        engine.submit(9, prompt_of(length, start=9), max_tokens=1, fields={"priority": 1})
        engine.scheduler.schedule(engine.now + 1)
        assert engine.preempted() == preempted
        assert (9 in engine.running) == bool(preempted)


@of_field("policy")
def test_a_growing_sequence_takes_blocks_of_the_lowest_priority_never_of_a_higher():
    # The pool holds three of 20 tokens; the victim is worst by priority, not by arrival or lost work.
    preempted = {}
    for policy in ("priority", "fcfs"):
        engine = SmallEngine(
            policy=policy,
            num_blocks=17,
            max_num_seqs=3,
            preemption_policy="last",
            setup={"enable_prefix_caching": False},
        )
        for request, priority in enumerate((1, 9, 3)):
            engine.submit(request, prompt_of(16, start=request), max_tokens=24, fields={"priority": priority})
        engine.drain()
        preempted[policy] = engine.preempted()
        for request in range(3):
            assert engine.tokens[request] == tokens_after(prompt_of(16, start=request), 24)
    assert preempted["priority"][0] == 1
    assert 0 not in preempted["priority"]
    assert preempted["fcfs"][0] == 2


@of_field("policy")
def test_preempted_ones_go_to_the_head_of_their_class_in_order_of_arrival():
    engine = priority_engine([5, 5, 5], max_num_seqs=3)
    engine.submit(3, prompt_of(4, start=3), max_tokens=2, fields={"priority": 5})
    for request in (10, 11, 12):
        engine.submit(request, prompt_of(4, start=request), max_tokens=3, fields={"priority": 0})
    engine.step()
    assert sorted(engine.preempted()) == [0, 1, 2]
    assert engine.queued == [0, 1, 2, 3]
    engine.drain()
    for request in range(3):
        assert engine.tokens[request] == tokens_after(prompt_of(4, start=request), 20)


@of_field("preemption_policy")
@pytest.mark.parametrize(("policy", "victim"), [("least_lost", 1), ("last", 2)])
def test_who_gives_up_its_blocks(policy, victim):
    """Request 0 is long, 1 short, and 2 long again and admitted last."""
    engine = SmallEngine(num_blocks=17, preemption_policy=policy, setup={"enable_prefix_caching": False})
    for request, length in ((0, 20), (1, 8), (2, 24)):
        engine.submit(request, prompt_of(length, start=request), max_tokens=16)
    engine.drain()
    assert engine.preempted()[0] == victim
    for request, length in ((0, 20), (1, 8), (2, 24)):
        assert engine.tokens[request] == tokens_after(prompt_of(length, start=request), 16)


@of_field("max_head_bypasses")
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_head_that_does_not_fit_is_passed_so_often_and_no_oftener(limit):
    engine = SmallEngine(num_blocks=17, max_head_bypasses=limit, setup={"enable_prefix_caching": False})
    engine.submit(0, prompt_of(24), max_tokens=20)
    engine.step()
    engine.submit(1, prompt_of(56, start=1), max_tokens=1)
    for request in range(2, 8):
        engine.submit(request, prompt_of(4, start=request), max_tokens=1)
    engine.drain()
    assert list(engine.ends).index(1) == 1 + limit


# ---- room ----


@of_field("scheduler_reserve_full_isl")
@pytest.mark.parametrize(("reserve", "admitted"), [(True, False), (False, True)])
def test_a_prompt_is_admitted_only_if_all_of_it_has_room(reserve, admitted):
    # 16 usable blocks, of which request 0 has 9: a prompt of 40 tokens needs 10, its first chunk of 24 six.
    engine = SmallEngine(num_blocks=17, max_num_batched_tokens=25, scheduler_reserve_full_isl=reserve)
    engine.submit(0, prompt_of(34), max_tokens=6)
    engine.steps(2)
    assert engine.load.num_free_blocks == 7
    engine.submit(1, prompt_of(40, start=1), max_tokens=1)
    assert engine.step_shares() == {0: 1} | ({1: 24} if admitted else {})
    if not admitted:
        assert engine.explain(1).figures["num_needed"] == 10
    engine.drain()
    assert engine.tokens[1] == tokens_after(prompt_of(40, start=1), 1)


@of_field("watermark")
@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, True), (0.24, True), (0.25, False), (0.5, False)])
def test_blocks_stay_free_when_a_request_is_admitted_beside_running_ones(watermark, admitted):
    # 32 usable blocks: request 0 grows to 14, request 1 needs 11, 7 are left. int(.24 * 33) is 7, int(.25 * 33) is 8.
    engine = SmallEngine(num_blocks=33, watermark=watermark)
    engine.submit(0, prompt_of(52), max_tokens=2)
    engine.step()
    engine.submit(1, prompt_of(44, start=1), max_tokens=1)
    engine.scheduler.schedule(engine.now + 1)
    assert engine.running == ([0, 1] if admitted else [0])
    assert engine.load.num_free_blocks == (7 if admitted else 18)


@of_field("watermark")
def test_the_watermark_holds_for_nobody_alone_and_never_for_growth():
    engine = SmallEngine(num_blocks=17, watermark=0.9)
    engine.submit(0, prompt_of(40), max_tokens=20)
    engine.drain()
    assert engine.tokens[0] == tokens_after(prompt_of(40), 20)
    assert engine.load.num_preemptions == 0


# ---- cache-aware admission ----


def warm_and_cold(
    *, window: int, threshold: float = 0.0, before: Callable[[SmallEngine], None] | None = None, **fields
):
    """Two slots, of which request 0 has one. Request 1's prefix is not cached, that of request 2 is."""
    engine = SmallEngine(
        **({"max_num_seqs": 2} | fields),
        num_blocks=33,
        cache_aware_admission_window=window,
        cache_aware_admission_threshold=threshold,
    )
    engine.submit(100, prompt_of(16, start=2), max_tokens=1)
    engine.drain()
    engine.submit(0, prompt_of(40, start=30), max_tokens=20)
    engine.step()
    if before is not None:
        before(engine)
    engine.submit(1, prompt_of(16, start=1), max_tokens=2)
    engine.submit(2, [*prompt_of(16, start=2), 3], max_tokens=2)
    return engine


@of_field("cache_aware_admission_window")
@pytest.mark.parametrize(("window", "first"), [(0, 1), (1, 1), (2, 2), (8, 2)])
def test_within_the_window_a_cached_prefix_goes_first(window, first):
    engine = warm_and_cold(window=window)
    engine.step()
    assert engine.running == [0, first]
    engine.drain()
    assert engine.tokens[1] == tokens_after(prompt_of(16, start=1), 2)


@of_field("cache_aware_admission_threshold")
@pytest.mark.parametrize(("threshold", "first"), [(0.0, 2), (0.34, 2), (0.35, 1), (0.5, 1), (1.0, 1)])
def test_below_the_threshold_of_used_blocks_order_is_that_of_arrival(threshold, first):
    # When the queue is looked at, request 0 has grown to 11 of 32 blocks: 0.34375 of them.
    engine = warm_and_cold(window=2, threshold=threshold)
    engine.scheduler.schedule(engine.now + 1)
    assert engine.running == [0, first]


@of_field("cache_aware_admission_window")
def test_nothing_moves_past_an_earlier_request_that_waits_for_an_event():
    def submit_one_with_a_grammar(engine: SmallEngine) -> None:
        engine.submit(3, prompt_of(4), fields={"grammar": Grammar(GrammarKind.JSON_OBJECT)})

    engine = warm_and_cold(window=8, before=submit_one_with_a_grammar)
    engine.step()
    assert engine.running == [0, 1]


@of_field("cache_aware_admission_window")
def test_a_later_request_that_waits_for_an_event_is_no_barrier():
    engine = warm_and_cold(window=8)
    engine.submit(3, prompt_of(4), fields={"grammar": Grammar(GrammarKind.JSON_OBJECT)})
    engine.step()
    assert engine.running == [0, 2]


@of_field("cache_aware_admission_window")
def test_nothing_moves_past_a_preempted_request():
    engine = SmallEngine(
        num_blocks=17, max_num_seqs=3, cache_aware_admission_window=8, cache_aware_admission_threshold=0
    )
    for request in range(2):
        engine.submit(request, prompt_of(16, start=request), max_tokens=40)
    while not engine.preempted():
        engine.step()
    (victim,) = engine.preempted()
    engine.submit(8, prompt_of(16, start=5), max_tokens=1)
    engine.submit(9, [*prompt_of(16, start=1 - victim)[:12], 3], max_tokens=1)
    line = [sequence.key[1] for sequence in engine.scheduler._waiting._in_line()]
    assert line == [victim, 8, 9]


@of_field("cache_aware_admission_window")
def test_priority_keeps_its_order_whatever_is_cached():
    engine = warm_and_cold(window=8, policy="priority")
    engine.step()
    assert engine.running == [0, 1]


@of_field("cache_aware_admission_window")
def test_probes_change_nothing():
    """With nothing cached the window makes no difference, not even to the order in which blocks are given up."""
    histories = []
    for window in (0, 8):
        engine = SmallEngine(num_blocks=17, cache_aware_admission_window=window, cache_aware_admission_threshold=0)
        for request in range(6):
            engine.submit(request, prompt_of(20, start=request), max_tokens=9)
        history = []
        while engine.scheduler.has_work():
            history.append((engine.step_shares(), engine.scheduler._state.kv.pool.free_blocks()))
        histories.append((history, engine.scheduler.take_stats()))
    assert histories[0] == histories[1]


# ---- KV loads ----


def submit_load(engine: SmallEngine, request: int, **params: object) -> None:
    fields = {"kv_transfer_params": {"external": 8, "is_async": 1} | params}
    engine.submit(request, prompt_of(12, start=request), max_tokens=2, fields=fields)


@of_field("max_num_inflight_kv_loads")
def test_loads_start_while_the_batch_is_full_only_with_a_limit():
    for limit in (None, 1, 2):
        engine = SmallEngine(with_connector=True, max_num_seqs=1, max_num_inflight_kv_loads=limit)
        engine.submit(0, prompt_of(4), max_tokens=20)
        engine.step()
        for request in (1, 2, 3):
            submit_load(engine, request)
        engine.step()
        assert sorted(key[1] for key in engine.connector.loading) == [1, 2, 3][: limit or 0]
        assert engine.load.num_loads == (limit or 0)
        engine.drain()
        for request in (1, 2, 3):
            assert engine.tokens[request] == tokens_after(prompt_of(12, start=request), 2)


@of_field("max_num_inflight_kv_loads")
def test_a_load_that_is_done_counts_until_its_request_runs():
    engine = SmallEngine(with_connector=True, max_num_seqs=1, max_num_inflight_kv_loads=1)
    engine.submit(0, prompt_of(4), max_tokens=6)
    engine.step()
    for request in (1, 2):
        submit_load(engine, request)
    engine.step()
    engine.end_load(1)
    engine.steps(2)
    assert engine.load.num_loads == 1
    assert engine.connector.loading == {}
    assert engine.explain(2).reason == "load_cap"
    assert engine.explain(2).figures["max_num_inflight_kv_loads"] == 1
    while 0 not in engine.ends:
        engine.step()
    engine.step()
    assert engine.running == [1]
    engine.step()
    assert list(engine.connector.loading) == [(0, 2)]


@of_field("max_num_inflight_kv_loads")
def test_without_a_limit_each_load_needs_a_slot_to_start():
    engine = SmallEngine(with_connector=True, max_num_seqs=3)
    engine.submit(0, prompt_of(4), max_tokens=20)
    engine.step()
    for request in (1, 2, 3):
        submit_load(engine, request)
    engine.step()
    assert sorted(engine.connector.loading) == [(0, 1), (0, 2)]


@of_field("max_async_kv_loads_per_step")
@pytest.mark.parametrize(("limit", "started"), [(None, [3, 0]), (1, [1, 1]), (2, [2, 1])])
def test_so_many_loads_start_in_one_step_and_others_are_not_held_up(limit, started):
    engine = SmallEngine(with_connector=True, max_async_kv_loads_per_step=limit)
    for request in (1, 2, 3):
        submit_load(engine, request)
    engine.submit(4, prompt_of(4), max_tokens=4)
    plan = engine.step()
    assert engine.running == [4]
    counts = [len(plan.connector_metadata)]
    plan = engine.step()
    counts.append(len(plan.connector_metadata or []))
    assert counts == started


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_after_a_failed_load_the_rest_is_computed_or_the_request_ends(policy):
    engine = SmallEngine(with_connector=True, kv_load_failure_policy=policy)
    submit_load(engine, 1)
    engine.step()
    engine.end_load(1, num_valid=4, cause="peer_lost")
    if policy == "recompute":
        assert engine.step_shares() == {1: 8}
    engine.drain()
    if policy == "recompute":
        assert engine.tokens[1] == tokens_after(prompt_of(12, start=1), 2)
        assert engine.ends[1].num_cached_tokens == 4
    else:
        assert engine.ends[1].reason is FinishReason.ERROR
        assert engine.ends[1].message == "its KV could not be loaded (peer_lost); send the request again"
        assert engine.tokens[1] == []


@of_field("max_kv_load_retries")
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_load_that_brought_nothing_is_tried_again_so_often(retries):
    engine = SmallEngine(with_connector=True, max_kv_load_retries=retries)
    submit_load(engine, 1)
    num_loads = 0
    for _ in range(10):
        engine.step()
        if not engine.connector.loading:
            break
        num_loads += 1
        engine.end_load(1, num_valid=0, cause="peer_lost")
    assert num_loads == 1 + retries
    engine.drain()
    assert engine.tokens[1] == tokens_after(prompt_of(12, start=1), 2)
    events = [entry.event for entry in engine.explain(1).timeline]
    assert events.count("load_started") == events.count("load_failed") == 1 + retries


# ---- how a step is made ----


@of_field("async_scheduling")
@pytest.mark.parametrize(
    ("value", "device", "num_in_flight"), [(None, "cpu", 1), (None, "cuda", 2), (True, "cpu", 2), (False, "cuda", 1)]
)
def test_the_next_step_is_planned_before_the_result_of_the_last(value, device, num_in_flight):
    is_async = SchedulerConfig(async_scheduling=value).resolve_async_scheduling(True, device)
    engine = SmallEngine(async_scheduling=value, setup={"async_scheduling": is_async})
    assert engine.scheduler.max_num_steps_in_flight == num_in_flight
    engine.submit(1, prompt_of(4), max_tokens=4)
    plans = [engine.scheduler.schedule(1.0) for _ in range(3)]
    assert [plan is not None for plan in plans] == [True, num_in_flight == 2, False]


@of_field("speculative")
def test_drafts_save_steps_and_change_no_token():
    prompt = prompt_of(6) * 4
    num_steps, tokens = {}, {}
    for number in (0, 2, 4):
        speculative = SpeculativeConfig(num_speculative_tokens=number, prompt_lookup_min=1) if number else None
        engine = SmallEngine(speculative=speculative)
        engine.submit(1, prompt, max_tokens=30)
        engine.drain()
        num_steps[number], tokens[number] = len(engine.plans), engine.tokens[1]
        drafts = [int(plan.num_drafts.max()) for plan in engine.plans if plan.num_drafts is not None]
        assert max(drafts, default=0) == number
    assert tokens[0] == tokens[2] == tokens[4] == tokens_after(prompt, 30)
    assert num_steps[2] <= num_steps[0]


@of_field("disable_hybrid_kv_cache_manager")
def test_windows_give_up_blocks_unless_all_layers_count_as_full_attention():
    groups = (KvGroup(), KvGroup(sliding_window=9))
    held, cached = {}, {}
    for disabled in (None, False, True):
        engine = SmallEngine(num_blocks=65, kv_groups=groups, disable_hybrid_kv_cache_manager=disabled)
        engine.submit(1, prompt_of(40), max_tokens=8)
        engine.steps(2)
        held[disabled] = engine.load.num_blocks - engine.load.num_free_blocks
        engine.drain()
        assert engine.tokens[1] == tokens_after(prompt_of(40), 8, kv_groups=groups)
        engine.submit(2, [*prompt_of(20), 5], max_tokens=8)
        engine.drain()
        cached[disabled] = engine.ends[2].num_cached_tokens
        assert engine.tokens[2] == tokens_after([*prompt_of(20), 5], 8, kv_groups=groups)
    assert held[True] == 2 * 11
    # A window of 9 at position 41 sees columns from 8 on.
    assert held[None] == held[False] == 2 * 11 - 8
    assert cached[True] == 20


class OneAtATime(Scheduler):
    """Runs one request, whatever the configuration says."""

    def __init__(self, config: SchedulerConfig, setup: SchedulerSetup) -> None:
        super().__init__(config.model_copy(update={"max_num_seqs": 1}), setup)


@of_field("scheduler_cls")
@pytest.mark.parametrize(("scheduler_cls", "num_running"), [(None, 3), (f"{__name__}.OneAtATime", 1), (OneAtATime, 1)])
def test_a_scheduler_of_ones_own_decides(scheduler_cls, num_running):
    engine = SmallEngine(scheduler_cls=scheduler_cls)
    config = engine.scheduler.config
    engine.scheduler = config.get_scheduler_cls()(config, engine.scheduler.setup)
    for request in range(3):
        engine.submit(request, prompt_of(4, start=request), max_tokens=3)
    engine.step()
    assert len(engine.running) == num_running
    engine.drain()
    assert list(engine.ends) == [0, 1, 2]
