"""Several connectors as one: who loads, who keeps, what is told, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_transfer.connector import (
    ConnectorEvent,
    ConnectorStats,
    ExternalMatch,
    KvRequest,
    LoadFenced,
    LoadFinished,
    SendFinished,
)
from kv_transfer.memory import KvMemory
from kv_transfer.multi_connector import MultiConnector
from kv_transfer.multi_scheduler import ChildLoad, MultiMetadata, MultiScheduler
from kv_transfer.multi_worker import MultiWorker
from tests.kv_transfer.store_rig import (
    BLOCK_SIZE,
    ConnectedEngine,
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

TABLE = np.array([[3, 4, 5, 6]], np.int32)
KEY = (0, 1)


def request(number: int = 1) -> KvRequest:
    return KvRequest((0, number), np.arange(16, dtype=np.int32), (), {})


class Deciding:
    """A scheduler half that does what the test says."""

    def __init__(self, match: ExternalMatch | None = None, *, keeps: bool = False, params: Any = None) -> None:
        self.match = match or ExternalMatch(0, False)
        self.unknown = False
        self.keeps, self.params = keeps, params
        self.allocated: list[int] = []
        self.told: list[str] = []
        self.pending: object | None = None

    def on_new_request(self, request: KvRequest) -> None:
        self.told.append("new")

    def may_load_async(self, request: KvRequest) -> bool:
        return self.match.is_async

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> ExternalMatch | None:
        return None if self.unknown else self.match

    def update_state_after_alloc(self, request: KvRequest, block_ids: np.ndarray, num_external_tokens: int) -> None:
        self.allocated.append(num_external_tokens)

    def request_computed(self, key: Any, num_tokens: int, block_ids: Any) -> None:
        self.told.append(f"computed {num_tokens}")

    def partial_ticket(self, key: Any, num_tokens: int, block_ids: np.ndarray) -> Any:
        self.told.append(f"ticket {num_tokens}")
        return self.params

    def abandoned(self, key: Any) -> None:
        pass

    def request_preempted(self, key: Any) -> None:
        self.told.append("preempted")

    def build_connector_meta(self) -> object | None:
        pending, self.pending = self.pending, None
        return pending

    def request_finished(self, request: KvRequest, block_ids: np.ndarray, *, hands_off: bool) -> tuple[bool, Any]:
        self.told.append("finished")
        return self.keeps, self.params

    def has_pending_work(self) -> bool:
        return self.pending is not None


class Rig:
    def __init__(self, *children: Deciding) -> None:
        self.children = children
        self.now = 0.0
        self.broken: set[int] = set()
        self.multi = MultiScheduler(
            children,
            [f"child {index}" for index in range(len(children))],
            self.broken,
            lambda: self.now,
            block_size=4,
            lookup_timeout_s=5.0,
        )
        self.multi.on_new_request(request())

    def ask(self) -> ExternalMatch | None:
        return self.multi.get_num_new_matched_tokens(request(), 4)


ASYNC, SYNC, NOTHING = ExternalMatch(8, True), ExternalMatch(8, False), ExternalMatch(0, False)


def test_the_first_that_has_tokens_loads_and_the_others_hear_of_none() -> None:
    rig = Rig(Deciding(), Deciding(ASYNC), Deciding(ExternalMatch(12, True)))
    assert rig.multi.may_load_async(request())
    assert rig.ask() == ASYNC
    rig.multi.update_state_after_alloc(request(), TABLE, 8)
    assert [child.allocated for child in rig.children] == [[0], [8], [0]]
    metadata = rig.multi.build_connector_meta()
    assert metadata is not None
    (load,) = metadata.loads
    assert (load.key, load.child, load.is_async, load.num_local_tokens) == (KEY, 1, True, 4)
    assert load.blocks.tolist() == [[4, 5, 6]]
    # After the load: nothing more for anybody.
    rig.multi.update_state_after_alloc(request(), TABLE, 0)
    assert [child.allocated for child in rig.children] == [[0, 0], [8, 0], [0, 0]]
    assert rig.multi.build_connector_meta() is None


def test_while_one_does_not_know_nobody_does_for_a_while() -> None:
    rig = Rig(Deciding(ASYNC), Deciding(ASYNC))
    rig.children[1].unknown = True
    assert rig.ask() is None
    rig.now = 4.9
    assert rig.ask() is None
    rig.now = 5.0
    assert rig.ask() == ASYNC
    rig.children[0].match = NOTHING
    assert rig.ask() == NOTHING


def test_loads_within_a_step_come_from_one_only() -> None:
    rig = Rig(Deciding(SYNC), Deciding(SYNC))
    assert rig.ask() == SYNC
    rig.multi.update_state_after_alloc(request(), TABLE, 8)
    rig.children[0].match = NOTHING
    assert rig.ask() == NOTHING
    rig.children[1].match = ASYNC
    assert rig.ask() == ASYNC


def test_all_are_told_everything() -> None:
    rig = Rig(Deciding(), Deciding())
    rig.multi.request_computed(KEY, 8, np.zeros((1, 2), np.int32))
    assert rig.multi.partial_ticket(KEY, 8, TABLE) is None
    rig.multi.request_preempted(KEY)
    rig.multi.request_finished(request(), TABLE, hands_off=False)
    for child in rig.children:
        assert child.told == ["new", "computed 8", "ticket 8", "preempted", "finished"]


def test_params_are_merged_and_contradictions_told() -> None:
    rig = Rig(Deciding(params={"a": 1}), Deciding(), Deciding(params={"b": 2}))
    assert rig.multi.request_finished(request(), TABLE, hands_off=True) == (False, {"a": 1, "b": 2})
    assert rig.multi.partial_ticket(KEY, 8, TABLE) == {"a": 1, "b": 2}
    rig = Rig(Deciding(params={"a": 1}, keeps=True), Deciding(params={"a": 2}))
    assert rig.multi.request_finished(request(), TABLE, hands_off=True) == (True, None)
    metadata = rig.multi.build_connector_meta()
    assert metadata is not None
    assert "child 0 and child 1 both have something to say as 'a'" in metadata.conflicts[0]
    assert metadata.kept == ((KEY, frozenset({0})),)


def test_a_broken_child_is_asked_for_nothing() -> None:
    rig = Rig(Deciding(ASYNC, keeps=True), Deciding(SYNC))
    rig.broken.add(0)
    assert not rig.multi.may_load_async(request())
    assert rig.ask() == SYNC
    assert rig.multi.request_finished(request(), TABLE, hands_off=False) == (False, None)


# ---- the worker halves ----


class Moving:
    """A worker half that does what the test says."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.post: Callable[[ConnectorEvent], None]
        self.raises_in = ""
        self.invalid: frozenset[int] = frozenset()
        self.computed: list[bool] = []
        self.own = ConnectorStats()

    def start(self, memory: KvMemory, post: Callable[[ConnectorEvent], None]) -> None:
        self.post = post
        self._may_raise("start")

    def handle_preemptions(self, metadata: object) -> None:
        self.log.append(f"{self.name} knows {metadata}")
        self._may_raise("handle_preemptions")

    def start_load_kv(self, metadata: object) -> None:
        self.log.append(f"{self.name} got {metadata}")
        self._may_raise("start_load_kv")

    def wait_for_layer_load(self, layer: int) -> None:
        self._may_raise("wait_for_layer_load")

    def save_kv_layer(self, layer: int) -> None:
        self._may_raise("save_kv_layer")

    def finish_step(self, metadata: object | None, *, was_computed: bool) -> frozenset[int]:
        self._may_raise("finish_step")
        self.computed.append(was_computed)
        self.log.append(f"{self.name} finished")
        return self.invalid

    def stats(self) -> ConnectorStats:
        return self.own

    def close(self, timeout_s: float) -> None:
        self.log.append(f"{self.name} closed")
        self._may_raise("close")

    def _may_raise(self, what: str) -> None:
        if self.raises_in == what:
            raise RuntimeError(f"{what} broke")


