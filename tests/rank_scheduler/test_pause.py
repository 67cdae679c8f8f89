"""Pause states, and forgetting the prefix cache."""

import pytest

from kv_transfer.connector import SendFinished
from rank_scheduler.interface import PauseState
from rank_scheduler.kv_events import AllBlocksCleared
from rank_scheduler.messages import Extend, FinishReason
from tests.rank_scheduler.small_engine import SmallEngine, prompt_of, tokens_after

LOAD = {"kv_transfer_params": {"external": 8, "is_async": 1}}


def pause(engine: SmallEngine, state: PauseState) -> None:
    engine.scheduler.set_pause(state, engine.now)


def test_paused_new_lets_running_ones_go_on_and_admits_nobody():
    engine = SmallEngine(max_num_batched_tokens=8)
    engine.submit(1, prompt_of(20), max_tokens=4)
    engine.step()
    pause(engine, PauseState.PAUSED_NEW)
    engine.submit(2, prompt_of(4, start=2), max_tokens=2)
    engine.steps(8)
    assert engine.tokens[1] == tokens_after(prompt_of(20), 4)
    assert (engine.running, engine.queued) == ([], [2])
    assert engine.step() is None
    pause(engine, PauseState.UNPAUSED)
    assert engine.scheduler.has_work()
    engine.run()
    assert engine.tokens[2] == tokens_after(prompt_of(4, start=2), 2)


def test_paused_new_admits_those_that_hold_kv_and_starts_no_loads():
    engine = SmallEngine(with_connector=True)
    engine.submit(1, prompt_of(12, start=1), max_tokens=2, fields=LOAD)
    engine.step()
    pause(engine, PauseState.PAUSED_NEW)
    engine.submit(2, prompt_of(12, start=2), max_tokens=2, fields=LOAD)
    engine.end_load(1)
    engine.steps(3)
    assert engine.tokens[1] == tokens_after(prompt_of(12, start=1), 2)
    assert engine.connector.loading == {}
    assert 2 not in engine.ends
    pause(engine, PauseState.UNPAUSED)
    engine.drain()
    assert engine.tokens[2] == tokens_after(prompt_of(12, start=2), 2)


def test_paused_new_preempts_for_no_priority():
    engine = SmallEngine(policy="priority", max_num_seqs=1)
    engine.submit(1, prompt_of(4), max_tokens=9, fields={"priority": 5})
    engine.step()
    pause(engine, PauseState.PAUSED_NEW)
    engine.submit(2, prompt_of(4, start=2), max_tokens=1, fields={"priority": 0})
    engine.steps(3)
    assert engine.preempted() == []
    pause(engine, PauseState.UNPAUSED)
    engine.step()
    assert engine.preempted() == [1]


def test_paused_new_does_not_bring_a_preempted_request_back():
    engine = SmallEngine(num_blocks=17)
    for request in (1, 2):
        engine.submit(request, prompt_of(20, start=request), max_tokens=30)
    while not engine.preempted():
        engine.step()
    pause(engine, PauseState.PAUSED_NEW)
    engine.steps(40)
    (victim,) = set(engine.preempted())
    assert list(engine.ends) == [3 - victim]
    assert engine.explain(victim).state == "preempted"
    pause(engine, PauseState.UNPAUSED)
    engine.drain()
    for request in (1, 2):
        assert engine.tokens[request] == tokens_after(prompt_of(20, start=request), 30)


@pytest.mark.parametrize("is_async", [False, True])
def test_paused_all_computes_nothing_and_loses_nothing(is_async):
    engine = SmallEngine(setup={"async_scheduling": is_async}, max_num_batched_tokens=8)
    engine.submit(1, prompt_of(20), max_tokens=6)
    engine.step()
    engine.step()
    pause(engine, PauseState.PAUSED_ALL)
    while engine.in_flight:
        engine.finish_step()
    engine.submit(2, prompt_of(4, start=2), max_tokens=2)
    before = engine.load
    for _ in range(5):
        assert engine.step() is None
    assert not engine.scheduler.has_work()
    assert engine.load == before
    pause(engine, PauseState.UNPAUSED)
    assert engine.scheduler.has_work()
    engine.run()
    assert engine.tokens[1] == tokens_after(prompt_of(20), 6)
    assert engine.tokens[2] == tokens_after(prompt_of(4, start=2), 2)


