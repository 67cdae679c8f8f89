"""Tickets of prompts that are still being computed, and KV that is loaded before its request has come."""

import numpy as np
import pytest

from kv_transfer.connector import LoadFenced, LoadFinished
from rank_scheduler.interface import KvGroup, PauseState
from rank_scheduler.messages import FinishReason, Prefetch
from rank_scheduler.prefetches import MAX_NUM_QUEUED
from tests.rank_scheduler.scenario import BLOCK_SIZE, Rank, expected, prompt_of
from tests.rank_scheduler.simulated_connector import SimulatedConnector

OWNER = 0
HANDS_OFF = {"hands_off": True, "kv_transfer_params": {"keep": 1}}


class DecodeRank(Rank):
    def __init__(self, **options):
        super().__init__(connector=SimulatedConnector(), **options)
        self.told = {}

    def take(self, frames):
        for frame in frames.values():
            for request_id, ticket in frame.tickets.items():
                self.told.setdefault(request_id, []).append(ticket)
        super().take(frames)

    def prefetch(self, prompt, owner=OWNER, salt="", **params):
        num_tokens = len(prompt)
        ticket = {"external": num_tokens, "is_async": 1, "num_tokens": num_tokens} | params
        data = np.array(prompt, "<i4").tobytes()
        self.scheduler.prefetch(owner, Prefetch(data, ticket, "r", salt), self.now)
        self.scheduler.check_integrity()

    @property
    def loading(self):
        """Numbers of prefetches whose loads the connector has begun."""
        return [number for _, number in self.connector.loading if number < 0]

    def end_prefetch(self, num_valid=None, cause="", *, is_fenced=True):
        number = max(self.loading)
        load = self.connector.loading.pop((OWNER, number))
        self.connector._fill(load, load[3] if num_valid is None else num_valid, self.runner)
        self.scheduler.load_finished(LoadFinished((OWNER, number), num_valid, cause, is_fenced), self.now)
        self.scheduler.check_integrity()
        return number

    def stats(self):
        return self.scheduler._state.stats

    def assert_over(self):
        """Nothing is left of any prefetch, and the connector knows of no request."""
        self.assert_nothing_held()
        assert not self.connector.known
        assert not self.scheduler._state.prefetching
        assert not self.scheduler.has_work()


# ---- tickets ----


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_each_chunk_but_the_last_is_told_when_it_is_computed(async_scheduling):
    rank = DecodeRank(max_num_batched_tokens=6, max_num_seqs=4, setup={"async_scheduling": async_scheduling})
    rank.submit(1, prompt_of(20), 6, fields=HANDS_OFF)
    rank.plan()
    assert not rank.told
    rank.run()
    assert [ticket["num_tokens"] for ticket in rank.told[1]] == [4, 12, 16]
    assert rank.ends[1].reason is FinishReason.HANDOFF


def test_who_does_not_hand_off_or_shares_no_prefixes_is_told_nothing():
    rank = DecodeRank(max_num_batched_tokens=6, max_num_seqs=4)
    rank.submit(1, prompt_of(20), 2)
    rank.submit(2, prompt_of(20, start=3), 2, fields={**HANDS_OFF, "reads_prefix_cache": False})
    rank.submit(3, prompt_of(4, start=5), 2, fields=HANDS_OFF)
    rank.run()
    assert not rank.told


def test_blocks_that_slide_out_of_a_window_are_never_told():
    rank = DecodeRank(max_num_batched_tokens=6, max_num_seqs=4, kv_groups=(KvGroup(), KvGroup(8)))
    rank.submit(1, prompt_of(20), 2, fields=HANDS_OFF)
    rank.run()
    assert not rank.told


def test_a_step_that_failed_tells_nothing():
    rank = DecodeRank(max_num_batched_tokens=8)
    rank.submit(1, prompt_of(20), 2, fields=HANDS_OFF)
    rank.step()
    assert len(rank.told[1]) == 1
    rank.plan()
    rank.take(rank.scheduler.fail(rank.in_flight.popleft(), "broke", rank.now))
    assert len(rank.told[1]) == 1
    assert rank.ends[1].reason is FinishReason.ERROR
    rank.end_send(1)
    rank.assert_over()


