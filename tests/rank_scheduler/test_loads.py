"""KV that comes from elsewhere: when loads start, how they end, and that they wedge nobody."""

import pytest

from rank_scheduler.messages import FinishReason
from rank_scheduler.sequence import WaitReason
from tests.rank_scheduler.scenario import Rank, expected, prompt_of
from tests.rank_scheduler.simulated_connector import SimulatedConnector


def make_rank(**options):
    return Rank(connector=SimulatedConnector(), **options)


def external(num_tokens, *, is_async=1, **params):
    """Fields of a request whose first `num_tokens` can be loaded."""
    return {"kv_transfer_params": {"external": num_tokens, "is_async": is_async, **params}}


def test_a_loaded_prefix_is_not_computed_again():
    rank = make_rank()
    prompt = prompt_of(14)
    rank.submit(1, prompt, 5, fields=external(12))
    assert rank.step().total_tokens == 0
    assert rank.state_of(1) == "waiting_for_kv_load"
    assert rank.scheduler.load().num_loads == rank.scheduler.load().num_deferred == 1
    rank.end_load(1)
    assert rank.step().num_tokens.tolist() == [2]
    rank.run()
    assert rank.tokens[1] == expected(prompt, 5)
    assert rank.ends[1].num_cached_tokens == 12
    assert rank.scheduler.take_stats().num_external_hits == 12
    rank.assert_nothing_held()


def test_a_whole_prompt_that_was_loaded_recomputes_one_token():
    rank = make_rank()
    rank.submit(1, prompt_of(12), 4, fields=external(12))
    rank.step()
    rank.end_load(1)
    assert rank.step().num_tokens.tolist() == [1]
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(12), 4)


def test_loaded_blocks_are_found_by_others():
    rank = make_rank()
    rank.submit(1, prompt_of(14), 2, fields=external(12))
    rank.step()
    rank.end_load(1)
    rank.submit(2, prompt_of(14), 2)
    rank.run()
    assert rank.ends[2].num_cached_tokens == 12
    assert rank.tokens[2] == expected(prompt_of(14), 2)


def test_only_what_is_missing_here_is_loaded():
    rank = make_rank()
    rank.submit(1, prompt_of(9), 1)
    rank.run()
    rank.submit(2, prompt_of(14), 3, fields=external(12))
    rank.step()
    (_, _, first, last) = rank.connector.loading[0, 2]
    assert (first, last) == (8, 12)
    rank.end_load(2)
    rank.run()
    assert rank.tokens[2] == expected(prompt_of(14), 3)


@pytest.mark.parametrize("length", [8, 9])
def test_with_nothing_to_load_a_candidate_is_computed_here(length):
    rank = make_rank()
    rank.submit(1, prompt_of(length), 3, fields=external(0))
    rank.run()
    rank.submit(2, prompt_of(length), 3, fields=external(8))
    rank.run(20)
    assert rank.tokens[1] == rank.tokens[2] == expected(prompt_of(length), 3)


def test_a_synchronous_hit_is_filled_within_the_first_step():
    rank = make_rank()
    rank.submit(1, prompt_of(14), 3, fields=external(10, is_async=0))
    plan = rank.step()
    assert plan.num_tokens.tolist() == [4]
    assert plan.connector_metadata is not None
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(14), 3)
    assert rank.ends[1].num_cached_tokens == 10


def test_a_synchronous_hit_of_the_whole_prompt_recomputes_one_token():
    rank = make_rank()
    rank.submit(1, prompt_of(12), 3, fields=external(12, is_async=0))
    assert rank.step().num_tokens.tolist() == [1]
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(12), 3)


def test_a_connector_that_does_not_know_yet_is_asked_again_and_holds_up_nobody():
    rank = make_rank()
    rank.submit(1, prompt_of(12), 2, fields=external(8, unknown=3))
    rank.submit(2, prompt_of(6, start=2), 8)
    rank.step()
    assert rank.explain(1).reason == WaitReason.CONNECTOR
    assert rank.running() == [2]
    rank.step_until(lambda: (0, 1) in rank.connector.loading, 4)
    rank.end_load(1)
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(12), 2)


# ---- starts and caps ----


