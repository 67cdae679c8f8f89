"""Grammars in the step loop: masks, ends, and an engine that misbehaves."""

import numpy as np
import pytest

from rank_scheduler.messages import FinishReason, Grammar, GrammarKind
from rank_scheduler.plan import StepResult
from tests.rank_scheduler.scenario import EOS, Rank, expected, prompt_of
from tests.rank_scheduler.soak import EveryThird

GRAMMAR = {"grammar": Grammar(GrammarKind.LARK, "every third")}


def submit(rank, request_id, *, max_tokens=20, start=1, **sampling):
    rank.submit(request_id, prompt_of(6, start=start), max_tokens, fields=GRAMMAR, **sampling)


def compile_all(rank, matcher=EveryThird):
    actions = rank.scheduler.take_compile_actions()
    for action in actions:
        rank.scheduler.grammar_compiled(action.owner, action.id, matcher(), "", rank.now)
    return [action.id for action in actions]


def allowed_tokens(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_a_request_waits_for_its_grammar_and_holds_up_nobody():
    rank = Rank(max_num_seqs=1)
    submit(rank, 1)
    rank.submit(2, prompt_of(5, start=2), 3)
    rank.step()
    assert rank.running() == [2]
    assert rank.explain(1).reason == "grammar"
    assert rank.scheduler.load().num_deferred == 1
    rank.step_until(lambda: 2 in rank.ends)
    assert not rank.scheduler.has_work()
    assert compile_all(rank) == [1]
    assert rank.scheduler.has_work()
    rank.run()
    assert rank.ends[1].reason is FinishReason.STOP


def test_only_positions_that_sample_under_a_grammar_have_a_mask():
    rank = Rank(max_num_batched_tokens=16)
    rank.submit(9, prompt_of(4, start=3), 20)
    submit(rank, 1)
    submit(rank, 2, start=2)
    compile_all(rank)
    plan = rank.step()
    assert plan.num_tokens.tolist() == [4, 6, 6]
    assert plan.masked.tolist() == [1, 2]
    assert plan.masks.shape == (2, 2)
    assert {token % 3 for token in allowed_tokens(plan.masks[0])} == {0}
    plan = rank.step()
    assert {token % 3 for token in allowed_tokens(plan.masks[1])} == {1}


def test_a_prompt_in_pieces_has_no_mask_before_its_last_piece():
    rank = Rank(max_num_batched_tokens=8)
    rank.submit(1, prompt_of(12), 5, fields=GRAMMAR)
    compile_all(rank)
    assert rank.step().masks is None
    assert rank.step().masked.tolist() == [0]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_grammars_end_is_the_requests_end(ignore_eos, is_async):
    rank = Rank(setup={"async_scheduling": is_async})
    submit(rank, 1, ignore_eos=ignore_eos)
    compile_all(rank)
    rank.run()
    assert rank.tokens[1][7:] == [EOS]
    assert all(token % 3 == place % 3 for place, token in enumerate(rank.tokens[1][:7]))
    assert (rank.ends[1].reason, rank.ends[1].stop_reason) == (FinishReason.STOP, None)
    rank.assert_nothing_held()


def test_a_token_that_does_not_fit_ends_its_request_alone():
    rank = Rank()
    submit(rank, 1)
    submit(rank, 2, start=2)
    rank.submit(3, prompt_of(5, start=3), 4)
    compile_all(rank)
    plan = rank.plan()
    result = rank.execute(plan)
    rank.in_flight.clear()
    tokens = result.tokens.copy()
    row = rank.running().index(1)
    tokens[row] = 1
    rank.take(rank.scheduler.update(plan, StepResult(tokens), rank.now))
    rank.scheduler.check_integrity()
    assert rank.ends[1].reason is FinishReason.ERROR
    assert "token 1 does not fit the request's grammar" in rank.ends[1].message
    rank.run()
    assert rank.ends[2].reason is FinishReason.STOP
    assert rank.tokens[3] == expected(prompt_of(5, start=3), 4)
    rank.assert_nothing_held()


class Breaks(EveryThird):
    """Fails with the third token."""

    method = ""

    def _work(self, method):
        if method == self.method and self.num_taken == 2:
            raise RuntimeError("the engine is broken")

    def accept(self, token_id):
        self._work("accept")
        return super().accept(token_id)

    def fill_mask(self, mask):
        self._work("fill_mask")
        super().fill_mask(mask)


@pytest.mark.parametrize("method", ["accept", "fill_mask"])
def test_an_engine_that_raises_ends_its_request_alone(method):
    rank = Rank()
    submit(rank, 1)
    submit(rank, 2, start=2)
    first, second = rank.scheduler.take_compile_actions()
    broken = Breaks()
    broken.method = method
    rank.scheduler.grammar_compiled(first.owner, first.id, broken, "", 0.0)
    rank.scheduler.grammar_compiled(second.owner, second.id, EveryThird(), "", 0.0)
    rank.run()
    assert rank.ends[1].reason is FinishReason.ERROR
    assert len(rank.tokens[1]) <= 3
    assert rank.ends[2].reason is FinishReason.STOP
    rank.assert_nothing_held()


@pytest.mark.parametrize("is_request_fault", [True, False])
def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(is_request_fault):
    rank = Rank()
    submit(rank, 1)
    submit(rank, 2, start=2)
    first, second = rank.scheduler.take_compile_actions()
    rank.scheduler.grammar_compiled(
        first.owner, first.id, None, "line 3: no such rule", 0.0, is_request_fault=is_request_fault
    )
    rank.scheduler.grammar_compiled(second.owner, second.id, EveryThird(), "", 0.0)
    rank.run()
    assert (rank.ends[1].reason, rank.ends[1].message) == (FinishReason.ERROR, "line 3: no such rule")
    assert rank.ends[1].is_request_fault == is_request_fault
    assert rank.ends[2].reason is FinishReason.STOP


def test_late_doubled_and_unknown_grammars_are_ignored():
    rank = Rank()
    submit(rank, 1)
    submit(rank, 2, start=2)
    compile_all(rank)
    rank.scheduler.grammar_compiled(0, 1, EveryThird(), "", 0.0)
    rank.scheduler.grammar_compiled(0, 1, None, "late", 0.0)
    rank.scheduler.grammar_compiled(0, 77, EveryThird(), "", 0.0)
    rank.abort(2)
    rank.scheduler.grammar_compiled(0, 2, EveryThird(), "", 0.0)
    assert rank.scheduler.num_ignored_messages == 4
    rank.run()
    assert rank.ends[1].reason is FinishReason.STOP
    rank.assert_nothing_held()


def test_a_request_that_is_aborted_while_its_grammar_is_compiled():
    rank = Rank()
    submit(rank, 1)
    rank.abort(1)
    assert rank.ends[1].reason is FinishReason.ABORT
    rank.assert_nothing_held()


def test_a_request_whose_router_is_gone_needs_no_compiler():
    rank = Rank()
    submit(rank, 1)
    rank.scheduler.drop_owner(0, 0.0)
    assert rank.scheduler.take_compile_actions() == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_request_goes_on_at_its_place_in_the_grammar(is_async):
    rank = Rank(num_blocks=17, setup={"async_scheduling": is_async}, preemption_policy="last")
    rank.submit(2, prompt_of(40, start=2), 24)
    rank.step()
    rank.submit(1, prompt_of(18), 20, fields=GRAMMAR)
    compile_all(rank)
    rank.run()
    assert rank.scheduler.load().num_preemptions > 0
    assert rank.tokens[1][7:] == [EOS]
    assert all(token % 3 == place % 3 for place, token in enumerate(rank.tokens[1][:7]))
    assert rank.tokens[2] == expected(prompt_of(40, start=2), 24)


def test_minimum_length_and_grammar_apply_together():
    rank = Rank()
    submit(rank, 1, min_tokens=10)
    compile_all(rank)
    rank.run()
    # The grammar allows its end only from the eighth token on, and that one is forbidden.
    assert rank.ends[1].reason is FinishReason.ERROR
    assert len(rank.tokens[1]) == 7
    assert "min_tokens" in rank.ends[1].message
