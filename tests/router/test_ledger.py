"""The ledger and the leases it gives: rule by rule, and together in a simulation with faults."""

from __future__ import annotations

from typing import Any

import pytest

from router.amounts import NOTHING, Amounts, Limits
from router.control_messages import Ask, Granted, Refused, Tighten
from router.lease import Lease
from router.ledger import TIGHTEN_TIMEOUT_S, Ledger, To
from tests.router.ledger_simulation import Simulation

ONE = Amounts(1, 0)


def ledger_of(*routers: str, requests: int | None = None, tokens: int | None = None, **options: Any) -> Ledger:
    ledger = Ledger(requests, tokens, **options)
    for router in routers:
        assert ledger.resume(router, NOTHING, 0.0) == []
    return ledger


def ask(ledger: Ledger, router: str, key: int, amounts: Amounts, now: float, **options: str) -> list[To]:
    return ledger.ask(router, Ask(key, amounts, **options), now)


def only(messages: list[To]) -> Any:
    """The one message."""
    ((_, message),) = messages
    return message


def fill(ledger: Ledger, router: str, amounts: Amounts, now: float = 0.0) -> None:
    assert isinstance(only(ask(ledger, router, 1000, amounts, now)), Granted)


# ---- the ledger ----


def test_the_candidate_counts() -> None:
    ledger = ledger_of("a", requests=2)
    assert only(ask(ledger, "a", 1, Amounts(2, 0), 0.0)) == Granted(1, Amounts(2, 0), NOTHING)
    refused = only(ask(ledger, "a", 2, ONE, 0.0))  # at once: two are too few to be lent ahead
    assert isinstance(refused, Refused)
    assert (refused.key, refused.limit, refused.current, refused.requested) == (2, 2, 2, 1)
    assert ledger.counts().num_refused_requests == 1


def test_zero_refuses_everything_and_too_much_is_refused_at_once() -> None:
    assert isinstance(only(ask(ledger_of("a", requests=0), "a", 1, ONE, 0.0)), Refused)
    assert isinstance(only(ask(ledger_of("a", tokens=0), "a", 1, Amounts(0, 1), 0.0)), Refused)
    refused = only(ask(ledger_of("a", tokens=10), "a", 1, Amounts(0, 11), 0.0))
    assert (refused.field, refused.limit, refused.current, refused.requested) == ("max_num_queued_tokens", 10, 0, 11)


def test_where_nothing_is_bounded_nothing_is_lent() -> None:
    ledger = ledger_of("a")
    assert only(ask(ledger, "a", 1, Amounts(10**9, 10**9), 0.0)) == Granted(1, NOTHING, NOTHING)
    assert ledger.lent == NOTHING


def test_a_loose_queue_lends_more_than_is_asked_for() -> None:
    ledger = ledger_of("a", "b", requests=100, tokens=1000)
    granted = only(ask(ledger, "a", 1, Amounts(1, 10), 0.0))
    assert granted == Granted(1, Amounts(1 + 12, 10 + 123), Amounts(12, 123))
    assert ledger.lent == granted.lent


def test_nobody_is_refused_before_all_idle_amounts_are_back() -> None:
    ledger = ledger_of("a", "b", "c", requests=100)
    granted = only(ask(ledger, "a", 1, ONE, 0.0))
    assert granted.kept.requests > 0
    fill(ledger, "b", Amounts(80, 0))
    left = 100 - ledger.lent.requests
    tightens = ask(ledger, "b", 2, Amounts(left + 1, 0), 0.0)
    assert sorted(tightens) == [("a", Tighten(1)), ("b", Tighten(1))]  # the third has nothing
    assert ledger.tightened("b", 1, 0.0) == []
    assert ask(ledger, "c", 3, Amounts(left + granted.kept.requests + 1, 0), 0.0) == []
    # What comes back is for the first that it is enough for.
    assert ledger.returned("a", granted.kept, 0.0) == [("b", Granted(2, Amounts(left + 1, 0), NOTHING))]
    assert isinstance(only(ledger.tightened("a", 1, 0.0)), Refused)
    # Now it is known, and nobody needs to be asked again.
    assert isinstance(only(ask(ledger, "a", 4, Amounts(20, 0), 0.0)), Refused)
    ledger.check_integrity()