def test_candidates_wait_in_their_own_queue_and_block_no_ordinary_request():
    rank = make_rank(max_async_kv_loads_per_step=1)
    for request_id in (1, 2, 3):
        rank.submit(request_id, prompt_of(12, start=request_id), 2, fields=external(8))
    rank.submit(4, prompt_of(6, start=4), 2)
    rank.step()
    assert [rank.state_of(request_id) for request_id in (1, 2, 3)] == ["waiting_for_kv_load", "waiting", "waiting"]
    assert rank.running() == [4]
    assert rank.explain(2).reason == WaitReason.LOAD_CAP
    rank.step()
    rank.step()
    assert len(rank.connector.loading) == 3


def test_a_start_costs_no_tokens():
    rank = make_rank(max_num_batched_tokens=8)
    rank.submit(1, prompt_of(8), 2)
    rank.submit(2, prompt_of(12, start=2), 2, fields=external(12))
    assert rank.step().total_tokens == 8
    assert (0, 2) in rank.connector.loading


def test_loads_in_progress_and_loads_done_but_not_running_count_against_the_cap():
    rank = make_rank(max_num_inflight_kv_loads=2, max_num_seqs=1)
    rank.submit(9, prompt_of(6), 12)
    for request_id in (1, 2, 3):
        rank.submit(request_id, prompt_of(12, start=request_id), 2, fields=external(8))
    rank.step()
    # The batch is full, and loads start all the same.
    assert rank.running() == [9]
    assert sorted(rank.connector.loading) == [(0, 1), (0, 2)]
    rank.end_load(1)
    rank.step()
    assert rank.scheduler.load().num_loads == 2
    assert rank.explain(3).figures["max_num_inflight_kv_loads"] == 2
    assert (0, 3) not in rank.connector.loading
    rank.step_until(lambda: rank.running() == [1], 20)
    rank.step()
    assert (0, 3) in rank.connector.loading


def test_without_the_cap_a_load_needs_a_free_slot():
    rank = make_rank(max_num_seqs=1)
    rank.submit(9, prompt_of(6), 3)
    rank.step()
    rank.submit(1, prompt_of(12), 2, fields=external(8))
    rank.step()
    assert rank.explain(1).reason == WaitReason.SLOTS
    rank.step_until(lambda: (0, 1) in rank.connector.loading, 5)


def test_loads_are_admitted_in_the_order_of_their_completion():
    rank = make_rank()
    for request_id in (1, 2, 3):
        rank.submit(request_id, prompt_of(12, start=request_id), 2, fields=external(8))
    rank.submit(4, prompt_of(5, start=9), 9)
    rank.step()
    for request_id in (3, 1, 2):
        rank.end_load(request_id)
    rank.step()
    assert rank.running() == [4, 3, 1, 2]


def test_a_load_never_takes_blocks_that_running_prompts_were_promised():
    """The prompt is computed in pieces, and grows into its blocks step by step."""
    rank = make_rank(
        num_blocks=17, max_num_batched_tokens=8, max_num_inflight_kv_loads=4, scheduler_reserve_full_isl=False
    )
    rank.submit(1, prompt_of(48), 2)
    rank.step()
    assert rank.num_held_blocks() == 2
    rank.submit(2, prompt_of(40, start=2), 2, fields=external(36))
    rank.submit(3, prompt_of(16, start=3), 2, fields=external(12))
    rank.step()
    assert rank.explain(2).reason == WaitReason.BLOCKS
    assert not rank.connector.loading, "the one behind may not pass either"
    rank.step_until(lambda: 1 in rank.ends)
    assert rank.scheduler.load().num_preemptions == 0
    rank.step()
    assert sorted(rank.connector.loading) == [(0, 2), (0, 3)]
    rank.end_load(3)
    rank.end_load(2)
    rank.run()
    for request_id, length in ((1, 48), (2, 40), (3, 16)):
        assert rank.tokens[request_id] == expected(prompt_of(length, start=request_id), 2)


def test_a_done_load_is_admitted_when_the_only_running_request_gave_up_its_blocks():
    rank = make_rank(num_blocks=17, max_num_seqs=1, max_num_inflight_kv_loads=1)
    rank.submit(1, prompt_of(1), 30)
    rank.submit(2, prompt_of(56, start=2), 2, fields=external(50))
    rank.step()
    rank.step()
    rank.end_load(2)
    rank.step_until(lambda: not rank.running())
    assert rank.scheduler.has_work()
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(1), 30)
    assert rank.tokens[2] == expected(prompt_of(56, start=2), 2)


