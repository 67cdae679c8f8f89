"""Streaming sessions: turns in one slot, with the KV of all turns before."""

import pytest

from rank_scheduler.messages import EncoderInput, FinishReason, Grammar, GrammarKind
from tests.rank_scheduler.scenario import EOS, Rank, expected, prompt_of
from tests.rank_scheduler.simulated_connector import SimulatedConnector

SESSION = {"is_session": True}


def make_rank(*, is_async=False, **options):
    return Rank(setup={"async_scheduling": is_async}, **options)


def run_turn(rank, request_id=1):
    """Step until the turn has ended."""
    num_ended = len(rank.turn_ends[request_id])
    rank.step_until(lambda: len(rank.turn_ends[request_id]) > num_ended or request_id in rank.ends)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_turn_goes_on_with_what_was_computed_before(is_async):
    rank = make_rank(is_async=is_async)
    rank.submit(1, prompt_of(10), 4, fields=SESSION)
    run_turn(rank)
    first = rank.tokens[1][:]
    assert first == expected(prompt_of(10), 4)
    assert rank.state_of(1) == "waiting_for_input"
    num_plans = len(rank.plans)
    rank.extend(1, [3, 1, 4], 5)
    run_turn(rank)
    # The last token of a turn was never an input: the extension takes its place.
    context = prompt_of(10) + first[:-1] + [3, 1, 4]
    assert rank.tokens[1][4:] == expected(context, 5)
    assert [plan.num_tokens.tolist() for plan in rank.plans[num_plans : num_plans + 2]] == [[3], [1]]
    assert [end.reason for end in rank.turn_ends[1]] == [FinishReason.LENGTH] * 2
    rank.extend(1, [], is_last=True)
    rank.run()
    assert rank.ends[1].reason is FinishReason.STOP
    rank.assert_nothing_held()


@pytest.mark.parametrize("is_async", [False, True])
def test_input_that_comes_during_a_turn_waits_for_its_end(is_async):
    rank = make_rank(is_async=is_async)
    rank.submit(1, prompt_of(10), 6, fields=SESSION)
    rank.step()
    rank.extend(1, [3, 1, 4], 2)
    rank.extend(1, [5], 3, is_last=True)
    rank.run()
    first = expected(prompt_of(10), 6)
    second = expected(context := prompt_of(10) + first[:-1] + [3, 1, 4], 2)
    third = expected(context + second[:-1] + [5], 3)
    assert rank.tokens[1] == first + second + third
    assert len(rank.turn_ends[1]) == 2
    assert rank.ends[1].reason is FinishReason.LENGTH
    rank.assert_nothing_held()


class Letters:
    """A text decoder: one letter per token."""

    def step(self, token_ids):
        return "".join(chr(0x100 + token) for token in token_ids)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_stop_string_does_not_reach_over_the_end_of_a_turn(is_preempted):
    first = expected(prompt_of(10), 4)
    second = expected([*prompt_of(10), *first[:-1], 3, 1, 4], 8)
    place = next(place for place in range(1, 8) if second[place] not in second[:place])
    across, within = Letters().step([first[-1], second[0]]), Letters().step(second[place - 1 : place + 1])
    assert across not in Letters().step(second)
    rank = Rank(setup={"make_text_decoder": Letters}, num_blocks=17)
    rank.submit(1, prompt_of(10), 4, fields=SESSION, stop=(across, within))
    run_turn(rank)
    assert rank.tokens[1] == first
    if is_preempted:
        rank.submit(2, prompt_of(60, start=2), 4)
        rank.step_until(lambda: 2 in rank.ends)
    rank.extend(1, [3, 1, 4], 8)
    run_turn(rank)
    assert rank.tokens[1] == first + second[: place + 1]
    assert [(end.reason, end.stop_reason) for end in rank.turn_ends[1]] == [
        (FinishReason.LENGTH, None),
        (FinishReason.STOP, within),
    ]


def test_a_session_that_is_over_when_its_turn_ends_has_one_end_and_no_turn_end():
    rank = make_rank()
    rank.submit(1, prompt_of(10), 3, fields=SESSION)
    rank.step()
    rank.extend(1, [], is_last=True)
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(10), 3)
    assert rank.turn_ends[1] == []
    assert rank.ends[1].reason is FinishReason.LENGTH


