"""Blocks as files that ranks share: the files, a disk that fails, and ranks that live off what another has computed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer.backoff import Backoff
from kv_transfer.block_store import StoreFailure, StoreReason, finite_rows
from kv_transfer.config import KvRole
from kv_transfer.file_store import FileStore
from kv_transfer.known_blocks import KnownBlocks
from kv_transfer.layered_loads import LayeredLoads
from kv_transfer.memory import KvMemory
from kv_transfer.shared_storage_connector import SharedStorageConnector
from kv_transfer.store_scheduler import LoadBlocks
from tests.kv_transfer.store_rig import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    NUM_LAYERS,
    ConnectedEngine,
    MirroredMemory,
    context_of,
    damage_block,
    expected,
    geometry,
    making_engines,
    prompt_of,
    serve,
    settle_stores,
    until,
)

HASHES = [bytes([number]) * 32 for number in range(1, 9)]
LARGE = 1 << 20


def blocks(*numbers: int) -> np.ndarray:
    return np.stack([np.full(BLOCK_BYTES, number, np.uint8) for number in numbers])


def make_store(directory: Path, max_size_bytes: int = LARGE, **changes: Any) -> FileStore:
    store = FileStore(geometry(**changes), directory, max_size_bytes, KnownBlocks())
    store.start()
    return store


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


# ---- files ----


def test_what_one_writes_another_finds_and_reads(tmp_path: Path) -> None:
    writer, reader = make_store(tmp_path), make_store(tmp_path)
    assert writer.put(HASHES[:3], blocks(1, 2, 3)).num_blocks == 3
    assert reader._index.num_leading((0, 0), HASHES[:4]) == 0

    def finds_them() -> bool:
        reader.maintain()
        return reader._index.num_leading((0, 0), HASHES[:4]) == 3

    until(finds_them, "the files are listed")
    assert reader.contains(HASHES[:4]).num_blocks == 3
    into = np.zeros((3, BLOCK_BYTES), np.uint8)
    assert reader.get(HASHES[:3], into).num_blocks == 3
    assert (into == blocks(1, 2, 3)).all()
    # Again is no work.
    assert writer.put(HASHES[:3], blocks(1, 2, 3)).num_blocks == 0
    assert len(files_in(tmp_path)) == 3


def test_nobody_sees_a_file_before_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    seen: list[int] = []
    rename = Path.rename

    def watching(self: Path, target: Path) -> Path:
        seen.append(self.stat().st_size)
        assert not target.exists()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watching)
    store.put(HASHES[:1], blocks(1))
    (path,) = files_in(tmp_path)
    assert seen == [path.stat().st_size]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_head(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)


def flip_content(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    """Another block's file under this name."""
    other = path.with_name(HASHES[-1].hex() + ".kv")
    path.write_bytes(other.read_bytes())