# ---- failures ----


def test_a_failed_load_keeps_its_valid_prefix_and_computes_the_rest():
    rank = make_rank()
    rank.submit(1, prompt_of(14), 3, fields=external(12))
    rank.step()
    rank.end_load(1, num_valid=7, cause="peer lost")
    assert rank.step().num_tokens.tolist() == [7]
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(14), 3)
    assert rank.scheduler.take_stats().num_failed_loads == 1
    assert "load_failed" in [entry.event for entry in rank.explain(1).timeline]


def test_blocks_that_a_failed_load_left_invalid_are_not_in_the_prefix_cache():
    rank = make_rank()
    rank.submit(1, prompt_of(14), 1, fields=external(12))
    rank.step()
    rank.end_load(1, num_valid=7, cause="peer lost")
    rank.abort(1)
    rank.submit(2, prompt_of(14), 3)
    rank.run()
    assert rank.ends[2].num_cached_tokens == 4
    assert rank.tokens[2] == expected(prompt_of(14), 3)


def test_a_load_without_any_valid_token_is_tried_again_then_computed_here():
    rank = make_rank(max_kv_load_retries=1)
    rank.submit(1, prompt_of(14), 3, fields=external(12))
    rank.step()
    rank.end_load(1, num_valid=0, cause="refused")
    assert rank.num_held_blocks() == 0
    rank.step()
    assert rank.state_of(1) == "waiting_for_kv_load"
    rank.end_load(1, num_valid=0, cause="refused")
    assert rank.step().num_tokens.tolist() == [14]
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(14), 3)


def test_no_retry_where_none_is_allowed():
    rank = make_rank(max_kv_load_retries=0)
    rank.submit(1, prompt_of(14), 3, fields=external(12))
    rank.step()
    rank.end_load(1, num_valid=0, cause="refused")
    assert rank.step().num_tokens.tolist() == [14]


def test_the_local_hit_survives_a_load_that_failed_entirely():
    rank = make_rank()
    rank.submit(1, prompt_of(9), 1)
    rank.run()
    rank.submit(2, prompt_of(14), 3, fields=external(12))
    rank.step()
    rank.end_load(2, num_valid=0, cause="refused")
    rank.run()
    assert rank.tokens[2] == expected(prompt_of(14), 3)
    assert rank.ends[2].num_cached_tokens == 8


def test_where_the_policy_says_so_a_failed_load_ends_its_request_and_no_other():
    rank = make_rank(kv_load_failure_policy="fail")
    rank.submit(1, prompt_of(14), 3, fields=external(12))
    rank.submit(2, prompt_of(14, start=2), 3, fields=external(12))
    rank.step()
    rank.end_load(1, num_valid=8, cause="peer lost")
    rank.end_load(2)
    rank.run()
    assert rank.ends[1].reason is FinishReason.ERROR
    assert "peer lost" in rank.ends[1].message
    assert rank.tokens[2] == expected(prompt_of(14, start=2), 3)
    rank.assert_nothing_held()


# ---- ends that come at the wrong time ----


def test_blocks_of_an_aborted_load_stay_in_quarantine_until_its_end():
    rank = make_rank()
    rank.submit(1, prompt_of(12), 3, fields=external(8))
    rank.step()
    rank.abort(1)
    assert rank.ends[1].reason is FinishReason.ABORT
    assert rank.num_held_blocks() == 3
    assert rank.scheduler.load().num_loads == 0
    rank.end_load(1)
    rank.assert_nothing_held()


def test_a_number_whose_blocks_are_in_quarantine_is_not_given_again():
    rank = make_rank()
    rank.submit(1, prompt_of(12), 3, fields=external(8))
    rank.step()
    rank.abort(1)
    rank.submit(1, prompt_of(5), 3)
    assert rank.scheduler.num_ignored_messages == 1
    rank.end_load(1)
    rank.assert_nothing_held()


def test_a_load_ends_although_the_router_that_asked_for_it_is_gone():
    rank = make_rank()
    rank.submit(1, prompt_of(12), 3, fields=external(8))
    rank.step()
    rank.scheduler.drop_owner(0, rank.now)
    assert rank.num_held_blocks() == 3
    rank.end_load(1)
    rank.assert_nothing_held()


