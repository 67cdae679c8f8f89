"""The deciding half of the store connectors, under a virtual clock."""

from __future__ import annotations

from typing import Any

import numpy as np

from kv_transfer.connector import ExternalMatch, KvRequest
from kv_transfer.known_blocks import KnownBlocks
from kv_transfer.store_scheduler import DropLoad, LoadBlocks, StoreComputed, StoreKept, StoreScheduler

NO_BLOCKS = np.zeros((1, 0), np.int32)

BLOCK_SIZE = 4
HASHES = tuple(bytes([number]) * 32 for number in range(1, 9))
TABLE = np.array([[11, 12, 13, 14, 15, 16, 17, 18]], np.int32)
KEY = (0, 1)
NOTHING = ExternalMatch(0, False)


def request(num_tokens: int = 18, num_hashes: int | None = None) -> KvRequest:
    count = num_tokens // BLOCK_SIZE if num_hashes is None else num_hashes
    return KvRequest(KEY, np.zeros(num_tokens, np.int32), HASHES[:count], {})


class Rig:
    def __init__(self, *held: bytes, is_async: bool = True, loads: bool = True, stores: bool = True) -> None:
        self.now = 0.0
        self.index = KnownBlocks()
        for block_hash in held:
            self.index.add(block_hash)
        self.half = StoreScheduler(
            self.index,
            lambda: self.now,
            block_size=BLOCK_SIZE,
            is_async=is_async,
            loads=loads,
            stores=stores,
            lookup_timeout_s=2.0,
        )
        self.half.on_new_request(request())

    def admit(self, num_local: int = 0, num_external: int = 0, num_tokens: int = 18) -> None:
        self.half.get_num_new_matched_tokens(request(num_tokens), num_local)
        columns = -(-num_tokens // BLOCK_SIZE)
        self.half.update_state_after_alloc(request(num_tokens), TABLE[:, :columns], num_external)

    def finish(self, num_tokens: int, num_hashes: int | None = None, columns: int | None = None) -> bool:
        count = -(-num_tokens // BLOCK_SIZE) if columns is None else columns
        keeps, params = self.half.request_finished(
            request(num_tokens, num_hashes), TABLE[:, :count], hands_off=False
        )  # fmt: skip
        assert params is None
        return keeps

    def orders(self, *, is_taken: bool = True) -> list[Any]:
        orders = list(self.half.build_connector_meta() or ())
        if is_taken:
            for order in orders:
                if isinstance(order, StoreComputed | StoreKept):
                    self.index.begin_storing(order.hashes)
        assert not self.half.has_pending_work()
        self.half.check_integrity()
        return orders


def test_what_is_held_behind_the_local_hit_is_offered() -> None:
    rig = Rig(*HASHES[1:3])
    assert rig.half.get_num_new_matched_tokens(request(), 0) == NOTHING
    assert rig.half.get_num_new_matched_tokens(request(), 4) == ExternalMatch(8, True)
    assert rig.half.get_num_new_matched_tokens(request(), 8) == ExternalMatch(4, True)
    assert rig.half.get_num_new_matched_tokens(request(), 12) == NOTHING
    assert rig.half.get_num_new_matched_tokens(request(), 16) == NOTHING
    # This rank writes into the block that such a hit ends in.
    assert rig.half.get_num_new_matched_tokens(request(), 6) == NOTHING


def test_requests_too_short_and_stores_that_are_empty_are_not_waited_for() -> None:
    assert Rig(*HASHES).half.may_load_async(request(4))
    assert not Rig(*HASHES).half.may_load_async(request(3))
    assert not Rig().half.may_load_async(request())
    assert not Rig(*HASHES, is_async=False).half.may_load_async(request())
    producer = Rig(*HASHES, loads=False)
    assert not producer.half.may_load_async(request())
    assert producer.half.get_num_new_matched_tokens(request(), 0) == NOTHING


def test_without_hashes_there_is_nothing_to_do() -> None:
    rig = Rig(*HASHES)
    assert rig.half.get_num_new_matched_tokens(request(num_hashes=0), 0) == NOTHING
    rig.half.update_state_after_alloc(request(num_hashes=0), TABLE, 0)
    rig.half.request_computed(KEY, 18, NO_BLOCKS)
    assert not rig.finish(22, num_hashes=0)
    assert rig.orders() == []


def test_it_waits_for_what_is_on_its_way_all_in_all_no_longer_than_it_may() -> None:
    rig = Rig(HASHES[0])
    rig.index.begin_storing(HASHES[1:2])
    assert rig.half.get_num_new_matched_tokens(request(), 0) is None
    rig.now = 1.9
    rig.index.end_storing(HASHES[1:2])
    assert rig.half.get_num_new_matched_tokens(request(), 0) == ExternalMatch(4, True)
    rig.index.begin_storing(HASHES[1:2])
    assert rig.half.get_num_new_matched_tokens(request(), 0) is None
    rig.now = 2.0
    assert rig.half.get_num_new_matched_tokens(request(), 0) == NOTHING


def test_a_load_is_for_the_blocks_behind_the_local_hit() -> None:
    rig = Rig(*HASHES)
    rig.admit(num_local=4, num_external=12)
    (load,) = rig.orders()
    assert isinstance(load, LoadBlocks)
    assert load.blocks.tolist() == [12, 13, 14]
    assert load.hashes == HASHES[1:4]
    assert (load.num_local_tokens, load.num_tokens) == (4, 16)


def test_a_load_of_all_but_the_last_token_brings_its_block_as_well() -> None:
    rig = Rig(*HASHES, is_async=False)
    rig.admit(num_local=0, num_external=15, num_tokens=16)
    (load,) = rig.orders()
    assert load.blocks.tolist() == [11, 12, 13, 14]
    assert load.num_tokens == 15


def test_full_blocks_are_stored_as_they_get_computed_each_once() -> None:
    rig = Rig(HASHES[1])
    rig.admit()
    rig.half.request_computed(KEY, 3, NO_BLOCKS)
    assert rig.orders() == []
    rig.half.request_computed(KEY, 11, NO_BLOCKS)
    (store,) = rig.orders()
    assert isinstance(store, StoreComputed)
    # The second is there.
    assert (store.blocks.tolist(), store.hashes) == ([11], HASHES[:1])
    rig.half.request_computed(KEY, 18, NO_BLOCKS)
    (store,) = rig.orders()
    assert (store.blocks.tolist(), store.hashes) == ([13, 14], HASHES[2:4])


def test_blocks_that_came_after_admission_are_stored_at_the_end() -> None:
    rig = Rig()
    rig.half.update_state_after_alloc(request(), TABLE[:, :2], 0)
    rig.half.request_computed(KEY, 8, NO_BLOCKS)
    rig.half.request_computed(KEY, 18, NO_BLOCKS)
    (store,) = rig.orders()
    assert store.blocks.tolist() == [11, 12]
    assert rig.finish(20)
    (store,) = rig.orders()
    assert isinstance(store, StoreKept)
    assert (store.key, store.blocks.tolist(), store.hashes) == (KEY, [13, 14], HASHES[2:4])


def test_what_was_not_taken_is_stored_at_the_end() -> None:
    rig = Rig()
    rig.admit()
    rig.half.request_computed(KEY, 18, NO_BLOCKS)
    assert len(rig.orders(is_taken=False)) == 1
    assert rig.finish(20)
    (store,) = rig.orders()
    assert store.blocks.tolist() == [11, 12, 13, 14]


def test_what_was_generated_is_stored_but_for_the_last_token() -> None:
    for num_tokens, generated in ((21, [15]), (20, None), (25, [15, 16])):
        rig = Rig()
        rig.admit()
        rig.half.request_computed(KEY, 18, NO_BLOCKS)
        rig.orders()
        assert rig.finish(num_tokens) is (generated is not None)
        orders = rig.orders()
        assert [order.blocks.tolist() for order in orders] == ([] if generated is None else [generated])


def test_of_a_prompt_that_may_not_be_computed_nothing_is_stored_at_the_end() -> None:
    rig = Rig()
    rig.admit()
    rig.half.request_computed(KEY, 4, NO_BLOCKS)
    rig.orders()
    assert not rig.finish(18)
    assert rig.orders() == []


def test_a_preempted_request_announces_its_new_blocks() -> None:
    rig = Rig()
    rig.admit()
    rig.half.request_computed(KEY, 8, NO_BLOCKS)
    rig.orders(is_taken=False)
    rig.half.request_preempted(KEY)
    rig.half.update_state_after_alloc(request(), TABLE[:, ::-1][:, :5], 0)
    rig.half.request_computed(KEY, 12, NO_BLOCKS)
    (store,) = rig.orders()
    assert store.blocks.tolist() == [18, 17, 16]


def test_a_request_that_ends_without_blocks_keeps_none() -> None:
    rig = Rig()
    rig.admit()
    rig.half.request_computed(KEY, 18, NO_BLOCKS)
    rig.half.request_preempted(KEY)
    rig.orders()
    assert not rig.finish(22, columns=0)


def test_of_a_session_that_went_on_only_announced_blocks_are_stored() -> None:
    """Its next input may not be computed when it ends; this half does not hear what was."""
    rig = Rig()
    rig.admit()
    rig.half.request_computed(KEY, 18, NO_BLOCKS)
    rig.half.request_computed(KEY, 26, NO_BLOCKS)
    rig.orders()
    assert not rig.finish(30)
    assert rig.orders() == []


def test_the_null_block_is_not_stored() -> None:
    rig = Rig()
    table = TABLE[:, :5].copy()
    table[0, 1] = 0
    rig.half.update_state_after_alloc(request(), table, 0)
    rig.half.request_computed(KEY, 18, NO_BLOCKS)
    (store,) = rig.orders()
    assert store.blocks.tolist() == [11, 13, 14]


def test_a_rank_that_does_not_produce_stores_nothing() -> None:
    rig = Rig(stores=False)
    rig.admit()
    rig.half.request_computed(KEY, 18, NO_BLOCKS)
    assert not rig.finish(26)
    assert rig.orders() == []


def test_a_load_is_dropped_with_its_request_and_not_after_it() -> None:
    rig = Rig(*HASHES)
    rig.admit(num_external=16)
    rig.orders()
    assert not rig.finish(18, columns=0)
    assert rig.orders() == [DropLoad(KEY)]
    rig.half.on_new_request(request())
    rig.admit(num_external=16)
    rig.half.update_state_after_alloc(request(), TABLE, 0)
    rig.orders()
    assert not rig.finish(18)
    assert rig.orders() == []


def test_blocks_on_their_way_are_counted_as_often_as_they_were_sent() -> None:
    index = KnownBlocks()
    index.begin_storing(HASHES[:2])
    index.begin_storing(HASHES[1:3])
    index.end_storing(HASHES[:2])
    assert [index.holds(block_hash) for block_hash in HASHES[:4]] == [False, True, True, False]
    assert index.may_hold()
    index.suspend(True)
    assert not index.may_hold()
    assert index.num_leading(KEY, HASHES) == 0
    index.suspend(False)
    index.end_storing(HASHES[1:3])
    assert not index.may_hold()