DAMAGES = [truncate, lengthen, empty, flip_head, flip_content, swap]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_told_counted_and_deleted(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = make_store(tmp_path)
    store.put([HASHES[0], HASHES[1], HASHES[-1]], blocks(1, 2, 9))
    path = store._path(HASHES[1])
    damage(path)
    into = np.zeros((2, BLOCK_BYTES), np.uint8)
    outcome = store.get(HASHES[:2], into)
    assert outcome.num_blocks == 1
    assert outcome.failure is not None
    assert outcome.failure.reason is StoreReason.CORRUPT
    assert store.num_corrupt == 1
    assert not path.exists()
    assert store._index.num_leading((0, 0), HASHES[:2]) == 1


def test_a_rank_of_another_geometry_reads_none_of_it(tmp_path: Path) -> None:
    ours = make_store(tmp_path)
    ours.put(HASHES[:1], blocks(1))
    for changes in ({"model": "other"}, {"dtype": "int64"}, {"num_layers": 4}):
        other = make_store(tmp_path, **changes)
        assert other._index.num_leading((0, 0), HASHES[:1]) == 0
        # Also if somebody puts it there.
        other._path(HASHES[0]).write_bytes(ours._path(HASHES[0]).read_bytes())
        outcome = other.get(HASHES[:1], blocks(0))
        assert outcome.failure is not None
        assert outcome.failure.reason is StoreReason.CORRUPT
    assert ours.get(HASHES[:1], blocks(0)).num_blocks == 1


def test_the_oldest_files_make_room_for_new_ones(tmp_path: Path) -> None:
    size = make_store(tmp_path)._format.file_size_bytes
    store = make_store(tmp_path, 3 * size)
    for number in range(5):
        store.put(HASHES[number : number + 1], blocks(number))
    assert store.num_evicted() == 2
    assert [store._index.holds(block_hash) for block_hash in HASHES[:5]] == [False, False, True, True, True]
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 3 * size


def test_the_limit_counts_what_other_ranks_and_models_have_written(tmp_path: Path) -> None:
    size = make_store(tmp_path)._format.file_size_bytes
    other = make_store(tmp_path, model="other")
    other.put(HASHES[:4], blocks(1, 2, 3, 4))
    for age, path in enumerate(files_in(tmp_path)):
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    store = make_store(tmp_path, 3 * size)
    assert len(files_in(tmp_path)) == 3
    store.put(HASHES[:1], blocks(1))
    assert len(files_in(tmp_path)) == 3
    assert store._path(HASHES[0]).exists()


def test_a_file_that_is_read_is_not_old(tmp_path: Path) -> None:
    size = make_store(tmp_path)._format.file_size_bytes
    store = make_store(tmp_path)
    store.put(HASHES[:3], blocks(1, 2, 3))
    for path in files_in(tmp_path):
        os.utime(path, (1_000_000, 1_000_000))
    store.get(HASHES[:1], blocks(0))
    limited = make_store(tmp_path, size)
    assert limited._index.holds(HASHES[0])
    assert len(files_in(tmp_path)) == 1


def test_what_a_crash_left_unfinished_is_cleared_away(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    old, young = (store._directory / f".unfinished-{name}" for name in ("old", "young"))
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, (1_000_000, 1_000_000))
    make_store(tmp_path)
    assert files_in(tmp_path) == [young]


def test_names_that_are_not_its_own_are_left_alone(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    foreign = store._directory / "notes.kv"
    foreign.write_text("mine")
    store.put(HASHES[:1], blocks(1))
    make_store(tmp_path)
    assert foreign.exists()


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, StoreReason.FULL), (errno.EIO, StoreReason.ERROR)])
def test_a_disk_that_refuses_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: StoreReason
) -> None:
    store = make_store(tmp_path)
    attempts: list[Path] = []

    def refusing(self: Path, target: Path) -> Path:
        attempts.append(target)
        raise OSError(code, "refused")

    monkeypatch.setattr(Path, "rename", refusing)
    outcome = store.put(HASHES[:1], blocks(1))
    assert outcome.failure is not None
    assert outcome.failure.reason is reason
    assert not store.accepts
    again = store.put(HASHES[:1], blocks(1))
    assert again.failure is not None
    assert again.failure.reason is StoreReason.UNAVAILABLE
    assert len(attempts) == 1
    assert files_in(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match=r"shared_storage_path is .*name a directory"):
        make_store(blocked / "below")


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, "kv_connector_extra_config.shared_storage_path: Field required"),
        ({"shared_storage_path": "/x", "path": 1}, "kv_connector_extra_config.path is 1"),
        ({"shared_storage_path": "/x", "max_size_bytes": 8}, "max_size_bytes is 8, and a block's file has"),
        ({"shared_storage_path": "/x", "max_staged_bytes": 8}, "max_staged_bytes is 8, and a block has 32 bytes"),
    ],
)
def test_settings_that_it_does_not_understand_are_refused(extra: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SharedStorageConnector.make_worker_half(context_of(("SharedStorageConnector", extra), geometry()))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_seen(dtype: str, value: float) -> None:
    rows = np.random.default_rng(1).normal(size=(3, 8)).astype(dtype)
    rows[1, 5] = value
    assert finite_rows(rows.view(np.uint8), dtype).tolist() == [True, False, True]
    if dtype == "float32":
        halves = np.ascontiguousarray(rows.view(np.uint16)[:, 1::2])
        assert finite_rows(halves.view(np.uint8), "bfloat16").tolist() == [True, False, True]


# ---- waiting after failures ----


def test_waits_double_and_are_bounded_and_one_call_tries() -> None:
    backoff = Backoff(1.0, 4.0)
    assert backoff.may_try(0.0)
    assert backoff.failed(0.0)
    # Calls that had begun before it.
    assert not backoff.failed(0.5)
    waits = []
    at = 0.0
    for _ in range(5):
        previous = at
        while not backoff.would_try(at):
            at += 0.25
        waits.append(at - previous)
        assert backoff.may_try(at)
        assert not backoff.may_try(at), "two try at once"
        backoff.failed(at)
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]
    at += 4.0
    assert backoff.may_try(at)
    assert backoff.succeeded()
    assert backoff.may_try(at)
    assert backoff.may_try(at)


