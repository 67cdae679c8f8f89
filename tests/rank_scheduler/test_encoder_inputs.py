"""Encoder items in prompts, and models with an encoder of their own."""

import pytest

from rank_scheduler.messages import EncoderInput, FinishReason
from tests.rank_scheduler.scenario import Rank, expected, prompt_of


def make_rank(*, is_async=False, **options):
    return Rank(is_multimodal_model=True, setup={"async_scheduling": is_async}, **options)


def item(name, offset, length=4):
    return EncoderInput(name.encode(), offset, length, b"picture of a " + name.encode())


def submit(rank, request_id, items, *, length=20, max_tokens=3, start=None):
    prompt = prompt_of(length, start=start or request_id)
    rank.submit(request_id, prompt, max_tokens, fields={"encoder_inputs": tuple(items)})
    return expected(prompt, max_tokens, encoder_inputs=items)


def runs(plan):
    return [run.item.identifier.decode() for run in plan.encoder_runs]


def test_an_item_is_encoded_with_the_chunk_that_needs_it():
    rank = make_rank(max_num_batched_tokens=8)
    right = submit(rank, 1, [item("cat", 2), item("dog", 10)])
    assert [runs(rank.step()) for _ in range(4)] == [["cat"], ["dog"], [], []]
    rank.run()
    assert rank.tokens[1] == right
    rank.assert_nothing_held()


def test_a_shared_item_is_encoded_once_even_in_the_same_step():
    rank = make_rank(max_num_batched_tokens=64)
    right = {
        1: submit(rank, 1, [item("cat", 2)]),
        2: submit(rank, 2, [item("cat", 5), item("cat", 12)]),
    }
    assert runs(rank.step()) == ["cat"]
    right[3] = submit(rank, 3, [item("cat", 0)])
    assert runs(rank.step()) == []
    rank.run()
    assert rank.tokens == right


def test_the_encoder_budget_of_a_step_cuts_the_prompt_before_the_item():
    rank = make_rank(max_num_encoder_input_tokens=6)
    right = submit(rank, 1, [item("cat", 2), item("dog", 10)])
    plans = [rank.step(), rank.step()]
    assert [plan.num_tokens.tolist() for plan in plans] == [[10], [10]]
    assert [runs(plan) for plan in plans] == [["cat"], ["dog"]]
    rank.run()
    assert rank.tokens[1] == right


def test_what_is_cached_costs_no_budget():
    rank = make_rank(max_num_encoder_input_tokens=6)
    submit(rank, 1, [item("cat", 2)])
    rank.run()
    submit(rank, 2, [item("cat", 2), item("dog", 10)])
    plan = rank.step()
    assert (plan.num_tokens.tolist(), runs(plan)) == ([20], ["dog"])


def test_a_request_whose_item_finds_no_budget_waits_and_lets_others_pass():
    rank = make_rank(max_num_encoder_input_tokens=4, max_num_batched_tokens=64)
    right = {1: submit(rank, 1, [item("cat", 0)]), 2: submit(rank, 2, [item("dog", 0)]), 3: submit(rank, 3, [])}
    plan = rank.step()
    assert runs(plan) == ["cat"]
    assert rank.running() == [1, 3]
    assert rank.explain(2).reason == "encoder"
    assert rank.explain(2).figures == {"budget_left": 0, "cache_held": 4}
    rank.run()
    assert rank.tokens == right


def test_items_that_others_hold_must_be_read_before_new_ones_fit():
    rank = make_rank(encoder_cache_size=6, max_num_batched_tokens=8)
    right = {1: submit(rank, 1, [item("cat", 2), item("dog", 10)]), 2: submit(rank, 2, [item("owl", 0)])}
    plans = []
    while rank.scheduler.has_work():
        plans.append(rank.step())
    assert [name for plan in plans for name in runs(plan)] == ["cat", "dog", "owl"]
    assert [name.decode() for plan in plans for name in plan.freed_encoder_outputs] == ["cat", "dog"]
    assert rank.tokens == right