class WorkerRig:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[ConnectorEvent] = []
        self.children = [Moving(self.log, name) for name in "abc"]
        self.broken: set[int] = set()
        self.multi = MultiWorker(self.children, ["a", "b", "c"], self.broken)
        self.memory = KvMemory(8, 32)

    def start(self) -> None:
        self.multi.start(self.memory, self.events.append)

    def step(self, *loads: ChildLoad, kept: Any = (), was_computed: bool = True) -> frozenset[int]:
        metadata = MultiMetadata(("ma", "mb", "mc"), loads, kept, ())
        self.multi.handle_preemptions(metadata)
        self.multi.start_load_kv(metadata)
        self.multi.wait_for_layer_load(0)
        self.multi.save_kv_layer(0)
        return self.multi.finish_step(metadata, was_computed=was_computed)


@pytest.fixture
def workers() -> Iterator[WorkerRig]:
    rig = WorkerRig()
    rig.start()
    yield rig
    rig.memory.close()


def load(child: int, *, is_async: bool, number: int = 1) -> ChildLoad:
    return ChildLoad((0, number), child, is_async, TABLE[:, 1:], 4)


def test_blocks_are_let_go_when_all_that_wanted_them_are_done(workers: WorkerRig) -> None:
    workers.step(kept=((KEY, frozenset({0, 2})),))
    a, b, c = workers.children
    a.post(SendFinished(KEY))
    a.post(SendFinished(KEY))
    b.post(SendFinished(KEY))
    assert workers.events == []
    c.post(SendFinished(KEY))
    assert workers.events == [SendFinished(KEY)]
    c.post(SendFinished(KEY))
    assert len(workers.events) == 1


