"""What routers ask each other through the control actor: one answer each, and nothing that is remembered for ever."""

from __future__ import annotations

import random

from cluster.inquiries import ANSWER_TIMEOUT_S, Inquiries
from router.control_messages import Inquired, Inquiry, InquiryAction, InquiryAnswer

INQUIRY = Inquiry(7, InquiryAction.CANCEL, "cmpl-1", "tenant:blue")


def test_the_first_yes_is_the_answer() -> None:
    inquiries = Inquiries()
    asked = inquiries.ask("a", INQUIRY, ["b", "c"], 0.0)
    question = Inquired(0, "a", InquiryAction.CANCEL, "cmpl-1", "tenant:blue")
    assert asked == [("b", question), ("c", question)]
    assert inquiries.replied("c", 0, True) == [("a", InquiryAnswer(7, True, 2))]
    assert inquiries.replied("b", 0, True) == []
    assert inquiries.num_open == 0


def test_no_takes_all_of_them() -> None:
    inquiries = Inquiries()
    inquiries.ask("a", INQUIRY, ["b", "c"], 0.0)
    assert inquiries.replied("b", 0, False) == []
    assert inquiries.replied("b", 0, False) == []
    assert inquiries.replied("d", 0, True) == []
    assert inquiries.replied("c", 0, False) == [("a", InquiryAnswer(7, False, 2))]


def test_with_nobody_to_ask_the_answer_is_no() -> None:
    assert Inquiries().ask("a", INQUIRY, [], 0.0) == [("a", InquiryAnswer(7, False, 0))]


def test_a_lost_router_says_no_and_wants_no_answer() -> None:
    inquiries = Inquiries()
    inquiries.ask("a", INQUIRY, ["b"], 0.0)
    inquiries.ask("b", INQUIRY, ["a"], 0.0)
    assert inquiries.router_lost("b") == [("a", InquiryAnswer(7, False, 1))]
    assert inquiries.num_open == 0
    assert inquiries.replied("a", 1, True) == []


def test_silent_ones_are_not_waited_for() -> None:
    inquiries = Inquiries()
    inquiries.ask("a", INQUIRY, ["b"], 0.0)
    inquiries.tick(ANSWER_TIMEOUT_S - 0.1)
    assert inquiries.num_open == 1
    inquiries.tick(ANSWER_TIMEOUT_S)
    assert inquiries.num_open == 0
    assert inquiries.replied("b", 0, True) == []


def test_each_query_has_one_answer_at_most_whatever_happens() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        inquiries, alive, now, query = Inquiries(), {"a", "b", "c", "d"}, 0.0, 0
        asked: list[tuple[str, int]] = []
        answers: dict[int, bool] = {}

        def hear(messages: list[tuple[str, InquiryAnswer]], answers: dict[int, bool] = answers) -> None:
            for _, answer in messages:
                assert answer.query not in answers
                answers[answer.query] = answer.is_yes

        for _ in range(60):
            now += rng.random()
            match rng.randrange(5):
                case 0 if alive:
                    asker, query = rng.choice(sorted(alive)), query + 1
                    inquiry = Inquiry(query, InquiryAction.CANCEL, "cmpl-1", "")
                    for router, message in inquiries.ask(asker, inquiry, alive - {asker}, now):
                        if isinstance(message, Inquired):
                            asked.append((router, message.number))
                        else:
                            hear([(router, message)])
                case 1 if len(alive) > 1:
                    lost = rng.choice(sorted(alive))
                    alive.discard(lost)
                    hear(inquiries.router_lost(lost))
                case 2:
                    inquiries.tick(now)
                case _ if asked:
                    router, number = rng.choice(asked)
                    hear(inquiries.replied(router, number, rng.random() < 0.3))
        inquiries.tick(now + ANSWER_TIMEOUT_S)
        assert inquiries.num_open == 0
