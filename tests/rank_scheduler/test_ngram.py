import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rank_scheduler.ngram import NgramIndex

CERTAIN = settings(deadline=None, derandomize=True)


def searched(tokens, min_n, max_n, k):
    """The drafts by search: the earliest occurrence of the longest last n-gram that has one before the end."""
    for n in range(max_n, min_n - 1, -1):
        last = tokens[-n:]
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == last:
                return tokens[start + n : start + n + k]
    return []


def drafts(tokens, min_n=1, max_n=3, k=4):
    index = NgramIndex(min_n, max_n)
    index.extend(np.array(tokens, np.int32))
    return index.propose(k)


@CERTAIN
@given(
    pieces=st.lists(st.lists(st.sampled_from([0, 1, 2, 2**31 - 1]), max_size=12), max_size=8),
    min_n=st.integers(1, 4),
    more=st.integers(0, 4),
    k=st.integers(0, 6),
)
def test_an_index_drafts_what_a_search_finds(pieces, min_n, more, k):
    index = NgramIndex(min_n, min_n + more)
    tokens: list[int] = []
    for piece in pieces:
        index.extend(np.array(piece, np.int32))
        tokens += piece
        assert index.propose(k) == searched(tokens, min_n, min_n + more, k)
        assert len(index) == len(tokens)


@CERTAIN
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=80), min_n=st.integers(1, 3), more=st.integers(0, 3))
def test_one_by_one_is_as_all_at_once(tokens, min_n, more):
    index = NgramIndex(min_n, min_n + more)
    for token in tokens:
        index.extend(np.array([token], np.int32))
    assert index.propose(5) == drafts(tokens, min_n, min_n + more, 5)


def test_the_longest_ngram_wins_over_an_earlier_shorter_one():
    assert drafts([2, 9, 1, 2, 8, 1, 2], k=1) == [8]


def test_the_earliest_of_equally_long_ones_wins():
    assert drafts([1, 2, 7, 1, 2, 8, 1, 2], k=1) == [7]


def test_an_occurrence_may_overlap_the_last_ngram():
    assert drafts([5, 5, 5, 5], min_n=3) == [5]


def test_drafts_end_where_the_sequence_ends():
    assert drafts([1, 2, 3, 1], k=9) == [2, 3, 1]


def test_nothing_is_drafted_below_min_n():
    assert drafts([1, 2, 3, 1], min_n=2) == drafts([], min_n=2) == drafts([1], min_n=2) == []


def test_tokens_do_not_match_across_their_bytes():
    assert drafts([0x01000000, 0x01, 0x0100]) == []


def test_sizes_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match="min_n is 3 and max_n is 2"):
        NgramIndex(3, 2)