def test_only_who_loads_tells_how_it_ended(workers: WorkerRig) -> None:
    workers.step(load(1, is_async=True))
    workers.children[0].post(LoadFinished(KEY))
    assert workers.events == []
    workers.children[1].post(LoadFinished(KEY, 6, "late"))
    workers.children[1].post(LoadFinished(KEY))
    assert workers.events == [LoadFinished(KEY, 6, "late")]


def test_who_loads_within_the_step_is_asked_first_and_what_it_lost_is_not_computed(workers: WorkerRig) -> None:
    workers.children[2].invalid = frozenset({5})
    workers.log.clear()
    assert workers.step(load(2, is_async=False)) == {5}
    assert workers.log[-3:] == ["c finished", "a finished", "b finished"]
    workers.children[2].invalid = frozenset()
    # The next step may have been planned on top of it.
    assert workers.step() == frozenset()
    assert workers.step() == frozenset()
    assert [child.computed for child in workers.children] == [[False, False, True]] * 2 + [[True, False, True]]


@pytest.mark.parametrize(
    "where", ["handle_preemptions", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "finish_step"]
)
@pytest.mark.parametrize("is_async", [True, False])
def test_one_that_raises_is_given_up_and_the_others_go_on(workers: WorkerRig, where: str, is_async: bool) -> None:
    workers.step(kept=(((0, 9), frozenset({1})), ((0, 8), frozenset({0, 1}))))
    workers.step(load(1, is_async=True, number=7))
    workers.children[1].post(LoadFinished((0, 7), 4, "x", is_fenced=False))
    workers.events.clear()
    workers.children[1].raises_in = where
    invalid = workers.step(load(1, is_async=is_async))
    assert invalid == (frozenset() if is_async else {4, 5, 6})
    assert workers.broken == {1}
    assert workers.log.count("b closed") == 1
    assert LoadFenced((0, 7)) in workers.events
    assert SendFinished((0, 9)) in workers.events
    assert SendFinished((0, 8)) not in workers.events
    assert (LoadFinished(KEY, 4, "b has failed") in workers.events) is is_async
    workers.log.clear()
    # What the scheduler half has planned before it knew.
    workers.step(load(1, is_async=True, number=3), kept=(((0, 5), frozenset({1})),))
    assert LoadFinished((0, 3), 4, "b has failed") in workers.events
    assert SendFinished((0, 5)) in workers.events
    assert workers.log == ["a knows ma", "c knows mc", "a got ma", "c got mc", "a finished", "c finished"]