@pytest.mark.parametrize("is_async", [False, True])
def test_a_turn_that_ends_by_its_end_of_sequence(is_async):
    length = next(length for length in range(1, 40) if EOS in expected(prompt_of(length), 12)[2:])
    right = expected(prompt_of(length), 12)
    first = right[: right.index(EOS) + 1]
    rank = make_rank(is_async=is_async, max_num_batched_tokens=64)
    rank.submit(1, prompt_of(length), 20, ignore_eos=False, fields=SESSION)
    run_turn(rank)
    assert rank.tokens[1] == first
    assert rank.turn_ends[1][0].reason is FinishReason.STOP
    rank.extend(1, [9, 9], 2, is_last=True)
    rank.run()
    second = rank.tokens[1][len(first) :]
    assert second == expected(prompt_of(length) + first[:-1] + [9, 9], len(second))
    rank.assert_nothing_held()


def test_an_idle_session_keeps_its_slot_and_its_blocks_while_others_run():
    rank = make_rank(max_num_seqs=2)
    rank.submit(1, prompt_of(10), 3, fields=SESSION)
    run_turn(rank)
    assert rank.num_held_blocks() == 3
    rank.submit(2, prompt_of(5, start=2), 6)
    rank.submit(3, prompt_of(5, start=3), 3)
    rank.step()
    rank.step()
    assert rank.explain(3).reason == "slots"
    assert rank.explain(1).reason == "input"
    load = rank.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_deferred) == (1, 1, 1)
    rank.step_until(lambda: 3 in rank.ends)
    assert rank.running() == [1]
    assert rank.scheduler.load().num_preemptions == 0
    assert rank.tokens[3] == expected(prompt_of(5, start=3), 3)


def test_idle_sessions_that_hold_every_slot_give_one_up_to_whoever_waits():
    rank = make_rank(max_num_seqs=2)
    rank.submit(1, prompt_of(10), 3, fields=SESSION)
    rank.submit(2, prompt_of(5, start=2), 3, fields=SESSION)
    rank.step_until(lambda: rank.turn_ends[1] and rank.turn_ends[2])
    rank.submit(3, prompt_of(5, start=3), 3)
    rank.step_until(lambda: 3 in rank.ends)
    assert rank.scheduler.load().num_preemptions == 1
    first = {request_id: rank.tokens[request_id][:] for request_id in (1, 2)}
    for request_id in (1, 2):
        rank.extend(request_id, [9], 3, is_last=True)
    rank.run()
    for request_id, length in ((1, 10), (2, 5)):
        context = [*prompt_of(length, start=request_id), *first[request_id][:-1], 9]
        assert rank.tokens[request_id] == first[request_id] + expected(context, 3)


def test_a_rank_with_only_idle_sessions_has_no_work():
    rank = make_rank()
    rank.submit(1, prompt_of(10), 3, fields=SESSION)
    run_turn(rank)
    assert rank.step() is None
    assert not rank.scheduler.has_work()
    rank.extend(1, [3], 1)
    assert rank.scheduler.has_work()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_idle_session_gives_up_its_blocks_only_when_nobody_else_can(is_async):
    rank = make_rank(is_async=is_async, num_blocks=17)
    rank.submit(1, prompt_of(10), 3, fields=SESSION)
    run_turn(rank)
    first = rank.tokens[1][:]
    rank.submit(2, prompt_of(20, start=2), 30)
    rank.submit(3, prompt_of(20, start=3), 10)
    rank.step_until(lambda: rank.scheduler.load().num_preemptions > 0)
    assert rank.running()[0] == 1, "a running request went first"
    rank.step_until(lambda: {2, 3} <= rank.ends.keys())
    rank.submit(4, prompt_of(61, start=4), 3)
    rank.step_until(lambda: 4 in rank.ends)
    assert rank.tokens[4] == expected(prompt_of(61, start=4), 3)
    rank.extend(1, [3, 1, 4], 4, is_last=True)
    rank.run()
    assert rank.tokens[1][3:] == expected(prompt_of(10) + first[:-1] + [3, 1, 4], 4)
    rank.assert_nothing_held()


