"""Results and messages that are late, doubled, unknown, out of order or broken: counted, never raised on."""

import random

import numpy as np
import pytest

from kv_transfer.connector import LoadFinished, SendFinished
from rank_scheduler.config import SpeculativeConfig
from rank_scheduler.messages import Extend, FinishReason, Grammar, GrammarKind, TokenLogprobs
from rank_scheduler.plan import StepPlan, StepResult
from tests.rank_scheduler.small_engine import VOCAB_SIZE, SmallEngine, prompt_of, tokens_after

NOBODY = 999


def ignored(engine: SmallEngine) -> int:
    return engine.scheduler.num_ignored_messages


def plan_of(engine: SmallEngine) -> StepPlan:
    engine.now += 1
    plan = engine.scheduler.schedule(engine.now)
    assert plan is not None
    return plan


def update(engine: SmallEngine, plan: StepPlan, result: StepResult) -> None:
    engine.take(engine.scheduler.update(plan, result, engine.now))
    engine.scheduler.check_integrity()


def fail(engine: SmallEngine, plan: StepPlan) -> None:
    engine.take(engine.scheduler.fail(plan, "the step failed", engine.now))
    engine.scheduler.check_integrity()


def two_requests(**options) -> SmallEngine:
    engine = SmallEngine(**options)
    for request in (1, 2):
        engine.submit(request, prompt_of(5, start=request), max_tokens=6)
    return engine


def assert_right(engine: SmallEngine, *requests: int, num_tokens: int = 6) -> None:
    for request in requests:
        assert engine.tokens[request] == tokens_after(prompt_of(5, start=request), num_tokens)
        assert engine.ends[request].reason is FinishReason.LENGTH


# ---- results in bad order ----


def test_a_result_that_comes_twice_counts_once():
    engine = two_requests()
    for _ in range(6):
        plan = plan_of(engine)
        result = engine.execute(plan)
        update(engine, plan, result)
        update(engine, plan, result)
    assert ignored(engine) == 6
    assert_right(engine, 1, 2)
    engine.check_empty()


def test_a_result_after_a_failure_and_a_failure_after_a_result():
    engine = two_requests()
    plan = plan_of(engine)
    result = engine.execute(plan)
    update(engine, plan, result)
    fail(engine, plan)
    assert ignored(engine) == 1
    assert not engine.ends
    engine.run()
    assert_right(engine, 1, 2)
    engine.submit(3, prompt_of(5, start=3), max_tokens=6)
    plan = plan_of(engine)
    fail(engine, plan)
    fail(engine, plan)
    update(engine, plan, engine.execute(plan))
    assert ignored(engine) == 3
    assert engine.ends[3].message == "the step failed"
    assert engine.tokens[3] == []
    engine.check_empty()


def test_a_result_of_a_plan_that_nobody_made():
    engine = two_requests()
    plan = plan_of(engine)
    for step in (0, -1, 77):
        stranger = StepPlan(step, plan.slots, plan.num_tokens, plan.samples)
        update(engine, stranger, StepResult(np.zeros((2, 1), np.int32)))
        fail(engine, stranger)
    assert ignored(engine) == 6
    update(engine, plan, engine.execute(plan))
    engine.run()
    assert_right(engine, 1, 2)


def test_nothing_is_planned_while_a_result_is_missing():
    engine = two_requests()
    plan = plan_of(engine)
    assert engine.scheduler.schedule(engine.now) is None
    update(engine, plan, engine.execute(plan))
    engine.run()
    assert_right(engine, 1, 2)


def test_results_in_the_wrong_order_are_taken_in_the_right_one():
    engine = two_requests(setup={"async_scheduling": True})
    engine.submit(3, prompt_of(20, start=3), max_tokens=4)
    count = 0
    for _ in range(2):
        first, second = plan_of(engine), plan_of(engine)
        results = [engine.execute(first), engine.execute(second)]
        update(engine, second, results[1])
        before = {request: len(tokens) for request, tokens in engine.tokens.items()}
        assert sum(before.values()) == count
        update(engine, first, results[0])
        count = sum(map(len, engine.tokens.values()))
        assert count > sum(before.values())
        update(engine, second, results[1])
    engine.run()
    assert_right(engine, 1, 2)
    assert engine.tokens[3] == tokens_after(prompt_of(20, start=3), 4)
    assert ignored(engine) == 4


