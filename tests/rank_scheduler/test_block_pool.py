import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rank_scheduler.block_pool import NULL_BLOCK, BlockPool


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(4)
    assert pool.num_usable_blocks == 3
    assert NULL_BLOCK not in pool.allocate(3)
    with pytest.raises(ValueError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)


def test_blocks_without_hash_go_first_then_least_recently_freed():
    pool = BlockPool(5)
    a, b, c, d = pool.allocate(4)
    pool.cache(a, b"a")
    pool.cache(b, b"b")
    pool.release([a])
    pool.release([b])
    pool.release([c])
    pool.release([d])
    assert pool.allocate(4) == [d, c, a, b]


def test_the_tail_of_a_sequence_is_evicted_before_its_head():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    for index, block in enumerate(blocks):
        pool.cache(block, bytes([index]))
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[1]]
    assert pool.lookup([bytes([0]), bytes([1])]) == [blocks[0]]


def test_a_freed_block_answers_lookups_until_it_is_handed_out():
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


def test_only_one_block_answers_for_a_hash():
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    assert pool.cache(a, b"h")
    assert not pool.cache(b, b"h")
    assert pool.lookup([b"h"]) == [a]
    pool.forget(a)
    assert pool.cache(b, b"h")


class BlockPoolMachine(RuleBasedStateMachine):
    """Random holders over a small pool; the pool's own invariants are checked after every move."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(9)
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


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase
