"""Requests that move between ranks, and KV loads that fail in the ways that only real ones do."""

import msgspec
import numpy as np
import pytest

from kv_transfer.connector import LoadFenced, LoadFinished
from rank_scheduler.messages import EncoderInput, FinishReason, Grammar, GrammarKind, Repetition
from rank_scheduler.plan import StepPlan, StepResult
from tests.rank_scheduler.scenario import BLOCK_SIZE, EOS, Rank, expected, prompt_of
from tests.rank_scheduler.simulated_connector import SimulatedConnector


def make_rank(**options):
    return Rank(connector=SimulatedConnector(), **options)


def external(num_tokens, *, is_async=1, **params):
    return {"kv_transfer_params": {"external": num_tokens, "is_async": is_async, **params}}


# ---- ends after the first token ----


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_that_is_handed_off_brings_one_token_and_what_the_connector_says(async_scheduling):
    rank = make_rank(max_num_batched_tokens=8, setup={"async_scheduling": async_scheduling})
    prompt = prompt_of(14)
    rank.submit(1, prompt, 6, fields={"hands_off": True, "kv_transfer_params": {"keep": 1}})
    rank.run()
    assert rank.tokens[1] == expected(prompt, 1)
    assert rank.ends[1].reason is FinishReason.HANDOFF
    assert rank.ends[1].kv_transfer_params == {"external": 14}
    assert rank.num_held_blocks() == 4
    rank.end_send(1)
    rank.run()
    rank.assert_nothing_held()


def test_no_step_is_planned_behind_a_handoff():
    rank = make_rank(setup={"async_scheduling": True})
    rank.submit(1, prompt_of(10), 6, fields={"hands_off": True})
    rank.run()
    assert sum(plan.total_tokens for plan in rank.plans) == 10


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 1}, FinishReason.LENGTH),
        ({"stop_token_ids": True}, FinishReason.STOP),
        ({"max_model_len": 13}, FinishReason.LENGTH),
    ],
)
def test_a_first_token_that_ends_the_request_hands_nothing_off(options, reason):
    prompt = prompt_of(12)
    rank = make_rank(max_model_len=options.pop("max_model_len", 64))
    if options.get("stop_token_ids"):
        options["stop_token_ids"] = (expected(prompt, 1)[0],)
    rank.submit(1, prompt, options.pop("max_tokens", 6), fields={"hands_off": True}, **options)
    rank.run()
    assert rank.ends[1].reason is reason
    assert rank.ends[1].kv_transfer_params is None
    rank.assert_nothing_held()


def test_a_preempted_prompt_is_handed_off_after_its_second_attempt():
    rank = make_rank(policy="priority", max_num_seqs=1, max_num_batched_tokens=8)
    rank.submit(1, prompt_of(20), 4, fields={"hands_off": True, "priority": 1})
    rank.step()
    rank.submit(2, prompt_of(6, start=5), 2)
    rank.run()
    assert rank.ends[1].reason is FinishReason.HANDOFF
    assert rank.tokens[1] == expected(prompt_of(20), 1)
    assert rank.tokens[2] == expected(prompt_of(6, start=5), 2)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_generated", [0, 1, 12, 19])
def test_what_was_generated_elsewhere_is_handed_off_with_the_prompt(async_scheduling, num_generated):
    rank = make_rank(max_num_batched_tokens=7, max_num_seqs=7, setup={"async_scheduling": async_scheduling})
    told = []
    rank.connector.request_computed = lambda key, num_tokens, table: told.append(num_tokens)
    rank.connector.partial_ticket = lambda key, num_tokens, table: None
    tokens = prompt_of(22 - num_generated)
    tokens += expected(tokens, 19)[:num_generated]
    rank.submit(1, tokens, 60, fields={"hands_off": True, "num_generated": num_generated})
    rank.run()
    assert rank.ends[1].reason is FinishReason.HANDOFF
    assert told == [7, 14, 21, 22]


