"""Blocks that leave the pool stay in host memory: the tier, its places, and a rank that lives off it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.block_store import StoreReason
from kv_transfer.host_tier import HostTier
from kv_transfer.known_blocks import KnownBlocks
from kv_transfer.lru import LruPlaces
from kv_transfer.offload_connector import OffloadConnector
from tests.kv_transfer.store_rig import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    ConnectedEngine,
    context_of,
    geometry,
    making_engines,
    prompt_of,
    serve,
)

HASHES = [bytes([number]) * 32 for number in range(8)]


class PlacesMachine(RuleBasedStateMachine):
    """Against a model: what was put in and not evicted is found, in a place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.places = LruPlaces(3)
        self.model: list[bytes] = []
        """Oldest use first."""
        self.reserved: dict[bytes, int] = {}
        self.pinned: list[bytes] = []

    @rule(block_hash=st.sampled_from(HASHES))
    def reserve(self, block_hash: bytes) -> None:
        placed = self.places.reserve(block_hash)
        if block_hash in self.model or block_hash in self.reserved:
            assert placed is None
            return
        is_full = len(self.model) + len(self.reserved) == 3
        victim = next((known for known in self.model if known not in self.pinned), None)
        if is_full and victim is None:
            assert placed is None
            return
        assert placed is not None
        assert placed.evicted == (victim if is_full else None)
        if placed.evicted is not None:
            self.model.remove(placed.evicted)
        self.reserved[block_hash] = placed.place

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        block_hash = data.draw(st.sampled_from(sorted(self.reserved)))
        del self.reserved[block_hash]
        self.places.publish(block_hash)
        self.model.append(block_hash)

    @rule(block_hash=st.sampled_from(HASHES))
    def pin(self, block_hash: bytes) -> None:
        place = self.places.pin(block_hash)
        assert (place is not None) == (block_hash in self.model)
        if place is not None:
            self.pinned.append(block_hash)
            self.model.remove(block_hash)
            self.model.append(block_hash)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        block_hash = data.draw(st.sampled_from(self.pinned))
        self.pinned.remove(block_hash)
        self.places.unpin(block_hash)

    @invariant()
    def holds(self) -> None:
        self.places.check_integrity()
        assert len(self.places) == len(self.model)
        assert all(block_hash in self.places for block_hash in self.model)


TestPlaces = PlacesMachine.TestCase


def block(number: int) -> np.ndarray:
    return np.full(BLOCK_BYTES, number, np.uint8)


def blocks(*numbers: int) -> np.ndarray:
    return np.stack([block(number) for number in numbers])


@pytest.fixture
def index() -> KnownBlocks:
    return KnownBlocks()


def test_a_full_tier_gives_up_the_end_of_the_prefix_first(index: KnownBlocks) -> None:
    tier = HostTier(geometry(), 3 * BLOCK_BYTES, index)
    tier.put(HASHES[:3], blocks(0, 1, 2))
    tier.put(HASHES[3:4], blocks(3))
    assert index.num_leading((0, 0), HASHES[:3]) == 2
    into = np.zeros((3, BLOCK_BYTES), np.uint8)
    outcome = tier.get(HASHES[:3], into)
    assert outcome.num_blocks == 2
    assert outcome.failure is not None
    assert outcome.failure.reason is StoreReason.MISSING
    assert (into[:2] == blocks(0, 1)).all()
    assert tier.num_evicted() == 1
    tier.check_integrity()


def test_a_tier_smaller_than_a_prefix_keeps_its_beginning(index: KnownBlocks) -> None:
    tier = HostTier(geometry(), 3 * BLOCK_BYTES, index)
    tier.put(HASHES[:5], blocks(0, 1, 2, 3, 4))
    assert index.num_leading((0, 0), HASHES[:5]) == 3
    tier.check_integrity()


def test_a_tier_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu_bytes_to_use is 31, and a block has 32 bytes"):
        OffloadConnector.make_worker_half(context_of(("OffloadConnector", {"cpu_bytes_to_use": 31}), geometry()))


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"cpu_bytes": 5}, "kv_connector_extra_config.cpu_bytes is 5.*OffloadConnector knows cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": -1}, "kv_connector_extra_config.cpu_bytes_to_use is -1"),
    ],
)
def test_settings_that_it_does_not_understand_are_refused(extra: dict[str, Any], told: str) -> None:
    for make in (OffloadConnector.make_scheduler_half, OffloadConnector.make_worker_half):
        with pytest.raises(ValueError, match=told):
            make(context_of(("OffloadConnector", extra), geometry()))


