"""Order, positions and counts of the waiting queue, against a plain sorted list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rank_scheduler.messages import SamplingParams, Submit
from rank_scheduler.sequence import Sequence
from rank_scheduler.waiting_queue import WaitingQueue


def make_sequence(order: int, priority: int = 0, is_preempted: bool = False, num_tokens: int = 3) -> Sequence:
    submit = Submit(order, b"", SamplingParams(seed=0, max_tokens=1), priority=priority)
    sequence = Sequence((0, order), submit, np.zeros(num_tokens, np.int32), None, None, order, 0.0)
    sequence.is_preempted = is_preempted
    return sequence


def orders(queue: WaitingQueue) -> list[int]:
    return [sequence.order for sequence in queue]


def test_fcfs_is_order_of_arrival_whatever_the_priority():
    queue = WaitingQueue(by_priority=False)
    for order, priority in ((2, -5), (0, 9), (1, 0)):
        queue.push(make_sequence(order, priority))
    assert orders(queue) == [0, 1, 2]
    assert queue.first.order == 0


def test_priority_comes_first_and_lower_is_better():
    queue = WaitingQueue(by_priority=True)
    for order, priority in ((0, 9), (1, 0), (2, -5), (3, 0)):
        queue.push(make_sequence(order, priority))
    assert orders(queue) == [2, 1, 3, 0]


@pytest.mark.parametrize("by_priority", [False, True])
def test_preempted_ones_go_to_the_head_of_their_class_in_order_of_arrival(by_priority):
    queue = WaitingQueue(by_priority=by_priority)
    queue.push(make_sequence(1))
    for order in (7, 5, 6):
        queue.push(make_sequence(order, is_preempted=True))
    queue.push(make_sequence(8, priority=-1))
    assert orders(queue) == ([8, 5, 6, 7, 1] if by_priority else [5, 6, 7, 1, 8])


def test_what_is_not_there_has_no_position_and_cannot_be_removed():
    queue = WaitingQueue(by_priority=False)
    queue.push(make_sequence(1))
    stranger = make_sequence(1)
    assert queue.position(stranger) == -1
    with pytest.raises(KeyError):
        queue.remove(stranger)
    assert len(queue) == 1


@settings(max_examples=150)
@given(
    by_priority=st.booleans(),
    moves=st.lists(
        st.tuples(st.booleans(), st.integers(-2, 2), st.booleans(), st.integers(0, 9), st.integers(0, 99)), max_size=40
    ),
)
def test_any_pushes_and_removals_keep_order_positions_and_tokens(by_priority, moves):
    queue = WaitingQueue(by_priority=by_priority)
    model: list[Sequence] = []
    for order, (is_removal, priority, is_preempted, num_tokens, pick) in enumerate(moves):
        if is_removal and model:
            queue.remove(model.pop(pick % len(model)))
        else:
            sequence = make_sequence(order, priority, is_preempted, num_tokens)
            model.append(sequence)
            queue.push(sequence)
        model.sort(key=lambda s: (s.priority if by_priority else 0, not s.is_preempted, s.order))
        assert list(queue) == model
        assert [queue.position(sequence) for sequence in model] == list(range(len(model)))
        assert queue.num_tokens == sum(len(sequence.token_ids) for sequence in model)
        assert len(queue) == len(model)
        assert not model or queue.first is model[0]
