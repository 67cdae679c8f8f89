"""Runs of blocks against the plain definition, and the checks of ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.block_runs import check_block_ids, check_pairs, find_runs

blocks = st.lists(st.integers(0, 9), max_size=30).map(lambda ids: np.array(ids, np.int32))


@given(blocks)
def test_runs_are_maximal_and_cover_the_list(ids: np.ndarray) -> None:
    firsts, lengths = find_runs(ids)
    covered = [ids[first] + offset for first, length in zip(firsts, lengths, strict=True) for offset in range(length)]
    assert covered == ids.tolist()
    for first in firsts[1:]:
        assert ids[first] != ids[first - 1] + 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_runs_of_pairs_go_up_at_both_ends(pairs: list[tuple[int, int]]) -> None:
    ours, theirs = (np.array([pair[side] for pair in pairs], np.int32) for side in (0, 1))
    firsts, lengths = find_runs(ours, theirs)
    assert lengths.sum() == len(pairs)
    for first, length in zip(firsts, lengths, strict=True):
        for ids in (ours, theirs):
            assert ids[first : first + length].tolist() == list(range(ids[first], ids[first] + length))
    for first in firsts[1:]:
        assert ours[first] != ours[first - 1] + 1 or theirs[first] != theirs[first - 1] + 1


@pytest.mark.parametrize("ids", [[0], [7], [], [3, 3, 0]])
def test_good_ids(ids: list[int]) -> None:
    checked = check_block_ids(np.array(ids, np.int64), 8, "our")
    assert checked.dtype == np.int32
    assert checked.tolist() == ids


@pytest.mark.parametrize(
    "ids",
    [
        np.array([8]),
        np.array([-1, 2]),
        np.array([1 << 32]),
        np.array([[1]]),
        np.array([1.0]),
        np.array([True]),
    ],
)
def test_bad_ids(ids: np.ndarray) -> None:
    with pytest.raises(ValueError, match="our"):
        check_block_ids(ids, 8, "our")


def test_pairs() -> None:
    check_pairs(np.zeros(3), np.zeros(3))
    with pytest.raises(ValueError, match="3 remote and 2 local"):
        check_pairs(np.zeros(3), np.zeros(2))
