from __future__ import annotations

import random

from rank_scheduler.messages import RankLoad
from router.placement import (
    LOADED_TOKENS_PER_COMPUTED,
    TOKENS_PER_SEQUENCE,
    Candidate,
    Leg,
    least_loaded,
    load_contains,
    num_uncached_tokens,
    own_tokens,
)


def test_the_emptier_rank_is_chosen() -> None:
    busy, calm = RankLoad(num_running=4, num_waiting_tokens=900), RankLoad(num_running=5, num_waiting_tokens=10)
    assert least_loaded([Candidate(busy), Candidate(calm)], 0) == 1


def test_requests_that_wait_for_something_else_are_work_too() -> None:
    assert least_loaded([Candidate(RankLoad(num_deferred=3)), Candidate(RankLoad(num_running=2))], 0) == 1


def test_equals_take_turns() -> None:
    ranks = [Candidate(RankLoad()) for _ in range(3)]
    assert [least_loaded(ranks, turn) for turn in range(6)] == [0, 1, 2, 0, 1, 2]


def test_what_was_submitted_since_the_last_frame_counts() -> None:
    assert least_loaded([Candidate(RankLoad(), 1, 500), Candidate(RankLoad(num_waiting_tokens=100))], 0) == 1


def test_a_burst_without_any_frame_is_spread_evenly() -> None:
    rng = random.Random(7)
    unseen = [[0, 0], [0, 0]]
    for turn in range(200):
        candidates = [Candidate(RankLoad(), sequences, tokens) for sequences, tokens in unseen]
        chosen = least_loaded(candidates, turn)
        unseen[chosen][0] += 1
        unseen[chosen][1] += rng.choice([10, 50, 2000])
    total = sum(tokens for _, tokens in unseen)
    assert min(tokens for _, tokens in unseen) >= 0.4 * total


def test_figures_contain_a_submit_after_a_step_that_began_later() -> None:
    assert not load_contains(5, RankLoad(num_steps=5))
    assert not load_contains(5, RankLoad(num_steps=6))
    assert load_contains(5, RankLoad(num_steps=7))


def test_a_rank_that_has_the_prefix_is_chosen_until_its_load_outweighs_it() -> None:
    def chosen(num_running: int) -> int:
        holder = Candidate(RankLoad(num_running=num_running), num_own_tokens=20)
        return least_loaded([Candidate(RankLoad(), num_own_tokens=1_000), holder], 0)

    num_worth_it = (1_000 - 20) // TOKENS_PER_SEQUENCE
    assert [chosen(count) for count in (0, num_worth_it, num_worth_it + 1)] == [1, 1, 0]


def test_the_last_token_is_never_cached() -> None:
    assert [num_uncached_tokens(32, cached) for cached in (0, 16, 31, 32)] == [32, 16, 1, 1]


def test_what_is_loaded_weighs_less_than_what_is_computed() -> None:
    assert own_tokens(Leg.WHOLE, 1_600) == own_tokens(Leg.PREFILL, 1_600) == 1_600
    assert own_tokens(Leg.DECODE, 1_600) == 1_600 // LOADED_TOKENS_PER_COMPUTED