# ---- loads within a step ----


class SlowStore(FileStore):
    """Reading stops before the second layer, until it is let go."""

    def __init__(self, directory: Path, index: KnownBlocks) -> None:
        super().__init__(geometry(), directory, LARGE, index)
        self.go_on = threading.Event()
        self.reached = threading.Event()

    def open(self, block_hash: bytes) -> Any:
        opened = super().open(block_hash)
        if not isinstance(opened, StoreFailure):
            read = opened.read_layer

            def slow(layer: int, into: np.ndarray) -> StoreFailure | None:
                if layer == 1:
                    self.reached.set()
                    assert self.go_on.wait(30)
                return read(layer, into)

            opened.read_layer = slow  # type: ignore[method-assign]
        return opened


@pytest.fixture
def slow(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[SlowStore, LayeredLoads, KvMemory, KnownBlocks]]:
    index = KnownBlocks()
    store = SlowStore(tmp_path, index)
    store.start()
    store.put(HASHES[:2], blocks(7, 8))
    loads = LayeredLoads(geometry(), store, index, 0.2)
    memory = (MirroredMemory if hasattr(request, "param") else KvMemory)(4, BLOCK_BYTES)
    loads.start(memory, lambda event: None)
    yield store, loads, memory, index
    store.go_on.set()
    loads.close(5.0)
    memory.close()


LOAD = LoadBlocks((0, 0), np.array([1, 2], np.int32), tuple(HASHES[:2]), 0, 8)


def test_a_layer_is_there_while_the_next_is_still_read(slow: Any) -> None:
    store, loads, memory, _ = slow
    loads.begin([LOAD])
    loads.wait_for_layer(0)
    half = BLOCK_BYTES // NUM_LAYERS
    assert store.reached.wait(5)
    assert (memory.blocks[1:3, :half] == blocks(7, 8)[:, :half]).all()
    assert not memory.blocks[:, half:].any()
    store.go_on.set()
    loads.wait_for_layer(1)
    assert loads.finish_step(was_computed=True) == frozenset()
    assert (memory.blocks[1:3] == blocks(7, 8)).all()


def test_a_disk_that_hangs_delays_one_step_and_writes_nothing_later(slow: Any) -> None:
    store, loads, memory, index = slow
    loads.begin([LOAD])
    for layer in range(NUM_LAYERS):
        loads.wait_for_layer(layer)
    assert loads.finish_step(was_computed=True) == {1, 2}
    assert index.num_leading((0, 0), HASHES[:2]) == 0, "nothing more is asked of it"
    memory.blocks[:] = 0xEE
    store.go_on.set()
    until(lambda: index.num_leading((0, 0), HASHES[:2]) == 2, "it is asked again once it answers")
    assert (memory.blocks == 0xEE).all(), "late bytes in blocks that are somebody else's"