@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_who_lost_its_blocks_while_its_step_was_computed_is_told_nothing(how):
    rank = DecodeRank(max_num_batched_tokens=8, policy="priority", max_num_seqs=1, setup={"async_scheduling": True})
    rank.submit(1, prompt_of(20), 2, fields={**HANDS_OFF, "priority": 1})
    rank.plan()
    if how == "aborted":
        rank.abort(1)
    else:
        rank.submit(2, prompt_of(6, start=5), 2)
        rank.plan()
        assert rank.running() == [2]
    rank.finish_step()
    assert not rank.told
    rank.run()
    if how == "preempted":
        assert rank.tokens[1] == expected(prompt_of(20), 1)
        assert rank.told[1]


# ---- prefetches ----


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_finds_what_was_loaded_before_it_came(async_scheduling):
    prompt = prompt_of(22)
    whole = expected(prompt, 5)
    rank = DecodeRank(setup={"async_scheduling": async_scheduling})
    rank.prefetch(prompt[:8])
    rank.step_until(lambda: rank.loading)
    assert rank.num_held_blocks() == 2
    rank.end_prefetch()
    assert rank.num_held_blocks() == 0
    rank.prefetch(prompt[:16])
    rank.step_until(lambda: rank.loading)
    assert [(load[2], load[3]) for load in rank.connector.loading.values()] == [(8, 16)]
    rank.end_prefetch()
    rank.submit(
        1, prompt + whole[:1], 5, fields={"num_generated": 1, "kv_transfer_params": {"external": 22, "is_async": 1}}
    )
    rank.step_until(lambda: rank.connector.loading)
    assert [(load[2], load[3]) for load in rank.connector.loading.values()] == [(16, 22)]
    rank.end_load(1)
    rank.run()
    assert rank.tokens[1] == whole[1:]
    assert rank.stats().num_prefetched_tokens == rank.scheduler.load().num_prefetched_tokens == 16
    assert rank.stats().num_external_hits == 6
    assert rank.stats().num_failed_loads == rank.stats().num_dropped_prefetches == 0
    assert list(rank.ends) == [1]
    rank.assert_over()


def test_another_salt_finds_nothing():
    prompt = prompt_of(12)
    rank = DecodeRank()
    rank.prefetch(prompt[:8], salt="a")
    rank.step()
    rank.end_prefetch()
    rank.submit(1, prompt, 2)
    rank.submit(2, prompt, 2, fields={"cache_salt": "a"})
    rank.run()
    assert (rank.ends[1].num_cached_tokens, rank.ends[2].num_cached_tokens) == (0, 8)


def test_a_tail_that_fills_no_block_is_left_out():
    rank = DecodeRank()
    rank.prefetch(prompt_of(11), external=8)
    rank.step()
    rank.end_prefetch()
    assert rank.stats().num_prefetched_tokens == 8
    rank.assert_over()


@pytest.mark.parametrize("prompt", [[], [1, 2, 3], list(range(40)) * 2])
def test_what_is_too_short_or_too_long_is_dropped(prompt):
    rank = DecodeRank()
    rank.prefetch(prompt)
    rank.assert_over()
    assert rank.stats().num_dropped_prefetches == 1


def test_token_ids_that_are_none_are_dropped():
    rank = DecodeRank()
    rank.scheduler.prefetch(OWNER, Prefetch(b"12345" * 5, {}), 0.0)
    rank.assert_over()


@pytest.mark.parametrize(
    "options", [{"kv_groups": (KvGroup(), KvGroup(8))}, {"setup": {"enable_prefix_caching": False}}]
)
def test_where_nothing_could_be_found_nothing_is_loaded(options):
    rank = DecodeRank(**options)
    rank.prefetch(prompt_of(8))
    rank.assert_over()


