"""The scheduler with the simulated runner, whose tokens are right only if every block held what it should."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner import simulated
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.messages import FinishReason, SamplingParams, Submit
from rank_scheduler.plan import StepResult
from tests.engine import Engine

VOCAB_SIZE = 50
EOS = 7


def expected_tokens(prompt, num_tokens):
    return simulated.expected_tokens(prompt, num_tokens, VOCAB_SIZE)


def make_engine(num_blocks=64, block_size=4, max_model_len=64, budget=32, max_num_seqs=8, head_bypasses=8, **options):
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_head_bypasses=head_bypasses)
    runner = simulated.SimulatedRunner(
        scheduler=config,
        cache=CacheConfig(num_blocks=num_blocks, block_size=block_size),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
    )
    return Engine(runner, config, **options)


def prompt_of(length, start=1):
    return [(start + 7 * index) % VOCAB_SIZE for index in range(length)]


def test_one_request_gets_its_tokens_and_one_end():
    engine = make_engine()
    engine.submit(1, prompt_of(5), max_tokens=6)
    engine.run()
    assert engine.tokens[1] == expected_tokens(prompt_of(5), 6)
    assert engine.ends[1].reason is FinishReason.LENGTH


def test_a_long_prompt_is_cut_by_the_budget_and_yields_one_token_at_its_end():
    engine = make_engine(budget=8)
    engine.submit(1, prompt_of(20), max_tokens=2)
    engine.run()
    assert [plan.num_tokens.tolist() for plan in engine.plans] == [[8], [8], [4], [1]]
    assert [plan.samples.tolist() for plan in engine.plans] == [[False], [False], [True], [True]]
    assert engine.tokens[1] == expected_tokens(prompt_of(20), 2)


def test_decoding_sequences_come_before_new_prompts_within_one_budget():
    engine = make_engine(budget=10)
    engine.submit(1, prompt_of(4), max_tokens=20)
    engine.step()
    engine.submit(2, prompt_of(30, start=3), max_tokens=2)
    plan = engine.step()
    assert plan.num_tokens.tolist() == [1, 9]


def test_equal_prefixes_are_computed_once_even_in_the_same_step():
    engine = make_engine()
    engine.submit(1, prompt_of(18), max_tokens=4)
    engine.submit(2, prompt_of(18), max_tokens=4)
    plan = engine.step()
    assert plan.num_tokens.tolist() == [18, 2]
    engine.run()
    assert engine.tokens[1] == engine.tokens[2] == expected_tokens(prompt_of(18), 4)
    assert (engine.ends[1].num_cached_tokens, engine.ends[2].num_cached_tokens) == (0, 16)


def test_a_full_hit_recomputes_one_token_in_a_copy_of_the_last_block():
    engine = make_engine()
    engine.submit(1, prompt_of(16), max_tokens=4)
    engine.run()
    engine.submit(2, prompt_of(16), max_tokens=4)
    plan = engine.step()
    assert plan.num_tokens.tolist() == [1]
    assert len(plan.block_copies) == 1
    engine.run()
    assert engine.tokens[2] == expected_tokens(prompt_of(16), 4)
    assert engine.ends[2].num_cached_tokens == 15


def test_a_full_hit_on_a_block_of_this_very_step_is_not_copied():
    engine = make_engine()
    engine.submit(1, prompt_of(16), max_tokens=4)
    engine.submit(2, prompt_of(16), max_tokens=4)
    plan = engine.step()
    assert plan.block_copies == []
    assert plan.num_tokens.tolist() == [16, 4]
    engine.run()
    assert engine.tokens[1] == engine.tokens[2] == expected_tokens(prompt_of(16), 4)


def test_generated_blocks_are_found_by_a_following_turn():
    engine = make_engine()
    engine.submit(1, prompt_of(6), max_tokens=10)
    engine.run()
    engine.submit(2, prompt_of(6) + engine.tokens[1] + [5], max_tokens=1)
    engine.run()
    # The last generated token was never an input, so its position is not computed: 15 positions, 3 full blocks.
    assert engine.ends[2].num_cached_tokens == 12


def test_without_prefix_caching_nothing_is_shared():
    engine = make_engine(enable_prefix_caching=False)
    engine.submit(1, prompt_of(12))
    engine.run()
    engine.submit(2, prompt_of(12))
    engine.run()
    assert engine.ends[2].num_cached_tokens == 0
    assert engine.tokens[2] == engine.tokens[1]


def test_running_out_of_blocks_preempts_and_every_token_stays_right():
    engine = make_engine(num_blocks=11, max_model_len=40)
    for request in range(4):
        engine.submit(request, prompt_of(9, start=request), max_tokens=20)
    engine.run()
    assert engine.scheduler.load().num_preemptions > 0
    for request in range(4):
        assert engine.tokens[request] == expected_tokens(prompt_of(9, start=request), 20)


def test_the_victim_is_who_loses_least_computed_work():
    engine = make_engine(num_blocks=9, max_model_len=32, enable_prefix_caching=False)
    engine.submit(1, prompt_of(4), max_tokens=20)
    engine.step()
    engine.submit(2, prompt_of(20, start=2), max_tokens=8)
    for _ in range(20):
        if engine.scheduler.load().num_preemptions:
            break
        engine.step()
    assert set(engine.ends) == set()
    assert engine.scheduler.load().num_running == 1
    survivor = {int(wire_id) for wire_id in engine.scheduler._state.batch.wire_id[engine.scheduler._state.batch.order]}
    assert survivor == {2}
    engine.run()
    assert engine.tokens[1] == expected_tokens(prompt_of(4), 20)


def test_later_requests_pass_a_head_that_does_not_fit_a_bounded_number_of_times():
    engine = make_engine(num_blocks=17, max_model_len=64, max_num_seqs=4, head_bypasses=3, enable_prefix_caching=False)
    engine.submit(0, prompt_of(20), max_tokens=40)
    engine.step()
    engine.submit(1, prompt_of(56, start=2), max_tokens=1)
    for request in range(2, 12):
        engine.submit(request, prompt_of(4, start=request), max_tokens=2)
    engine.run()
    ended = list(engine.ends)
    assert ended.index(1) <= 4 + 1, f"the head was passed too often: {ended}"
    assert any(ended.index(request) < ended.index(1) for request in range(2, 12))


def test_no_request_passes_the_head_when_bypasses_are_off():
    engine = make_engine(num_blocks=17, max_model_len=64, max_num_seqs=4, head_bypasses=0, enable_prefix_caching=False)
    engine.submit(0, prompt_of(20), max_tokens=20)
    engine.step()
    engine.submit(1, prompt_of(56, start=2), max_tokens=1)
    engine.submit(2, prompt_of(4, start=3), max_tokens=1)
    engine.run()
    assert list(engine.ends) == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "prompt is empty"),
        (prompt_of(64), 1, "max_model_len"),
        ([VOCAB_SIZE], 1, "token ids outside"),
        ([-1], 1, "token ids outside"),
        ([1], 0, "max_tokens is 0"),
    ],
)
def test_impossible_requests_are_refused_when_added(prompt, max_tokens, message):
    engine = make_engine()
    engine.submit(1, prompt, max_tokens=max_tokens)
    engine.run()
    assert engine.ends[1].reason is FinishReason.ERROR
    assert message in engine.ends[1].message
    assert engine.tokens[1] == []


def test_a_broken_token_buffer_is_refused():
    engine = make_engine()
    engine.scheduler.add(0, Submit(1, b"abc", SamplingParams(seed=0, max_tokens=1)), 0.0)
    engine.run()
    assert "not a whole number" in engine.ends[1].message


def test_generation_ends_at_the_models_length():
    engine = make_engine(max_model_len=32)
    engine.submit(1, prompt_of(30), max_tokens=100)
    engine.run()
    assert len(engine.tokens[1]) == 2
    assert engine.ends[1].reason is FinishReason.LENGTH


def test_a_pool_smaller_than_the_longest_sequence_is_refused():
    with pytest.raises(ValueError, match=r"max_model_len \(64\); raise num_blocks to at least 17"):
        make_engine(num_blocks=16, max_model_len=64)


def test_stop_by_end_of_sequence_token_id_and_string():
    tokens = expected_tokens(prompt_of(5), 8)

    class Letters:
        def step(self, token_ids):
            return "".join(chr(0x4E00 + token) for token in token_ids)

    engine = make_engine(make_text_decoder=Letters)
    text = Letters().step(tokens)
    engine.submit(1, prompt_of(5), max_tokens=8, stop_token_ids=(tokens[3],))
    engine.submit(2, prompt_of(5), max_tokens=8, stop=(text[1:3], "never"))
    engine.run()
    assert (engine.tokens[1], engine.ends[1].stop_reason) == (tokens[: tokens.index(tokens[3]) + 1], tokens[3])
    assert engine.ends[1].reason is engine.ends[2].reason is FinishReason.STOP
    assert (engine.tokens[2], engine.ends[2].stop_reason) == (tokens[:3], text[1:3])


def test_end_of_sequence_stops_unless_ignored():
    prompt = next(prompt for start in range(2000) if EOS in expected_tokens(prompt := prompt_of(5, start=start), 8)[1:])
    tokens = expected_tokens(prompt, 8)
    engine = make_engine()
    engine.submit(1, prompt, max_tokens=8, ignore_eos=False)
    engine.submit(2, prompt, max_tokens=8, ignore_eos=True)
    engine.run()
    assert engine.tokens[1] == tokens[: tokens.index(EOS) + 1]
    assert (engine.ends[1].reason, engine.ends[1].stop_reason) == (FinishReason.STOP, None)
    assert engine.tokens[2] == tokens


def test_aborts_free_everything_at_once_wherever_the_request_is():
    engine = make_engine(budget=8, max_num_seqs=2)
    for request in range(4):
        engine.submit(request, prompt_of(20, start=request), max_tokens=4)
    engine.step()
    for request in (0, 3, 1):
        engine.scheduler.abort(0, request, engine.now)
        engine.scheduler.check_integrity()
    engine.scheduler.abort(0, 99, engine.now)
    engine.scheduler.abort(0, 0, engine.now)
    assert engine.scheduler.num_ignored_messages == 2
    engine.run()
    assert {request for request, end in engine.ends.items() if end.reason is FinishReason.ABORT} == {0, 1, 3}
    assert engine.tokens[2] == expected_tokens(prompt_of(20, start=2), 4)
    load = engine.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 0, 0)
    assert load.num_free_blocks == load.num_blocks


def test_losing_an_owner_ends_its_requests_and_no_others():
    engine = make_engine()
    engine.submit(1, prompt_of(5), owner=1)
    engine.submit(2, prompt_of(5, start=2), owner=2)
    engine.submit(3, [], owner=1)
    engine.step()
    engine.submit(4, prompt_of(9), owner=1)
    engine.scheduler.drop_owner(1, engine.now)
    engine.run()
    assert engine.tokens[2] == expected_tokens(prompt_of(5, start=2), 8)
    assert 4 not in engine.ends
    assert engine.scheduler.load().num_free_blocks == engine.scheduler.load().num_blocks


def test_a_duplicate_submit_is_counted_and_ignored():
    engine = make_engine()
    engine.submit(1, prompt_of(5), max_tokens=3)
    engine.submit(1, prompt_of(9), max_tokens=7)
    engine.run()
    assert engine.tokens[1] == expected_tokens(prompt_of(5), 3)
    assert engine.scheduler.num_ignored_messages == 1


def test_each_owner_gets_its_own_tokens_in_one_frame():
    engine = make_engine()
    engine.submit(7, prompt_of(5), owner=1)
    engine.submit(7, prompt_of(6, start=2), owner=2)
    engine.submit(8, prompt_of(7, start=3), owner=2)
    plan = engine.scheduler.schedule(1.0)
    frames = engine.scheduler.update(plan, engine.runner.execute(plan), 1.0)
    assert sorted(frames) == [1, 2]
    assert frames[1].ids == frames[1].first_token_ids == [7]
    assert frames[2].ids == frames[2].first_token_ids == [7, 8]
    assert frames[2].tokens == [
        expected_tokens(prompt_of(6, start=2), 1)[0],
        expected_tokens(prompt_of(7, start=3), 1)[0],
    ]


def test_a_failed_row_ends_its_request_alone_and_leaves_nothing_in_the_prefix_cache():
    engine = make_engine()
    engine.submit(1, prompt_of(12), max_tokens=3)
    engine.submit(2, prompt_of(5, start=2), max_tokens=3)
    plan = engine.scheduler.schedule(1.0)
    result = engine.runner.execute(plan)
    tokens = result.tokens.copy()
    tokens[0] = -1
    engine.take(engine.scheduler.update(plan, StepResult(tokens, failed={0: "logits are not finite"}), 1.0))
    engine.run()
    assert engine.ends[1].reason is FinishReason.ERROR
    assert engine.tokens[2] == expected_tokens(prompt_of(5, start=2), 3)
    engine.submit(3, prompt_of(12), max_tokens=3)
    engine.run()
    assert engine.ends[3].num_cached_tokens == 0
    assert engine.tokens[3] == expected_tokens(prompt_of(12), 3)


def test_a_failed_step_leaves_nothing_of_itself_in_the_prefix_cache():
    engine = make_engine()
    engine.submit(1, prompt_of(12), max_tokens=3)
    plan = engine.scheduler.schedule(1.0)
    engine.take(engine.scheduler.fail(plan, "the model step failed", 1.0))
    engine.scheduler.check_integrity()
    assert engine.ends[1].reason is FinishReason.ERROR
    engine.submit(2, prompt_of(12), max_tokens=3)
    engine.run()
    assert engine.ends[2].num_cached_tokens == 0
    assert engine.tokens[2] == expected_tokens(prompt_of(12), 3)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    num_blocks=st.integers(9, 24),
    budget=st.integers(4, 40),
    max_num_seqs=st.integers(1, 4),
    caching=st.booleans(),
)
def test_any_mix_of_arrivals_and_aborts_drains_with_the_right_tokens(data, num_blocks, budget, max_num_seqs, caching):
    engine = make_engine(
        num_blocks=num_blocks,
        max_model_len=32,
        budget=budget,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caching,
    )
    # Few different beginnings, so that prefixes are shared, fully and in part.
    requests = data.draw(
        st.lists(st.tuples(st.integers(1, 31), st.integers(1, 3), st.integers(1, 30)), min_size=1, max_size=14)
    )
    aborted = set()
    for request, (length, start, max_tokens) in enumerate(requests):
        engine.submit(request, prompt_of(length, start), max_tokens=max_tokens)
        for _ in range(data.draw(st.integers(0, 4))):
            engine.step()
        if data.draw(st.integers(0, 5)) == 0:
            victim = data.draw(st.integers(0, request))
            engine.scheduler.abort(0, victim, engine.now)
            engine.scheduler.check_integrity()
            aborted.add(victim)
    engine.run()
    for request, (length, start, max_tokens) in enumerate(requests):
        tokens = expected_tokens(prompt_of(length, start), min(max_tokens, 32 - length))
        if engine.ends[request].reason is FinishReason.ABORT:
            assert request in aborted
            assert engine.tokens[request] == tokens[: len(engine.tokens[request])]
        else:
            assert engine.tokens[request] == tokens
    load = engine.scheduler.load()
    assert load.num_free_blocks == load.num_blocks


def test_a_steady_decode_step_touches_no_sequence():
    """The step's plan is a delta: no new sequence, no block, only arrays."""
    engine = make_engine(num_blocks=200, block_size=16, max_model_len=64)
    for request in range(8):
        engine.submit(request, prompt_of(3, start=request), max_tokens=40)
    engine.step()
    engine.step()
    plan = engine.step()
    assert plan.num_tokens.tolist() == [1] * 8
    assert (plan.new_sequences, plan.freed_slots, plan.block_copies) == ([], [], [])
    assert not len(plan.appended_blocks)
    assert plan.slots.dtype == plan.num_tokens.dtype == np.int32


def test_scheduler_is_a_pure_value_of_its_inputs():
    """Two schedulers fed alike decide alike, step by step."""
    engines = [make_engine(num_blocks=11, max_model_len=40) for _ in range(2)]
    for engine in engines:
        for request in range(5):
            engine.submit(request, prompt_of(9, start=request % 2), max_tokens=18)
        engine.run()
    first, second = ([(p.slots.tolist(), p.num_tokens.tolist(), p.freed_slots) for p in e.plans] for e in engines)
    assert first == second


def test_the_configuration_refuses_a_budget_below_the_slots():
    with pytest.raises(ValueError, match=r"raise max_num_batched_tokens or lower max_num_seqs"):
        SchedulerConfig(max_num_batched_tokens=4, max_num_seqs=8)
    with pytest.raises(ValueError, match="max_num_sequences"):
        SchedulerConfig(max_num_sequences=4)