def test_one_that_does_not_start_closes_the_others(workers: WorkerRig) -> None:
    rig = WorkerRig()
    rig.children[1].raises_in = "start"
    with pytest.raises(RuntimeError, match="start broke"):
        rig.start()
    assert rig.log == ["b closed", "a closed"]
    rig.memory.close()


def test_they_are_closed_in_reverse_order_whatever_they_do(workers: WorkerRig) -> None:
    workers.children[1].raises_in = "close"
    workers.multi.close(1.0)
    assert workers.log[-3:] == ["c closed", "b closed", "a closed"]
    workers.children[0].post(SendFinished(KEY))
    assert workers.events == []


def test_figures_are_summed_and_contradictions_counted(workers: WorkerRig) -> None:
    for count, child in enumerate(workers.children, 1):
        child.own = ConnectorStats(num_loads=count, load_failures={"timeout": count, f"only {count}": 1})
        child.own.load_seconds[2] = count
    workers.multi.start_load_kv(MultiMetadata((None, None, None), (), (), ("they differ",)))
    stats = workers.multi.stats()
    assert (stats.num_loads, stats.load_seconds[2], stats.num_rejected_params) == (6, 6, 1)
    assert stats.load_failures == {"timeout": 6, "only 1": 1, "only 2": 1, "only 3": 1}


