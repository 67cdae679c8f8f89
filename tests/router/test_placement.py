from __future__ import annotations

import random

from rank_scheduler.messages import RankLoad
from router.placement import Candidate, least_loaded, load_contains


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
