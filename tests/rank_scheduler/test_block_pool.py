from importlib import import_module

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer import extension
from rank_scheduler import block_pool
from rank_scheduler.block_pool import NULL_BLOCK
from rank_scheduler.kv_events import AllBlocksCleared, BlockRemoved


def c_pool(*arguments, **keywords):
    return import_module("rank_scheduler._block_pool").BlockPool(*arguments, **keywords)


C_IS_MISSING = extension.why_missing().get("rank_scheduler._block_pool")
needs_c = pytest.mark.skipif(C_IS_MISSING is not None, reason=str(C_IS_MISSING))
in_both = pytest.mark.parametrize(
    "BlockPool",
    [pytest.param(block_pool.BlockPool, id="python"), pytest.param(c_pool, id="c", marks=needs_c)],
)


@in_both
def test_the_null_block_is_never_handed_out(BlockPool):
    pool = BlockPool(4)
    assert pool.num_usable_blocks == 3
    assert NULL_BLOCK not in pool.allocate(3)
    with pytest.raises(ValueError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockPool(1)
    with pytest.raises(ValueError, match="num_groups is 0"):
        BlockPool(4, 0)


@in_both
def test_blocks_without_hash_go_first_then_least_recently_freed(BlockPool):
    pool = BlockPool(5)
    a, b, c, d = pool.allocate(4)
    pool.cache(a, b"a")
    pool.cache(b, b"b")
    pool.release([a])
    pool.release([b])
    pool.release([c])
    pool.release([d])
    assert pool.allocate(4) == [d, c, a, b]


@in_both
def test_the_tail_of_a_sequence_is_evicted_before_its_head(BlockPool):
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    for index, block in enumerate(blocks):
        pool.cache(block, bytes([index]))
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[1]]
    assert pool.lookup([bytes([0]), bytes([1])]) == [blocks[0]]


@in_both
def test_a_freed_block_answers_lookups_until_it_is_handed_out(BlockPool):
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.cache(block, b"h")
    pool.release([block])
    assert pool.lookup([b"h"]) == [block]
    assert pool.num_unheld([block]) == 1
    pool.touch([block])
    assert pool.num_free_blocks == 0
    pool.release([block])
    pool.allocate(1)
    assert pool.lookup([b"h"]) == []


@in_both
def test_only_one_block_answers_for_a_hash(BlockPool):
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    assert pool.cache(a, b"h")
    assert not pool.cache(b, b"h")
    assert pool.lookup([b"h"]) == [a]
    pool.forget(a)
    assert pool.cache(b, b"h")


@in_both
def test_taking_writes_what_was_held_and_what_is_new(BlockPool):
    pool = BlockPool(7)
    (first,) = pool.allocate(1)
    pool.cache(first, b"h")
    pool.release([first])
    row = np.zeros(3, np.int32)
    pool.take([first], row)
    assert row[0] == first
    assert len(set(row.tolist())) == 3
    pool.check_integrity(row)
    with pytest.raises(ValueError, match="4 blocks asked for, 3 are free"):
        pool.take([first], np.zeros(5, np.int32))
    with pytest.raises(ValueError, match="asked for"):
        pool.take(row, np.zeros(2, np.int32))
    pool.check_integrity(row)


@in_both
def test_an_unheld_hit_is_not_counted_as_free(BlockPool):
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.release(blocks)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 are free"):
        pool.take(blocks[:2], np.zeros(4, np.int32))
    pool.check_integrity([])


@in_both
def test_rows_of_any_stride_are_blocks(BlockPool):
    pool = BlockPool(9)
    table = np.array(pool.allocate(8), np.int32).reshape(4, 2)
    pool.release(table[:, 0])
    assert pool.num_unheld(table[:, 0]) == 4
    assert pool.num_sole_references(table[:, 1]) == 4
    pool.check_integrity(table[:, 1])


@in_both
@pytest.mark.parametrize("number", [-1, 5, 2**40, -(2**70)])
def test_numbers_that_no_block_has_are_refused(BlockPool, number):
    pool = BlockPool(5)
    held = pool.allocate(2)
    for method in (pool.touch, pool.release, pool.num_unheld, pool.num_sole_references, pool.check_integrity):
        with pytest.raises(ValueError, match="there is no block"):
            method([*held, number])
    for method in (pool.is_cached, pool.forget, pool.num_references):
        with pytest.raises(ValueError, match="there is no block"):
            method(number)
    for call in (
        lambda: pool.cache(number, b"h"),
        lambda: pool.cache_all([held[0], number], [b"g", b"h"]),
        lambda: pool.take([number], np.zeros(3, np.int32)),
    ):
        with pytest.raises(ValueError, match="there is no block"):
            call()
    assert pool.find(b"g") is None
    pool.check_integrity(held)