def test_a_preempted_idle_session_goes_on_when_its_input_comes():
    rank = make_rank(num_blocks=17)
    rank.submit(1, prompt_of(10), 3, fields=SESSION)
    run_turn(rank)
    first = rank.tokens[1][:]
    rank.submit(2, prompt_of(40, start=2), 24)
    rank.step_until(lambda: rank.running() == [2])
    assert rank.state_of(1) == "waiting_for_input"
    assert rank.explain(1).num_preemptions == 1
    rank.extend(1, [3, 1, 4], 4, is_last=True)
    rank.run()
    assert rank.tokens[1][3:] == expected(prompt_of(10) + first[:-1] + [3, 1, 4], 4)
    assert rank.tokens[2] == expected(prompt_of(40, start=2), 24)


def test_a_session_is_preempted_in_the_middle_of_a_turn():
    rank = make_rank(num_blocks=17, preemption_policy="last")
    rank.submit(2, prompt_of(20, start=2), 40)
    rank.submit(1, prompt_of(10), 20, fields=SESSION)
    rank.step_until(lambda: rank.running() == [2])
    rank.extend(1, [3, 1, 4], 4, is_last=True)
    rank.run()
    first = expected(prompt_of(10), 20)
    assert rank.tokens[1] == first + expected(prompt_of(10) + first[:-1] + [3, 1, 4], 4)


def test_a_session_whose_turn_ends_in_flight_while_it_is_preempted_waits_without_a_slot():
    right = expected(prompt_of(10), 40)
    for place in range(2, 30):
        if right[place] in right[:place]:
            continue
        rank = make_rank(is_async=True, num_blocks=17, preemption_policy="last")
        rank.submit(2, prompt_of(20, start=2), 44)
        rank.submit(1, prompt_of(10), 40, fields=SESSION, stop_token_ids=(right[place],))
        for _ in range(place + 2):
            rank.plan()
            drains = bool(rank.scheduler._state.draining)
            if len(rank.in_flight) == 2:
                rank.finish_step()
            if drains and rank.turn_ends[1]:
                assert rank.running() == [2]
                assert rank.state_of(1) == "waiting_for_input"
                rank.extend(1, [5], 3, is_last=True)
                rank.run()
                assert rank.tokens[1] == right[: place + 1] + expected([*prompt_of(10), *right[:place], 5], 3)
                rank.assert_nothing_held()
                return
    raise AssertionError("it never came about")


def test_a_session_that_grows_too_long_ends_with_the_reason():
    rank = make_rank()
    rank.submit(1, prompt_of(40), 3, fields=SESSION)
    run_turn(rank)
    rank.extend(1, prompt_of(30), 3)
    rank.run()
    assert rank.ends[1].reason is FinishReason.ERROR
    assert "max_model_len (64)" in rank.ends[1].message
    rank.assert_nothing_held()


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "message"),
    [([], 3, "prompt is empty"), ([50], 3, "outside"), ([-1], 3, "outside"), ([1], 0, "max_tokens is 0")],
)
def test_bad_input_ends_the_session_with_the_reason(token_ids, max_tokens, message):
    rank = make_rank()
    rank.submit(1, prompt_of(5), 3, fields=SESSION)
    run_turn(rank)
    rank.extend(1, token_ids, max_tokens)
    rank.run()
    assert rank.ends[1].reason is FinishReason.ERROR
    assert message in rank.ends[1].message
    rank.assert_nothing_held()


def test_a_turn_ends_at_the_models_length():
    rank = make_rank()
    rank.submit(1, prompt_of(55), 4, fields=SESSION)
    run_turn(rank)
    rank.extend(1, [1, 2, 3], 20, is_last=True)
    rank.run()
    assert len(rank.tokens[1]) == 4 + 64 - (55 + 3 + 3)
    assert rank.ends[1].reason is FinishReason.LENGTH


@pytest.mark.parametrize("is_preempted", [False, True])
def test_an_idle_session_can_be_aborted(is_preempted):
    rank = make_rank(num_blocks=17)
    rank.submit(1, prompt_of(10), 3, fields=SESSION)
    run_turn(rank)
    if is_preempted:
        rank.submit(2, prompt_of(60, start=2), 4)
        rank.step_until(lambda: 2 in rank.ends)
    rank.abort(1)
    assert rank.ends[1].reason is FinishReason.ABORT
    rank.assert_nothing_held()
    rank.extend(1, [3], 1)
    assert rank.scheduler.num_ignored_messages == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_session_with_too_many_waiting_inputs_ends_with_the_reason(is_async):
    rank = make_rank(is_async=is_async)
    for request_id in (1, 2):
        rank.submit(request_id, prompt_of(10), 8, fields=SESSION)
    rank.step()
    for _ in range(64):
        rank.extend(1, [3], 2)
        rank.extend(2, [3], 2)
    assert rank.ends == {}
    rank.extend(1, [3], 2)
    rank.run()
    assert (rank.ends[1].reason, rank.ends[1].is_request_fault) == (FinishReason.ERROR, True)
    assert rank.ends[1].message.startswith("64 inputs of the session wait for its turn to end, and one more came: send")
    assert len(rank.turn_ends[2]) > 10, "as many as were allowed are taken, until it is too long"
    rank.assert_nothing_held()


