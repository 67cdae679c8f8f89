"""Blocks of several layer groups: what is shared, what slides out, and that a need that was predicted is met."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rank_scheduler.block_pool import NULL_BLOCK, BlockPool
from rank_scheduler.interface import KvGroup
from rank_scheduler.kv_cache_manager import KvCacheManager
from rank_scheduler.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.rank_scheduler.scenario import Rank, expected, prompt_of

BLOCK_SIZE = 4
FULL_AND_WINDOW = (KvGroup(), KvGroup(sliding_window=6))


def hashes_of(count, content=b"a"):
    return [content * (index + 1) for index in range(count)]


def filled(kv, num_columns, content=b"a"):
    """A table of so many full, cached columns."""
    table = kv.take(kv.probe([]), num_columns)
    kv.cache(table, hashes_of(num_columns, content), 0, num_columns, np.zeros(64, np.int32))
    return table


def test_each_column_takes_a_block_of_every_group():
    kv = KvCacheManager(20, BLOCK_SIZE, FULL_AND_WINDOW)
    table = kv.take(kv.probe([]), 3)
    assert table.shape == (2, 3)
    assert len(set(table.ravel().tolist())) == 6
    assert kv.take_columns(2).shape == (2, 2)
    assert kv.pool.num_free_blocks == 19 - 10


def test_groups_do_not_answer_for_each_other():
    kv = KvCacheManager(20, BLOCK_SIZE, (KvGroup(), KvGroup()))
    table = filled(kv, 2)
    hit = kv.probe(hashes_of(3))
    assert hit.num_columns == 2
    assert hit.blocks == table.tolist()
    kv.pool.forget(int(table[1, 1]))
    assert kv.probe(hashes_of(3)).num_columns == 1


@pytest.mark.parametrize("groups", [FULL_AND_WINDOW, FULL_AND_WINDOW[::-1]])
def test_changes_are_those_of_the_full_attention_group(groups):
    kv = KvCacheManager(20, BLOCK_SIZE, groups, records_changes=True)
    a, aa = (content.ljust(8, b"\0") for content in (b"a", b"aa"))
    assert kv.take_changes() == (b"", b"")
    table = filled(kv, 2)
    assert kv.take_changes() in ((a + aa, b""), (aa + a, b""))
    assert sorted(kv.pool.findable()) == [b"a", b"aa"]
    assert kv.take_changes() == (b"", b"")
    full = groups.index(KvGroup())
    kv.pool.forget(int(table[1 - full, 0]))
    assert kv.take_changes() == (b"", b"")
    kv.pool.forget(int(table[full, 0]))
    assert kv.take_changes() == (b"", a)


def test_recording_changes_leaves_the_bulk_paths_on():
    assert KvCacheManager(20, BLOCK_SIZE, (KvGroup(),), records_changes=True).caches_in_bulk


def test_a_window_group_needs_only_what_the_next_position_sees():
    kv = KvCacheManager(20, BLOCK_SIZE, FULL_AND_WINDOW)
    table = filled(kv, 4)
    # Position 16 sees positions 11 to 15, in columns 2 and 3.
    for column in (0, 1):
        kv.pool.forget(int(table[1, column]))
    hit = kv.probe(hashes_of(4))
    assert hit.num_columns == 4
    assert hit.blocks[1][:2] == [NULL_BLOCK, NULL_BLOCK]
    kv.pool.forget(int(table[1, 2]))
    assert kv.probe(hashes_of(4)).num_columns == 0


def test_groups_shorten_each_others_hit_until_they_agree():
    kv = KvCacheManager(40, BLOCK_SIZE, (KvGroup(), KvGroup(sliding_window=6), KvGroup(sliding_window=9)))
    table = filled(kv, 6)
    kv.pool.forget(int(table[0, 5]))
    kv.pool.forget(int(table[1, 4]))
    kv.pool.forget(int(table[2, 3]))
    # 5 by the full group, 4 by the first window, 3 by the second, and there all agree.
    assert kv.probe(hashes_of(6)).num_columns == 3


def test_blocks_that_slid_out_are_free_and_the_table_shows_null_blocks():
    kv = KvCacheManager(20, BLOCK_SIZE, FULL_AND_WINDOW)
    table = kv.take(kv.probe([]), 4)
    kv.slide(table, 8)
    assert (table[1] == NULL_BLOCK).tolist() == [False] * 4, "position 8 sees position 3"
    kv.slide(table, 9)
    assert (table[1] == NULL_BLOCK).tolist() == [True, False, False, False]
    kv.slide(table, 14)
    assert (table[1] == NULL_BLOCK).tolist() == [True, True, False, False]
    assert (table[0] != NULL_BLOCK).all()
    assert kv.pool.num_free_blocks == 19 - 6
    kv.release(table)
    assert kv.pool.num_free_blocks == 19


def test_events_tell_of_each_group_what_is_stored_and_removed():
    kv = KvCacheManager(5, BLOCK_SIZE, (KvGroup(), KvGroup()), emit_events=True)
    table = kv.take(kv.probe([]), 2)
    kv.cache(table, hashes_of(2), 0, 2, np.arange(8, dtype=np.int32))
    assert kv.take_events() == [BlockStored((b"a", b"aa"), None, tuple(range(8)), group) for group in (0, 1)]
    kv.release(table)
    kv.take(kv.probe([]), 1)
    # The tail goes first.
    assert kv.take_events() == [BlockRemoved(b"aa", 0), BlockRemoved(b"a", 0)]
    assert not kv.pool.clear()
    assert kv.take_events() == []


def test_clearing_is_one_event():
    kv = KvCacheManager(9, BLOCK_SIZE, (KvGroup(),), emit_events=True)
    kv.release(filled(kv, 2))
    kv.take_events()
    assert kv.pool.clear()
    assert kv.take_events() == [AllBlocksCleared()]
    assert kv.probe(hashes_of(2)).num_columns == 0


# ---- in the scheduler, with a runner that raises if a position reads before its window ----

GROUPS = [
    (KvGroup(sliding_window=6),),
    FULL_AND_WINDOW,
    (KvGroup(), KvGroup(sliding_window=5), KvGroup(sliding_window=12)),
]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("is_async", [False, True])
def test_windows_slide_over_long_outputs(groups, is_async):
    rank = Rank(kv_groups=groups, setup={"async_scheduling": is_async})
    rank.submit(1, prompt_of(30), 34)
    most = 0
    while rank.in_flight or rank.scheduler.has_work():
        rank.step()
        most = max(most, rank.num_held_blocks())
    assert rank.tokens[1] == expected(prompt_of(30), 34, kv_groups=groups)
    assert most < 16 * len(groups), "no block slid out"
    rank.assert_nothing_held()


@pytest.mark.parametrize("groups", GROUPS)
def test_prefixes_are_shared_also_when_their_windows_have_slid(groups):
    rank = Rank(kv_groups=groups)
    rank.submit(1, prompt_of(30), 20)
    rank.run()
    context = prompt_of(30) + rank.tokens[1]
    for request_id, prompt in ((2, context), (3, prompt_of(30)), (4, [*prompt_of(18), 9])):
        rank.submit(request_id, prompt, 8)
        rank.run()
        assert rank.tokens[request_id] == expected(prompt, 8, kv_groups=groups)
    assert rank.ends[2].num_cached_tokens == 48
    rank.assert_nothing_held()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_that_slid_out_serve_others_while_blocks_run_out(groups, is_async):
    rank = Rank(kv_groups=groups, num_blocks=16 * len(groups) + 1, setup={"async_scheduling": is_async})
    for request_id in range(5):
        rank.submit(request_id, prompt_of(10 + request_id, start=request_id % 2 + 1), 40)
    rank.run()
    for request_id in range(5):
        prompt = prompt_of(10 + request_id, start=request_id % 2 + 1)
        assert rank.tokens[request_id] == expected(prompt, 40, kv_groups=groups)
    rank.assert_nothing_held()


def test_a_full_hit_of_windows_computes_its_last_block_again():
    """One token's computation could see columns that the hit left out."""
    rank = Rank(kv_groups=FULL_AND_WINDOW)
    rank.submit(1, prompt_of(16), 4)
    rank.run()
    rank.submit(2, prompt_of(16), 4)
    plan = rank.step()
    assert (plan.num_tokens.tolist(), plan.block_copies) == ([4], [])
    rank.run()
    assert rank.tokens[2] == expected(prompt_of(16), 4, kv_groups=FULL_AND_WINDOW)


