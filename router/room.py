"""Whether a rank is given more work, or had better finish some first; pure."""

from __future__ import annotations

from enum import IntEnum

from rank_scheduler.messages import RankLoad
from router.control_messages import RankRecord

NUM_STEPS_AHEAD = 2
"""A rank is given a prompt of any length when what it has to compute takes fewer steps than this: one is under way, and
one begins before the router can hear that it has. More would wait there in vain, where it cannot go anywhere else.

Where one sequence gets a limited part of a step, it is given the next long one when the last part of the one before is
under way: two at a time would make steps longer for all others, and nothing faster.
"""


class Room(IntEnum):
    """What a rank takes now."""

    NONE = 0
    SLOT = 1
    """A sequence whose prompt is computed elsewhere."""
    STEP = 2
    """A sequence whose prompt takes no more steps: a long one in progress leaves it some of each."""
    PROMPT = 3
    """A sequence for whose prompt it has KV room."""
    ANYTHING = 4
    """It is idle: what is too much for it now, would be so for ever."""


def room(record: RankRecord, load: RankLoad, num_unseen_sequences: int, num_unseen_tokens: int) -> Room:
    """`unseen`: what it was given that `load` does not contain."""
    num_sequences = load.num_running + load.num_waiting + load.num_deferred + num_unseen_sequences
    if num_sequences == 0:
        return Room.ANYTHING
    if num_sequences >= record.max_num_seqs:
        return Room.SLOT if num_sequences < record.max_num_seqs + record.max_num_inflight_kv_loads else Room.NONE
    num_tokens = load.num_waiting_tokens + num_unseen_tokens
    limit = record.long_prefill_token_threshold or NUM_STEPS_AHEAD * record.max_num_batched_tokens
    if num_tokens < limit:
        return Room.PROMPT
    is_left = num_step_tokens_left(record, load, num_unseen_sequences, num_unseen_tokens) > 0
    return Room.STEP if is_left else Room.SLOT


def num_step_tokens_left(record: RankRecord, load: RankLoad, num_unseen_sequences: int, num_unseen_tokens: int) -> int:
    """How long a prompt may be that goes beside those in progress: its next step has room for it, if not for all."""
    most_of_one = record.long_prefill_token_threshold or record.max_num_batched_tokens
    most_of_new = max(most_of_one, record.short_prefill_tokens)
    num_unseen = min(num_unseen_tokens, num_unseen_sequences * most_of_new)
    num_left = record.max_num_batched_tokens - load.num_step_tokens - num_unseen
    return min(num_left, max(NUM_STEPS_AHEAD * most_of_one, most_of_new))
