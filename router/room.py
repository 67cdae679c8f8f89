"""Whether a rank is given more work, or had better finish some first; pure."""

from __future__ import annotations

from enum import IntEnum

from rank_scheduler.messages import RankLoad
from router.control_messages import RankRecord

NUM_STEPS_AHEAD = 2
"""So many steps' worth of prompt tokens a rank has to compute at most when it is given more: one is under way, and one
begins before the router can hear that it has. More would wait there in vain, where it cannot go anywhere else."""


class Room(IntEnum):
    """What a rank takes now."""

    NONE = 0
    SLOT = 1
    """A sequence whose prompt is computed elsewhere."""
    PROMPT = 2
    """A sequence for whose prompt it has KV room."""
    ANYTHING = 3
    """It is idle: what is too much for it now, would be so for ever."""


def room(record: RankRecord, load: RankLoad, num_unseen_sequences: int, num_unseen_tokens: int) -> Room:
    """`unseen`: what it was given that `load` does not contain."""
    num_sequences = load.num_running + load.num_waiting + load.num_deferred + num_unseen_sequences
    if num_sequences == 0:
        return Room.ANYTHING
    if num_sequences >= record.max_num_seqs:
        return Room.NONE
    num_tokens = load.num_waiting_tokens + num_unseen_tokens
    return Room.PROMPT if num_tokens < NUM_STEPS_AHEAD * record.max_num_batched_tokens else Room.SLOT