def test_a_rank_without_a_connector_ignores_it():
    rank = Rank()
    rank.scheduler.prefetch(OWNER, Prefetch(np.arange(8, dtype="<i4").tobytes(), {}), 0.0)
    assert not rank.scheduler.has_work()


@pytest.mark.parametrize("params", [{"external": 0}, {"external": 4}, {"is_async": 0}])
def test_no_match_ends_it(params):
    rank = DecodeRank()
    rank.prefetch(prompt_of(8), **params)
    assert rank.scheduler.has_work()
    rank.step()
    rank.assert_over()
    assert rank.stats().num_dropped_prefetches == 1


def test_a_full_local_hit_ends_it():
    rank = DecodeRank()
    rank.submit(1, prompt_of(9), 1)
    rank.run()
    rank.prefetch(prompt_of(8))
    rank.step()
    assert not rank.loading
    rank.assert_over()


@pytest.mark.parametrize(("num_valid", "cause"), [(0, "peer_lost"), (8, "lease_expired"), (4, ""), (0, "")])
def test_what_was_not_loaded_as_a_whole_is_not_found(num_valid, cause):
    prompt = prompt_of(14)
    rank = DecodeRank(kv_load_failure_policy="fail")
    rank.prefetch(prompt[:12])
    rank.step()
    rank.end_prefetch(num_valid, cause)
    rank.assert_over()
    rank.submit(1, prompt, 3)
    rank.run()
    assert rank.tokens[1] == expected(prompt, 3)
    assert rank.ends[1].num_cached_tokens == 0
    assert rank.stats().num_dropped_prefetches == 1
    assert rank.stats().num_failed_loads == rank.stats().num_prefetched_tokens == 0


def test_blocks_without_a_fence_are_nobodys():
    rank = DecodeRank()
    rank.prefetch(prompt_of(12))
    rank.step()
    number = rank.end_prefetch(0, "timeout", is_fenced=False)
    assert rank.num_held_blocks() == 3
    rank.scheduler.load_fenced(LoadFenced((OWNER, number)), rank.now)
    rank.assert_over()
    rank.scheduler.load_finished(LoadFinished((OWNER, number)), rank.now)
    rank.scheduler.load_fenced(LoadFenced((OWNER, number)), rank.now)
    assert rank.scheduler.num_ignored_messages == 2


def test_what_the_connector_keeps_is_held_until_it_lets_go():
    rank = DecodeRank()
    rank.prefetch(prompt_of(12), keep=1)
    rank.step()
    number = rank.end_prefetch()
    assert rank.num_held_blocks() == 3
    rank.end_send(number)
    rank.assert_over()


def test_it_goes_on_when_its_router_is_gone():
    prompt = prompt_of(12)
    rank = DecodeRank()
    rank.prefetch(prompt[:8])
    rank.step()
    rank.scheduler.drop_owner(OWNER, rank.now)
    rank.scheduler.check_integrity()
    rank.end_prefetch()
    rank.submit(1, prompt, 2, owner=1)
    rank.run()
    assert rank.ends[1].num_cached_tokens == 8
    rank.assert_over()


def test_who_must_ask_again_is_asked_again_and_the_queue_is_bounded():
    rank = DecodeRank()
    for start in range(MAX_NUM_QUEUED + 3):
        rank.prefetch(prompt_of(4, start), unknown=2)
    assert rank.stats().num_dropped_prefetches == 3
    assert rank.step() is None
    assert rank.scheduler.has_work()
    assert rank.step() is None
    assert rank.step() is not None
    while rank.loading:
        rank.end_prefetch()
    rank.assert_over()


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
@pytest.mark.parametrize("comes", ["before", "while"])
def test_a_paused_rank_starts_none(state, comes):
    rank = DecodeRank()
    if comes == "before":
        rank.prefetch(prompt_of(8))
    rank.scheduler.set_pause(state, rank.now)
    if comes == "while":
        rank.prefetch(prompt_of(8))
    rank.step()
    assert not rank.loading
    rank.scheduler.set_pause(PauseState.UNPAUSED, rank.now)
    rank.run()
    rank.assert_over()