def test_models_with_several_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_groups is 2.*use another kv_connector"):
        OffloadConnector.make_scheduler_half(context_of(("OffloadConnector", {}), geometry(num_groups=2)))


MakeEngine = Callable[..., ConnectedEngine]


@pytest.fixture(params=[False, True], ids=["shared", "mirrored"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    with making_engines() as make_any:
        yield lambda size_bytes=1 << 20, **options: make_any(
            ("OffloadConnector", {"cpu_bytes_to_use": size_bytes}), mirrored=request.param, **options
        )


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_the_pool_has_given_up_is_not_computed_again(make: MakeEngine, async_scheduling: bool) -> None:
    engine = make(num_blocks=20, max_num_seqs=2, setup={"async_scheduling": async_scheduling})
    prompts = [prompt_of(30, start) for start in range(1, 9)]
    serve(engine, prompts)
    assert engine.worker.stats().num_stored_blocks >= 8 * 7
    before = engine.num_computed_tokens()
    serve(engine, prompts, first_id=100)
    computed = engine.num_computed_tokens() - before
    # Of each prompt, what no full block holds; and the tokens but one that are generated.
    assert computed <= 8 * (30 % BLOCK_SIZE + 3) + 8
    stats = engine.worker.stats()
    assert stats.num_loads >= 5
    assert stats.load_failures == {}


def test_what_was_generated_is_found_by_the_next_turn(make: MakeEngine) -> None:
    engine = make(num_blocks=17, max_num_seqs=1)
    serve(engine, [prompt_of(10)], num_tokens=12)
    generated = engine.tokens[0]
    serve(engine, [prompt_of(40, 3), prompt_of(40, 5)], first_id=1)
    before = engine.num_computed_tokens()
    serve(engine, [[*prompt_of(10), *generated, 9]], num_tokens=1, first_id=9)
    # 23 tokens, of which 21 had been computed, in five full blocks.
    assert engine.num_computed_tokens() - before == 3


def test_a_tier_that_forgets_costs_computation_only(make: MakeEngine) -> None:
    engine = make(10 * BLOCK_BYTES, num_blocks=17, max_num_seqs=2)
    prompts = [prompt_of(30, start) for start in range(1, 9)]
    serve(engine, prompts)
    serve(engine, prompts, first_id=100)
    assert engine.worker.stats().num_evicted_blocks > 0
    engine.worker._store.check_integrity()


def test_steps_that_failed_leave_nothing_behind(make: MakeEngine) -> None:
    engine = make()
    engine.failing_steps = {1}
    engine.submit(0, prompt_of(20), 4)
    engine.run()
    assert engine.worker.stats().num_stored_blocks == 0
    serve(engine, [prompt_of(20)], first_id=1)


def test_aborted_in_the_middle_of_a_load_nothing_is_lost(make: MakeEngine) -> None:
    engine = make(num_blocks=17, max_num_seqs=1)
    serve(engine, [prompt_of(30, start) for start in range(1, 5)])
    for number in range(10, 40):
        engine.submit(number, prompt_of(30, 1 + number % 4), 2)
        engine.step()
        engine.scheduler.abort(0, number, engine.now)
    engine.run()
    engine.assert_nothing_held()
    serve(engine, [prompt_of(30, start) for start in range(1, 5)], first_id=100)


def test_after_its_end_it_tells_nothing(make: MakeEngine) -> None:
    engine = make(num_blocks=17, max_num_seqs=1)
    serve(engine, [prompt_of(30, start) for start in range(1, 5)])
    engine.submit(9, prompt_of(30, 1), 2)
    metadata = None
    while metadata is None:
        plan = engine.scheduler.schedule(engine.now)
        assert plan is not None
        metadata = plan.connector_metadata
        engine.in_flight.append(plan)
    engine.worker.close(5.0)
    engine.finish_step()
    assert engine.events.empty()
