"""The moving half of the store connectors over a store that stalls, fails and loses on command."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kv_transfer.block_store import StoreFailure, StoreOutcome, StoreReason
from kv_transfer.connector import ConnectorEvent, ConnectorStats, LoadFinished, SendFinished
from kv_transfer.deadlines import Deadlines
from kv_transfer.known_blocks import KnownBlocks
from kv_transfer.memory import KvMemory
from kv_transfer.store_loads import AsyncLoads, LoadCounts
from kv_transfer.store_scheduler import DropLoad, LoadBlocks, StoreComputed, StoreKept
from kv_transfer.store_worker import StoreWorker
from kv_transfer.store_writer import StoreWriter
from tests.kv_transfer.store_rig import BLOCK_BYTES, PATIENCE_S, MirroredMemory, Resources, geometry, until

HASHES = tuple(bytes([number]) * 32 for number in range(1, 9))
KEY = (0, 1)
GARBAGE = 0xEE


class StallingStore:
    """Every call waits to be let go; blocks hold their hash's first byte."""

    is_local = False
    num_blocks_per_call = 2
    accepts = True

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.num_calls = 0
        self.has_stopped_at: StoreOutcome | None = None
        self.raises = False
        self.stored: list[bytes] = []
        self.content: list[int] = []
        """Of what is stored, the first byte."""

    def start(self) -> None:
        """Nothing to begin."""

    def contains(self, hashes: Sequence[bytes]) -> StoreOutcome:
        return StoreOutcome(len(hashes))

    def get(self, hashes: Sequence[bytes], into: np.ndarray) -> StoreOutcome:
        self._stall()
        into[:] = np.array([[block_hash[0]] for block_hash in hashes], np.uint8)
        return self.has_stopped_at or StoreOutcome(len(hashes))

    def put(self, hashes: Sequence[bytes], blocks: np.ndarray) -> StoreOutcome:
        self._stall()
        self.stored += hashes
        self.content += blocks[:, 0].tolist()
        return StoreOutcome(len(hashes))

    def maintain(self) -> None:
        """Nothing to do."""

    def num_evicted(self) -> int:
        return 0

    def close(self) -> None:
        self.go_on.set()

    def _stall(self) -> None:
        self.num_calls += 1
        assert self.go_on.wait(PATIENCE_S)
        if self.raises:
            raise RuntimeError("a bug in the store")


class Rig:
    def __init__(
        self, dtype: str = "uint64", load_timeout_s: float = PATIENCE_S, num_staged: int = 4, *, mirrored: bool = False
    ) -> None:
        shape = geometry(dtype=dtype)
        self.store = StallingStore()
        self.index = KnownBlocks()
        deadlines = Deadlines("test-deadlines")
        store: Any = self.store
        loads = AsyncLoads(shape, store, deadlines, load_timeout_s)
        writer = StoreWriter(shape, store, self.index, num_staged * BLOCK_BYTES)
        self.worker = StoreWorker(shape, store, self.index, loads, writer, deadlines)
        self.memory = MirroredMemory(8, BLOCK_BYTES) if mirrored else KvMemory(8, BLOCK_BYTES)
        self.memory.blocks[:] = GARBAGE
        self.events: queue.SimpleQueue[ConnectorEvent] = queue.SimpleQueue()
        self.worker.start(self.memory, self.events.put)

    def event(self) -> ConnectorEvent:
        return self.events.get(timeout=PATIENCE_S)

    def load(self, *blocks: int, num_local: int = 0) -> None:
        order = LoadBlocks(
            KEY, np.array(blocks, np.int32), HASHES[: len(blocks)], num_local, num_local + 4 * len(blocks)
        )  # fmt: skip
        self.worker.start_load_kv((order,))

    def close(self) -> None:
        self.store.go_on.set()
        self.worker.close(PATIENCE_S)
        self.memory.close()


MakeRig = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[MakeRig]:
    resources = Resources()
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    while rigs:
        rigs.pop().close()
    resources.assert_as_before()


# ---- loads ----


def test_a_load_fills_its_blocks_and_no_others(make: MakeRig) -> None:
    rig = make()
    rig.store.go_on.set()
    rig.load(3, 5, 4)
    assert rig.event() == LoadFinished(KEY)
    assert rig.memory.blocks[:, 0].tolist() == [GARBAGE, GARBAGE, GARBAGE, 1, 3, 2, GARBAGE, GARBAGE]
    stats = rig.worker.stats()
    assert (stats.num_loads, stats.num_loaded_bytes, sum(stats.load_seconds)) == (1, 3 * BLOCK_BYTES, 1)