def test_who_was_to_be_asked_again_is_not_once_the_rank_is_paused():
    rank = DecodeRank()
    rank.prefetch(prompt_of(8), unknown=5)
    rank.step()
    rank.scheduler.set_pause(PauseState.PAUSED_NEW, rank.now)
    assert rank.step() is None
    rank.assert_over()


# ---- behind every request ----


@pytest.mark.parametrize(
    "config", [{"max_num_inflight_kv_loads": 1}, {"max_async_kv_loads_per_step": 1}, {"max_num_seqs": 1}]
)
def test_loads_of_requests_go_first_and_do_not_wait_for_prefetches(config):
    rank = DecodeRank(**config)
    load = {"kv_transfer_params": {"external": 8, "is_async": 1}}
    rank.prefetch(prompt_of(8))
    rank.submit(1, prompt_of(9, start=3), 2, fields=load)
    rank.step()
    assert list(rank.connector.loading) == [(OWNER, 1)]
    assert rank.stats().num_dropped_prefetches == 1
    rank.end_load(1)
    rank.run()
    rank.prefetch(prompt_of(8))
    rank.step()
    assert rank.loading == [-2]
    rank.submit(2, prompt_of(9, start=4), 2, fields=load)
    rank.step()
    assert (OWNER, 2) in rank.connector.loading
    rank.end_prefetch()
    rank.end_load(2)
    rank.run()
    rank.assert_over()


def test_prefetches_leave_blocks_for_all_who_run_and_wait():
    """32 blocks: a quarter stays free, another is the most that prefetches hold."""
    rank = DecodeRank(num_blocks=33, max_model_len=64, max_num_seqs=1)
    rank.prefetch(prompt_of(36))
    rank.step()
    assert not rank.loading  # 9 of 8
    rank.prefetch(prompt_of(20))
    rank.step()
    rank.prefetch(prompt_of(16, start=3))
    rank.step()
    assert len(rank.loading) == 1  # 5 + 4 of 8
    rank.end_prefetch()
    rank.submit(1, prompt_of(40, start=5), 8)
    rank.submit(2, prompt_of(24, start=7), 8)
    rank.prefetch(prompt_of(32, start=9))
    rank.prefetch(prompt_of(28, start=9))
    rank.prefetch(prompt_of(24, start=9))
    rank.step()
    # The two need 16 (18, as a queue's are rounded), and a quarter are 8: 6 are to spare.
    assert [load[1].size for load in rank.connector.loading.values()] == [6]
    rank.run()
    assert rank.scheduler.load().num_preemptions == 0
    rank.end_prefetch()
    rank.assert_over()


def test_a_prefetch_does_not_keep_a_rank_from_its_requests():
    """A day of prefetches that end anyhow, under requests that fill the pool: each gets what it would have got."""
    rng = np.random.default_rng(1)
    rank = DecodeRank(num_blocks=25, max_model_len=64, max_num_batched_tokens=16)
    prompts = [prompt_of(int(rng.integers(3, 40)), start) for start in range(40)]
    for index, prompt in enumerate(prompts):
        rank.submit(index, prompt, 6)
        for other in rng.choice(len(prompts), 2):
            rank.prefetch(
                prompts[other][: len(prompts[other]) // BLOCK_SIZE * BLOCK_SIZE], external=len(prompts[other])
            )
        for _ in range(int(rng.integers(1, 5))):
            rank.step()
            if rank.loading and rng.random() < 0.5:
                fails = rng.random() < 0.3
                rank.end_prefetch(0 if fails else None, "peer_lost" if fails else "")
    rank.run()
    while rank.loading:
        rank.end_prefetch()
    rank.run()
    assert [rank.tokens[index] for index in range(len(prompts))] == [expected(prompt, 6) for prompt in prompts]
    assert rank.stats().num_prefetched_tokens > 0
    rank.assert_over()
