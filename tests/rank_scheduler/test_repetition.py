import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rank_scheduler.messages import Repetition
from rank_scheduler.repetition import is_repeating

CERTAIN = settings(deadline=None, derandomize=True)


def searched(tokens, repetition):
    for size in range(repetition.min_pattern_size, repetition.max_pattern_size + 1):
        stretches = [
            tokens[len(tokens) - (index + 1) * size : len(tokens) - index * size]
            for index in range(repetition.min_count)
            if len(tokens) >= (index + 1) * size
        ]
        if len(stretches) == repetition.min_count and all(stretch == stretches[0] for stretch in stretches):
            return True
    return False


def repeats(tokens, **fields):
    return is_repeating(np.array(tokens, np.int32), Repetition(**fields))


def repetitions():
    sizes = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted)
    return st.builds(
        lambda sizes, count: Repetition(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=count),
        sizes,
        st.integers(2, 5),
    )


@CERTAIN
@given(
    before=st.lists(st.integers(0, 2), max_size=10),
    pattern=st.lists(st.integers(0, 2), max_size=9),
    count=st.integers(0, 6),
    after=st.lists(st.integers(0, 2), max_size=2),
    spoiled=st.none() | st.integers(0, 60),
    repetition=repetitions(),
)
def test_agrees_with_a_comparison_of_all_stretches(before, pattern, count, after, spoiled, repetition):
    tokens = before + pattern * count + after
    if spoiled is not None and spoiled < len(tokens):
        tokens[spoiled] = 9
    assert is_repeating(np.array(tokens, np.int32), repetition) == searched(tokens, repetition)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([7, 1, 2, 3, 1, 2, 3, 1, 2, 3], True),
        ([7, 1, 2, 3, 1, 2, 3], False),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3, 4], False),
        ([1, 9, 3, 1, 2, 3, 1, 2, 3], False),
        ([1, 2, 3, 1, 9, 3, 1, 2, 3], False),
        ([3, 3, 3], False),
        ([], False),
    ],
)
def test_three_stretches_of_two_to_four_tokens(tokens, expected):
    assert repeats(tokens, min_pattern_size=2, max_pattern_size=4, min_count=3) is expected


def test_one_token_again_and_again_is_a_pattern_of_any_size():
    assert repeats([5] * 6, min_pattern_size=3, max_pattern_size=3, min_count=2)


def test_a_range_of_sizes_in_the_wrong_order_never_repeats():
    assert not repeats([5] * 9, min_pattern_size=3, max_pattern_size=2, min_count=2)
