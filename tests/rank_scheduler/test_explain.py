"""Why a request waits, with figures that are right to the number, and what became of it so far."""

import re

import pytest

from rank_scheduler.explanation import _WORDS
from rank_scheduler.interface import PauseState
from rank_scheduler.messages import Extend, FinishReason, Grammar, GrammarKind
from rank_scheduler.rank_state import NUM_REMEMBERED
from rank_scheduler.sequence import WaitReason
from tests.rank_scheduler.small_engine import SmallEngine, item, prompt_of, tokens_after


def submit(engine: SmallEngine, request: int, length: int, max_tokens: int = 8, **fields: object) -> None:
    engine.submit(request, prompt_of(length, start=request), max_tokens=max_tokens, fields=fields)


def plan_step(engine: SmallEngine) -> None:
    """Plan the next step without executing it, so that figures are those of the pass itself."""
    engine.now += 1
    plan = engine.scheduler.schedule(engine.now)
    assert plan is not None
    engine.in_flight.append(plan)


def assert_waits(
    engine: SmallEngine, request: int, reason: WaitReason, message: str, figures: dict[str, int], position: int = 0
) -> None:
    found = engine.explain(request)
    assert (found.reason, found.message) == (reason, message)
    assert (found.figures, found.position) == (figures, position)


def events(engine: SmallEngine, request: int) -> list[str]:
    return [entry.event for entry in engine.explain(request).timeline]


def causes(engine: SmallEngine, request: int) -> dict[str, str]:
    """Of each kind of event the latest cause."""
    return {entry.event: entry.cause for entry in engine.explain(request).timeline}


# ---- why ----


def test_new():
    engine = SmallEngine()
    submit(engine, 1, 5)
    submit(engine, 2, 5)
    assert_waits(engine, 1, WaitReason.NEW, "no step has been planned since it was queued", {})
    assert_waits(engine, 2, WaitReason.NEW, "no step has been planned since it was queued", {}, position=1)


def test_new_ends_with_the_next_step_also_for_a_head_that_no_pass_comes_to():
    engine = SmallEngine(max_num_seqs=1)
    submit(engine, 0, 5)
    engine.step()
    submit(engine, 1, 5)
    assert engine.explain(1).reason == WaitReason.NEW
    engine.step()
    assert engine.explain(1).reason == WaitReason.SLOTS


def test_slots():
    engine = SmallEngine(max_num_seqs=4, max_num_active_seqs=2)
    for request in range(4):
        submit(engine, request, 5)
    engine.step()
    engine.step()
    assert_waits(engine, 2, WaitReason.SLOTS, "all slots are taken: 2 of 2", {"num_active": 2, "limit": 2})


def test_behind():
    engine = SmallEngine(max_num_seqs=1)
    for request in range(4):
        submit(engine, request, 5)
    engine.step()
    for request, position in ((2, 1), (3, 2)):
        message = f"it waits its turn: {position} in the queue come before it"
        figures = {"position": position, "ahead_num_active": 1, "ahead_limit": 1}
        assert_waits(engine, request, WaitReason.BEHIND, message, figures, position)


@pytest.mark.parametrize("watermark", [0.0, 0.1])
def test_blocks(watermark):
    engine = SmallEngine(num_blocks=21, watermark=watermark, setup={"enable_prefix_caching": False})
    submit(engine, 0, 40, max_tokens=10)
    plan_step(engine)
    engine.finish_step()
    submit(engine, 1, 46)
    plan_step(engine)
    kept = int(watermark * 21)
    message = f"it needs 12 KV blocks; 9 are free, and {kept} of them are kept (watermark, promises to running prompts)"
    assert_waits(engine, 1, WaitReason.BLOCKS, message, {"num_needed": 12, "num_free": 9, "num_kept_free": kept})


def test_blocks_of_a_load_leave_those_that_running_prompts_were_promised():
    engine = SmallEngine(num_blocks=21, with_connector=True, max_num_batched_tokens=8, scheduler_reserve_full_isl=False)
    submit(engine, 0, 40)
    engine.step()
    submit(engine, 1, 40, kv_transfer_params={"external": 40, "is_async": 1})
    engine.step()
    assert engine.explain(1).reason == WaitReason.LOADING
    submit(engine, 2, 4, kv_transfer_params={"external": 4, "is_async": 1})
    plan_step(engine)
    # The load has 10 of 20 blocks; request 0 has 6 after this step, and was promised 10.
    message = "it needs 1 KV blocks; 4 are free, and 4 of them are kept (watermark, promises to running prompts)"
    assert_waits(engine, 2, WaitReason.BLOCKS, message, {"num_needed": 1, "num_free": 4, "num_kept_free": 4})