# ---- any order of calls ----

NUM_BLOCKS = 24
MACHINE_GROUPS = (KvGroup(), KvGroup(sliding_window=6), KvGroup(sliding_window=11))
MAX_COLUMNS = 6


class Holder:
    """A sequence as the manager's caller sees it."""

    def __init__(self, content, table, num_cached):
        self.content = content
        self.table = table
        self.num_cached = num_cached
        self.num_settled = 0

    @property
    def hashes(self):
        return hashes_of(MAX_COLUMNS, self.content)


class KvCacheManagerMachine(RuleBasedStateMachine):
    """Against a dictionary of references, and one of what every block holds.

    A block's content is (group, hash) once a column of it has been filled; whoever finds the block by a hash must
    find just that.
    """

    def __init__(self):
        super().__init__()
        self.kv = KvCacheManager(NUM_BLOCKS, BLOCK_SIZE, MACHINE_GROUPS)
        self.holders = []
        self.contents = {}

    def fill(self, holder):
        """What the model writes: every column that the table has now."""
        for group, row in enumerate(holder.table.tolist()):
            for column, block in enumerate(row):
                if block != NULL_BLOCK:
                    self.contents[block] = (group, holder.hashes[column])

    @rule(content=st.sampled_from([b"a", b"b"]), looked_up=st.integers(0, MAX_COLUMNS), more=st.integers(0, 3))
    def take(self, content, looked_up, more):
        hit = self.kv.probe(hashes_of(looked_up, content))
        assert hit.num_columns <= looked_up
        num_columns = min(hit.num_columns + more, MAX_COLUMNS)
        self.check_hit(hit, content)
        free = self.kv.pool.num_free_blocks
        needed = self.kv.num_needed(hit, num_columns)
        if needed > free:
            return
        table = self.kv.take(hit, num_columns)
        assert free - self.kv.pool.num_free_blocks == needed, "the need was predicted wrongly"
        assert table.shape == (len(MACHINE_GROUPS), num_columns)
        assert table[:, : hit.num_columns].tolist() == hit.blocks
        if num_columns:
            self.holders.append(Holder(content, table, hit.num_columns))
            self.fill(self.holders[-1])

    def check_hit(self, hit, content):
        for group, blocks in enumerate(hit.blocks):
            assert len(blocks) == hit.num_columns
            window = MACHINE_GROUPS[group].sliding_window
            first_seen = 0 if window is None else max(0, hit.num_columns * BLOCK_SIZE - window + 1)
            for column, block in enumerate(blocks):
                if block == NULL_BLOCK:
                    assert (column + 1) * BLOCK_SIZE <= first_seen, "a column that will be read is missing"
                else:
                    assert self.contents[block] == (group, content * (column + 1)), "a hit on other content"

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 2))
    def take_columns(self, data, count):
        holder = data.draw(st.sampled_from(self.holders))
        free = self.kv.pool.num_free_blocks
        if holder.table.shape[1] + count > MAX_COLUMNS or count * len(MACHINE_GROUPS) > free:
            return
        columns = self.kv.take_columns(count)
        assert free - self.kv.pool.num_free_blocks == count * len(MACHINE_GROUPS)
        holder.table = np.concatenate((holder.table, columns.T), axis=1)
        self.fill(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_more=st.integers(1, MAX_COLUMNS))
    def cache(self, data, num_more):
        holder = data.draw(st.sampled_from(self.holders))
        last = min(holder.num_cached + num_more, holder.table.shape[1])
        added = self.kv.cache(holder.table, holder.hashes, holder.num_cached, last, np.zeros(64, np.int32))
        held = holder.table[:, holder.num_cached : last].ravel().tolist()
        assert set(added) <= set(held) - {NULL_BLOCK}
        holder.num_cached = last
        for group in range(len(MACHINE_GROUPS)):
            for column in range(last):
                found = self.kv.pool.find(holder.hashes[column], group)
                assert found is None or self.contents[found] == (group, holder.hashes[column])

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def slide(self, data, tokens):
        holder = data.draw(st.sampled_from(self.holders))
        holder.num_settled = min(holder.num_settled + tokens, holder.table.shape[1] * BLOCK_SIZE)
        before = holder.table.copy()
        self.kv.slide(holder.table, holder.num_settled)
        for group, kv_group in enumerate(MACHINE_GROUPS):
            seen_from = 0
            if kv_group.sliding_window is not None:
                seen_from = max(0, holder.num_settled - kv_group.sliding_window + 1)
            for column, block in enumerate(holder.table[group].tolist()):
                if (column + 1) * BLOCK_SIZE <= seen_from:
                    assert block == NULL_BLOCK, "a block that nobody sees was kept"
                else:
                    assert block == before[group, column], "a block within the window is gone"

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        predicted, free = self.kv.num_freed_by(holder.table), self.kv.pool.num_free_blocks
        self.kv.release(holder.table)
        assert self.kv.pool.num_free_blocks - free == predicted
        self.holders.remove(holder)

    @rule(block=st.integers(1, NUM_BLOCKS - 1))
    def forget(self, block):
        self.kv.pool.forget(block)
        assert not self.kv.pool.is_cached(block)

    @rule()
    def clear(self):
        assert self.kv.pool.clear() == (not self.holders)
        if not self.holders:
            assert self.kv.probe(hashes_of(MAX_COLUMNS)).num_columns == 0

    @invariant()
    def nothing_leaks(self):
        self.kv.pool.check_integrity([block for holder in self.holders for block in holder.table.ravel().tolist()])

    def teardown(self):
        for holder in self.holders:
            self.kv.release(holder.table)
        assert self.kv.pool.num_free_blocks == NUM_BLOCKS - 1


class PythonMachine(KvCacheManagerMachine):
    """With the pool in Python, whatever was built."""

    def __init__(self):
        super().__init__()
        self.kv.pool = BlockPool(NUM_BLOCKS, len(MACHINE_GROUPS))


KvCacheManagerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True
)
PythonMachine.TestCase.settings = KvCacheManagerMachine.TestCase.settings
TestKvCacheManagerMachine = KvCacheManagerMachine.TestCase
TestMachineWithPythonPool = PythonMachine.TestCase