def test_who_does_not_confirm_is_not_waited_for() -> None:
    ledger = ledger_of("a", "b", requests=4)
    fill(ledger, "a", Amounts(4, 0))
    assert ask(ledger, "b", 1, ONE, 1.0) == [("a", Tighten(1))]
    assert ledger.wakes_at == 1.0 + TIGHTEN_TIMEOUT_S
    assert ledger.wake(1.0 + TIGHTEN_TIMEOUT_S / 2) == []
    assert isinstance(only(ledger.wake(1.0 + TIGHTEN_TIMEOUT_S)), Refused)
    assert ledger.wakes_at is None


def test_a_lost_router_is_not_waited_for_and_keeps_its_place_until_the_grace_is_over() -> None:
    ledger = ledger_of("a", "b", requests=40, holder_grace_s=5.0)
    fill(ledger, "a", Amounts(40, 0))
    assert ask(ledger, "b", 1, ONE, 1.0) == [("a", Tighten(1))]
    assert isinstance(only(ledger.router_lost("a", 1.0)), Refused)
    assert ledger.tick(5.9) == ([], [])
    assert isinstance(only(ask(ledger, "b", 1, ONE, 5.9)), Refused)
    assert ledger.tick(6.0) == (["a"], [])
    assert isinstance(only(ask(ledger, "b", 1, ONE, 6.0)), Granted)


def test_a_router_that_resumes_in_time_loses_nothing() -> None:
    ledger = ledger_of("a", tokens=10, holder_grace_s=5.0)
    fill(ledger, "a", Amounts(0, 7))
    ledger.router_lost("a", 1.0)
    assert ledger.resume("a", Amounts(0, 7), 3.0) == []  # its queue is loose, what is idle may stay
    assert ledger.tick(100.0) == ([], [])
    assert ledger.lent == Amounts(0, 7)


def test_a_new_ledger_waits_for_the_routers_it_expects() -> None:
    ledger = Ledger(10, None, now=100.0, recovery_s=6.0, num_routers=2)
    assert ledger.resume("a", Amounts(3, 0), 100.0) == [("a", Tighten(1))]
    assert ask(ledger, "a", 1, ONE, 100.1) == []
    assert ledger.wakes_at == 106.0
    messages = ledger.resume("b", Amounts(6, 0), 101.0)
    assert messages == [("b", Tighten(2)), ("a", Granted(1, ONE, NOTHING))]
    assert ledger.lent == Amounts(10, 0)


def test_a_new_ledger_does_not_wait_for_ever() -> None:
    ledger = Ledger(10, None, now=100.0, recovery_s=6.0)
    ledger.resume("a", NOTHING, 100.0)
    assert ask(ledger, "a", 1, ONE, 100.1) == []
    assert ledger.wake(105.9) == []
    assert isinstance(only(ledger.wake(106.0)), Granted)


def test_more_than_the_limits_may_have_been_lent_before() -> None:
    ledger = Ledger(10, None)
    ledger.resume("a", Amounts(8, 99), 0.0)
    ledger.resume("b", Amounts(7, 0), 0.0)
    assert ledger.lent == Amounts(15, 0)
    ledger.tightened("a", 1, 0.0)
    assert isinstance(only(ask(ledger, "a", 1, ONE, 0.0) + ledger.tightened("b", 2, 0.0)), Refused)


def test_a_new_connection_of_a_router_forgets_what_the_old_one_asked() -> None:
    ledger = ledger_of("a", "b", requests=1)
    fill(ledger, "a", ONE)
    ask(ledger, "b", 1, ONE, 0.0)
    ledger.resume("b", NOTHING, 0.1)
    assert ledger.wakes_at is None
    assert ledger.returned("a", ONE, 0.2) == []


def test_retry_after_grows_while_nothing_leaves() -> None:
    waits = []
    for now in (0.5, 7.0, 25.0, 500.0):
        ledger = ledger_of("a", requests=1)
        fill(ledger, "a", ONE)
        waits.append(only(ask(ledger, "a", 2, ONE, now)).retry_after_s)
    assert waits == [1.0, 7.0, 25.0, 60.0]