def test_budget():
    engine = SmallEngine(max_num_batched_tokens=8)
    submit(engine, 0, 20)
    submit(engine, 1, 5)
    engine.step()
    assert_waits(engine, 1, WaitReason.BUDGET, "the step's tokens were used up (0 left)", {"budget": 8, "left": 0})
    submit(engine, 2, 5)
    engine.step()
    figures = {"position": 1, "ahead_budget": 8, "ahead_left": 0}
    message = "it waits its turn: 1 in the queue come before it"
    assert_waits(engine, 2, WaitReason.BEHIND, message, figures, position=1)


def test_budget_of_a_prompt_that_may_not_be_cut():
    engine = SmallEngine(enable_chunked_prefill=False)
    submit(engine, 0, 44)
    submit(engine, 1, 30)
    engine.step()
    message = "the step's tokens were used up (20 left)"
    assert_waits(engine, 1, WaitReason.BUDGET, message, {"num_tokens": 30, "left": 20})


def test_cadence():
    engine = SmallEngine(prefill_schedule_interval=3)
    submit(engine, 0, 4, max_tokens=20)
    engine.step()
    submit(engine, 1, 5)
    engine.step()
    message = "while others decode, prompts are computed in one step of 3"
    assert_waits(engine, 1, WaitReason.CADENCE, message, {"prefill_schedule_interval": 3})


def test_encoder():
    engine = SmallEngine(is_multimodal_model=True, max_num_encoder_input_tokens=6, encoder_cache_size=20)
    submit(engine, 1, 12, encoder_inputs=(item(0, 4, 1),))
    submit(engine, 2, 12, encoder_inputs=(item(0, 4, 2),))
    plan_step(engine)
    message = "the encoder budget (2 left in the step) or cache (4 held) is used up"
    assert_waits(engine, 2, WaitReason.ENCODER, message, {"budget_left": 2, "cache_held": 4})


def test_preemption():
    engine = SmallEngine(num_blocks=17, setup={"enable_prefix_caching": False})
    submit(engine, 0, 28, max_tokens=30)
    submit(engine, 1, 24, max_tokens=30)
    while not engine.preempted():
        engine.step()
    (victim,) = engine.preempted()
    message = "1 of the running sequences had to give up their blocks in this step, which admits nobody"
    assert_waits(engine, victim, WaitReason.PREEMPTION, message, {"num_preempted_in_step": 1})
    assert engine.explain(victim).state == "preempted"
    engine.step()
    assert engine.explain(victim).reason == WaitReason.BLOCKS


def test_draining():
    engine = SmallEngine(policy="priority", max_num_seqs=1, setup={"async_scheduling": True})
    submit(engine, 0, 5, priority=5)
    engine.step()
    engine.step()
    assert len(engine.in_flight) == 1
    submit(engine, 1, 5, priority=0)
    plan_step(engine)
    message = "it was preempted, and 1 tokens of steps in flight are still to come"
    assert_waits(engine, 0, WaitReason.DRAINING, message, {"num_draining": 1}, position=-1)
    engine.finish_step()
    assert engine.explain(0).reason == WaitReason.NEW
    engine.run()
    assert engine.tokens[0] == tokens_after(prompt_of(5), 8)


def test_grammar():
    engine = SmallEngine()
    submit(engine, 1, 5, grammar=Grammar(GrammarKind.JSON_OBJECT))
    assert_waits(engine, 1, WaitReason.GRAMMAR, "its grammar is being compiled", {}, position=-1)
    assert engine.explain(1).state == "waiting_for_grammar"


def test_loading_and_load_cap_and_behind_it():
    engine = SmallEngine(with_connector=True, max_num_inflight_kv_loads=1)
    for request in (1, 2, 3):
        submit(engine, request, 12, kv_transfer_params={"external": 7, "is_async": 1})
    engine.step()
    assert_waits(
        engine, 1, WaitReason.LOADING, "its KV is being loaded (7 tokens)", {"num_external_tokens": 7}, position=-1
    )
    figures = {"num_loads": 1, "num_started": 1, "max_num_inflight_kv_loads": 1}
    message = "1 KV loads are in progress or done and waiting, 1 started in this step"
    assert_waits(engine, 2, WaitReason.LOAD_CAP, message, figures)
    behind = {"position": 1} | {f"ahead_{name}": figure for name, figure in figures.items()}
    message = "it waits its turn: 1 in the queue come before it"
    assert_waits(engine, 3, WaitReason.BEHIND, message, behind, position=1)


