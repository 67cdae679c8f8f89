"""Who waits gets its turn, and nobody gives anything up for nothing."""

from tests.rank_scheduler.scenario import VOCAB_SIZE, Rank
from tests.rank_scheduler.simulated_connector import SimulatedConnector


def prompt_of(length, start=1):
    return [(start * 13 + 7 * index) % VOCAB_SIZE for index in range(length)]


def run_until_idle(rank, max_steps=400):
    """As a rank's loop would: it steps only while the scheduler says that there is something to do."""
    for _ in range(max_steps):
        if not rank.in_flight and not rank.scheduler.has_work():
            return
        rank.step()
    raise AssertionError("it never came to rest")


def high(**fields):
    return {"priority": 0} | fields


def low(**fields):
    return {"priority": 5} | fields


def test_a_prefill_cadence_does_not_strand_who_was_preempted_for_a_priority():
    rank = Rank(policy="priority", prefill_schedule_interval=4, max_num_seqs=1)
    rank.submit(0, prompt_of(8), 20, fields=low())
    rank.step()
    rank.step()
    rank.submit(1, prompt_of(8, 2), 4, fields=high())
    run_until_idle(rank)
    assert sorted(rank.ends) == [0, 1]


def test_a_chunk_that_yields_may_take_from_an_idle_session_if_nobody_else_goes_on():
    rank = Rank(policy="priority", num_blocks=17, max_model_len=64)
    for session, length in ((0, 23), (1, 19)):
        rank.submit(session, prompt_of(length, session), 1, fields=low(is_session=True))
        run_until_idle(rank)
    rank.extend(1, prompt_of(30, 4))
    rank.submit(2, prompt_of(60, 5), 2, fields=high())
    run_until_idle(rank)
    assert sorted(rank.ends) == [2]
    assert len(rank.turn_ends[1]) == 2


def test_a_victim_that_shares_the_newcomers_prefix_is_not_preempted_over_and_over():
    rank = Rank(policy="priority", num_blocks=27, max_model_len=64, max_num_batched_tokens=64)
    shared = prompt_of(24, 9)
    rank.submit(0, prompt_of(44), 20, fields=high())
    rank.submit(1, shared + prompt_of(5, 2), 30, fields=low())
    rank.step()
    rank.step()
    rank.submit(2, shared + prompt_of(38, 6), 2, fields=high())
    run_until_idle(rank)
    assert sorted(rank.ends) == [0, 1, 2]
    assert rank.scheduler.load().num_preemptions <= 1


def test_no_more_are_preempted_than_the_steps_tokens_can_replace():
    rank = Rank(policy="priority", num_blocks=400, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=8)
    for request in range(8):
        rank.submit(request, prompt_of(4, request), 40, fields=low())
    for _ in range(6):
        rank.step()
    for request in range(8):
        rank.submit(10 + request, prompt_of(48, request), 4, fields=high())
    rank.step()
    assert rank.scheduler.load().num_preemptions == 1
    run_until_idle(rank)
    assert len(rank.ends) == 16


def test_nobody_is_preempted_for_a_request_whose_connector_does_not_know_yet():
    rank = Rank(policy="priority", max_num_seqs=1, connector=SimulatedConnector())
    rank.submit(0, prompt_of(8), 30, fields=low())
    rank.step()
    params = {"external": 4, "is_async": 0, "unknown": 10}
    rank.submit(1, prompt_of(8, 2), 2, fields=high(kv_transfer_params=params))
    for _ in range(8):
        rank.step()
    # Once, before the connector was asked for the first time.
    assert rank.scheduler.load().num_preemptions <= 1
    run_until_idle(rank)
    assert sorted(rank.ends) == [0, 1]


def test_an_idle_session_of_lower_priority_gives_way_at_once():
    rank = Rank(policy="priority", max_num_seqs=2)
    rank.submit(0, prompt_of(8), 1, fields=low(is_session=True))
    run_until_idle(rank)
    rank.submit(1, prompt_of(8, 2), 30, fields=high())
    rank.step()
    rank.submit(2, prompt_of(8, 3), 2, fields=high())
    rank.step()
    assert rank.scheduler.load().num_running == 2


def test_an_encoder_item_survives_the_row_that_it_was_planned_for():
    """Its request must not be cheated of it, nor the step of everybody else fail."""
    from rank_scheduler.messages import EncoderInput

    rank = Rank(
        policy="priority",
        num_blocks=17,
        max_model_len=64,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        scheduler_reserve_full_isl=False,
        is_multimodal_model=True,
    )
    rank.submit(0, prompt_of(39), 1, fields=high(is_session=True))
    run_until_idle(rank)
    rank.submit(2, prompt_of(4, 2), 1, fields=low())
    item = EncoderInput(b"item", 24, 8, b"x")
    rank.submit(1, prompt_of(50, 3), 1, fields=low(encoder_inputs=(item,)))
    run_until_idle(rank)
    assert {request: str(end.reason) for request, end in rank.ends.items()} == {1: "length", 2: "length"}