def test_an_early_result_that_comes_twice():
    engine = two_requests(setup={"async_scheduling": True})
    first, second = plan_of(engine), plan_of(engine)
    results = [engine.execute(first), engine.execute(second)]
    update(engine, second, results[1])
    update(engine, second, results[1])
    update(engine, first, results[0])
    assert {request: len(tokens) for request, tokens in engine.tokens.items()} == {1: 2, 2: 2}
    engine.run()
    assert_right(engine, 1, 2)


@pytest.mark.parametrize("failed", ["first", "second"])
def test_one_of_two_steps_in_flight_fails_out_of_order(failed):
    engine = two_requests(setup={"async_scheduling": True})
    first, second = plan_of(engine), plan_of(engine)
    result = engine.execute(first)
    if failed == "second":
        fail(engine, second)
        assert engine.tokens == {}
        update(engine, first, result)
    else:
        update(engine, second, engine.execute(second))
        fail(engine, first)
    assert {end.reason for end in engine.ends.values()} == {FinishReason.ERROR}
    assert sorted(engine.ends) == [1, 2]
    engine.check_empty()
    engine.submit(3, prompt_of(5, start=3), max_tokens=6)
    engine.run()
    assert_right(engine, 3)


def test_an_early_result_of_a_step_that_then_fails_is_forgotten():
    engine = two_requests(setup={"async_scheduling": True})
    first, second = plan_of(engine), plan_of(engine)
    results = [engine.execute(first), engine.execute(second)]
    update(engine, second, results[1])
    fail(engine, second)
    update(engine, first, results[0])
    assert engine.scheduler._early == {}
    engine.check_empty()


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_results_and_aborts_gives_the_right_tokens(seed):
    rng = random.Random(seed)
    engine = SmallEngine(
        num_blocks=19, max_num_seqs=3, max_num_batched_tokens=12, setup={"async_scheduling": seed % 3 > 0}
    )
    out: list[tuple[StepPlan, StepResult]] = []
    old: list[tuple[StepPlan, StepResult]] = []
    aborted = set()
    for request in range(10):
        engine.submit(request, prompt_of(5 + request, start=request), max_tokens=6)
    while len(engine.ends) < 10:
        engine.now += 1
        plan = engine.scheduler.schedule(engine.now)
        if plan is not None:
            out.append((plan, engine.execute(plan)))
        engine.take(engine.scheduler.take_frames())
        if rng.random() < 0.05 and engine.running:
            aborted.add(victim := rng.choice(engine.running))
            engine.scheduler.abort(0, victim, engine.now)
        if out and (plan is None or rng.random() < 0.7):
            done = out.pop(rng.randrange(len(out)))
            update(engine, *done)
            old.append(done)
        if old and rng.random() < 0.3:
            update(engine, *rng.choice(old))
    for plan, result in out:
        update(engine, plan, result)
    for request in range(10):
        right = tokens_after(prompt_of(5 + request, start=request), 6)
        if engine.ends[request].reason is FinishReason.ABORT:
            assert request in aborted
            assert engine.tokens[request] == right[: len(engine.tokens[request])]
        else:
            assert engine.tokens[request] == right
    engine.check_empty()


# ---- broken results ----

SHAPES = {
    "a row too few": np.zeros((1, 1), np.int32),
    "a row too many": np.zeros((3, 1), np.int32),
    "no rows": np.zeros((0, 1), np.int32),
    "no columns": np.zeros((2, 0), np.int32),
    "flat": np.zeros(2, np.int32),
    "deep": np.zeros((2, 1, 1), np.int32),
    "of another kind": np.zeros((2, 1), np.float64),
    "of another size": np.zeros((2, 1), np.int64),
}