@in_both
def test_misuse_is_refused_with_nothing_broken(BlockPool):
    pool = BlockPool(5)
    held = pool.allocate(2)
    pool.cache(held[0], b"h")
    for error, call in (
        (ValueError, lambda: pool.release([4])),
        (ValueError, lambda: pool.touch([NULL_BLOCK])),
        (ValueError, lambda: pool.take([NULL_BLOCK], np.zeros(2, np.int32))),
        (ValueError, lambda: pool.allocate(-1)),
        (ValueError, lambda: pool.cache(NULL_BLOCK, b"x")),
        (ValueError, lambda: pool.cache(held[0], b"x")),
        (ValueError, lambda: pool.cache(held[1], b"x", group=1)),
        (ValueError, lambda: pool.find(b"x", group=-1)),
        (ValueError, lambda: pool.lookup([b"x"], 1)),
        (ValueError, lambda: pool.cache_all(held, [b"x"])),
        (TypeError, lambda: pool.release(["one"])),
        (TypeError, lambda: pool.release([1.5, 2])),
        (TypeError, lambda: pool.release(7)),
        (TypeError, lambda: pool.allocate(None)),
        (AssertionError, lambda: pool.check_integrity([])),
    ):
        with pytest.raises(error):
            call()
        pool.check_integrity(held)
    assert pool.find(b"x") is None
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.release([held[1], held[1]])
    pool.check_integrity(held[:1])


@in_both
def test_events_tell_what_is_given_up(BlockPool):
    events = []
    pool = BlockPool(4, 2, events=events)
    blocks = pool.allocate(3)
    pool.cache_all(blocks[:2], [b"a", b"b"], 1)
    pool.cache(blocks[2], b"a")
    assert pool.lookup([b"a", b"b"], 1) == blocks[:2]
    assert pool.lookup([b"a", b"b"]) == blocks[2:]
    pool.forget(blocks[0])
    pool.release(blocks)
    pool.allocate(2)
    assert events == [BlockRemoved(b"a", 1), BlockRemoved(b"a", 0)]
    assert not pool.clear()
    pool.release(blocks[:1] + blocks[2:])
    assert pool.clear()
    assert events[2:] == [AllBlocksCleared()]
    assert pool.find(b"b", 1) is None


@in_both
def test_changes_hold_the_latest_word_on_each_hash_of_one_group(BlockPool):
    pool = BlockPool(5, 2, records_changes=True, watched_group=1)

    def changes():
        return [
            sorted(keys[at : at + 8].rstrip(b"\0") for at in range(0, len(keys), 8)) for keys in pool.take_changes()
        ]

    assert changes() == [[], []]
    blocks = pool.allocate(4)
    pool.cache_all(blocks[:2], [b"a", b"b"], 1)
    pool.cache(blocks[2], b"c")
    assert not pool.cache(blocks[3], b"a", 1), "another block answers already"
    assert changes() == [[b"a", b"b"], []]
    pool.forget(blocks[0])
    pool.cache(blocks[0], b"d", 1)
    pool.forget(blocks[2])
    pool.forget(blocks[1])
    pool.cache(blocks[1], b"b", 1)
    assert changes() == [[b"b", b"d"], [b"a"]]
    assert changes() == [[], []]
    assert sorted(pool.findable()) == [b"b", b"d"]
    pool.release(blocks)
    pool.allocate(3)
    assert changes() == [[], [b"b"]], "evicted"
    assert not pool.clear()
    pool.release(blocks[1:])
    assert pool.clear()
    assert changes() == [[], [b"d"]]
    assert pool.findable() == []


@in_both
def test_changes_of_nobody_are_not_kept(BlockPool):
    pool = BlockPool(5)
    pool.cache(pool.allocate(1)[0], b"a")
    assert pool.take_changes() == (b"", b"")


class BlockPoolMachine(RuleBasedStateMachine):
    """Random holders over a small pool; the pool's own invariants are checked after every move."""

    BlockPool: type[block_pool.BlockPool]

    def __init__(self):
        super().__init__()
        self.pool = self.BlockPool(9)
        self.holders: list[list[int]] = []
        self.next_hash = 0

    @rule(count=st.integers(1, 5))
    def allocate(self, count):
        if count <= self.pool.num_free_blocks:
            self.holders.append(self.pool.allocate(count))
        else:
            with pytest.raises(ValueError, match="are free"):
                self.pool.allocate(count)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), reuse=st.booleans())
    def cache(self, data, reuse):
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.holders))))
        if not self.pool.is_cached(block):
            self.next_hash += not reuse
            self.pool.cache(block, self.next_hash.to_bytes(4, "little"))

    @rule(data=st.data())
    def share(self, data):
        hits = self.pool.lookup([data.draw(st.integers(0, self.next_hash + 1)).to_bytes(4, "little")])
        if hits:
            self.pool.touch(hits)
            self.holders.append(hits)

    @rule(data=st.data())
    def forget(self, data):
        self.pool.forget(data.draw(st.integers(1, 8)))

    @invariant()
    def holds(self):
        self.pool.check_integrity([block for holder in self.holders for block in holder])


class PythonMachine(BlockPoolMachine):
    BlockPool = block_pool.BlockPool


class CMachine(BlockPoolMachine):
    BlockPool = staticmethod(c_pool)


for _machine in (PythonMachine, CMachine):
    _machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPythonBlockPool = PythonMachine.TestCase
TestCBlockPool = needs_c(CMachine.TestCase)
