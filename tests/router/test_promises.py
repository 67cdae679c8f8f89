"""What a refusal promises, and how it is kept: slots, tokens, aliases, and who goes before whom."""

from __future__ import annotations

from typing import Any

import pytest

from router.amounts import NOTHING, Amounts
from router.bookings import CLAIM_S, HOLD_S, LEAD_S, MAX_NUM_BOOKINGS, Bookings
from router.control_messages import Ask, Granted, Refused, Tighten
from router.ledger import CLAIM_PATIENCE_S, PATIENCE_S, Ledger, To

ONE = Amounts(1, 0)
PER_S = 10
"""Requests that leave, with 100 tokens each."""


class FullQueue:
    """Full at 10.0 after ten seconds of steady drain, tight, and nobody keeps anything idle."""

    def __init__(self, **limits: Any) -> None:
        self.now = 10.0
        self.ledger = Ledger(limits.get("requests"), limits.get("tokens"), secret=b"s" * 32)
        self._keys = iter(range(1, 10**6))
        ((_, tighten),) = self.ledger.resume("a", Amounts(limits.get("requests", 0), limits.get("tokens", 0)), 0.0)
        assert isinstance(tighten, Tighten)
        self.ledger.tightened("a", tighten.serial, 0.0)
        self.ledger.resume("b", NOTHING, 0.0)
        for tenth in range(1, 101):
            self.ledger.reported("a", NOTHING, Amounts(PER_S // 10, 10 * PER_S), tenth / 10)

    def ask(
        self, amounts: Amounts = ONE, token: str = "", alias: str = "", *, router: str = "b", now: float | None = None
    ) -> list[To]:
        self.now = self.now if now is None else now
        messages = self.ledger.ask(router, Ask(next(self._keys), amounts, token, alias), self.now)
        self.ledger.check_integrity()
        return messages

    def refused(self, amounts: Amounts = ONE, token: str = "", alias: str = "", now: float | None = None) -> Refused:
        """Asked, and refused at once."""
        ((_, message),) = self.ask(amounts, token, alias, now=now)
        assert isinstance(message, Refused)
        return message

    def is_granted(self, token: str = "", now: float | None = None, amounts: Amounts = ONE) -> bool:
        """Asked, and admitted at once, before all that wait."""
        messages = self.ask(amounts, token, now=now)
        return bool(messages) and isinstance(messages[0][1], Granted)

    def free(self, amounts: Amounts = ONE, now: float | None = None) -> list[To]:
        self.now = self.now if now is None else now
        return self.ledger.returned("a", amounts, self.now)

    def wake(self, now: float) -> list[To]:
        self.now = now
        messages = self.ledger.wake(now)
        self.ledger.check_integrity()
        return messages


def test_each_refusal_gets_a_later_slot_and_a_token_of_its_own() -> None:
    queue = FullQueue(requests=10)
    refusals = [queue.refused() for _ in range(100)]
    waits = [refused.retry_after_s for refused in refusals]
    assert waits == sorted(set(waits))
    assert 0.1 <= waits[0] <= 0.3
    assert 10.0 <= waits[-1] <= 12.5  # the hundredth, with some caution
    assert len({refused.token for refused in refusals}) == 100


def test_a_slot_is_for_as_many_tokens_as_are_asked_for() -> None:
    queue = FullQueue(tokens=5000)
    refused = queue.refused(Amounts(0, 4000))
    assert refused.field == "max_num_queued_tokens"
    assert 4.0 <= refused.retry_after_s <= 5.5
    assert 5.0 <= queue.refused(Amounts(0, 1000)).retry_after_s <= 7.0


def test_nothing_is_promised_beyond_a_minute_or_beyond_the_limit() -> None:
    queue = FullQueue(requests=10)
    refusals = [queue.refused() for _ in range(1000)]
    assert {(refused.retry_after_s, refused.token) for refused in refusals[600:]} == {(60.0, "")}
    assert queue.refused(Amounts(11, 0)).token == ""


def test_a_retry_on_time_goes_before_a_newcomer() -> None:
    queue = FullQueue(requests=10)
    refused = queue.refused()
    slot = queue.now + refused.retry_after_s
    assert queue.free(now=slot - LEAD_S / 2) == []
    assert queue.ask() == []  # it finds a place that is free, so it is not refused; but it is not its own
    ((router, granted),) = queue.ask(token=refused.token, now=slot)[:1]
    assert (router, type(granted)) == ("b", Granted)


def test_the_newcomer_that_waited_is_refused_once_the_place_is_taken() -> None:
    queue = FullQueue(requests=10)
    refused = queue.refused()
    queue.free()
    assert queue.ask(now=10.0 + refused.retry_after_s) == []
    granted, late = queue.ask(token=refused.token)
    assert isinstance(granted[1], Granted)
    assert isinstance(late[1], Refused)


def test_a_place_that_nobody_claims_is_the_newcomer_s() -> None:
    queue = FullQueue(requests=10)
    slot = queue.now + queue.refused().retry_after_s
    queue.free(now=slot)
    assert queue.ask() == []
    assert queue.ledger.wakes_at == pytest.approx(slot + HOLD_S)
    ((_, granted),) = queue.wake(slot + HOLD_S)
    assert isinstance(granted, Granted)


def test_nobody_waits_for_long_for_a_place_that_is_free() -> None:
    queue = FullQueue(requests=10)
    for _ in range(20):
        queue.refused()
    queue.free()
    assert queue.ask() == []
    messages: list[To] = []
    for _ in range(100):
        at = queue.ledger.wakes_at
        if messages or at is None:
            break
        messages = queue.wake(at)
    assert queue.now == pytest.approx(10.0 + PATIENCE_S)
    assert isinstance(messages[0][1], Granted)


def test_who_is_on_time_and_finds_no_place_gets_the_next_one() -> None:
    queue = FullQueue(requests=10)
    refused = queue.refused()
    assert queue.ask(token=refused.token, now=10.0 + refused.retry_after_s) == []
    newcomer = queue.refused()
    assert newcomer.retry_after_s > 0
    ((_, granted),) = queue.free()
    assert isinstance(granted, Granted)


def test_who_waited_in_vain_gets_another_slot_under_the_same_token_before_all_others() -> None:
    queue = FullQueue(requests=10)
    first, *others = [queue.refused() for _ in range(50)]
    slot = 10.0 + first.retry_after_s
    assert queue.ask(token=first.token, now=slot) == []
    ((_, again),) = [to for to in queue.wake(slot + CLAIM_PATIENCE_S) if isinstance(to[1], Refused)]
    assert isinstance(again, Refused)
    assert again.token == first.token
    assert again.retry_after_s < 1.5 < others[-1].retry_after_s
    queue.free(now=queue.now + again.retry_after_s)
    assert queue.is_granted(first.token)


def test_who_waited_in_vain_for_the_first_part_of_its_place_keeps_its_promise() -> None:
    queue = FullQueue(requests=10, tokens=5000)
    queue.free(Amounts(5, 0))
    first, *others = [queue.refused(Amounts(0, 400)) for _ in range(10)]
    queue.ask(Amounts(5, 0))
    slot = 10.0 + first.retry_after_s
    assert queue.ask(ONE, token=first.token, now=slot) == []
    queue.wake(slot + HOLD_S)
    ((_, again),) = [to for to in queue.wake(slot + CLAIM_PATIENCE_S) if isinstance(to[1], Refused)]
    assert isinstance(again, Refused)
    assert again.token == first.token
    assert again.retry_after_s < others[-1].retry_after_s


def test_who_is_early_is_told_the_rest() -> None:
    queue = FullQueue(requests=10)
    refused = [queue.refused() for _ in range(50)][-1]
    early = queue.refused(token=refused.token, now=12.0)
    assert early.token == refused.token
    assert early.retry_after_s == pytest.approx(refused.retry_after_s - 2.0)


def test_who_is_early_and_finds_a_place_has_it_and_books_none() -> None:
    queue = FullQueue(requests=10)
    refused = [queue.refused() for _ in range(50)][-1]
    queue.free()
    assert queue.ask(token=refused.token) == []  # the place is booked, though
    ((_, granted),) = queue.wake(10.0 + PATIENCE_S)
    assert isinstance(granted, Granted)
    assert queue.refused(token=refused.token).token != refused.token


def test_who_is_early_while_another_limit_has_room_is_refused_as_a_whole() -> None:
    queue = FullQueue(requests=10, tokens=5000)
    queue.free(Amounts(5, 0))
    refused = queue.refused(Amounts(0, 4000))
    early = queue.refused(ONE, token=refused.token, now=11.0)
    assert (early.field, early.token) == ("max_num_queued_tokens", refused.token)


def test_the_tokens_of_a_retry_are_held_from_when_it_is_counted_until_its_prompt_is_known() -> None:
    queue = FullQueue(requests=10, tokens=5000)
    queue.free(Amounts(5, 0))
    refused = queue.refused(Amounts(0, 400))
    slot = 10.0 + refused.retry_after_s
    queue.free(Amounts(0, 400), now=slot)
    ledger = queue.ledger
    ((_, granted),) = ledger.ask("b", Ask(7777, ONE, refused.token), slot + HOLD_S / 2)
    assert isinstance(granted, Granted)
    assert ledger.ask("b", Ask(8888, Amounts(0, 400)), slot + HOLD_S * 1.2) == []
    (_, granted), _ = ledger.ask("b", Ask(7777, Amounts(0, 400), refused.token), slot + HOLD_S * 1.4)
    assert isinstance(granted, Granted)
    assert granted.key == 7777


def test_who_is_late_is_before_others_for_a_while_and_then_a_newcomer() -> None:
    for late_s, is_known in ((CLAIM_S - 0.1, True), (CLAIM_S + 0.1, False)):
        queue = FullQueue(requests=10)
        refused = queue.refused()
        messages = queue.ask(token=refused.token, now=10.0 + refused.retry_after_s + late_s)
        assert (messages == []) == is_known  # it waits for the next place, or is refused as all are


@pytest.mark.parametrize("token", ["0" * 32, "", "nonsense", "another's alias"])
def test_a_token_that_nobody_gave_is_worth_nothing(token: str) -> None:
    queue = FullQueue(requests=10)
    refused = queue.refused(alias="mine")
    now = 10.0 + refused.retry_after_s
    queue.free(now=now)
    assert not queue.is_granted(token)
    assert queue.is_granted(refused.token)


def test_a_token_is_good_for_one_request() -> None:
    queue = FullQueue(requests=10)
    refused = queue.refused()
    now = 10.0 + refused.retry_after_s
    queue.free(now=now)
    assert queue.is_granted(refused.token)
    assert queue.refused(token=refused.token).token != refused.token


def test_a_token_sent_twice_before_its_time_is_good_for_one_request() -> None:
    queue = FullQueue(requests=10)
    first, second = queue.refused(), queue.refused()
    now = 10.0 + first.retry_after_s - LEAD_S / 2
    assert now < 10.0 + second.retry_after_s - LEAD_S
    queue.free(now=now)
    # A place is free, but booked for the first: both wait for it, until the second is on time.
    assert queue.ask(token=second.token) == queue.ask(token=second.token) == []
    (_, granted), (_, refused) = queue.wake(10.0 + second.retry_after_s)
    assert isinstance(granted, Granted)
    assert isinstance(refused, Refused)
    assert refused.token not in ("", second.token)


def test_who_sends_no_token_is_known_by_its_alias_and_equals_take_turns() -> None:
    queue = FullQueue(requests=10)
    for _ in range(10):
        queue.refused()
    first, second = (queue.refused(alias="same") for _ in range(2))
    assert queue.refused(token="same", now=10.0).token == first.token  # early
    now = 10.0 + second.retry_after_s
    queue.free(Amounts(2, 0), now=now)
    assert queue.is_granted("same")
    assert queue.is_granted("same")
    assert isinstance(queue.ask(token="same")[0][1], Refused)


def test_another_ledger_knows_no_token() -> None:
    token = FullQueue(requests=10).refused().token
    queue = FullQueue(requests=10)
    queue.ledger = Ledger(10, None, secret=b"t" * 32)
    queue.ledger.resume("b", Amounts(10, 0), 0.0)
    queue.ledger.tightened("b", 1, 0.0)
    assert queue.refused(token=token).token not in ("", token)


def test_a_lost_router_s_claim_may_be_made_again() -> None:
    queue = FullQueue(requests=10)
    refused = queue.refused()
    now = 10.0 + refused.retry_after_s
    ask = Ask(4242, ONE, refused.token)
    assert queue.ledger.ask("b", ask, now) == []
    queue.ledger.router_lost("b", now)
    queue.ledger.resume("b", NOTHING, now)
    assert queue.ledger.ask("b", ask, now) == []
    ((_, granted),) = queue.free(now=now + 0.1)
    assert isinstance(granted, Granted)
    assert granted.key == 4242


def test_bookings_are_bounded_in_number_and_forgotten() -> None:
    bookings = Bookings(b"secret")
    tokens = [bookings.book(ONE, 1.0, "alias") for _ in range(MAX_NUM_BOOKINGS + 1)]
    assert tokens[-1] == ""
    assert len(set(tokens)) == MAX_NUM_BOOKINGS + 1
    bookings.check_integrity()
    bookings.advance(1.0)
    assert (bookings.due, bookings.outstanding) == (Amounts(MAX_NUM_BOOKINGS, 0),) * 2
    bookings.advance(1.0 + HOLD_S)
    assert bookings.outstanding == NOTHING
    assert len(bookings) == MAX_NUM_BOOKINGS
    bookings.advance(1.0 + CLAIM_S)
    assert len(bookings) == 0
    assert bookings.next_change_at is None
    bookings.check_integrity()