def test_load_cap_per_step():
    engine = SmallEngine(with_connector=True, max_async_kv_loads_per_step=1)
    for request in (1, 2):
        submit(engine, request, 12, kv_transfer_params={"external": 7, "is_async": 1})
    engine.step()
    message = "1 KV loads are in progress or done and waiting, 1 started in this step"
    figures = {"num_loads": 1, "num_started": 1, "max_async_kv_loads_per_step": 1}
    assert_waits(engine, 2, WaitReason.LOAD_CAP, message, figures)


def test_connector():
    engine = SmallEngine(with_connector=True)
    submit(engine, 0, 5, max_tokens=20)
    submit(engine, 1, 12, kv_transfer_params={"external": 8, "is_async": 1, "unknown": 3})
    engine.step()
    message = "the KV connector does not know yet what it can load"
    assert_waits(engine, 1, WaitReason.CONNECTOR, message, {})


def test_input():
    engine = SmallEngine()
    submit(engine, 1, 5, max_tokens=1, is_session=True)
    engine.step()
    assert_waits(engine, 1, WaitReason.INPUT, "the session waits for its next input", {}, position=-1)


def test_paused():
    for pause in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL):
        engine = SmallEngine()
        engine.scheduler.set_pause(pause, engine.now)
        submit(engine, 1, 5)
        submit(engine, 2, 5)
        engine.step()
        assert_waits(
            engine, 2, WaitReason.PAUSED, "the rank is paused (2 requests wait)", {"num_paused": 2}, position=1
        )
        engine.scheduler.set_pause(PauseState.UNPAUSED, engine.now)
        assert engine.explain(1).message
        engine.run()
        assert engine.explain(1).reason == engine.explain(1).message == ""


def test_every_reason_has_words_and_a_test():
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    for reason in WaitReason:
        assert len(_WORDS[reason].split()) > 3
        assert any(reason in name for name in tests), reason


def test_no_reason_is_given_for_what_runs_or_has_ended():
    engine = SmallEngine()
    submit(engine, 1, 5, max_tokens=3)
    engine.step()
    for _ in range(2):
        found = engine.explain(1)
        assert (found.reason, found.message, found.figures, found.position) == ("", "", {}, -1)
        engine.run()
    assert engine.explain(1).state == "finished (length)"


@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_waits_is_explained_in_words_at_every_step(is_async):
    """Everything at once, few blocks, few slots: no message is a bare word, and no place is left open."""
    engine = SmallEngine(
        num_blocks=17,
        max_num_seqs=3,
        max_num_batched_tokens=20,
        policy="priority",
        prefill_schedule_interval=2,
        with_connector=True,
        max_num_inflight_kv_loads=2,
        max_async_kv_loads_per_step=1,
        setup={"async_scheduling": is_async},
    )
    seen = set()
    for request in range(12):
        params = {"external": 8, "is_async": 1, "unknown": request % 2} if request % 3 == 0 else None
        submit(engine, request, 10 + request, priority=request % 2, kv_transfer_params=params, max_tokens=16)
    for at in range(400):
        if len(engine.ends) == 12:
            break
        if at % 50 == 20:
            engine.scheduler.set_pause(PauseState.PAUSED_NEW, engine.now)
        if at % 50 == 25:
            engine.scheduler.set_pause(PauseState.UNPAUSED, engine.now)
        engine.step()
        if at % 3 == 0:
            engine.end_loads()
        for request in range(12):
            found = engine.explain(request)
            if found.state == "running" or found.state.startswith("finished"):
                assert found.message == found.reason == ""
                continue
            seen.add(found.reason)
            assert len(found.message.split()) > 3, found
            assert not re.search(r"[{}]", found.message)
            if found.reason in (WaitReason.LOADING, WaitReason.DRAINING):
                assert found.position == -1
            else:
                assert found.position >= 0
    assert len(engine.ends) == 12
    assert len(seen) >= 5, seen


# ---- figures ----