def test_an_item_is_released_once_its_last_position_was_computed():
    rank = make_rank(max_num_batched_tokens=8)
    submit(rank, 1, [item("cat", 2), item("dog", 6)])
    cache = rank.scheduler._state.encoder
    rank.plan()
    assert cache.held_size == 8, "planned is not computed"
    rank.finish_step()
    assert cache.held_size == 4
    rank.step()
    assert cache.held_size == 0
    assert cache.size == 8


@pytest.mark.parametrize("is_async", [False, True])
def test_an_item_is_never_cut_where_that_is_switched_off(is_async):
    rank = make_rank(is_async=is_async, max_num_batched_tokens=8, disable_chunked_mm_input=True)
    items = [item("cat", 6, 5), item("dog", 13, 6)]
    right = submit(rank, 1, items, length=24)
    rank.run()
    assert rank.tokens[1] == right
    computed = 0
    for plan in rank.plans:
        computed += plan.total_tokens
        assert not any(picture.offset < computed < picture.offset + picture.length for picture in items)


def test_a_preempted_request_has_its_items_encoded_again_if_they_are_gone():
    rank = make_rank(num_blocks=17, encoder_cache_size=4, preemption_policy="last", max_num_batched_tokens=40)
    right = {2: submit(rank, 2, [], length=30, max_tokens=30)}
    rank.step()
    # Its item lies in its last, never full block, so that it must be computed again.
    right[1] = submit(rank, 1, [item("cat", 17, 2)], length=19, max_tokens=20)
    rank.step()
    rank.step_until(lambda: rank.running() == [2])
    right[3] = submit(rank, 3, [item("dog", 0, 4)], length=5, max_tokens=1)
    rank.run()
    names = [name for plan in rank.plans for name in runs(plan)]
    assert names.count("cat") == 2
    assert rank.tokens == right
    rank.assert_nothing_held()


def test_a_prefix_with_an_item_is_shared_only_by_those_with_the_same_item():
    rank = make_rank()
    right = {1: submit(rank, 1, [item("cat", 2)], start=5)}
    rank.run()
    right[2] = submit(rank, 2, [item("cat", 2)], start=5)
    right[3] = submit(rank, 3, [item("dog", 2)], start=5)
    rank.run()
    assert (rank.ends[2].num_cached_tokens, rank.ends[3].num_cached_tokens) == (19, 0)
    assert rank.tokens == right


def test_a_failed_step_leaves_no_item_that_was_never_encoded():
    rank = make_rank()
    submit(rank, 1, [item("cat", 2)])
    plan = rank.plan()
    rank.take(rank.scheduler.fail(rank.in_flight.popleft(), "out of memory", rank.now))
    assert runs(plan) == ["cat"]
    right = submit(rank, 2, [item("cat", 2)])
    assert runs(rank.step()) == ["cat"]
    rank.run()
    assert rank.tokens[2] == right
    rank.assert_nothing_held()


def test_an_item_planned_by_a_request_that_is_aborted_is_there_for_another():
    rank = make_rank(is_async=True, max_num_batched_tokens=16)
    submit(rank, 1, [item("cat", 2)], length=40)
    rank.plan()
    rank.abort(1)
    right = submit(rank, 2, [item("cat", 2)])
    plan = rank.plan()
    assert runs(plan) == []
    rank.run()
    assert rank.tokens[2] == right


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([item("cat", 2, 40)], "more than max_num_encoder_input_tokens"),
        ([item("cat", 18)], "stands at [18, 22)"),
        ([item("cat", 2), item("dog", 4)], "over the item before it"),
    ],
)
def test_items_that_can_never_be_computed_are_refused(items, message):
    rank = make_rank()
    rank.submit(1, prompt_of(20), fields={"encoder_inputs": tuple(items)})
    rank.run()
    assert rank.ends[1].reason is FinishReason.ERROR
    assert message in rank.ends[1].message


def test_a_model_without_encoder_refuses_items():
    rank = Rank()
    submit(rank, 1, [item("cat", 2)])
    rank.run()
    assert "this model has no encoder" in rank.ends[1].message


# ---- models with encoder and decoder ----