def test_a_step_that_is_not_computed_ends_its_loads(slow: Any) -> None:
    store, loads, memory, _ = slow
    loads.begin([LOAD])
    assert store.reached.wait(5)
    loads.finish_step(was_computed=False)
    memory.blocks[:] = 0xEE
    store.go_on.set()
    loads.close(5.0)
    assert (memory.blocks == 0xEE).all()


mirrored = pytest.mark.parametrize("slow", ["mirrored"], indirect=True)


@mirrored
def test_on_a_device_blocks_are_there_as_a_whole_before_the_first_layer(slow: Any) -> None:
    store, loads, memory, _ = slow
    loads.begin([LOAD])
    assert store.reached.wait(5)
    waiting = threading.Thread(target=loads.wait_for_layer, args=(0,))
    waiting.start()
    assert not memory.device.any(), "half of a block"
    assert waiting.is_alive()
    store.go_on.set()
    waiting.join(5)
    assert (memory.device[1:3] == blocks(7, 8)).all()
    assert loads.finish_step(was_computed=True) == frozenset()


@mirrored
def test_only_blocks_that_are_complete_come_to_the_device(tmp_path: Path, slow: Any) -> None:
    store, loads, memory, _ = slow
    (path,) = tmp_path.rglob(f"{HASHES[1].hex()}.kv")
    flip_content(path)
    store.go_on.set()
    loads.begin([LOAD])
    loads.wait_for_layer(0)
    assert (memory.device[1] == 7).all()
    assert not memory.device[2].any()
    assert loads.finish_step(was_computed=True) == {2}


@mirrored
@pytest.mark.parametrize("was_computed", [False, True], ids=["not_computed", "late"])
def test_nothing_comes_to_the_device_for_a_step_that_is_over(slow: Any, was_computed: bool) -> None:
    store, loads, memory, _ = slow
    loads.begin([LOAD])
    assert store.reached.wait(5)
    assert loads.finish_step(was_computed=was_computed) == {1, 2}
    store.go_on.set()
    loads.close(5.0)
    assert not memory.device.any()


