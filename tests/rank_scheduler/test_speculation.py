"""Drafts from the request's own text: never another token, and a ledger that forgets what was wrong."""

import numpy as np
import pytest

from rank_scheduler import result_intake
from rank_scheduler.config import SpeculativeConfig
from rank_scheduler.messages import FinishReason, Grammar, GrammarKind
from rank_scheduler.plan import StepResult
from tests.rank_scheduler.scenario import Rank, expected, prompt_of
from tests.rank_scheduler.soak import EveryThird


def make_rank(num_drafts=3, **options):
    speculative = SpeculativeConfig(num_speculative_tokens=num_drafts, prompt_lookup_min=1, prompt_lookup_max=2)
    return Rank(speculative=speculative, **options)


def foreseen(length=6, num_tokens=12):
    """A prompt that contains its own continuation, so that drafts are right."""
    tokens = prompt_of(length)
    return tokens, expected(tokens, num_tokens)


def drafted(rank, prompt, drafts, max_tokens=20, **sampling):
    """Start a request and give it these drafts for its next step, whatever the index proposes."""
    rank.submit(1, prompt, max_tokens, **sampling)
    rank.step()
    batch = rank.scheduler._state.batch
    (slot,) = batch.order.tolist()
    batch.drafts[slot, : len(drafts)] = drafts
    batch.num_drafts[slot] = len(drafts)
    rank.scheduler.take_stats()
    return slot


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_the_right_drafts_are_kept_and_one_more_token_is_gained(num_right):
    rank = make_rank()
    right = expected(prompt_of(6), 8)
    drafts = [token if place < num_right else (token + 1) % 50 for place, token in enumerate(right[1:4])]
    slot = drafted(rank, prompt_of(6), drafts)
    plan = rank.step()
    assert (plan.num_tokens.tolist(), plan.num_drafts.tolist(), plan.draft_tokens.tolist()) == ([4], [3], drafts)
    assert rank.tokens[1] == right[: 2 + num_right]
    batch = rank.scheduler._state.batch
    assert batch.num_computed[slot] == batch.num_tokens[slot] - 1
    assert batch.num_placeholders[slot] == batch.num_in_flight[slot] == 0
    stats = rank.scheduler.take_stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 3, num_right)
    assert stats.accepted_per_position == [int(place < num_right) for place in range(3)]
    assert stats.num_generated_tokens == 1 + num_right
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(6), 20)
    rank.assert_nothing_held()


def test_a_draft_after_a_wrong_one_does_not_count_even_if_it_is_right():
    rank = make_rank()
    right = expected(prompt_of(6), 8)
    drafted(rank, prompt_of(6), [(right[1] + 1) % 50, right[2], right[3]])
    rank.step()
    assert rank.tokens[1] == right[:2]


def test_a_stop_token_among_the_drafts_ends_the_request_there():
    right = expected(prompt_of(6), 8)
    place = next(place for place in (1, 2) if right[place] not in right[:place])
    rank = make_rank()
    drafted(rank, prompt_of(6), right[1:4], stop_token_ids=(right[place],))
    rank.step()
    assert rank.tokens[1] == right[: place + 1]
    assert (rank.ends[1].reason, rank.ends[1].stop_reason) == (FinishReason.STOP, right[place])
    rank.assert_nothing_held()


def test_no_draft_stands_beyond_the_last_token():
    rank = make_rank()
    right = expected(prompt_of(6), 3)
    drafted(rank, prompt_of(6), [*right[1:3], 1], max_tokens=3)
    assert rank.step().num_drafts.tolist() == [1]
    assert rank.tokens[1] == right
    assert rank.ends[1].reason is FinishReason.LENGTH


def test_no_draft_stands_beyond_the_models_length():
    rank = make_rank(max_num_batched_tokens=80)
    right = expected(prompt_of(61), 3)
    drafted(rank, prompt_of(61), [*right[1:3], 1])
    assert rank.step().num_drafts.tolist() == [1]
    assert rank.tokens[1] == right


def test_the_budget_trims_drafts():
    rank = make_rank(max_num_batched_tokens=8, max_num_seqs=4)
    right = expected(prompt_of(6), 8)
    drafted(rank, prompt_of(6), right[1:4])
    for request_id in (2, 3):
        rank.submit(request_id, prompt_of(3, start=request_id), 5)
    rank.step()
    assert rank.tokens[1] == right[:5], "what runs comes first"
    batch = rank.scheduler._state.batch
    order = batch.order.tolist()
    batch.num_drafts[order] = 3
    batch.drafts[order] = 1
    plan = rank.step()
    assert plan.total_tokens <= 8
    assert plan.num_drafts.tolist()[:2] == [3, 3]
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(6), 20)


def test_drafts_are_proposed_from_the_requests_own_text():
    prompt, continuation = foreseen()
    # The prompt's end stands in it once before, with what followed there.
    repeated = prompt + continuation + prompt[-2:]
    rank = make_rank(num_drafts=2, max_num_batched_tokens=64)
    rank.submit(1, repeated, 20)
    rank.run()
    assert rank.tokens[1] == expected(repeated, 20)
    assert any(plan.num_drafts is not None for plan in rank.plans)


def indexed(rank):
    """How many tokens of each request's n-gram index has, by order of arrival; None: it has no index."""
    sequences = sorted(rank.scheduler._state.sequences.values(), key=lambda sequence: sequence.order)
    return [None if sequence.ngram is None else len(sequence.ngram) for sequence in sequences]