def make_encoder_decoder(*, num_blocks=64, **options):
    return Rank(
        is_encoder_decoder=True,
        is_multimodal_model=True,
        enable_chunked_prefill=False,
        disable_chunked_mm_input=True,
        max_num_batched_tokens=64,
        num_blocks=num_blocks,
        **options,
    )


def submit_cross(rank, request_id, audio, *, length=9, max_tokens=5):
    prompt = prompt_of(length, start=request_id)
    rank.submit(request_id, prompt, max_tokens, fields={"encoder_inputs": (audio,)})
    return expected(prompt, max_tokens, cross_inputs=(audio,))


def test_the_encoders_output_has_blocks_of_its_own():
    rank = make_encoder_decoder()
    right = submit_cross(rank, 1, item("cat", 0, 10))
    plan = rank.step()
    (entered,) = plan.new_sequences
    assert len(entered.cross_block_ids) == 3
    assert rank.num_held_blocks() == 3 + 3
    rank.run()
    assert rank.tokens[1] == right
    rank.assert_nothing_held()


def test_cross_blocks_are_filled_for_each_request_even_if_the_item_is_the_same():
    rank = make_encoder_decoder()
    right = {request_id: submit_cross(rank, request_id, item("cat", 0, 10)) for request_id in (1, 2)}
    assert runs(rank.step()) == ["cat", "cat"]
    rank.run()
    assert rank.tokens == right


def test_equal_prompts_with_different_input_share_nothing():
    rank = make_encoder_decoder()
    prompt = prompt_of(12)
    for request_id, audio in ((1, item("cat", 0, 10)), (2, item("dog", 0, 10)), (3, item("cat", 0, 10))):
        rank.submit(request_id, prompt, 5, fields={"encoder_inputs": (audio,)})
        rank.run()
        assert rank.tokens[request_id] == expected(prompt, 5, cross_inputs=(audio,))
        assert rank.ends[request_id].num_cached_tokens == 0


def test_a_preempted_request_encodes_again():
    rank = make_encoder_decoder(num_blocks=21, preemption_policy="last")
    right = {2: submit_cross(rank, 2, item("dog", 0, 8), length=30, max_tokens=34)}
    rank.step()
    right[1] = submit_cross(rank, 1, item("cat", 0, 8), length=9, max_tokens=30)
    rank.run()
    assert rank.scheduler.load().num_preemptions > 0
    assert [name for plan in rank.plans for name in runs(plan)].count("cat") > 1
    assert rank.tokens == right
    rank.assert_nothing_held()


def test_an_encoder_decoder_model_needs_exactly_one_item():
    rank = make_encoder_decoder()
    rank.submit(1, prompt_of(5), 3)
    rank.submit(2, prompt_of(5), 3, fields={"encoder_inputs": (item("cat", 0), item("dog", 4))})
    rank.submit(3, prompt_of(5), 3, fields={"encoder_inputs": (item("cat", 1),)})
    rank.run()
    assert all("needs exactly one, at offset 0" in rank.ends[request_id].message for request_id in (1, 2, 3))


def test_a_request_whose_own_and_cross_blocks_never_fit_is_refused():
    rank = make_encoder_decoder(num_blocks=18)
    submit_cross(rank, 1, item("cat", 0, 10), length=50, max_tokens=14)
    right = submit_cross(rank, 2, item("cat", 0, 4), length=50, max_tokens=14)
    rank.run()
    assert "the request needs 19 KV blocks" in rank.ends[1].message
    assert rank.tokens[2] == right


def test_an_output_that_a_failed_plan_should_have_freed_is_freed_by_the_next():
    rank = make_rank(encoder_cache_size=6)
    submit(rank, 1, [item("cat", 2)])
    rank.run()
    submit(rank, 2, [item("dog", 2)])
    plan = rank.scheduler.schedule(rank.now)
    assert plan.freed_encoder_outputs == [b"cat"]
    rank.take(rank.scheduler.fail(plan, "out of memory", rank.now))
    submit(rank, 3, [])
    assert b"cat" in rank.step().freed_encoder_outputs
    rank.run()
    rank.assert_nothing_held()