def test_what_has_been_loaded_is_on_the_device(make: MakeRig) -> None:
    rig = make(mirrored=True)
    assert isinstance(rig.memory, MirroredMemory)
    rig.store.go_on.set()
    rig.load(3, 5, 4)
    assert rig.event() == LoadFinished(KEY)
    assert rig.memory.device[:, 0].tolist() == [0, 0, 0, 1, 3, 2, 0, 0]


def test_loads_are_counted_once() -> None:
    counts, stats = LoadCounts(), ConnectorStats()
    counts.ended(0.5, 10, None)
    counts.ended(0.25, 10, None)
    counts.add_to(stats)
    assert (stats.num_loads, stats.num_loaded_bytes, sum(stats.load_seconds)) == (2, 20, 2)
    assert stats.load_seconds_sum == 0.75


def test_what_came_before_a_failure_is_valid(make: MakeRig) -> None:
    rig = make()
    rig.store.go_on.set()
    rig.store.has_stopped_at = StoreOutcome(1, StoreFailure(StoreReason.CORRUPT, "damaged"))
    rig.load(3, 5, 4, num_local=4)
    event = rig.event()
    assert event == LoadFinished(KEY, 8, "corrupt: damaged")
    assert rig.memory.blocks[[3, 5, 4], 0].tolist() == [1, GARBAGE, GARBAGE]
    assert rig.worker.stats().load_failures == {"corrupt": 1}


@pytest.mark.parametrize("how", ["deadline", "dropped", "closed"])
def test_a_load_that_has_ended_writes_nothing_later(make: MakeRig, how: str) -> None:
    rig = make(load_timeout_s=0.05 if how == "deadline" else PATIENCE_S, mirrored=True)
    rig.load(3, 5, 4)
    until(lambda: rig.store.num_calls == 1, "the store is asked")
    closing = threading.Thread(target=rig.worker.close, args=(PATIENCE_S,))
    if how == "dropped":
        rig.worker.start_load_kv((DropLoad(KEY),))
    elif how == "closed":
        closing.start()
    event = rig.event()
    assert isinstance(event, LoadFinished)
    assert (event.num_valid_tokens, event.is_fenced) == (0, True)
    assert event.cause.startswith("timeout" if how == "deadline" else "ended")
    rig.store.go_on.set()
    if how == "closed":
        closing.join(PATIENCE_S)
    else:
        # One behind it, to know that the thread is done with it.
        rig.load(6)
        assert isinstance(rig.event(), LoadFinished)
    assert (rig.memory.blocks[3:6] == GARBAGE).all()
    assert isinstance(rig.memory, MirroredMemory)
    assert not rig.memory.device[3:6].any()
    assert rig.events.empty(), "a load has ended twice"


