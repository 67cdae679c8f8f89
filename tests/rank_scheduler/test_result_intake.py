"""What goes into a frame, and what a step's result costs."""

from rank_scheduler.messages import TokenLogprobs
from rank_scheduler.result_intake import OwnerTokens
from tests.rank_scheduler.scenario import Rank, expected, prompt_of


def test_ids_are_copied_once_before_they_change_and_never_again():
    shared = [1, 2]
    out = OwnerTokens(shared, [10, 20], shares_ids=True)
    out.add(1, 11, None, is_first=False)
    own = out.ids
    out.add(2, 21, TokenLogprobs(-1.0), is_first=True)
    out.own_ids().append(3)
    assert out.ids is own
    assert (own, shared) == ([1, 2, 1, 2, 3], [1, 2])
    assert (out.tokens, out.logprobs, out.first_token_ids) == ([10, 20, 11, 21], {3: TokenLogprobs(-1.0)}, [2])


def test_results_that_come_together_leave_the_steady_steps_ids_alone():
    rank = Rank(setup={"async_scheduling": True})
    for request_id in (1, 2):
        rank.submit(request_id, prompt_of(5, start=request_id), 16)
    for _ in range(4):
        rank.step()
    while len(rank.in_flight) < 2:
        rank.plan()
    plans = [rank.in_flight.popleft(), rank.in_flight.popleft()]
    results = [rank.execute(plan) for plan in plans]
    assert rank.scheduler.update(plans[1], results[1], rank.now) == {}, "it must wait for the step before"
    frames = rank.scheduler.update(plans[0], results[0], rank.now)
    assert frames[0].ids == [1, 2, 1, 2]
    rank.take(frames)
    rank.run()
    for request_id in (1, 2):
        assert rank.tokens[request_id] == expected(prompt_of(5, start=request_id), 16)
