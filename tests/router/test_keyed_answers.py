"""Which answers are kept under their idempotency keys, on a clock that moves only when told."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from router.errors import ApiError, Cause
from router.idempotency import ENTRY_BYTES, KeyedAnswers, key_id, request_digest

TTL_S = 10.0


@dataclass(eq=False)
class Answer:
    digest: bytes = b"d"
    num_bytes: int = 0
    is_joinable: bool = True


def answers(max_answers: float = 100) -> KeyedAnswers[Answer]:
    return KeyedAnswers(TTL_S, int(max_answers * ENTRY_BYTES))


def test_keys_are_an_accounts_own() -> None:
    assert key_id("a", "b") == key_id("a", "b")
    assert len({key_id("a", "b"), key_id("", "b"), key_id("ab", ""), key_id("", "ab")}) == 4


def test_digests_are_of_route_and_body() -> None:
    assert request_digest("/a", b"b") == request_digest("/a", b"b")
    assert len({request_digest("/a", b"b"), request_digest("/c", b"b"), request_digest("/a", b"c")}) == 3


def test_one_that_runs_is_joined_and_then_kept_for_a_while() -> None:
    store, answer = answers(), Answer()
    assert store.find("k", b"d", 0.0) is None
    store.add("k", answer)
    assert store.find("k", b"d", 100.0) is answer
    store.ended("k", answer, is_whole=True, now=100.0)
    assert store.find("k", b"d", 100.0 + TTL_S - 0.1) is answer
    store.check_integrity()
    assert store.find("k", b"d", 100.0 + TTL_S) is None
    assert store.num_bytes == 0


def test_one_that_failed_is_not_kept() -> None:
    store, answer = answers(), Answer()
    store.add("k", answer)
    store.ended("k", answer, is_whole=False, now=0.0)
    assert store.find("k", b"d", 0.0) is None
    another = Answer()
    store.add("k", another)
    store.ended("k", answer, is_whole=True, now=0.0)  # late, of the first
    assert store.find("k", b"d", 0.0) is another


@pytest.mark.parametrize("is_ended", [False, True])
def test_another_request_under_the_same_key(is_ended: bool) -> None:
    store, answer = answers(), Answer()
    store.add("k", answer)
    if is_ended:
        store.ended("k", answer, is_whole=True, now=0.0)
    with pytest.raises(ApiError, match="use a new key") as caught:
        store.find("k", b"other", 0.0)
    assert (caught.value.cause, caught.value.status) == (Cause.IDEMPOTENCY_KEY_REUSED, 422)


def test_one_without_its_beginning_cannot_be_joined() -> None:
    store = answers()
    store.add("k", Answer(is_joinable=False, num_bytes=12345))
    with pytest.raises(ApiError, match="12345 bytes") as caught:
        store.find("k", b"d", 0.0)
    assert (caught.value.cause, caught.value.status) == (Cause.IDEMPOTENCY_IN_PROGRESS, 409)
    assert caught.value.headers()["retry-after"] == "1"


def test_the_oldest_go_where_there_is_no_room() -> None:
    store = answers(max_answers=3)
    for index in range(4):
        answer = Answer()
        store.add(str(index), answer)
        store.ended(str(index), answer, is_whole=True, now=float(index))
        store.check_integrity()
    assert [store.find(str(index), b"d", 4.0) is not None for index in range(4)] == [False, True, True, True]
    large = Answer(num_bytes=4 * ENTRY_BYTES)
    store.add("large", large)
    store.ended("large", large, is_whole=True, now=4.0)
    assert store.num_bytes == 0


def test_who_owns_a_key_where_two_routers_begin_at_once() -> None:
    store, answer = answers(), Answer()
    store.add("k", answer)
    assert store.is_owned("k", against=True, now=0.0)
    assert not store.is_owned("k", against=False, now=0.0)
    store.claimed("k")
    assert store.is_owned("k", against=False, now=0.0)
    store.ended("k", answer, is_whole=True, now=0.0)
    assert store.is_owned("k", against=False, now=0.0)
    assert not store.is_owned("k", against=True, now=TTL_S)
    assert not store.is_owned("other", against=True, now=0.0)


def test_the_books_stay_right_whatever_happens() -> None:
    for seed in range(100):
        rng, now = random.Random(seed), 0.0
        store = answers(max_answers=rng.choice([0, 2, 10]))
        running: dict[str, Answer] = {}
        for _ in range(200):
            now += rng.random()
            key = str(rng.randrange(8))
            if rng.random() < 0.5:
                found = store.find(key, b"d", now)
                if found is None:
                    running[key] = Answer(num_bytes=rng.randrange(3 * ENTRY_BYTES))
                    store.add(key, running[key])
                elif key in running:
                    assert found is running[key]
            elif key in running:
                store.ended(key, running.pop(key), is_whole=rng.random() < 0.7, now=now)
            store.check_integrity()
