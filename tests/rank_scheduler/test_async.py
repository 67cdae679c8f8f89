"""Steps planned one ahead of the results: what is in flight is neither lost nor computed for nothing."""

import pytest

from rank_scheduler.interface import PauseState
from rank_scheduler.messages import FinishReason, Grammar, GrammarKind
from rank_scheduler.plan import StepResult
from tests.rank_scheduler.scenario import EOS, Rank, expected, prompt_of
from tests.rank_scheduler.simulated_connector import SimulatedConnector
from tests.rank_scheduler.soak import EveryThird


def make_rank(**options):
    return Rank(setup={"async_scheduling": True}, **options)


def preempt_one_in_flight(rank, first=1, stops=None):
    """Run four requests in too few blocks until one of them is preempted with a token on its way; returns it."""
    for request_id in range(4):
        stop_token_ids = (stops or {}).get(request_id, ())
        rank.submit(request_id, prompt_of(9, start=request_id + first), 25, stop_token_ids=stop_token_ids)
    for _ in range(200):
        plan = rank.plan()
        if rank.scheduler._state.draining:
            (sequence,) = rank.scheduler._state.draining.values()
            return sequence.key[1]
        if rank.in_flight and (plan is None or len(rank.in_flight) == 2):
            rank.finish_step()
    raise AssertionError("nobody was preempted")


def test_two_steps_are_in_flight_and_no_more():
    rank = make_rank()
    assert rank.scheduler.max_num_steps_in_flight == 2
    rank.submit(1, prompt_of(5), 6)
    first = rank.scheduler.schedule(1.0)
    second = rank.scheduler.schedule(1.0)
    assert (first.num_tokens.tolist(), second.num_tokens.tolist()) == ([5], [1])
    assert rank.scheduler.schedule(1.0) is None
    rank.take(rank.scheduler.update(first, rank.execute(first), 2.0))
    assert rank.scheduler.schedule(2.0) is not None


@pytest.mark.parametrize("length", [1, 5, 40])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_an_end_by_length_is_foreseen_and_nothing_is_computed_beyond_it(length, max_tokens):
    rank = make_rank(max_num_batched_tokens=16)
    rank.submit(1, prompt_of(length), max_tokens)
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(length), max_tokens)
    assert sum(plan.total_tokens for plan in rank.plans) == length + max_tokens - 1


def test_an_end_by_length_is_seen_although_nothing_was_planned_since_the_last_result():
    rank = make_rank()
    rank.submit(1, prompt_of(5), 3)
    rank.step_until(lambda: len(rank.tokens[1]) == 1)
    rank.plan()
    rank.scheduler.set_pause(PauseState.PAUSED_ALL, rank.now)
    while rank.in_flight:
        rank.finish_step()
        assert rank.plan() is None
    assert rank.tokens[1] == expected(prompt_of(5), 3)
    assert rank.ends[1].reason is FinishReason.LENGTH


def test_an_end_of_sequence_wastes_one_step_whose_token_is_dropped():
    length, right = next(
        (length, tokens) for length in range(1, 60) if EOS in (tokens := expected(prompt_of(length), 8))[2:6]
    )
    num_tokens = right.index(EOS) + 1
    rank = make_rank(max_num_batched_tokens=64, max_model_len=80)
    rank.submit(1, prompt_of(length), 30, ignore_eos=False)
    rank.run()
    assert rank.tokens[1] == right[:num_tokens]
    assert rank.ends[1].reason is FinishReason.STOP
    assert sum(plan.total_tokens for plan in rank.plans) == length + num_tokens
    rank.assert_nothing_held()


def test_a_slot_that_was_given_up_early_brings_nothing_to_its_next_holder():
    """The step in flight still has a row of the request that was aborted."""
    rank = make_rank(max_num_seqs=1)
    rank.submit(1, prompt_of(5), 20)
    rank.step()
    rank.step()
    rank.abort(1)
    rank.submit(2, prompt_of(7, start=2), 5)
    rank.run()
    assert rank.tokens[2] == expected(prompt_of(7, start=2), 5)
    assert rank.ends[1].reason is FinishReason.ABORT
    rank.assert_nothing_held()


@pytest.mark.parametrize("policy", ["least_lost", "last"])
def test_tokens_in_flight_of_a_preempted_request_are_delivered(policy):
    rank = make_rank(num_blocks=17, preemption_policy=policy)
    victim = preempt_one_in_flight(rank)
    before = len(rank.tokens[victim])
    assert rank.explain(victim).reason == "draining"
    rank.finish_step()
    assert len(rank.tokens[victim]) == before + 1
    rank.run()
    for request_id in range(4):
        assert rank.tokens[request_id] == expected(prompt_of(9, start=request_id + 1), 25)
    rank.assert_nothing_held()


def test_a_request_may_end_with_the_token_that_was_in_flight_when_it_was_preempted():
    for first in range(20):
        rank = make_rank(num_blocks=17)
        victim = preempt_one_in_flight(rank, first)
        right = expected(prompt_of(9, start=victim + first), 1 + len(rank.tokens[victim]))
        if right.index(right[-1]) == len(right) - 1:
            break
    rank = make_rank(num_blocks=17)
    assert preempt_one_in_flight(rank, first, {victim: (right[-1],)}) == victim
    rank.finish_step()
    assert rank.ends[victim].stop_reason == right[-1]
    assert rank.tokens[victim] == right
    rank.run()
    assert len(rank.ends) == 4
    rank.assert_nothing_held()


