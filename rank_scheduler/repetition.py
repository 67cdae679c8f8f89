"""Whether an output has begun to repeat itself."""

from __future__ import annotations

import numpy as np

from rank_scheduler.messages import Repetition
from rank_scheduler.plan import Int32Array


def is_repeating(token_ids: Int32Array, repetition: Repetition) -> bool:
    """Whether for some pattern size the last `min_count` stretches of that size are equal; `token_ids`: shape [n].

    Repeating with period p means: each of the last p * (min_count - 1) tokens equals the one p before it.
    """
    num_tokens, min_count = len(token_ids), repetition.min_count
    largest = min(repetition.max_pattern_size, num_tokens // min_count)
    smallest = repetition.min_pattern_size
    if largest < smallest:
        return False
    # Look at both ends of what must be equal first: in ordinary text, and in a run that is still too short, hardly a
    # period is left to compare in full.
    before_last = token_ids[num_tokens - 1 - largest : num_tokens - smallest]
    periods = largest - np.flatnonzero(before_last == token_ids[-1])
    if not len(periods):
        return False
    firsts = num_tokens - periods * (min_count - 1)
    periods = periods[token_ids[firsts] == token_ids[firsts - periods]]
    size = token_ids.itemsize
    tail = token_ids[num_tokens - largest * min_count :].tobytes()
    for period in periods.tolist():
        end = len(tail) - period * size
        if tail.endswith(tail[end - period * size * (min_count - 1) : end]):
            return True
    return False