def test_counts_of_a_running_request():
    engine = SmallEngine(max_num_batched_tokens=8)
    submit(engine, 1, 20, max_tokens=4)
    counts = []
    for _ in range(5):
        engine.step()
        found = engine.explain(1)
        counts.append((found.num_prompt_tokens, found.num_computed_tokens, found.num_generated_tokens))
    assert counts == [(20, 8, 0), (20, 16, 0), (20, 20, 1), (20, 21, 2), (20, 22, 3)]
    engine.run()
    found = engine.explain(1)
    assert (found.state, found.num_generated_tokens) == ("finished (length)", 4)


def test_computed_tokens_are_those_whose_step_is_over():
    engine = SmallEngine(setup={"async_scheduling": True})
    submit(engine, 1, 20, max_tokens=4)
    engine.now += 1
    plan = engine.scheduler.schedule(engine.now)
    assert engine.explain(1).num_computed_tokens == 0
    engine.in_flight.append(plan)
    engine.finish_step()
    assert engine.explain(1).num_computed_tokens == 20


def test_cached_tokens_and_preemptions_are_told():
    engine = SmallEngine(num_blocks=17)
    submit(engine, 0, 16, max_tokens=1)
    engine.run()
    engine.submit(1, [*prompt_of(16), 3], max_tokens=20)
    submit(engine, 2, 16, max_tokens=30)
    engine.run()
    assert engine.explain(1).num_cached_tokens == engine.ends[1].num_cached_tokens == 16
    for request in (1, 2):
        assert engine.explain(request).num_preemptions == engine.preempted().count(request)
    assert engine.preempted()


def test_all_sequences_of_a_request_are_told_in_order_of_arrival():
    engine = SmallEngine(max_num_seqs=1)
    for number in range(3):
        submit(engine, number, 5, max_tokens=2, request_id="one request")
    engine.step()
    assert [found.state for found in engine.scheduler.explain("one request")] == ["running", "waiting", "waiting"]
    engine.step()
    states = [found.state for found in engine.scheduler.explain("one request")]
    assert states == ["finished (length)", "waiting", "waiting"]
    assert engine.scheduler.explain("another") == []


# ---- timeline ----


def test_the_timeline_of_a_plain_request():
    engine = SmallEngine(max_num_batched_tokens=8, max_num_seqs=1)
    submit(engine, 0, 5, max_tokens=2)
    submit(engine, 1, 12, max_tokens=2)
    engine.run()
    found = [(entry.at, entry.event, entry.cause) for entry in engine.explain(1).timeline]
    assert found == [
        (0.0, "queued", ""),
        (3.0, "scheduled", "0 of 12 tokens computed before"),
        (4.0, "first_token", ""),
        (5.0, "finished", "length"),
    ]


def test_a_preemption_and_the_return_are_told_with_their_causes():
    engine = SmallEngine(num_blocks=17, setup={"enable_prefix_caching": False})
    submit(engine, 0, 28, max_tokens=30)
    submit(engine, 1, 24, max_tokens=30)
    engine.run()
    (victim,) = set(engine.preempted())
    assert events(engine, victim)[:5] == ["queued", "scheduled", "first_token", "preempted", "resumed"]
    assert events(engine, victim)[-1] == "finished"
    assert causes(engine, victim)["preempted"] == "1 blocks needed, 0 free"
    assert re.fullmatch(r"0 of \d+ tokens computed before", causes(engine, victim)["resumed"])


def test_a_preemption_for_a_priority_names_it():
    engine = SmallEngine(policy="priority", max_num_seqs=1)
    submit(engine, 0, 5, priority=5)
    engine.step()
    submit(engine, 1, 5, priority=-2)
    engine.step()
    assert causes(engine, 0)["preempted"] == "priority -2 waits for a slot or blocks"


def test_a_load_is_told():
    engine = SmallEngine(with_connector=True, max_kv_load_retries=1)
    submit(engine, 1, 12, kv_transfer_params={"external": 8, "is_async": 1})
    engine.step()
    engine.end_load(1, num_valid=0, cause="peer_lost")
    engine.step()
    engine.end_load(1)
    engine.drain()
    assert events(engine, 1) == [
        "queued",
        "load_started",
        "load_failed",
        "load_started",
        "load_finished",
        "scheduled",
        "first_token",
        "finished",
    ]
    assert causes(engine, 1)["load_started"] == "8 tokens"
    assert causes(engine, 1)["load_failed"] == "peer_lost"
    assert causes(engine, 1)["scheduled"] == "8 of 12 tokens computed before"