# ---- handed off as it stands, since the rank leaves ----


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_whatever_runs_is_handed_off_with_what_is_computed(async_scheduling, num_tokens):
    rank = make_rank(setup={"async_scheduling": async_scheduling})
    prompt = prompt_of(10)
    rank.submit(1, prompt, 20, fields={"kv_transfer_params": {"keep": 1}})
    rank.submit(2, prompt_of(6, start=5), 20)
    rank.step_until(lambda: len(rank.tokens[1]) == num_tokens)
    if async_scheduling:
        rank.plan()
    rank.hand_off(1)
    assert rank.ends[1].reason is FinishReason.HANDOFF
    generated = expected(prompt, 20)[:num_tokens]
    assert rank.tokens[1] == generated
    # All but the last token, whose step is yet to come.
    num_computed = len(prompt) + num_tokens - 1 if num_tokens else 0
    assert rank.connector.num_computed_at_end[0, 1] == num_computed
    rank.run()
    assert rank.tokens[2] == expected(prompt_of(6, start=5), 20)
    assert rank.tokens[1] == generated
    if num_tokens:
        assert rank.num_held_blocks() == -(-(num_computed + 1) // BLOCK_SIZE)
    rank.end_send(1)
    rank.run()
    rank.assert_nothing_held()
    assert generated + goes_on(prompt, generated, 20) == expected(prompt, 20)


def goes_on(prompt, generated, max_tokens):
    """What another rank makes of it."""
    rank = make_rank()
    rank.submit(1, prompt + generated, max_tokens, fields={"num_generated": len(generated)})
    rank.run()
    return rank.tokens[1]


@pytest.mark.parametrize("where", ["queued", "preempted", "loading", "for its grammar"])
def test_what_waits_is_handed_off_without_kv(where):
    rank = make_rank(policy="priority", max_num_seqs=1)
    fields = {"priority": 1}
    if where == "loading":
        fields |= external(8)
    if where == "for its grammar":
        fields["grammar"] = Grammar(GrammarKind.JSON_OBJECT)
    if where == "queued":
        rank.submit(2, prompt_of(6, start=5), 8)
    rank.submit(1, prompt_of(12), 8, fields=fields)
    rank.step()
    if where == "preempted":
        rank.submit(2, prompt_of(6, start=5), 8)
        rank.step()
    rank.hand_off(1)
    assert (rank.ends[1].reason, rank.ends[1].message) == (FinishReason.HANDOFF, "")
    assert rank.connector.num_computed_at_end[0, 1] == 0
    if where == "loading":
        rank.end_load(1)
    rank.run()
    rank.assert_nothing_held()


def test_an_abort_lets_go_of_what_was_handed_off_and_of_nothing_else():
    rank = make_rank()
    rank.submit(1, prompt_of(10), 6, fields={"hands_off": True, "kv_transfer_params": {"keep": 1}})
    rank.run()
    rank.hand_off(1)
    assert rank.connector.given_up == []
    rank.abort(1)
    rank.abort(2)
    assert rank.connector.given_up == [(0, 1)]
    assert rank.num_held_blocks() == 3
    rank.end_send(1)
    rank.abort(1)
    assert rank.connector.given_up == [(0, 1)]
    rank.assert_nothing_held()
    assert rank.scheduler.num_ignored_messages == 3


# ---- goes on behind what another rank has generated ----


@pytest.mark.parametrize("num_generated", [1, 3, 7])
def test_a_request_goes_on_where_another_rank_has_left_it(num_generated):
    prompt = prompt_of(10)
    whole = expected(prompt, 8)
    rank = make_rank()
    rank.submit(1, prompt + whole[:num_generated], 8, fields={"num_generated": num_generated})
    rank.run()
    assert rank.tokens[1] == whole[num_generated:]
    assert rank.ends[1].reason is FinishReason.LENGTH


def test_only_tokens_of_the_prompt_count_as_such():
    prompt = prompt_of(10)
    rank = make_rank()
    rank.submit(1, prompt + expected(prompt, 4), 8, fields={"num_generated": 4})
    rank.run()
    assert rank.scheduler.load().num_prompt_tokens == 10


def test_only_tokens_of_the_prompt_count_as_cached():
    prompt = prompt_of(10)
    tokens = prompt + expected(prompt, 10)
    rank = make_rank()
    for number in (1, 2):
        rank.submit(number, tokens, 12, fields={"num_generated": 10})
        rank.run()
    assert [rank.ends[number].num_cached_tokens for number in (1, 2)] == [0, 10]


def test_with_the_kv_of_its_prompt_it_computes_one_token():
    prompt = prompt_of(12)
    whole = expected(prompt, 5)
    rank = make_rank()
    rank.submit(1, prompt + whole[:1], 5, fields={"num_generated": 1} | external(12))
    rank.step()
    rank.end_load(1)
    assert rank.step().num_tokens.tolist() == [1]
    rank.run()
    assert rank.tokens[1] == whole[1:]


def test_min_tokens_count_from_where_the_prompt_ended():
    """The runner keeps EOS away by the length of the prompt, not by that of what was submitted."""
    prompt = next(p for p in map(prompt_of, range(4, 60)) if EOS in expected(p, 4)[1:])
    first = expected(prompt, 1)
    alone, moved = make_rank(), make_rank()
    alone.submit(1, prompt, 4, min_tokens=4, ignore_eos=False)
    moved.submit(1, prompt + first, 4, fields={"num_generated": 1}, min_tokens=4, ignore_eos=False)
    alone.run()
    moved.run()
    assert alone.tokens[1] == first + moved.tokens[1]
    assert EOS not in moved.tokens[1][:2]


def test_repetition_is_seen_over_what_was_generated_elsewhere():
    rank = make_rank()
    prompt = prompt_of(6)
    whole = expected(prompt, 3)
    generated = [*whole[:1], *([9] * 3)]
    rank.submit(1, prompt + generated, 40, fields={"num_generated": 4}, repetition=Repetition(1, 4))
    rank.run()
    assert len(rank.tokens[1]) <= 40


@pytest.mark.parametrize(
    ("fields", "max_tokens", "named"),
    [
        ({"num_generated": 6}, 8, "num_generated is 6 of 6 tokens"),
        ({"num_generated": 4}, 4, "num_generated is 4, and max_tokens 4"),
        ({"num_generated": 1, "is_session": True}, 4, "num_generated"),
        ({"hands_off": True, "is_session": True}, 4, "hands_off"),
    ],
)
def test_what_cannot_move_is_refused(fields, max_tokens, named):
    rank = make_rank()
    rank.submit(1, prompt_of(6), max_tokens, fields=fields)
    rank.run()
    assert rank.ends[1].reason is FinishReason.ERROR
    assert rank.ends[1].is_request_fault
    assert named in rank.ends[1].message


# ---- loads that end without a fence ----


def unfenced(rank, request_id):
    rank.connector.loading.pop((0, request_id))
    rank.scheduler.load_finished(LoadFinished((0, request_id), 0, "timeout", is_fenced=False), rank.now)
    rank.scheduler.check_integrity()


def test_blocks_without_a_fence_are_nobodys_until_it_comes():
    rank = make_rank()
    prompt = prompt_of(14)
    rank.submit(1, prompt, 4, fields=external(12))
    rank.step()
    held = set(rank.sequence(1).blocks.ravel().tolist())
    unfenced(rank, 1)
    plan = rank.step()
    assert not held & set(plan.new_sequences[0].block_ids.ravel().tolist())
    rank.run()
    assert rank.tokens[1] == expected(prompt, 4)
    assert rank.num_held_blocks() == len(held)
    rank.scheduler.load_fenced(LoadFenced((0, 1)), rank.now)
    rank.run()
    rank.assert_nothing_held()
    rank.scheduler.load_fenced(LoadFenced((0, 1)), rank.now)
    assert rank.scheduler.num_ignored_messages == 1


def test_a_load_of_an_aborted_request_is_quarantined_until_the_fence():
    rank = make_rank()
    rank.submit(1, prompt_of(14), 4, fields=external(12))
    rank.step()
    rank.abort(1)
    unfenced(rank, 1)
    assert rank.num_held_blocks() == 4
    rank.scheduler.load_fenced(LoadFenced((0, 1)), rank.now)
    rank.assert_nothing_held()


def test_with_the_policy_fail_the_fence_still_counts():
    rank = make_rank(kv_load_failure_policy="fail")
    rank.submit(1, prompt_of(14), 4, fields=external(12))
    rank.step()
    unfenced(rank, 1)
    rank.run()
    assert rank.ends[1].reason is FinishReason.ERROR
    assert rank.num_held_blocks() == 4
    rank.scheduler.load_fenced(LoadFenced((0, 1)), rank.now)
    rank.assert_nothing_held()


# ---- synchronous loads that did not fill their blocks ----


class LossyRank(Rank):
    """The columns in `lose` of a request's synchronous load do not arrive, once."""

    def __init__(self, **options):
        super().__init__(connector=SimulatedConnector(), **options)
        self.lose: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        invalid: set[int] = set()
        for new in plan.new_sequences:
            for columns in [self.lose.pop(len(new.token_ids), [])]:
                invalid |= set(new.block_ids[:, columns].ravel().tolist())
        if invalid:
            hooks = self.runner.kv_hooks
            real = hooks.start_load_kv

            def wrecked(metadata: object) -> None:
                real(metadata)
                self.runner._kv[sorted(invalid)] = 12345

            hooks.start_load_kv = wrecked
            result = super().execute(plan)
            hooks.start_load_kv = real
            return msgspec.structs.replace(result, invalid_blocks=frozenset(invalid))
        return super().execute(plan)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("columns", [[0], [1], [2], [0, 2]])
def test_what_a_synchronous_load_lost_is_computed_again(columns, async_scheduling):
    rank = LossyRank(setup={"async_scheduling": async_scheduling})
    prompt = prompt_of(15)
    rank.lose = {15: columns}
    rank.submit(1, prompt, 5, fields=external(12, is_async=0))
    rank.submit(2, prompt_of(6, start=3), 5)
    rank.run()
    assert rank.tokens[1] == expected(prompt, 5)
    assert rank.tokens[2] == expected(prompt_of(6, start=3), 5)
    assert rank.scheduler.take_stats().num_failed_loads == 1
    computed = sum(int(n) for plan in rank.plans for n in plan.num_tokens)
    # The valid prefix was not computed again.
    assert computed <= (3 + 4) + (15 - 4 * columns[0] + 4) + (6 + 4) + 2
    rank.assert_nothing_held()


def test_whoever_shared_what_was_lost_starts_again_as_well():
    rank = LossyRank()
    prompt = prompt_of(15)
    rank.lose = {15: [1]}
    rank.submit(1, prompt, 4, fields=external(12, is_async=0))
    rank.submit(2, [*prompt[:12], 8, 9, 10, 11], 4)
    rank.run()
    assert rank.tokens[1] == expected(prompt, 4)
    assert rank.tokens[2] == expected([*prompt[:12], 8, 9, 10, 11], 4)
    rank.submit(3, [*prompt[:12], 30], 3)
    rank.run()
    assert rank.tokens[3] == expected([*prompt[:12], 30], 3)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("keeps", [0, 1])
def test_who_has_left_meanwhile_leaves_nothing_lost_behind(async_scheduling, keeps):
    rank = LossyRank(setup={"async_scheduling": async_scheduling})
    prompt = prompt_of(15)
    rank.lose = {15: [1]}
    rank.submit(1, prompt, 4, fields=external(12, is_async=0, keep=keeps))
    rank.plan()
    rank.abort(1)
    while rank.in_flight:
        rank.finish_step()
    rank.submit(2, prompt, 4)
    rank.run()
    assert rank.tokens[2] == expected(prompt, 4)
    if keeps:
        rank.end_send(1)
    rank.run()
    rank.assert_nothing_held()


def test_with_the_policy_fail_a_lost_block_ends_its_request_only():
    rank = LossyRank(kv_load_failure_policy="fail")
    rank.lose = {15: [1]}
    rank.submit(1, prompt_of(15), 4, fields=external(12, is_async=0))
    rank.submit(2, prompt_of(6, start=3), 4)
    rank.run()
    assert rank.ends[1].reason is FinishReason.ERROR
    assert "could not be loaded" in rank.ends[1].message
    assert rank.tokens[2] == expected(prompt_of(6, start=3), 4)
    rank.assert_nothing_held()


def test_a_token_computed_on_what_was_lost_does_not_reach_one_that_was_preempted_meanwhile():
    rank = LossyRank(policy="priority", max_num_seqs=1, setup={"async_scheduling": True})
    prompt = prompt_of(15)
    rank.lose = {15: [1]}
    rank.submit(1, prompt, 4, fields=external(12, is_async=0) | {"priority": 1})
    rank.plan()
    rank.submit(2, prompt_of(6, start=3), 4)
    rank.plan()
    assert rank.state_of(1) == "preempted"
    rank.run()
    assert rank.tokens[1] == expected(prompt, 4)
    assert rank.tokens[2] == expected(prompt_of(6, start=3), 4)
    rank.assert_nothing_held()


def test_a_session_between_two_turns_loses_what_is_invalid_and_goes_on():
    rank = make_rank()
    prompt = prompt_of(9)
    rank.submit(1, prompt, 4, fields={"is_session": True})
    rank.step_until(lambda: rank.turn_ends[1])
    rank.submit(2, prompt_of(6, start=3), 4)
    execute, table = rank.execute, rank.scheduler._state.batch.table(rank.sequence(1).slot)
    invalid = frozenset(table.ravel().tolist())
    rank.execute = lambda plan: msgspec.structs.replace(execute(plan), invalid_blocks=invalid)
    rank.step()
    rank.execute = execute
    assert rank.state_of(1) == "waiting_for_input"
    rank.extend(1, [5, 6], 3, is_last=True)
    rank.run()
    assert rank.tokens[1][4:] == expected([*prompt, *rank.tokens[1][:3], 5, 6], 3)
    assert rank.tokens[2] == expected(prompt_of(6, start=3), 4)
    rank.assert_nothing_held()


def test_nothing_is_loaded_for_a_model_with_encoder_and_decoder():
    """Its prompt's KV is that of one encoder output, whose blocks no load fills."""
    rank = make_rank(
        is_encoder_decoder=True,
        is_multimodal_model=True,
        enable_chunked_prefill=False,
        disable_chunked_mm_input=True,
        max_num_batched_tokens=64,
    )
    item = EncoderInput(b"item", 0, 5, b"data")
    for request_id, is_async in enumerate((0, 1)):
        fields = {"encoder_inputs": (item,)} | external(8, is_async=is_async)
        rank.submit(request_id, prompt_of(10), 4, fields=fields)
    rank.run()
    for request_id in range(2):
        assert rank.tokens[request_id] == expected(prompt_of(10), 4, cross_inputs=(item,))
    rank.assert_nothing_held()


def test_unknown_invalid_blocks_concern_nobody():
    rank = make_rank()
    rank.submit(1, prompt_of(6), 3)
    execute = rank.execute
    rank.execute = lambda plan: msgspec.structs.replace(execute(plan), invalid_blocks=frozenset({60}))
    rank.run()
    assert rank.tokens[1] == expected(prompt_of(6), 3)
    assert np.all(rank.plans[0].num_tokens == 6)