def test_a_store_that_raises_fails_the_load_and_lives_on(make: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig = make()
    rig.store.go_on.set()
    rig.store.raises = True
    rig.load(3)
    event = rig.event()
    assert isinstance(event, LoadFinished)
    assert "a bug in the store" in event.cause
    rig.store.raises = False
    rig.load(3)
    assert rig.event() == LoadFinished(KEY)
    # Its traceback would keep everything.
    caplog.clear()


# ---- stores ----


def order(kind: Any, *blocks: int) -> Any:
    ids, hashes = np.array(blocks, np.int32), HASHES[: len(blocks)]
    return StoreKept(KEY, ids, hashes) if kind is StoreKept else StoreComputed(ids, hashes)


def step(rig: Rig, *orders: Any, was_computed: bool = True) -> None:
    rig.worker.start_load_kv(orders)
    assert rig.worker.finish_step(orders, was_computed=was_computed) == frozenset()


def test_blocks_are_free_before_the_store_has_taken_them(make: MakeRig) -> None:
    rig = make()
    step(rig, order(StoreKept, 1, 2))
    assert rig.event() == SendFinished(KEY)
    assert rig.index.num_leading(KEY, HASHES[:2]) is None, "they are on their way"
    rig.store.go_on.set()
    until(lambda: not rig.index.holds(HASHES[0]), "they have been written")
    assert sorted(rig.store.stored) == list(HASHES[:2])
    assert rig.worker.stats().num_stored_blocks == 2


@pytest.mark.parametrize("kind", [StoreKept, StoreComputed])
@pytest.mark.parametrize("is_local", [False, True])
def test_what_is_stored_comes_from_the_device(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch, kind: Any, is_local: bool
) -> None:
    monkeypatch.setattr(StallingStore, "is_local", is_local)
    rig = make(mirrored=True)
    assert isinstance(rig.memory, MirroredMemory)
    rig.memory.device[:] = np.arange(8, dtype=np.uint8)[:, None]
    rig.store.go_on.set()
    step(rig, order(kind, 5, 1, 6))
    until(lambda: len(rig.store.stored) == 3, "they are stored")
    assert dict(zip(rig.store.stored, rig.store.content, strict=True)) == dict(zip(HASHES, (5, 1, 6), strict=False))


def test_what_does_not_fit_is_left_out_from_the_end(make: MakeRig) -> None:
    rig = make(num_staged=3)
    step(rig, order(StoreComputed, 1, 2, 3, 4, 5))
    step(rig, order(StoreComputed, 1))
    rig.store.go_on.set()
    until(lambda: rig.worker.stats().num_stored_blocks == 3, "the rest is written")
    assert sorted(rig.store.stored) == list(HASHES[:3])
    assert rig.worker.stats().store_failures == {"backlog": 3}
    step(rig, order(StoreComputed, 1))
    until(lambda: rig.worker.stats().num_stored_blocks == 4, "there is room again")


def test_blocks_of_a_step_that_was_not_computed_are_not_stored(make: MakeRig) -> None:
    rig = make()
    rig.store.go_on.set()
    step(rig, order(StoreComputed, 1), was_computed=False)
    step(rig, order(StoreKept, 1, 2))
    until(lambda: rig.worker.stats().num_stored_blocks == 2, "the others are written")
    assert len(rig.store.stored) == 2


def test_blocks_that_are_not_finite_are_not_stored(make: MakeRig) -> None:
    rig = make(dtype="float32")
    rig.store.go_on.set()
    numbers = rig.memory.blocks.view(np.float32)
    numbers[:] = 1.0
    numbers[2, 3] = np.nan
    step(rig, order(StoreComputed, 1, 2, 3))
    until(lambda: rig.worker.stats().num_stored_blocks == 2, "the others are written")
    assert sorted(rig.store.stored) == [HASHES[0], HASHES[2]]
    assert rig.worker.stats().store_failures == {"not_finite": 1}


def test_nothing_is_copied_for_a_store_that_would_refuse(make: MakeRig) -> None:
    rig = make()
    rig.store.accepts = False
    step(rig, order(StoreKept, 1, 2))
    assert rig.event() == SendFinished(KEY)
    assert rig.worker.stats().store_failures == {"unavailable": 2}
    assert rig.store.num_calls == 0


def test_what_is_staged_is_written_at_the_end_as_far_as_time_goes(make: MakeRig) -> None:
    patient, impatient = make(), make()
    for rig in (patient, impatient):
        step(rig, order(StoreComputed, 1, 2, 3, 4))
        until(lambda rig=rig: rig.store.num_calls == 1, "the first are being written")  # type: ignore[misc]
    patient.store.go_on.set()
    patient.worker.close(PATIENCE_S)
    assert sorted(patient.store.stored) == list(HASHES[:4])
    impatient.worker.close(0.05)
    assert len(impatient.store.stored) <= 2


def test_a_pool_of_another_size_is_refused() -> None:
    rig = Rig()
    try:
        memory = KvMemory(2, BLOCK_BYTES + 8)
        with pytest.raises(ValueError, match="the pool's blocks have 40 bytes, and the geometry says 32"):
            rig.worker.start(memory, rig.events.put)
        memory.close()
    finally:
        rig.close()


# ---- deadlines ----


def test_calls_come_in_the_order_of_their_time_unless_called_off() -> None:
    deadlines = Deadlines("test-deadlines")
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    deadlines.start()
    try:
        deadlines.call_in(0.04, lambda: calls.put("second"))
        off = deadlines.call_in(0.01, lambda: calls.put("never"))
        deadlines.call_off(off)
        deadlines.call_in(0.02, lambda: calls.put("first"))
        deadlines.call_in(0.03, _raise)
        assert [calls.get(timeout=PATIENCE_S) for _ in range(2)] == ["first", "second"]
        deadlines.call_in(3600.0, lambda: calls.put("never"))
    finally:
        deadlines.close(PATIENCE_S)
    assert calls.empty()
    assert not [thread for thread in threading.enumerate() if thread.name == "test-deadlines"]


def _raise() -> None:
    raise RuntimeError("one that fails stops nobody")
