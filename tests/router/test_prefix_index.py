"""What the router believes of ranks' prefix caches, against sets that are kept the simple way."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rank_scheduler.messages import PrefixEvents, PrefixSnapshot
from rank_scheduler.prefix_chain import HASH_BYTES, pack
from rank_scheduler.prefix_hash import ExtraKeys, extend_block_hashes
from router.prefix_index import PrefixIndex, PromptPrefix

BLOCK_SIZE = 4


def as_bytes(tokens):
    return struct.pack(f"<{len(tokens)}i", *tokens)


def prompt(*tokens, salt="", is_read=True):
    return PromptPrefix(as_bytes(tokens), salt, is_read=is_read)


def rank_hashes(tokens, salt="", block_size=BLOCK_SIZE):
    """As a rank's scheduler makes them."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, np.array(tokens, "<i4"), block_size, ExtraKeys(salt) if salt else None)
    return hashes


def index_with(**ranks):
    """Name → the tokens whose blocks it has."""
    index = PrefixIndex()
    for name, tokens in ranks.items():
        index.add(name, BLOCK_SIZE)
        index.take_snapshot(name, PrefixSnapshot(0, pack(rank_hashes(tokens))))
    return index


@settings(deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 49_000), max_size=70),
    salt=st.sampled_from(["", "a", "ä"]),
    block_size=st.integers(1, 20),
)
def test_the_chain_of_a_prompt_is_the_ranks(tokens, salt, block_size):
    expected = [int.from_bytes(one[:HASH_BYTES], "little") for one in rank_hashes(tokens, salt, block_size)]
    assert list(prompt(*tokens, salt=salt).hashes(block_size)) == expected


def test_each_rank_has_what_it_has_from_the_first_block_on():
    index = index_with(a=range(12), b=range(8), c=[9, 9, 9, 9], d=[])
    assert index.num_cached_tokens(prompt(*range(15))) == {"a": 12, "b": 8}
    assert index.num_cached_tokens(prompt(*range(8), 7, 7, 7, 7)) == {"a": 8, "b": 8}
    assert index.num_cached_tokens(prompt(*range(3))) == {}
    assert index.num_cached_tokens(prompt(9, 9, 9, 9)) == {"c": 4}


def test_a_hole_ends_the_prefix():
    index = index_with(a=range(12))
    assert index.take_events("a", PrefixEvents(1, removed=pack(rank_hashes(range(8))[1:])))
    assert index.num_cached_tokens(prompt(*range(12))) == {"a": 4}


def test_salts_and_requests_that_do_not_read_share_nothing():
    index = index_with(a=range(8))
    assert index.num_cached_tokens(prompt(*range(8), salt="s")) == {}
    assert index.num_cached_tokens(prompt(*range(8), is_read=False)) == {}
    assert index.take_events("a", PrefixEvents(1, pack(rank_hashes(range(8), "s"))))
    assert index.num_cached_tokens(prompt(*range(8), salt="s")) == {"a": 8}


def test_ranks_may_have_blocks_of_different_sizes():
    index = index_with(a=range(8))
    index.add("b", 3)
    index.take_snapshot("b", PrefixSnapshot(0, pack(rank_hashes(range(9), block_size=3))))
    assert index.block_sizes == {3, 4}
    assert index.num_cached_tokens(prompt(*range(11))) == {"a": 8, "b": 9}


def test_a_lost_rank_is_forgotten_and_may_come_again():
    index = index_with(a=range(8), b=range(8))
    index.forget("a")
    index.forget("nobody")
    assert index.num_cached_tokens(prompt(*range(8))) == {"b": 8}
    index.add("a", BLOCK_SIZE)
    assert index.num_hashes("a") == 0
    index.take_snapshot("a", PrefixSnapshot(7, pack(rank_hashes(range(4)))))
    assert index.num_cached_tokens(prompt(*range(8))) == {"a": 4, "b": 8}
    index.check_integrity()


def test_a_gap_is_told_once_and_mended_by_a_snapshot():
    index = index_with(a=range(8))
    more = pack(rank_hashes(range(12)))
    assert not index.take_events("a", PrefixEvents(2, more))
    assert index.take_events("a", PrefixEvents(3, more)), "asked for already"
    assert index.num_cached_tokens(prompt(*range(12))) == {"a": 8}, "the last that was known"
    index.take_snapshot("a", PrefixSnapshot(3, more))
    assert index.num_cached_tokens(prompt(*range(12))) == {"a": 12}
    assert index.take_events("a", PrefixEvents(4, removed=more))
    assert index.num_cached_tokens(prompt(*range(12))) == {}
    index.check_integrity()