# ---- settings ----


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, "kv_connector_extra_config.connectors: Field required"),
        ({"connectors": []}, "kv_connector_extra_config.connectors is \\[\\]"),
        ({"connectors": [{"kv_connector": "MultiConnector"}]}, "connectors.0.kv_connector is 'MultiConnector'.*list"),
        ({"connectors": [{"kv_connector": "OffloadConnector", "size": 1}]}, "connectors.0.size is 1"),
        ({"connectors": [{"kv_connector": "NoConnector"}]}, "kv_connector is 'NoConnector', which is not known"),
        (
            {"connectors": [{"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"x": 1}}]},
            "kv_connector_extra_config.x is 1",
        ),
    ],
)
def test_settings_that_it_does_not_understand_are_refused(extra: dict[str, Any], told: str) -> None:
    for make in (MultiConnector.make_scheduler_half, MultiConnector.make_worker_half):
        with pytest.raises(ValueError, match=told):
            make(context_of(("MultiConnector", extra), geometry()))


# ---- ranks ----


def multi(directory: Path, *names: str) -> tuple[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {
        "OffloadConnector": {"cpu_bytes_to_use": 1 << 20},
        "SharedStorageConnector": {"shared_storage_path": str(directory), "scan_interval_s": 0.02},
        "PullConnector": {"transport": "inproc"},
    }
    children = [{"kv_connector": name, "kv_connector_extra_config": settings[name]} for name in names]
    return "MultiConnector", {"connectors": children}


MakeEngine = Callable[..., ConnectedEngine]


@pytest.fixture
def make() -> Iterator[MakeEngine]:
    with making_engines() as make:
        yield make


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_host_memory_first_then_files(make: MakeEngine, tmp_path: Path, async_scheduling: bool) -> None:
    setup = {"async_scheduling": async_scheduling}
    prompts = [prompt_of(30, start) for start in range(1, 6)]
    connector = multi(tmp_path, "OffloadConnector", "SharedStorageConnector")
    first = make(connector, num_blocks=20, max_num_seqs=2, setup=setup)
    serve(first, prompts)
    settle_stores(first)
    assert first.worker.stats().num_stored_blocks == 2 * 5 * 8
    serve(first, prompts, first_id=10)
    offload, files = first.worker._children
    assert offload.stats().num_loads >= 4
    assert files.stats().num_loads == 0
    second = make(connector, setup=setup)
    serve(second, prompts)
    assert second.num_computed_tokens() <= 5 * (30 % BLOCK_SIZE + 4)
    offload, files = second.worker._children
    assert (offload.stats().num_loads, files.stats().num_loads) == (0, 5)
    # What came out of files is in memory now.
    assert offload.stats().num_stored_blocks >= 5 * 7


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_files_have_lost_gets_into_no_other_store(
    make: MakeEngine, tmp_path: Path, async_scheduling: bool
) -> None:
    prompts = [prompt_of(30, start) for start in range(1, 6)]
    connector = multi(tmp_path, "SharedStorageConnector", "OffloadConnector")
    connector[1]["connectors"][0]["kv_connector_extra_config"]["scan_interval_s"] = 600.0
    first = make(connector)
    serve(first, prompts)
    settle_stores(first)
    second = make(connector, num_blocks=20, max_num_seqs=2, setup={"async_scheduling": async_scheduling})
    for path in sorted(tmp_path.rglob("*.kv"))[::3]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    for turn in range(3):
        serve(second, prompts, first_id=10 * turn)
    assert second.worker.stats().load_failures.get("corrupt", 0) >= 1


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_was_computed_on_a_lost_block_gets_into_no_other_store(
    make: MakeEngine, tmp_path: Path, async_scheduling: bool
) -> None:
    files = multi(tmp_path, "SharedStorageConnector", "OffloadConnector")
    files[1]["connectors"][0]["kv_connector_extra_config"]["scan_interval_s"] = 600.0
    first = make(files)
    serve(first, [prompt_of(16)], num_tokens=1)
    settle_stores(first)
    setup = {"async_scheduling": async_scheduling}
    second = make(files, num_blocks=17, max_num_seqs=1, setup=setup, max_num_batched_tokens=8)
    damage_block(tmp_path, prompt_of(16), 1)
    serve(second, [prompt_of(48)])
    assert second.worker.stats().load_failures == {"corrupt": 1}
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    # So that it is not found in the pool any more, and in no file.
    serve(second, [prompt_of(48, start) for start in (2, 3)], first_id=1)
    second.connector._children[0]._index.replace(())
    serve(second, [prompt_of(48)], first_id=9)
    assert second.worker._children[1].stats().num_loads >= 1


def test_a_child_that_dies_in_the_middle_costs_computation_only(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [prompt_of(30, start) for start in range(1, 6)]
    connector = multi(tmp_path, "OffloadConnector", "SharedStorageConnector")
    engine: ConnectedEngine = make(connector, num_blocks=20, max_num_seqs=2)
    serve(engine, prompts)
    real = engine.worker._children[0].start_load_kv
    calls: list[int] = []

    def dying(metadata: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a bug in one connector")
        real(metadata)

    monkeypatch.setattr(engine.worker._children[0], "start_load_kv", dying)
    serve(engine, prompts, first_id=10)
    assert len(calls) == 2
    settle_stores(engine)
    serve(engine, prompts, first_id=20)
    assert engine.worker._children[1].stats().num_loads >= 1
    assert engine.tokens[20] == expected(prompts[0], 4)
    monkeypatch.undo()
    # Its traceback would keep everything.
    caplog.clear()


def test_a_prompt_goes_from_rank_to_rank_and_stays_in_memory_on_both(make: MakeEngine, tmp_path: Path) -> None:
    connector = multi(tmp_path, "PullConnector", "OffloadConnector")
    prefill, decode = make(connector), make(connector)
    prompt = prompt_of(30)
    right = expected(prompt, 6)
    prefill.submit(1, prompt, 6, fields={"hands_off": True, "kv_transfer_params": {"do_remote_decode": True}})
    until(lambda: prefill.step() is None and 1 in prefill.ends, "the prompt is computed")
    ticket = prefill.ends[1].kv_transfer_params
    assert prefill.tokens[1] == right[:1]
    decode.submit(1, prompt + right[:1], 6, fields={"num_generated": 1, "kv_transfer_params": ticket})

    def both() -> bool:
        prefill.step()
        decode.step()
        load = prefill.scheduler.load()
        return 1 in decode.ends and load.num_free_blocks == load.num_blocks

    until(both, "the request has ended, and its blocks on the other rank are let go")
    assert decode.tokens[1] == right[1:]
    assert decode.num_computed_tokens() == 5
    decode.run()
    for engine in (prefill, decode):
        engine.assert_nothing_held()
        assert engine.worker._children[1].stats().num_stored_blocks >= 7
    assert decode.worker._children[0].stats().num_loads == 1