def test_more_blocks_than_files_may_be_open(
    tmp_path: Path, slow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("kv_transfer.layered_loads.MAX_NUM_OPEN", 1)
    store, loads, memory, _ = slow
    store.go_on.set()
    loads.begin([LOAD])
    loads.wait_for_layer(0)
    assert (memory.blocks[2] == 8).all()
    loads.wait_for_layer(1)
    assert loads.finish_step(was_computed=True) == frozenset()
    assert (memory.blocks[1:3] == blocks(7, 8)).all()


# ---- ranks ----


MakeEngine = Callable[..., ConnectedEngine]


@pytest.fixture(params=[False, True], ids=["shared", "mirrored"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeEngine]:
    with making_engines() as make_any:

        def make(extra: dict[str, Any] | None = None, **options: Any) -> ConnectedEngine:
            settings = {"shared_storage_path": str(tmp_path), "scan_interval_s": 0.02} | (extra or {})
            return make_any(("SharedStorageConnector", settings), mirrored=request.param, **options)

        yield make


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_second_rank_goes_on_where_the_first_has_computed(make: MakeEngine, async_scheduling: bool) -> None:
    setup = {"async_scheduling": async_scheduling}
    prompts = [prompt_of(30, start) for start in range(1, 6)]
    first = make(setup=setup)
    serve(first, prompts)
    settle_stores(first)
    second = make(setup=setup)
    serve(second, prompts)
    # Of each prompt what no full block holds, and all but one of the generated tokens; a token too many ahead.
    assert second.num_computed_tokens() <= 5 * (30 % BLOCK_SIZE + 4)
    stats = second.worker.stats()
    assert stats.num_loads == 5
    assert stats.num_loaded_bytes == 5 * 7 * BLOCK_BYTES
    assert stats.load_failures == {}


def test_ranks_that_run_at_the_same_time_find_each_others_blocks(make: MakeEngine) -> None:
    first, second = make(), make()
    serve(first, [prompt_of(30)])
    until(lambda: second.connector._index.may_hold(), "the second has seen the files")
    serve(second, [prompt_of(30)])
    assert second.worker.stats().num_loads == 1


def test_a_prompt_that_is_there_as_a_whole_computes_one_token(make: MakeEngine) -> None:
    first = make()
    serve(first, [prompt_of(32)])
    settle_stores(first)
    second = make()
    serve(second, [prompt_of(32)], num_tokens=1)
    assert second.num_computed_tokens() == 1


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("damage", [truncate, flip_content, Path.unlink])
def test_damaged_and_missing_blocks_are_computed_again(
    make: MakeEngine, tmp_path: Path, damage: Callable[[Path], None], async_scheduling: bool
) -> None:
    prompts = [prompt_of(30, start) for start in range(1, 6)]
    first = make()
    serve(first, prompts)
    settle_stores(first)
    second = make({"scan_interval_s": 600.0}, setup={"async_scheduling": async_scheduling}, max_num_batched_tokens=16)
    for path in files_in(tmp_path)[::3]:
        damage(path)
    serve(second, prompts)
    stats = second.worker.stats()
    assert sum(stats.load_failures.values()) >= 1
    settle_stores(second)
    # What was computed anew is right as well, and nothing wrong was stored.
    third = make()
    serve(third, prompts)
    assert third.worker.stats().load_failures == {}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_was_computed_on_a_lost_block_is_not_stored(
    make: MakeEngine, tmp_path: Path, async_scheduling: bool
) -> None:
    """Neither what its own step has computed, nor what the next one has, which had been planned already."""
    first = make()
    serve(first, [prompt_of(16)], num_tokens=1)
    settle_stores(first)
    second = make({"scan_interval_s": 600.0}, setup={"async_scheduling": async_scheduling}, max_num_batched_tokens=8)
    damage_block(tmp_path, prompt_of(16), 1)
    serve(second, [prompt_of(48)])
    assert second.worker.stats().load_failures == {"corrupt": 1}
    settle_stores(second)
    third = make()
    serve(third, [prompt_of(48)])
    assert third.worker.stats().num_loaded_bytes == 12 * BLOCK_BYTES


def test_a_lost_block_ends_its_request_where_that_is_wanted(make: MakeEngine, tmp_path: Path) -> None:
    first = make()
    serve(first, [prompt_of(30)])
    settle_stores(first)
    second = make({"scan_interval_s": 600.0}, setup={"kv_load_failure_policy": "fail"})
    files_in(tmp_path)[0].unlink()
    second.submit(0, prompt_of(30), 4)
    second.submit(1, prompt_of(20, 9), 4)
    second.run()
    assert "could not be loaded" in second.ends[0].message
    assert second.tokens[1] == expected(prompt_of(20, 9), 4)


def test_a_step_that_failed_stores_nothing(make: MakeEngine, tmp_path: Path) -> None:
    engine = make()
    engine.failing_steps = {1}
    engine.submit(0, prompt_of(30), 4)
    engine.run()
    settle_stores(engine)
    assert files_in(tmp_path) == []


def test_a_rank_that_only_consumes_stores_nothing(make: MakeEngine, tmp_path: Path) -> None:
    engine = make(role=KvRole.CONSUMER)
    serve(engine, [prompt_of(30)])
    settle_stores(engine)
    assert files_in(tmp_path) == []
    producer = make(role=KvRole.PRODUCER)
    serve(producer, [prompt_of(30)])
    serve(producer, [prompt_of(30)], first_id=5)
    settle_stores(producer)
    assert producer.worker.stats().num_loads == 0
    assert len(files_in(tmp_path)) == 8


def test_what_does_not_fit_into_the_staging_memory_is_left_out(make: MakeEngine) -> None:
    engine = make({"max_staged_bytes": 2 * BLOCK_BYTES})
    serve(engine, [prompt_of(30)])
    stats = engine.worker.stats()
    assert stats.store_failures.get("backlog", 0) >= 1