def test_only_sessions_can_be_extended():
    rank = make_rank()
    rank.submit(1, prompt_of(10), 3)
    rank.extend(1, [3], 1)
    rank.run()
    assert rank.scheduler.num_ignored_messages == 1
    assert rank.tokens[1] == expected(prompt_of(10), 3)


def test_nothing_can_follow_the_last_input():
    rank = make_rank()
    rank.submit(1, prompt_of(10), 3, fields=SESSION)
    run_turn(rank)
    rank.extend(1, [3], 3, is_last=True)
    rank.extend(1, [4], 3)
    assert rank.scheduler.num_ignored_messages == 1
    rank.run()
    assert len(rank.tokens[1]) == 6


def test_a_session_cannot_have_a_grammar():
    rank = make_rank()
    rank.submit(1, prompt_of(5), 3, fields=SESSION | {"grammar": Grammar(GrammarKind.LARK, "x")})
    rank.run()
    assert "cannot have a grammar" in rank.ends[1].message


def test_turns_are_found_in_the_prefix_cache_and_the_replaced_token_is_not():
    rank = make_rank()
    rank.submit(1, prompt_of(10), 7, fields=SESSION)
    run_turn(rank)
    first = rank.tokens[1][:]
    rank.extend(1, [3, 1, 4], 2, is_last=True)
    rank.run()
    context = prompt_of(10) + first[:-1] + [3, 1, 4]
    rank.submit(2, [*context, 8], 3)
    rank.run()
    assert rank.ends[2].num_cached_tokens == 16
    assert rank.tokens[2] == expected([*context, 8], 3)


def test_extending_a_session_whose_step_failed_is_ignored():
    rank = make_rank()
    rank.submit(1, prompt_of(10), 7, fields=SESSION)
    plan = rank.plan()
    rank.take(rank.scheduler.fail(plan, "out of memory", rank.now))
    rank.extend(1, [3], 1)
    assert rank.ends[1].reason is FinishReason.ERROR
    assert rank.scheduler.num_ignored_messages == 1


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_session_may_have_been_loaded(is_preempted):
    rank = make_rank(connector=SimulatedConnector(), num_blocks=17)
    rank.submit(1, prompt_of(10), 3, fields=SESSION | {"kv_transfer_params": {"external": 8, "is_async": 1}})
    rank.step()
    rank.end_load(1)
    run_turn(rank)
    first = rank.tokens[1][:]
    if is_preempted:
        rank.submit(2, prompt_of(60, start=2), 4)
        rank.step_until(lambda: 2 in rank.ends)
    rank.extend(1, [3, 1, 4], 4, is_last=True)
    for _ in range(10):
        rank.step()
        if (0, 1) in rank.connector.loading:
            rank.end_load(1)
    rank.run()
    assert rank.tokens[1] == first + expected(prompt_of(10) + first[:-1] + [3, 1, 4], 4)
    rank.assert_nothing_held()


def test_a_session_keeps_the_encoder_inputs_of_its_prompt():
    item = EncoderInput(b"cat", 2, 4, b"meow")
    rank = make_rank(is_multimodal_model=True, num_blocks=17)
    rank.submit(1, prompt_of(10), 3, fields=SESSION | {"encoder_inputs": (item,)})
    run_turn(rank)
    first = rank.tokens[1][:]
    assert first == expected(prompt_of(10), 3, encoder_inputs=(item,))
    rank.submit(2, prompt_of(60, start=2), 4)
    rank.step_until(lambda: 2 in rank.ends)
    rank.extend(1, [3, 1, 4], 4, is_last=True)
    rank.run()
    context = prompt_of(10) + first[:-1] + [3, 1, 4]
    assert rank.tokens[1][3:] == expected(context, 4, encoder_inputs=(item,))