def test_a_load_that_lacks_blocks_is_passed_a_bounded_number_of_times():
    rank = Rank(num_blocks=21, max_model_len=64, max_num_seqs=8, max_head_bypasses=3, connector=SimulatedConnector())
    for request in range(100, 103):
        rank.submit(request, prompt_of(9, request), 12)
    rank.step()
    rank.submit(0, prompt_of(60), 2, fields={"kv_transfer_params": {"external": 40, "is_async": 1}})
    for request in range(1, 60):
        rank.submit(request, prompt_of(9, request), 12)
        rank.step()
        if rank.connector.loading:
            break
    assert rank.connector.loading
    assert len(rank.ends) <= 3 + 3


def test_a_cold_request_is_passed_by_warm_ones_a_bounded_number_of_times():
    rank = Rank(
        max_num_seqs=1, cache_aware_admission_window=4, cache_aware_admission_threshold=0.0, max_head_bypasses=3
    )
    warm = prompt_of(16, 3)
    rank.submit(0, [*warm, 1], 2)
    run_until_idle(rank)
    rank.submit(1, prompt_of(10, 8), 1)
    for request in range(2, 14):
        rank.submit(request, [*warm, request], 1)
    while 1 not in rank.ends:
        rank.step()
    assert len(rank.ends) == 1 + 3 + 1


def test_a_session_without_slot_is_no_barrier_to_warm_requests():
    rank = Rank(max_num_seqs=2, cache_aware_admission_window=4, cache_aware_admission_threshold=0.0, policy="fcfs")
    warm = prompt_of(16, 3)
    rank.submit(0, [*warm, 1], 2)
    rank.submit(9, prompt_of(6, 1), 1, fields={"is_session": True})
    run_until_idle(rank)
    rank.submit(10, prompt_of(40, 4), 1)
    rank.submit(11, prompt_of(40, 5), 1)
    run_until_idle(rank)
    rank.submit(1, prompt_of(10, 8), 30)
    rank.step()
    rank.submit(2, prompt_of(10, 6), 1)
    rank.submit(3, [*warm, 3], 1)
    run_until_idle(rank)
    order = [request for request in rank.ends if request in (2, 3)]
    assert order == [3, 2]


def test_drafts_preempt_nobody():
    rank = Rank(
        num_blocks=15,
        max_model_len=56,
        setup={"enable_prefix_caching": False},
        speculative={"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    )
    for request in range(2):
        rank.submit(request, [1, 2] * 8, 12)
    run_until_idle(rank)
    assert rank.scheduler.load().num_draft_tokens > 0
    assert rank.scheduler.load().num_preemptions == 0


def test_a_connector_is_told_the_hashes_of_what_it_is_asked_about():
    seen = []

    class Watching(SimulatedConnector):
        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            seen.append((len(request.token_ids), len(request.block_hashes)))
            return super().get_num_new_matched_tokens(request, num_computed_tokens)

    rank = Rank(connector=Watching())
    rank.submit(0, prompt_of(18), 1, fields={"kv_transfer_params": {"external": 0, "is_async": 0}})
    run_until_idle(rank)
    assert seen[-1] == (18, 4)


def test_an_idle_session_keeps_no_blocks_from_a_load_for_a_token_that_will_be_replaced():
    rank = Rank(connector=SimulatedConnector(), num_blocks=17, max_model_len=64)
    rank.submit(0, prompt_of(3), 2, fields={"is_session": True})
    run_until_idle(rank)
    rank.submit(1, prompt_of(60, 2), 2, fields={"kv_transfer_params": {"external": 40, "is_async": 1}})
    run_until_idle(rank)
    rank.end_load(1)
    run_until_idle(rank)
    assert sorted(rank.ends) == [1]


def test_a_higher_priority_takes_blocks_though_there_is_always_a_step_in_flight():
    """With a connector the blocks of a victim are usable only after the steps in flight, so these are waited for."""
    rank = Rank(
        connector=SimulatedConnector(),
        policy="priority",
        num_blocks=29,
        max_model_len=64,
        setup={"async_scheduling": True},
    )
    for request_id in range(2):
        rank.submit(request_id, prompt_of(34, 2 + request_id), 20, fields=low())
    rank.step()
    rank.step()
    rank.submit(2, prompt_of(60, 7), 2, fields=high())
    for _ in range(4):
        rank.step()
    assert rank.state_of(2) == "running"
    run_until_idle(rank)
    assert sorted(rank.ends) == [0, 1, 2]
    assert rank.scheduler.load().num_preemptions == 1
