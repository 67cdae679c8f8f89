"""Runs of blocks against the plain definition, and the checks of ids."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import block_runs, extension
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


@pytest.fixture(params=["python", "c"])
def are_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[np.ndarray, int], bool]:
    """The check is made by this twin."""
    chosen = block_runs.are_blocks_in_python
    if request.param == "c":
        if (why := extension.why_missing().get("kv_transfer._block_moves")) is not None:
            pytest.skip(why)
        chosen = import_module("kv_transfer._block_moves").are_blocks
    monkeypatch.setattr(block_runs, "are_blocks", chosen)
    return chosen


@pytest.mark.parametrize(
    ("ids", "is_good"),
    [
        (np.array([7, 0], np.int32), True),
        (np.array([], np.int32), True),
        (np.array([8], np.int32), False),
        (np.array([0, -1], np.int32), False),
        (np.array([-(2**31)], np.int32), False),
        # To be brought into form first.
        (np.array([1]), False),
        (np.array([1], ">i4"), False),
        (np.array([1], np.uint32), False),
        (np.array([1, 2, 3], np.int32)[::2], False),
        (np.array([[1]], np.int32), False),
    ],
)
def test_quick_check(are_blocks: Callable[[np.ndarray, int], bool], ids: np.ndarray, is_good: bool) -> None:
    assert are_blocks(ids, 8) is is_good


@pytest.mark.usefixtures("are_blocks")
@pytest.mark.parametrize("ids", [[0], [7], [], [3, 3, 0]])
def test_good_ids(ids: list[int]) -> None:
    checked = check_block_ids(np.array(ids, np.int64), 8, "our")
    assert checked.dtype == np.int32
    assert checked.tolist() == ids


@pytest.mark.usefixtures("are_blocks")
@pytest.mark.parametrize(
    "ids",
    [
        np.array([8]),
        np.array([-1, 2]),
        np.array([1 << 32]),
        np.array([[1]]),
        np.array([1.0]),
        np.array([True]),
        np.array([-1], np.int32),
        np.array([9, 0], np.int32)[::-1],
    ],
)
def test_bad_ids(ids: np.ndarray) -> None:
    with pytest.raises(ValueError, match="our"):
        check_block_ids(ids, 8, "our")


def test_pairs() -> None:
    check_pairs(np.zeros(3), np.zeros(3))
    with pytest.raises(ValueError, match="3 remote and 2 local"):
        check_pairs(np.zeros(3), np.zeros(2))
