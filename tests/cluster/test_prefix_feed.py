"""A rank's feed and routers' indices on it: each knows exactly what the rank has, whenever it began to listen."""

from __future__ import annotations

import random

import pytest

from cluster import prefix_feed
from cluster.prefix_feed import PrefixFeed
from rank_scheduler.messages import PrefixSnapshot, RankLoad, StepFrame
from rank_scheduler.prefix_chain import HASH_BYTES, pack, unpack
from router.prefix_index import PrefixIndex

LOAD = RankLoad(num_steps=3)


def block_hash(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "little") + bytes(24)


def test_changes_go_into_the_frames_of_those_who_listen() -> None:
    feed = PrefixFeed()
    frames = {1: StepFrame(LOAD, [5], [6]), 2: StepFrame(LOAD, [7], [8])}
    assert feed.add_to(frames, (pack([block_hash(1)]), b""), LOAD) is frames, "nobody listens"
    assert feed.watch(2, [block_hash(1)]) == [PrefixSnapshot(0, pack([block_hash(1)]))]
    feed.watch(3, [])
    assert feed.add_to(frames, (b"", b""), LOAD) is frames, "nothing new"
    told = feed.add_to(frames, (pack([block_hash(2)]), pack([block_hash(1)])), LOAD)
    assert told[1] is frames[1]
    events = told[2].prefixes
    assert events is not None
    assert (events.seq, events.stored, events.removed) == (1, pack([block_hash(2)]), pack([block_hash(1)]))
    assert (told[2].ids, told[2].tokens) == ([7], [8])
    assert told[3] == StepFrame(LOAD, prefixes=events)
    feed.drop(2)
    feed.drop(4)
    assert feed.add_to({}, (pack([block_hash(3)]), b""), LOAD).keys() == {3}


def test_a_snapshot_comes_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_feed, "MAX_HASHES_PER_FRAME", 2)
    parts = PrefixFeed().watch(1, [block_hash(number) for number in range(5)])
    assert [(part.is_first, part.is_last, unpack(part.hashes)) for part in parts] == [
        (True, False, (0, 1)),
        (False, False, (2, 3)),
        (False, True, (4,)),
    ]
    assert PrefixFeed().watch(1, []) == [PrefixSnapshot(0, b"", True, True)]


@pytest.mark.parametrize("seed", range(10))
def test_every_listener_ends_with_what_the_rank_has(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_feed, "MAX_HASHES_PER_FRAME", 6)
    rng = random.Random(seed)
    feed, findable = PrefixFeed(), set[int]()
    changes: dict[bytes, bool] = {}
    indices: dict[int, PrefixIndex] = {}
    num_gaps = 0

    def watch(owner: int) -> None:
        for part in feed.watch(owner, [block_hash(number) for number in sorted(findable)]):
            indices[owner].take_snapshot("rank", part)

    def tell(share_lost: float) -> None:
        nonlocal num_gaps
        stored = pack(one for one, is_findable in changes.items() if is_findable)
        removed = pack(one for one, is_findable in changes.items() if not is_findable)
        for owner, frame in feed.add_to({}, (stored, removed), LOAD).items():
            assert frame.prefixes is not None
            if rng.random() < share_lost:
                continue
            if not indices[owner].take_events("rank", frame.prefixes):
                num_gaps += 1
                watch(owner)
        changes.clear()

    for turn in range(400):
        for _ in range(rng.choice([0, 1, 2, 9])):
            number = rng.randrange(20)
            (findable.discard if number in findable else findable.add)(number)
            changes[block_hash(number)] = number in findable
        if rng.random() < 0.05:
            # One comes (again), with changes still untold.
            owner = rng.randrange(4)
            feed.drop(owner)
            indices[owner] = PrefixIndex()
            indices[owner].add("rank", 4)
            watch(owner)
        if rng.random() < 0.8:
            tell(0.05)
        if turn % 40 == 39:
            # Two in a row that arrive: one shows what is missing, and the other goes on from there.
            for number in (100, 101):
                changes[block_hash(number)] = True
                findable.add(number)
                tell(0.0)
            for index in indices.values():
                assert index._ranks["rank"].hashes == findable
                index.check_integrity()
    assert num_gaps > 3