def test_a_preempted_request_that_is_aborted_while_it_drains_gets_nothing_more():
    rank = make_rank(num_blocks=17)
    victim = preempt_one_in_flight(rank)
    rank.abort(victim)
    rank.run()
    assert rank.ends[victim].reason is FinishReason.ABORT
    rank.assert_nothing_held()


def test_a_row_with_a_grammar_waits_for_its_token_and_holds_up_no_other():
    rank = make_rank()
    rank.submit(1, prompt_of(5), 4, fields={"grammar": Grammar(GrammarKind.LARK, "every third")})
    rank.submit(2, prompt_of(5, start=2), 9)
    (action,) = rank.scheduler.take_compile_actions()
    rank.scheduler.grammar_compiled(action.owner, action.id, EveryThird(), "", 0.0)
    rank.run()
    rows_of = [sorted(plan.num_tokens.tolist()) for plan in rank.plans]
    assert rows_of[:4] == [[5, 5], [1], [1, 1], [1]]
    assert rank.tokens[2] == expected(prompt_of(5, start=2), 9)
    assert [token % 3 for token in rank.tokens[1]] == [0, 1, 2, 0]


def test_a_step_that_fails_takes_the_step_planned_after_it_along():
    rank = make_rank()
    rank.submit(1, prompt_of(12), 6)
    first = rank.scheduler.schedule(1.0)
    rank.submit(2, prompt_of(12, start=2), 6)
    second = rank.scheduler.schedule(1.0)
    assert len(second.slots) == 2
    rank.take(rank.scheduler.fail(first, "out of memory", 2.0))
    rank.scheduler.check_integrity()
    assert (rank.ends[1].reason, rank.ends[1].message) == (FinishReason.ERROR, "out of memory")
    assert 2 not in rank.ends
    # A runner that lost a step executes nothing that was planned on top of it.
    rank.take(rank.scheduler.fail(second, "out of memory", 2.0))
    rank.scheduler.check_integrity()
    rank.submit(3, prompt_of(12), 6)
    rank.run()
    assert rank.ends[3].num_cached_tokens == 0, "the failed steps' blocks were never computed"
    assert rank.tokens[3] == expected(prompt_of(12), 6)
    rank.assert_nothing_held()


def test_a_request_preempted_before_its_step_failed_goes_on():
    rank = make_rank(num_blocks=17)
    survivor = preempt_one_in_flight(rank)
    while rank.in_flight:
        plan = rank.in_flight.popleft()
        rank.take(rank.scheduler.fail(plan, "out of memory", rank.now))
        rank.scheduler.check_integrity()
    rank.run()
    assert rank.ends[survivor].reason is FinishReason.LENGTH
    assert rank.tokens[survivor] == expected(prompt_of(9, start=survivor + 1), 25)
    rank.assert_nothing_held()


def test_results_that_come_in_the_wrong_order_are_taken_in_the_right_one():
    rank = make_rank()
    rank.submit(1, prompt_of(5), 2)
    first, second = rank.scheduler.schedule(1.0), rank.scheduler.schedule(1.0)
    results = [rank.execute(first), rank.execute(second)]
    rank.take(rank.scheduler.update(second, results[1], 2.0))
    assert rank.tokens[1] == []
    rank.take(rank.scheduler.update(first, results[0], 2.0))
    assert rank.tokens[1] == expected(prompt_of(5), 2)
    rank.take(rank.scheduler.update(first, results[0], 2.0))
    rank.take(rank.scheduler.fail(second, "late", 2.0))
    assert rank.scheduler.num_ignored_messages == 3
    rank.assert_nothing_held()


def test_a_result_of_the_wrong_shape_ends_the_rows_of_its_step():
    rank = make_rank()
    rank.submit(1, prompt_of(5), 4)
    first = rank.scheduler.schedule(1.0)
    rank.take(rank.scheduler.update(first, StepResult(first.slots[:0, None]), 2.0))
    rank.scheduler.check_integrity()
    assert "tokens of shape (0, 1)" in rank.ends[1].message
    rank.assert_nothing_held()


def test_with_a_connector_blocks_are_free_only_when_no_step_in_flight_can_write_them():
    rank = make_rank(connector=SimulatedConnector())
    rank.submit(1, prompt_of(12), 20)
    first, second = rank.scheduler.schedule(1.0), rank.scheduler.schedule(1.0)
    held = rank.num_held_blocks()
    rank.abort(1)
    assert rank.num_held_blocks() == held
    rank.take(rank.scheduler.update(first, rank.execute(first), 2.0))
    assert rank.num_held_blocks() == held
    rank.take(rank.scheduler.update(second, rank.execute(second), 2.0))
    rank.assert_nothing_held()


def test_without_a_connector_blocks_are_free_at_once():
    """Steps are executed in order, so whoever gets a block writes it after the step in flight did."""
    rank = make_rank()
    rank.submit(1, prompt_of(12), 20)
    rank.scheduler.schedule(1.0)
    rank.abort(1)
    assert rank.num_held_blocks() == 0


def test_a_step_ahead_decides_no_other_tokens():
    for seed in range(6):
        results = []
        for is_async in (False, True):
            rank = Rank(num_blocks=19, max_num_batched_tokens=12, setup={"async_scheduling": is_async})
            for request_id in range(6):
                length = 1 + (5 * request_id + 7 * seed) % 30
                rank.submit(request_id, prompt_of(length, start=request_id + seed), 3 + (seed + request_id) % 17)
            rank.run()
            results.append(dict(rank.tokens))
            rank.assert_nothing_held()
        assert results[0] == results[1]