def test_changes_before_the_first_snapshot_are_passed_over():
    index = PrefixIndex()
    index.add("a", BLOCK_SIZE)
    assert index.take_events("a", PrefixEvents(5, pack(rank_hashes(range(8)))))
    assert index.num_hashes("a") == 0


def test_a_snapshot_in_parts_counts_when_it_is_whole():
    index = index_with(a=[1, 2, 3, 4])
    hashes = rank_hashes(range(8))
    index.take_snapshot("a", PrefixSnapshot(4, pack(hashes[:1]), is_last=False))
    assert index.take_events("a", PrefixEvents(5)), "in the middle of it"
    index.take_snapshot("a", PrefixSnapshot(4, pack(hashes[1:]), is_first=False))
    assert index.num_cached_tokens(prompt(*range(8))) == {"a": 8}
    assert index.num_hashes("a") == 2
    assert index.take_events("a", PrefixEvents(5))


@pytest.mark.parametrize(
    "message", [PrefixEvents(1, b"seven.."), PrefixEvents(1, removed=b"n"), PrefixSnapshot(1, b"123456789")]
)
def test_what_are_no_hashes_is_refused_with_nothing_changed(message):
    index = index_with(a=range(8))
    take = index.take_snapshot if isinstance(message, PrefixSnapshot) else index.take_events
    with pytest.raises(ValueError, match="are not hashes"):
        take("a", message)
    assert index.num_cached_tokens(prompt(*range(8))) == {"a": 8}


class IndexMachine(RuleBasedStateMachine):
    """Ranks come, change, lose messages and go; prompts are pieces of a small tree of prefixes."""

    names = st.sampled_from(["a", "b", "c"])
    tokens = st.lists(st.sampled_from([1, 2]), max_size=3).map(lambda kinds: [k for k in kinds for _ in range(4)])

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.truth: dict[str, set[bytes]] = {}
        self.seqs: dict[str, int] = {}
        self.known: dict[str, set[bytes] | None] = {}
        """What the index should believe; a rank is in `waiting` while it is not told."""
        self.waiting: set[str] = set()
        self.heard: dict[str, int] = {}
        """Number of the latest changes that have come."""

    @rule(name=names)
    def come(self, name):
        self.index.add(name, BLOCK_SIZE)
        self.truth[name], self.known[name], self.seqs[name] = set(), set(), 0
        self.waiting.add(name)

    @rule(name=names)
    def go(self, name):
        self.index.forget(name)
        for of in (self.truth, self.known, self.seqs):
            of.pop(name, None)
        self.waiting.discard(name)

    @rule(name=names, stored=tokens, removed=tokens, is_lost=st.integers(0, 5))
    def change(self, name, stored, removed, is_lost):
        if name not in self.truth:
            return
        gone = set(rank_hashes(removed)[-1:]) - set(rank_hashes(stored))
        self.truth[name] = self.truth[name] - gone | set(rank_hashes(stored))
        self.seqs[name] += 1
        if not is_lost:
            return
        events = PrefixEvents(self.seqs[name], pack(rank_hashes(stored)), pack(sorted(gone)))
        # One that was lost before shows now.
        missed = name not in self.waiting and self.seqs[name] - 1 != self.heard[name]
        assert self.index.take_events(name, events) == (not missed)
        if missed:
            self.waiting.add(name)
        elif name not in self.waiting:
            self.known[name] = set(self.truth[name])
            self.heard[name] = self.seqs[name]

    @rule(name=names, cut=st.integers(0, 4))
    def snapshot(self, name, cut):
        if name not in self.truth:
            return
        hashes = sorted(self.truth[name])
        parts = [hashes[:cut], hashes[cut:]] if cut else [hashes]
        for at, part in enumerate(parts):
            is_last = at == len(parts) - 1
            self.index.take_snapshot(name, PrefixSnapshot(self.seqs[name], pack(part), at == 0, is_last))
        self.known[name] = set(hashes)
        self.heard[name] = self.seqs[name]
        self.waiting.discard(name)

    @rule(tokens=tokens)
    def ask(self, tokens):
        expected = {}
        for name, hashes in self.known.items():
            count = 0
            for block_hash in rank_hashes(tokens):
                if block_hash not in hashes:
                    break
                count += BLOCK_SIZE
            if count:
                expected[name] = count
        assert self.index.num_cached_tokens(prompt(*tokens, 5)) == expected

    @invariant()
    def both_views_agree(self):
        self.index.check_integrity()
        for name, hashes in self.known.items():
            assert self.index.num_hashes(name) == len(hashes)


IndexMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)
TestIndexMachine = IndexMachine.TestCase
