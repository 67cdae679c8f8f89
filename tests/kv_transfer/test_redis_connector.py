"""Blocks in Redis: a real server that is killed, stopped, full and tampered with, and what only looks like one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer.block_store import StoreOutcome, StoreReason
from kv_transfer.deadlines import Deadlines
from kv_transfer.lookup_board import LookupBoard
from kv_transfer.redis_connector import RedisConnector
from tests.kv_transfer.redis_rig import (
    FakeServer,
    RedisProcess,
    ends,
    garbage,
    hang_up,
    needs_redis,
    silence,
    trickle,
)
from tests.kv_transfer.store_rig import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    ConnectedEngine,
    Resources,
    context_of,
    geometry,
    making_engines,
    prompt_of,
    serve,
    settle_stores,
    until,
)

HASHES = [bytes([number]) * 32 for number in range(1, 9)]


def blocks(*numbers: int) -> np.ndarray:
    return np.stack([np.full(BLOCK_BYTES, number, np.uint8) for number in numbers])


# ---- look-ups ----


@pytest.fixture
def board() -> Iterator[Any]:
    """A board, what the store behind it holds, and its clock."""
    clock = [0.0]
    held: set[bytes] = set()
    asked: list[int] = []
    board = LookupBoard(100.0, lambda: clock[0])

    def contains(hashes: Any) -> StoreOutcome:
        asked.append(len(hashes))
        count = next((place for place, block_hash in enumerate(hashes) if block_hash not in held), len(hashes))
        return StoreOutcome(count)

    board.start(contains, lambda: True)
    yield board, held, asked, clock
    board.close(5.0)


def answer(board: LookupBoard, hashes: list[bytes], number: int = 0) -> int:
    """What it knows in the end."""
    found: list[int] = []

    def knows() -> bool:
        count = board.num_leading((0, number), hashes)
        found.extend([] if count is None else [count])
        return count is not None

    until(knows, "the look-up is answered")
    return found[0]


def test_a_look_up_is_made_once_and_answers_for_what_is_left_of_it(board: Any) -> None:
    board, held, asked, _ = board
    held.update(HASHES[:5])
    assert answer(board, HASHES) == 5
    assert board.num_leading((0, 0), HASHES[2:]) == 3
    assert board.num_leading((0, 0), HASHES[6:]) == 0
    assert asked == [8]
    # Another request's is another, and so is one for other blocks, or more.
    assert answer(board, HASHES, number=1) == 5
    assert board.num_leading((0, 0), HASHES[1:3]) is None
    assert answer(board, HASHES[1:3]) == 2
    assert board.num_leading((0, 0), HASHES) is None
    assert answer(board, HASHES) == 5
    assert asked == [8, 8, 2, 8]


def test_what_was_answered_is_asked_again_when_it_is_old_or_was_wrong(board: Any) -> None:
    board, held, asked, clock = board
    assert answer(board, HASHES) == 0
    held.update(HASHES)
    assert board.num_leading((0, 0), HASHES) == 0
    clock[0] = 31.0
    assert answer(board, HASHES) == 8
    board.forget((0, 0))
    assert answer(board, HASHES) == 8
    assert len(asked) == 3


def test_what_was_seen_lately_need_not_be_stored(board: Any) -> None:
    board, _, _, clock = board
    board.see(HASHES[:3])
    board.begin_storing(HASHES[3:4])
    assert [board.holds(block_hash) for block_hash in HASHES[:5]] == [True, True, True, True, False]
    board.end_storing(HASHES[3:4])
    board.miss(HASHES[1:2])
    assert [board.holds(block_hash) for block_hash in HASHES[:4]] == [True, False, True, False]
    clock[0] = 100.0
    assert not board.holds(HASHES[0])


# ---- the store ----


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path)
    yield server
    server.kill()


MakeStore = Callable[..., Any]


@pytest.fixture
def make_store() -> Iterator[MakeStore]:
    from kv_transfer.redis_store import RedisStore

    resources = Resources()
    opened: list[Any] = []

    def make(url: str, **options: Any) -> RedisStore:
        index = LookupBoard(100.0, lambda: 0.0)
        deadlines = Deadlines("test-deadlines")
        deadlines.start()
        shape = geometry(**options.pop("changes", {}))
        settings = {"url": url, "key_prefix": "t", "ttl_s": 60.0, "timeout_s": 0.3} | options
        store = RedisStore(shape, index, deadlines, **settings)
        store.start()
        opened.extend([store, deadlines])
        return store

    yield make
    while opened:
        deadlines, store = opened.pop(), opened.pop()
        store.close()
        deadlines.close(5.0)
        del store
    resources.assert_as_before()


@needs_redis
def test_what_one_writes_another_finds_and_reads(server: RedisProcess, make_store: MakeStore) -> None:
    writer, reader = make_store(server.url), make_store(server.url)
    assert writer.put(HASHES[:3], blocks(1, 2, 3)) == StoreOutcome(3)
    assert reader.contains(HASHES[:5]) == StoreOutcome(3)
    into = np.zeros((3, BLOCK_BYTES), np.uint8)
    assert reader.get(HASHES[:3], into) == StoreOutcome(3)
    assert (into == blocks(1, 2, 3)).all()
    other = make_store(server.url, changes={"model": "other"})
    assert other.contains(HASHES[:3]) == StoreOutcome(0)
    with contextlib.closing(server.client()) as client:
        assert all(0 < client.pttl(key) <= 60_000 for key in client.keys("*"))


@needs_redis
def test_many_blocks_are_looked_up_in_bounded_batches(
    server: RedisProcess, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.redis_store._NUM_KEYS_PER_LOOKUP", 2)
    store = make_store(server.url)
    store.put(HASHES[:5], blocks(1, 2, 3, 4, 5))
    assert store.contains(HASHES) == StoreOutcome(5)
    assert store.contains(HASHES[:5]) == StoreOutcome(5)


@needs_redis
@pytest.mark.parametrize("damage", ["truncated", "flipped", "swapped", "empty", "of another type"])
def test_a_value_that_was_tampered_with_is_told_and_removed(
    server: RedisProcess, make_store: MakeStore, damage: str
) -> None:
    store = make_store(server.url)
    store.put(HASHES[:3], blocks(1, 2, 3))
    key, other = store._key(HASHES[1]), store._key(HASHES[2])
    with contextlib.closing(server.client()) as client:
        value = client.get(key)
        if damage == "of another type":
            client.delete(key)
            client.rpush(key, "x")
        else:
            changed = {
                "truncated": value[:-1],
                "flipped": value[:-1] + bytes([value[-1] ^ 1]),
                "swapped": client.get(other),
                "empty": b"",
            }[damage]
            client.set(key, changed)
    outcome = store.get(HASHES[:3], np.zeros((3, BLOCK_BYTES), np.uint8))
    assert outcome.num_blocks == 1
    # MGET answers nil for a key that holds no string.
    assert outcome.failure.reason is (StoreReason.MISSING if damage == "of another type" else StoreReason.CORRUPT)
    if damage != "of another type":
        assert key not in server.all_keys()


@needs_redis
def test_a_server_without_memory_is_read_from_and_not_written_to_for_a_while(
    tmp_path: Path, make_store: MakeStore
) -> None:
    server = RedisProcess(tmp_path)
    try:
        store = make_store(server.url)
        store.put(HASHES[:2], blocks(1, 2))
        with contextlib.closing(server.client()) as client:
            client.config_set("maxmemory", "1kb")
        outcome = store.put(HASHES[2:4], blocks(3, 4))
        assert outcome.num_blocks == 0
        assert outcome.failure.reason is StoreReason.FULL
        assert not store.accepts
        assert store.put(HASHES[2:4], blocks(3, 4)).failure.reason is StoreReason.UNAVAILABLE
        assert store.get(HASHES[:2], np.zeros((2, BLOCK_BYTES), np.uint8)) == StoreOutcome(2)
        with contextlib.closing(server.client()) as client:
            client.config_set("maxmemory", "0")
        until(lambda: store.accepts, "it is tried again")
        assert store.put(HASHES[2:4], blocks(3, 4)) == StoreOutcome(2)
    finally:
        server.kill()


@needs_redis
@pytest.mark.parametrize("answer", [garbage, trickle, silence, hang_up])
def test_a_server_that_is_none_costs_one_timeout_and_is_left_alone(make_store: MakeStore, answer: Any) -> None:
    server = FakeServer(answer)
    try:
        store = make_store(server.url)
        into = np.zeros((3, BLOCK_BYTES), np.uint8)
        for call in (
            lambda: store.contains(HASHES[:3]),
            lambda: store.get(HASHES[:3], into),
            lambda: store.put(HASHES[:3], blocks(1, 2, 3)),
        ):
            until(lambda: store._server.would_try(), "it is tried again")
            outcome = ends(call)
            assert outcome.num_blocks == 0
            assert outcome.failure is not None
        assert not store.accepts
        num_connections = server.num_connections
        for _ in range(100):
            assert store.get(HASHES[:3], into).failure.reason is StoreReason.UNAVAILABLE
        assert server.num_connections <= num_connections + 1
    finally:
        server.close()


@needs_redis
def test_a_server_that_stops_and_goes_on_is_used_again(server: RedisProcess, make_store: MakeStore) -> None:
    store = make_store(server.url)
    store.put(HASHES[:2], blocks(1, 2))
    assert store._index.holds(HASHES[0])
    server.pause()
    into = np.zeros((2, BLOCK_BYTES), np.uint8)
    outcome = store.get(HASHES[:2], into)
    assert outcome.failure is not None
    assert outcome.failure.reason is StoreReason.TIMEOUT
    assert not store._index.may_hold()
    assert not store._index.holds(HASHES[0])
    server.resume()
    until(lambda: store.get(HASHES[:2], into).num_blocks == 2, "it is used again")
    assert (into == blocks(1, 2)).all()


@needs_redis
def test_a_server_that_is_killed_and_comes_back_is_used_again(server: RedisProcess, make_store: MakeStore) -> None:
    store = make_store(server.url)
    store.put(HASHES[:2], blocks(1, 2))
    server.kill()
    assert store._index.holds(HASHES[0])
    assert store.contains(HASHES[:2]).failure is not None
    # It may come back without them.
    assert not store._index.holds(HASHES[0])
    assert store.put(HASHES[:2], blocks(1, 2)).failure is not None
    server.start()
    until(lambda: store.put(HASHES[:2], blocks(1, 2)).num_blocks == 2, "it is used again")


@needs_redis
def test_a_wrong_password_is_told_without_the_password(
    tmp_path: Path, make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisProcess(tmp_path)
    try:
        with contextlib.closing(server.client()) as client:
            client.config_set("requirepass", "right")
        store = make_store(server.url.replace("redis://", "redis://:wrong-one@"))
        assert store.contains(HASHES).failure is not None
        assert "fails, and is tried again later" in caplog.text
        assert "wrong-one" not in caplog.text
    finally:
        server.kill()


@needs_redis
@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"host": "x"}, "kv_connector_extra_config.host is 'x'.*RedisConnector knows url"),
        ({"url": "http://x"}, "kv_connector_extra_config.url cannot be used.*redis://host:6379/0"),
        ({"ttl_s": 0}, "kv_connector_extra_config.ttl_s is 0"),
        ({"max_staged_bytes": 8}, "max_staged_bytes is 8, and a block has 32 bytes"),
    ],
)
def test_settings_that_it_does_not_understand_are_refused(extra: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RedisConnector.make_worker_half(context_of(("RedisConnector", extra), geometry()))


# ---- ranks ----


MakeEngine = Callable[..., ConnectedEngine]
QUICK = {"timeout_s": 0.3, "lookup_timeout_s": 0.5, "load_timeout_s": 1.0}


@pytest.fixture
def make() -> Iterator[MakeEngine]:
    with making_engines() as make_any:

        def make(url: str, extra: dict[str, Any] | None = None, **options: Any) -> ConnectedEngine:
            return make_any(("RedisConnector", QUICK | {"url": url} | (extra or {})), **options)

        yield make


PROMPTS = [prompt_of(30, start) for start in range(1, 6)]
PATIENT = {"lookup_timeout_s": 20.0, "load_timeout_s": 20.0, "timeout_s": 5.0}


@needs_redis
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_second_rank_goes_on_where_the_first_has_computed(
    server: RedisProcess, make: MakeEngine, async_scheduling: bool
) -> None:
    setup = {"async_scheduling": async_scheduling}
    first = make(server.url, PATIENT, setup=setup)
    serve(first, PROMPTS)
    settle_stores(first)
    assert len(server.all_keys()) == 5 * 8
    second = make(server.url, PATIENT, setup=setup)
    serve(second, PROMPTS)
    assert second.num_computed_tokens() <= 5 * (30 % BLOCK_SIZE + 4)
    stats = second.worker.stats()
    assert (stats.num_loads, stats.load_failures) == (5, {})
    settle_stores(second)
    # What is there is not written again.
    assert stats.num_stored_blocks <= 5


@needs_redis
def test_expired_and_tampered_blocks_are_computed_again(server: RedisProcess, make: MakeEngine) -> None:
    first = make(server.url, PATIENT)
    serve(first, PROMPTS)
    settle_stores(first)
    with contextlib.closing(server.client()) as client:
        for number, key in enumerate(server.all_keys()):
            if number % 3 == 0:
                client.delete(key)
            elif number % 3 == 1:
                client.set(key, b"x" * 36)
    second = make(server.url, PATIENT)
    serve(second, PROMPTS)
    settle_stores(second)
    third = make(server.url, PATIENT)
    serve(third, PROMPTS)


@needs_redis
def test_a_server_killed_in_the_middle_of_loads_costs_computation_only(server: RedisProcess, make: MakeEngine) -> None:
    first = make(server.url, PATIENT)
    serve(first, PROMPTS)
    settle_stores(first)
    second = make(server.url)
    for number, prompt in enumerate(PROMPTS):
        second.submit(number, prompt, 4)
    until(lambda: second.step() is not None, "the first loads have begun")
    server.kill()
    second.run()
    second.assert_nothing_held()
    serve(second, PROMPTS, first_id=10)
    server.start()
    until(lambda: second.connector._index.may_hold(), "it is tried again")
    serve(second, [prompt_of(20, 9)], first_id=20)


@needs_redis
@pytest.mark.parametrize("answer", [garbage, trickle, silence, hang_up])
def test_serving_goes_on_whatever_answers(make: MakeEngine, answer: Any) -> None:
    server = FakeServer(answer)
    try:
        engine = make(server.url)
        serve(engine, PROMPTS)
        stats = engine.worker.stats()
        assert stats.num_loads == stats.num_stored_blocks == 0
        assert server.num_connections <= 8
    finally:
        server.close()


@needs_redis
def test_nobody_there_at_all(make: MakeEngine) -> None:
    engine = make("redis://127.0.0.1:1/0")
    serve(engine, PROMPTS)
    serve(engine, PROMPTS, first_id=10)


@needs_redis
def test_a_server_that_stops_while_blocks_are_read_ends_loads_in_time(server: RedisProcess, make: MakeEngine) -> None:
    first = make(server.url, PATIENT)
    serve(first, PROMPTS)
    settle_stores(first)
    second = make(server.url)
    for number, prompt in enumerate(PROMPTS):
        second.submit(number, prompt, 4)
    second.step()
    server.pause()
    try:
        second.run()
        second.assert_nothing_held()
    finally:
        server.resume()