def test_paused_all_still_takes_in_the_result_of_a_step_in_flight():
    engine = SmallEngine()
    engine.submit(1, prompt_of(4), max_tokens=3)
    plan = engine.scheduler.schedule(1.0)
    pause(engine, PauseState.PAUSED_ALL)
    engine.take(engine.scheduler.update(plan, engine.runner.execute(plan), 2.0))
    assert engine.tokens[1] == tokens_after(prompt_of(4), 1)


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_requests_are_refused_aborted_and_told_of_during_a_pause(state):
    engine = SmallEngine()
    pause(engine, state)
    engine.submit(1, prompt_of(4))
    engine.submit(2, [])
    assert engine.scheduler.has_work()
    engine.scheduler.abort(0, 1, engine.now)
    engine.step()
    assert engine.ends[1].reason is FinishReason.ABORT
    assert engine.ends[2].reason is FinishReason.ERROR
    assert not engine.scheduler.has_work()


def test_a_session_is_extended_during_a_pause_and_goes_on_after_it():
    engine = SmallEngine()
    engine.submit(1, prompt_of(4), max_tokens=1, fields={"is_session": True})
    engine.run()
    pause(engine, PauseState.PAUSED_ALL)
    engine.scheduler.extend(0, Extend(1, b"\5\0\0\0", max_tokens=2, is_last=True), engine.now)
    assert engine.step() is None
    pause(engine, PauseState.UNPAUSED)
    engine.run()
    assert engine.tokens[1][1:] == tokens_after([*prompt_of(4), 5], 2)
    assert engine.ends[1].reason is FinishReason.LENGTH


def test_a_load_that_ends_during_a_pause_counts_after_it():
    engine = SmallEngine(with_connector=True)
    engine.submit(1, prompt_of(12, start=1), max_tokens=2, fields=LOAD)
    engine.step()
    pause(engine, PauseState.PAUSED_ALL)
    engine.end_load(1)
    assert engine.step() is None
    pause(engine, PauseState.UNPAUSED)
    assert engine.step_shares() == {1: 4}
    engine.drain()


def test_the_cache_is_forgotten_only_when_nobody_holds_a_block():
    engine = SmallEngine(setup={"emit_kv_events": True})
    engine.submit(1, prompt_of(12), max_tokens=3)
    engine.step()
    before = engine.scheduler.take_kv_events()
    assert before
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.take_kv_events() == []
    engine.run()
    engine.submit(2, prompt_of(12), max_tokens=1)
    engine.run()
    assert engine.ends[2].num_cached_tokens == 11
    engine.scheduler.take_kv_events()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.take_kv_events() == [AllBlocksCleared()]
    engine.submit(3, prompt_of(12), max_tokens=3)
    engine.run()
    assert engine.ends[3].num_cached_tokens == 0
    assert engine.tokens[3] == engine.tokens[1] == tokens_after(prompt_of(12), 3)


def test_a_request_that_waits_while_the_cache_is_forgotten_finds_nothing_of_it():
    engine = SmallEngine(num_blocks=17)
    engine.submit(1, prompt_of(12), max_tokens=1)
    engine.run()
    pause(engine, PauseState.PAUSED_NEW)
    engine.submit(2, prompt_of(12), max_tokens=3)
    engine.step()
    assert engine.scheduler.reset_prefix_cache()
    pause(engine, PauseState.UNPAUSED)
    engine.run()
    assert engine.ends[2].num_cached_tokens == 0
    assert engine.tokens[2] == tokens_after(prompt_of(12), 3)


def test_blocks_that_a_peer_still_reads_keep_the_cache():
    engine = SmallEngine(with_connector=True)
    engine.submit(1, prompt_of(12), max_tokens=1, fields={"kv_transfer_params": {"keep": 1}})
    engine.run()
    assert not engine.scheduler.reset_prefix_cache()
    engine.scheduler.send_finished(SendFinished((0, 1)), engine.now)
    assert engine.scheduler.reset_prefix_cache()