def test_late_doubled_and_unknown_events_are_counted_and_change_nothing():
    rank = make_rank()
    rank.submit(1, prompt_of(12), 3, fields=external(8))
    rank.tell_load_ended(1)
    rank.step()
    rank.end_load(1)
    rank.tell_load_ended(1, 0, "late")
    rank.step()
    rank.tell_load_ended(1)
    rank.tell_load_ended(77)
    rank.end_send(1)
    rank.run()
    rank.tell_load_ended(1)
    assert rank.scheduler.num_ignored_messages == 6
    assert rank.tokens[1] == expected(prompt_of(12), 3)
    rank.assert_nothing_held()


@pytest.mark.parametrize("num_valid", [-5, 1000])
def test_an_event_with_an_absurd_count_is_cut_to_what_was_loaded(num_valid):
    rank = make_rank(max_kv_load_retries=0)
    rank.submit(1, prompt_of(12), 3, fields=external(8))
    rank.step()
    load = rank.connector.loading.pop((0, 1))
    rank.connector._fill(load, load[3], rank.runner)
    rank.tell_load_ended(1, num_valid)
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(12), 3)


# ---- after the end ----


def test_kept_blocks_are_held_until_they_were_sent():
    rank = make_rank()
    rank.submit(1, prompt_of(12), 3, fields={"kv_transfer_params": {"keep": 1}})
    rank.run()
    assert rank.ends[1].reason is FinishReason.LENGTH
    assert rank.num_held_blocks() == 4
    rank.end_send(1)
    rank.assert_nothing_held()
    rank.end_send(1)
    assert rank.scheduler.num_ignored_messages == 1


def test_a_request_that_was_never_given_blocks_is_not_kept():
    rank = make_rank(max_num_seqs=1)
    rank.submit(1, prompt_of(12), 3)
    rank.step()
    rank.submit(2, prompt_of(12), 3, fields={"kv_transfer_params": {"keep": 1}})
    rank.step()
    rank.abort(2)
    rank.run()
    # The connector hears of its end all the same: a peer may hold a ticket for it.
    assert rank.connector.finished == [(0, 2), (0, 1)]
    rank.assert_nothing_held()


def test_the_connector_hears_once_of_each_request_that_had_blocks():
    rank = make_rank(num_blocks=17)
    for request_id in range(3):
        rank.submit(request_id, prompt_of(12, start=request_id + 1), 24, fields=external(0, is_async=0))
    rank.run()
    assert rank.scheduler.load().num_preemptions > 0
    assert sorted(rank.connector.finished) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("is_async", [False, True])
def test_loads_and_preemptions_together_lose_no_token(is_async):
    rank = make_rank(num_blocks=17, max_num_inflight_kv_loads=2, setup={"async_scheduling": is_async})
    for request_id in range(6):
        fields = external(8) if request_id % 2 else {}
        rank.submit(request_id, prompt_of(12, start=request_id + 1), 20, fields=fields)
    for _ in range(400):
        rank.step()
        for _, request_id in sorted(rank.connector.loading):
            rank.end_load(request_id)
    rank.run()
    assert rank.scheduler.load().num_preemptions > 0
    for request_id in range(6):
        assert rank.tokens[request_id] == expected(prompt_of(12, start=request_id + 1), 20)
    rank.assert_nothing_held()


def test_a_load_does_not_rely_on_what_a_step_only_promises():
    """The step that was to compute part of the shared prefix fails; who loads the rest goes on, and rightly."""
    rank = make_rank(max_num_batched_tokens=8, max_num_seqs=3)
    shared = prompt_of(12)
    rank.submit(1, [*shared, 1], 2)
    rank.step()
    rank.submit(2, [*shared, 2, 3, 4, 5, 6], 3, fields=external(16))
    rank.submit(3, prompt_of(6, start=7), 2)
    plan = rank.plan()
    assert rank.state_of(2) == "waiting_for_kv_load"
    rank.in_flight.clear()
    rank.take(rank.scheduler.fail(plan, "the step failed", rank.now))
    rank.connector.start_load_kv(plan.connector_metadata)
    rank.end_load(2)
    rank.run()
    assert rank.tokens[2] == expected([*shared, 2, 3, 4, 5, 6], 3)
    rank.assert_nothing_held()