@pytest.mark.parametrize("when", ["in a prompt's step", "in a steady step"])
@pytest.mark.parametrize("tokens", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("is_async", [False, True])
def test_a_result_of_the_wrong_shape_ends_its_requests_and_no_others(tokens, is_async, when):
    engine = two_requests(setup={"async_scheduling": is_async})
    if when == "in a steady step":
        for _ in range(2):
            plan = plan_of(engine)
            update(engine, plan, engine.execute(plan))
    engine.submit(4, [], max_tokens=1)
    plan = plan_of(engine)
    assert len(plan.slots) == 2
    engine.submit(3, prompt_of(5, start=3), max_tokens=6)
    engine.execute(plan)
    update(engine, plan, StepResult(tokens))
    for request in (1, 2):
        assert engine.ends[request].reason is FinishReason.ERROR
        assert engine.ends[request].message.startswith("the model runner returned tokens of")
        assert engine.ends[request].message.endswith("retry")
    engine.run()
    assert_right(engine, 3)
    engine.check_empty()


@pytest.mark.parametrize("token", [-1, -2, VOCAB_SIZE, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("num_steps_before", [0, 1, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_token_that_is_none_ends_its_request_alone(token, num_steps_before, is_async):
    engine = two_requests(setup={"async_scheduling": is_async})
    for _ in range(num_steps_before):
        plan = plan_of(engine)
        update(engine, plan, engine.execute(plan))
    plan = plan_of(engine)
    result = engine.execute(plan)
    row = engine.scheduler._state.batch.wire_id[plan.slots].tolist().index(1)
    result.tokens[row, 0] = token
    update(engine, plan, result)
    assert engine.ends[1].message == f"the model runner returned {token} for a token; retry"
    assert engine.tokens[1] == tokens_after(prompt_of(5, start=1), 6)[:num_steps_before]
    engine.run()
    assert_right(engine, 2)
    engine.check_empty()


def test_a_token_of_a_row_that_samples_nothing_is_not_looked_at():
    engine = SmallEngine(max_num_batched_tokens=8)
    engine.submit(1, prompt_of(20), max_tokens=2)
    plan = plan_of(engine)
    result = engine.execute(plan)
    result.tokens[:] = 17
    update(engine, plan, result)
    engine.run()
    assert engine.tokens[1] == tokens_after(prompt_of(20), 2)


@pytest.mark.parametrize("width", [1, 2])
def test_a_result_too_narrow_for_its_drafts_ends_the_requests(width):
    engine = SmallEngine(speculative=SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1))
    engine.submit(1, prompt_of(6) * 4, max_tokens=20)
    plan = plan_of(engine)
    while plan.num_drafts is None or plan.num_drafts.max() < 3:
        update(engine, plan, engine.execute(plan))
        plan = plan_of(engine)
    update(engine, plan, StepResult(np.zeros((1, width), np.int32)))
    assert engine.ends[1].message == f"the model runner returned tokens of shape (1, {width}) for 1 rows; retry"
    engine.check_empty()


@pytest.mark.parametrize("place", [0, 1])
def test_a_token_out_of_range_behind_a_right_draft_ends_the_request(place):
    engine = SmallEngine(speculative=SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1))
    prompt = prompt_of(6) * 4
    engine.submit(1, prompt, max_tokens=20)
    plan = plan_of(engine)
    while plan.num_drafts is None:
        update(engine, plan, engine.execute(plan))
        plan = plan_of(engine)
    num_before = len(engine.tokens[1])
    result = engine.execute(plan)
    result.tokens[0] = result.tokens[0, 0]
    result.tokens[0, place:] = VOCAB_SIZE + 3
    update(engine, plan, result)
    assert engine.ends[1].message == f"the model runner returned {VOCAB_SIZE + 3} for a token; retry"
    assert len(engine.tokens[1]) == num_before + place
    assert all(token < VOCAB_SIZE for token in engine.tokens[1])
    engine.check_empty()


def test_failed_rows_end_their_requests_with_their_words_and_unknown_rows_nobody():
    engine = two_requests()
    plan = plan_of(engine)
    result = engine.execute(plan)
    result.failed.update({0: "logits are not finite", 7: "?", -1: "?", 2: "?"})
    update(engine, plan, result)
    assert engine.ends[1].message == "logits are not finite"
    engine.run()
    assert_right(engine, 2)


def test_a_failed_row_of_a_prompt_in_the_middle_ends_it():
    engine = SmallEngine(max_num_batched_tokens=8)
    engine.submit(1, prompt_of(20), max_tokens=2)
    plan = plan_of(engine)
    result = engine.execute(plan)
    result.failed[0] = "logits are not finite"
    update(engine, plan, result)
    assert engine.ends[1].message == "logits are not finite"
    engine.check_empty()


def test_a_failed_row_while_the_next_step_is_in_flight():
    engine = two_requests(setup={"async_scheduling": True})
    first, second = plan_of(engine), plan_of(engine)
    results = [engine.execute(first), engine.execute(second)]
    results[0].failed[0] = "logits are not finite"
    update(engine, first, results[0])
    third = plan_of(engine)
    update(engine, second, results[1])
    update(engine, third, engine.execute(third))
    engine.run()
    assert engine.ends[1].reason is FinishReason.ERROR
    assert engine.tokens[1] == []
    assert_right(engine, 2)
    engine.check_empty()


@pytest.mark.parametrize("logprobs", [{0: []}, {5: [TokenLogprobs(0.0)]}, {-1: []}])
@pytest.mark.parametrize("drafted", [False, True])
def test_logprobs_that_are_missing_or_of_nobody_are_left_out(logprobs, drafted):
    speculative = SpeculativeConfig(num_speculative_tokens=2, prompt_lookup_min=1) if drafted else None
    engine = SmallEngine(speculative=speculative)
    prompt = prompt_of(6) * 3
    engine.submit(1, prompt, max_tokens=8, num_logprobs=0)
    while engine.scheduler.has_work():
        plan = plan_of(engine)
        result = engine.execute(plan)
        update(engine, plan, StepResult(result.tokens, logprobs, result.failed))
    assert engine.tokens[1] == tokens_after(prompt, 8)


def test_a_pooling_row_without_its_output_ends_alone():
    engine = SmallEngine(runner_type="pooling")
    for request in (1, 2):
        engine.submit(request, prompt_of(5, start=request))
    plan = plan_of(engine)
    result = engine.execute(plan)
    del result.pooled[0]
    update(engine, plan, result)
    assert engine.ends[1].message == "the model runner returned no pooled output; retry"
    assert engine.ends[2].pooled
    engine.check_empty()


# ---- messages and events ----


def test_messages_for_nobody_are_counted():
    engine = two_requests(with_connector=True)
    scheduler, now = engine.scheduler, 1.0
    calls = [
        lambda: engine.submit(1, prompt_of(9)),
        lambda: scheduler.abort(0, NOBODY, now),
        lambda: scheduler.abort(9, 1, now),
        lambda: scheduler.extend(0, Extend(NOBODY, b"\1\0\0\0"), now),
        lambda: scheduler.extend(0, Extend(1, b"\1\0\0\0"), now),
        lambda: scheduler.grammar_compiled(0, NOBODY, None, "", now),
        lambda: scheduler.grammar_compiled(0, 1, None, "", now),
        lambda: scheduler.load_finished(LoadFinished((0, NOBODY)), now),
        lambda: scheduler.load_finished(LoadFinished((0, 1), 0, "lost"), now),
        lambda: scheduler.send_finished(SendFinished((0, NOBODY)), now),
        lambda: scheduler.send_finished(SendFinished((0, 1)), now),
    ]
    for count, call in enumerate(calls, 1):
        call()
        assert ignored(engine) == count
        scheduler.check_integrity()
        engine.step()
    scheduler.drop_owner(NOBODY, now)
    engine.run()
    assert_right(engine, 1, 2)


def test_everything_again_after_the_end_is_counted():
    engine = two_requests()
    engine.run()
    for call in (
        lambda: engine.scheduler.abort(0, 1, engine.now),
        lambda: engine.scheduler.extend(0, Extend(1, is_last=True), engine.now),
        lambda: engine.scheduler.grammar_compiled(0, 1, None, "", engine.now),
    ):
        before = ignored(engine)
        call()
        assert ignored(engine) == before + 1
    assert not engine.scheduler.has_work()
    assert list(engine.ends) == [1, 2]


def test_a_grammar_that_is_reported_twice_or_after_the_abort():
    engine = SmallEngine()
    for request in (1, 2):
        engine.submit(request, prompt_of(5), fields={"grammar": Grammar(GrammarKind.JSON_OBJECT)})
    engine.scheduler.grammar_compiled(0, 1, None, "no such schema", 1.0)
    engine.scheduler.grammar_compiled(0, 1, None, "no such schema", 1.0)
    engine.scheduler.abort(0, 2, 1.0)
    engine.scheduler.grammar_compiled(0, 2, None, "no such schema", 1.0)
    engine.run()
    assert ignored(engine) == 2
    assert engine.ends[1].message == "no such schema"
    assert engine.ends[2].reason is FinishReason.ABORT


def test_a_load_that_ends_twice_or_after_the_abort():
    engine = two_requests(with_connector=True)
    for request in (3, 4):
        fields = {"kv_transfer_params": {"external": 4, "is_async": 1}}
        engine.submit(request, prompt_of(5, start=request), max_tokens=6, fields=fields)
    engine.step()
    engine.end_load(3)
    engine.scheduler.load_finished(LoadFinished((0, 3)), engine.now)
    assert ignored(engine) == 1
    engine.scheduler.abort(0, 4, engine.now)
    engine.scheduler.abort(0, 4, engine.now)
    assert ignored(engine) == 2
    engine.submit(4, prompt_of(9), max_tokens=1)
    assert ignored(engine) == 3, "its number is taken as long as the load may still write"
    held = engine.load.num_blocks - engine.load.num_free_blocks
    engine.end_load(4)
    assert ignored(engine) == 3
    assert engine.load.num_blocks - engine.load.num_free_blocks == held - 2
    engine.scheduler.load_finished(LoadFinished((0, 4)), engine.now)
    assert ignored(engine) == 4
    engine.drain()
    assert_right(engine, 1, 2, 3)


@pytest.mark.parametrize("num_valid", [-5, 0, 3, 1000])
def test_a_load_that_reports_an_impossible_count(num_valid):
    engine = two_requests(with_connector=True)
    fields = {"kv_transfer_params": {"external": 4, "is_async": 1}}
    engine.submit(3, prompt_of(5, start=3), max_tokens=6, fields=fields)
    engine.step()
    load = engine.connector.loading.pop((0, 3))
    engine.connector._fill(load, min(max(num_valid, 0), 4), engine.runner)
    engine.scheduler.load_finished(LoadFinished((0, 3), num_valid), engine.now)
    engine.scheduler.check_integrity()
    engine.drain()
    assert_right(engine, 1, 2, 3)


def test_blocks_that_were_sent_are_let_go_once():
    engine = two_requests(with_connector=True)
    engine.submit(3, prompt_of(5, start=3), max_tokens=6, fields={"kv_transfer_params": {"keep": 1}})
    engine.run()
    assert engine.load.num_free_blocks < engine.load.num_blocks
    for count in (0, 1, 2):
        engine.scheduler.send_finished(SendFinished((0, 3)), engine.now)
        assert ignored(engine) == count
        engine.check_empty()
    assert engine.connector.finished == [(0, 1), (0, 2), (0, 3)]
