"""A rank's record of one request, and the legal moves of its state."""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from rank_scheduler.messages import SamplingParams
from rank_scheduler.plan import Int32Array
from rank_scheduler.stop_strings import StopStringMatcher


class SequenceState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_LEGAL_MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.PREEMPTED: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}

# Owner (a router's connection) and the number that the owner gave the request.
SequenceKey = tuple[int, int]


class InvalidTransition(Exception):
    """A state machine was asked for a move that its table does not have."""

    def __init__(self, key: SequenceKey, old: SequenceState, new: SequenceState, story: tuple[str, ...]) -> None:
        super().__init__(key, old, new, story)
        self.key = key
        self.old = old
        self.new = new
        self.story = story

    def __str__(self) -> str:
        return f"sequence {self.key}: no move from {self.old} to {self.new}; story: {' → '.join(self.story)}"


class Sequence:
    """One request on this rank. While it runs, its tokens and counts live in the batch, at `slot`."""

    __slots__ = (
        "_story",
        "arrival",
        "block_hashes",
        "key",
        "num_bypasses",
        "num_cached_tokens",
        "num_prompt_tokens",
        "sampling",
        "slot",
        "state",
        "stop_strings",
        "token_ids",
    )

    def __init__(
        self,
        key: SequenceKey,
        token_ids: Int32Array,
        sampling: SamplingParams,
        stop_strings: StopStringMatcher | None,
        arrival: float,
    ) -> None:
        self.key = key
        self.token_ids = token_ids
        """Known tokens when it last waited, shape [n]: the prompt, and after a preemption what was generated."""
        self.num_prompt_tokens = len(token_ids)
        self.sampling = sampling
        self.stop_strings = stop_strings
        self.arrival = arrival
        self.block_hashes: list[bytes] = []
        self.state = SequenceState.WAITING
        self.slot = -1
        self.num_bypasses = 0
        """How often a later request was admitted while this one, at the head, did not fit."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache at first admission."""
        self._story: deque[str] = deque([f"waiting at {arrival:.6f}"], maxlen=16)

    def move(self, new: SequenceState, now: float) -> None:
        """Raises InvalidTransition, with the sequence's story, unless the table has the move."""
        if new not in _LEGAL_MOVES[self.state]:
            raise InvalidTransition(self.key, self.state, new, tuple(self._story))
        self._story.append(f"{new} at {now:.6f}")
        self.state = new