def test_nonsense_is_counted_and_ignored() -> None:
    ledger = ledger_of("a", requests=5, tokens=5)
    assert ask(ledger, "nobody", 1, ONE, 0.0) == []
    assert ledger.returned("nobody", ONE, 0.0) == []
    assert ledger.returned("a", ONE, 0.0) == []  # it has not been lent
    assert ledger.returned("a", Amounts(-1, 0), 0.0) == []
    assert ledger.tightened("a", 7, 0.0) == []
    ledger.reported("nobody", ONE, ONE, 0.0)
    ledger.reported("a", ONE, Amounts(0, -1), 0.0)
    assert ledger.router_lost("nobody", 0.0) == []
    assert only(ask(ledger, "a", 1, Amounts(-3, 1), 0.0)).lent.requests >= 0
    ledger.resume("b", Amounts(-1, 2), 0.0)
    assert ledger.num_ignored == 10
    ledger.check_integrity()


# ---- the lease ----


def leased(lent: Amounts, kept: Amounts = NOTHING) -> Lease:
    lease = Lease(valid_s=5.0)
    lease.bounded_by(Limits(100, 100))
    lease.heard(0.0)
    lease.granted(None, NOTHING, lent, kept)
    return lease


def test_what_is_idle_can_be_taken_and_put_back() -> None:
    lease = leased(Amounts(2, 10), kept=Amounts(2, 10))
    assert lease.take(1, Amounts(1, 0), 0.0)
    assert lease.take(1, Amounts(0, 8), 0.0)
    assert not lease.take(2, Amounts(1, 3), 0.0)
    assert lease.take(2, Amounts(1, 2), 0.0)
    assert lease.idle == NOTHING
    assert lease.put_back(1, 5) == Amounts(0, 5)
    assert lease.put_back(1, 5) == Amounts(0, 3)
    assert lease.put_back(1) == Amounts(1, 0)
    assert lease.put_back(1) == NOTHING
    assert lease.idle == Amounts(1, 8)
    assert lease.taken == Amounts(1, 2)
    lease.check_integrity()


def test_idle_amounts_are_returned_beyond_twice_what_may_be_kept() -> None:
    lease = leased(Amounts(9, 0), kept=Amounts(3, 0))
    lease.take(1, Amounts(3, 0), 0.0)
    assert lease.surplus() == NOTHING
    lease.put_back(1)
    assert lease.surplus() == Amounts(6, 0)
    assert lease.idle == Amounts(3, 0)
    assert lease.tighten() == Amounts(3, 0)
    assert (lease.lent, lease.idle) == (NOTHING, NOTHING)


def test_what_comes_too_late_is_idle_and_returned_in_a_tight_queue() -> None:
    lease = leased(NOTHING)
    lease.granted(None, NOTHING, ONE, NOTHING)
    assert lease.surplus() == ONE


def test_idle_amounts_are_good_for_a_while_without_the_ledger() -> None:
    lease = leased(Amounts(3, 0), kept=Amounts(3, 0))
    lease.take(1, ONE, 4.9)
    lease.lost(4.9)
    assert lease.lent == Amounts(3, 0)
    assert not lease.take(2, ONE, 5.0)
    lease.lost(5.0)
    assert lease.lent == ONE
    lease.check_integrity()


def test_what_no_limit_bounds_needs_no_ledger_once_that_is_known() -> None:
    lease = Lease(valid_s=5.0)
    assert not lease.take(1, ONE, 0.0)
    lease.bounded_by(Limits(None, 10))
    assert lease.take(1, ONE, 1000.0)
    assert not lease.take(1, Amounts(0, 1), 1000.0)
    assert (lease.taken, lease.lent) == (ONE, NOTHING)


# ---- together ----


@pytest.mark.parametrize("with_faults", [False, True], ids=["calm", "faults"])
@pytest.mark.parametrize("num_routers", [1, 4, 8])
@pytest.mark.parametrize("limits", [Limits(40, None), Limits(5, 2000), Limits(400, 3000)], ids=str)
def test_limits_hold_and_no_room_is_left_unused(limits: Limits, num_routers: int, with_faults: bool) -> None:
    # One and a half times as many as there is room for, each for 0.4 s.
    assert limits.requests is not None
    arrivals_per_s = min(1.5 * limits.requests / 0.4, 200) / num_routers
    simulation = Simulation(
        num_routers, num_routers=num_routers, limits=limits, with_faults=with_faults, arrivals_per_s=arrivals_per_s
    )
    simulation.run(300)
    simulation.drain()
    figures = simulation.figures
    assert figures.num_admitted > 50
    assert all(router.lease.taken == NOTHING for router in simulation.routers.values())
    if not with_faults:
        assert figures.num_admitted + figures.num_refused + figures.num_given_up >= 300
        assert simulation.ledger is not None
        assert simulation.ledger.counts().num_requests == 0