def test_prompts_are_indexed_in_portions_and_get_drafts_once_that_is_done(monkeypatch):
    monkeypatch.setattr(result_intake, "MAX_NUM_INDEXED", 16)
    prompt, continuation = foreseen()
    repeated = prompt + continuation + prompt[-2:] + continuation[:4]
    rank = make_rank(num_drafts=2, max_num_batched_tokens=96)

    def drafts_of_the_last_one():
        return sum(int(plan.num_drafts[plan.slots == 2].sum()) for plan in rank.plans if plan.num_drafts is not None)

    rank.submit(1, [3] * 8, 40)
    rank.step()
    assert indexed(rank) == [9]
    rank.submit(2, repeated, 30)
    rank.submit(3, repeated, 30)
    before = 0
    lengths = []
    while lengths[-1:] != [[len(repeated) + len(rank.tokens[k]) for k in (2, 3)]]:
        rank.step()
        first, *others = indexed(rank)
        lengths.append(others)
        assert first == 8 + len(rank.tokens[1]), "who has caught up stays so"
        assert sum(others) - before <= 16 + 2 * (1 + 2)
        before = sum(others)
    assert lengths[:2] == [[16, 0], [26, 6]]
    assert drafts_of_the_last_one() == 0
    rank.run()
    assert drafts_of_the_last_one() > 0
    for request_id, tokens in ((1, [3] * 8), (2, repeated), (3, repeated)):
        assert rank.tokens[request_id] == expected(tokens, 40 if request_id == 1 else 30)
    rank.assert_nothing_held()


def test_a_prompt_is_indexed_while_it_is_computed(monkeypatch):
    monkeypatch.setattr(result_intake, "MAX_NUM_INDEXED", 16)
    rank = make_rank(max_num_batched_tokens=16)
    rank.submit(1, prompt_of(40), 4)
    lengths = []
    for _ in range(3):
        rank.step()
        lengths += indexed(rank)
    assert lengths == [16, 32, 41]
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(40), 4)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_speculation_changes_no_token_while_blocks_run_out(num_drafts):
    rank = make_rank(num_drafts, num_blocks=17)
    prompts = {request_id: (prompt_of(4, start=request_id + 1) * 6)[: 12 + request_id] for request_id in range(5)}
    for request_id, prompt in prompts.items():
        rank.submit(request_id, prompt, 24)
    rank.run()
    load = rank.scheduler.load()
    assert load.num_preemptions > 0
    assert load.num_draft_tokens > 0
    for request_id, prompt in prompts.items():
        assert rank.tokens[request_id] == expected(prompt, 24)
    rank.assert_nothing_held()


def test_wrong_drafts_do_not_get_into_the_prefix_cache():
    rank = make_rank()
    right = expected(prompt_of(6), 8)
    wrong = [(right[1] + 1) % 50, 0, 0]
    drafted(rank, prompt_of(6), wrong)
    rank.step()
    rank.abort(1)
    rank.submit(2, [*prompt_of(6), right[0], *wrong, 0, 0, 0], 2)
    rank.run()
    assert rank.ends[2].num_cached_tokens == 4
    assert rank.tokens[2] == expected([*prompt_of(6), right[0], *wrong, 0, 0, 0], 2)


# ---- with a grammar ----


def grammar_rank(drafts):
    rank = make_rank()
    rank.submit(1, prompt_of(6), 20, fields={"grammar": Grammar(GrammarKind.LARK, "every third")})
    (action,) = rank.scheduler.take_compile_actions()
    rank.scheduler.grammar_compiled(action.owner, action.id, EveryThird(), "", 0.0)
    rank.step()
    batch = rank.scheduler._state.batch
    (slot,) = batch.order.tolist()
    batch.drafts[slot, : len(drafts)] = drafts
    batch.num_drafts[slot] = len(drafts)
    return rank


def test_drafts_that_the_grammar_refuses_are_dropped_before_they_cost_anything():
    rank = grammar_rank([1, 4, 2])
    plan = rank.step()
    assert plan.draft_tokens.tolist() == [1]
    assert plan.num_tokens.tolist() == [2]
    assert len(plan.masked) == 2


def test_each_draft_has_the_mask_of_its_place():
    rank = grammar_rank([1, 5, 3])
    plan = rank.step()
    assert plan.masked.tolist() == [0, 1, 2, 3]
    allowed = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in plan.masks]
    assert [{token % 3 for token in tokens} for tokens in allowed] == [{1}, {2}, {0}, {1}]
    rank.run()
    assert all(token % 3 == place % 3 for place, token in enumerate(rank.tokens[1][:7]))


def test_with_no_draft_that_fits_the_grammar_the_row_decodes():
    rank = grammar_rank([2, 2, 2])
    plan = rank.step()
    assert (plan.num_drafts, plan.num_tokens.tolist(), plan.masked.tolist()) == (None, [1], [0])


# ---- what a runner may not do ----


def test_a_token_outside_of_the_vocabulary_ends_the_request():
    rank = make_rank()
    right = expected(prompt_of(6), 8)
    drafted(rank, prompt_of(6), right[1:4])
    plan = rank.plan()
    rank.take(rank.scheduler.update(plan, StepResult(np.array([[right[1], 50, 3, 4]], np.int32)), rank.now))
    rank.scheduler.check_integrity()
    assert rank.ends[1].reason is FinishReason.ERROR
    assert 50 not in rank.tokens[1]
    rank.assert_nothing_held()


def test_a_result_too_narrow_for_the_drafts_ends_the_request():
    rank = make_rank()
    right = expected(prompt_of(6), 8)
    drafted(rank, prompt_of(6), right[1:4])
    plan = rank.plan()
    rank.take(rank.scheduler.update(plan, StepResult(np.array([[right[1]]], np.int32)), rank.now))
    rank.scheduler.check_integrity()
    assert rank.ends[1].reason is FinishReason.ERROR
    rank.assert_nothing_held()