def test_a_part_of_a_load_that_is_not_valid_is_told_in_figures():
    engine = SmallEngine(with_connector=True)
    submit(engine, 1, 12, kv_transfer_params={"external": 8, "is_async": 1})
    engine.step()
    engine.end_load(1, num_valid=4)
    assert causes(engine, 1)["load_failed"] == "4 of 8 tokens are valid"


class AnyToken:
    def accept(self, token_id):
        return True

    def num_valid(self, token_ids):
        return len(token_ids)

    def fill_mask(self, mask):
        mask[:] = 0xFFFFFFFF

    def rollback(self, num_tokens):
        pass


def test_a_grammar_is_told():
    engine = SmallEngine()
    for request in (1, 2):
        submit(engine, request, 5, max_tokens=1, grammar=Grammar(GrammarKind.JSON_OBJECT))
    engine.scheduler.grammar_compiled(0, 1, AnyToken(), "", 3.0)
    assert engine.explain(1).reason == WaitReason.NEW
    engine.scheduler.grammar_compiled(0, 2, None, "no such schema", 4.0)
    engine.run()
    assert events(engine, 1) == ["queued", "grammar_ready", "scheduled", "first_token", "finished"]
    assert events(engine, 2) == ["queued", "finished"]
    assert causes(engine, 2)["finished"] == "error: no such schema"


def test_a_session_is_told():
    engine = SmallEngine()
    submit(engine, 1, 5, max_tokens=2, is_session=True)
    engine.run()
    engine.scheduler.extend(0, Extend(1, b"\1\0\0\0\2\0\0\0", max_tokens=2), engine.now)
    engine.run()
    engine.scheduler.extend(0, Extend(1, is_last=True), engine.now)
    engine.run()
    assert events(engine, 1) == [
        "queued",
        "scheduled",
        "first_token",
        "turn_ended",
        "extended",
        "first_token",
        "turn_ended",
        "finished",
    ]
    assert causes(engine, 1)["turn_ended"] == "length"
    assert causes(engine, 1)["extended"] == "2 tokens"


def test_an_abort_and_a_lost_owner_are_told():
    engine = SmallEngine()
    submit(engine, 1, 5)
    engine.submit(2, prompt_of(5), owner=1)
    engine.step()
    engine.scheduler.abort(0, 1, engine.now)
    engine.scheduler.drop_owner(1, engine.now)
    assert causes(engine, 1)["finished"] == "abort"
    assert causes(engine, 2)["finished"] == "abort: its router is gone"


def test_of_a_long_story_the_middle_is_missing():
    engine = SmallEngine()
    submit(engine, 1, 5, max_tokens=1, is_session=True)
    for turn in range(50):
        engine.run()
        engine.now = 100.0 + turn
        engine.scheduler.extend(0, Extend(1, b"\1\0\0\0", max_tokens=1), engine.now)
    engine.run()
    timeline = engine.explain(1).timeline
    assert len(timeline) == 64
    assert [entry.event for entry in timeline[:3]] == ["queued", "scheduled", "first_token"]
    assert timeline[-1].event == "turn_ended"
    assert [entry.at for entry in timeline] == sorted(entry.at for entry in timeline)


# ---- memory ----


def test_ended_requests_are_remembered_up_to_a_bound():
    engine = SmallEngine(max_num_batched_tokens=256, max_num_seqs=256)
    for request in range(NUM_REMEMBERED + 20):
        submit(engine, request, 3, max_tokens=1)
    engine.run()
    assert len(engine.ends) == NUM_REMEMBERED + 20
    remembered = [request for request in range(NUM_REMEMBERED + 20) if engine.scheduler.explain(f"r{request}")]
    assert remembered == list(range(20, NUM_REMEMBERED + 20))


def test_an_ended_request_is_told_even_if_its_number_is_used_again():
    engine = SmallEngine()
    for request_id in ("first", "second"):
        engine.submit(1, prompt_of(5), max_tokens=1, fields={"request_id": request_id})
        engine.step()
        del engine.ends[1]
    for request_id in ("first", "second"):
        (found,) = engine.scheduler.explain(request_id)
        assert found.state == f"finished ({FinishReason.LENGTH})"


def test_a_request_without_a_public_name_is_not_remembered():
    engine = SmallEngine()
    engine.submit(1, prompt_of(5), max_tokens=1, fields={"request_id": ""})
    engine.run()
    assert engine.scheduler.explain("") == []
