"""A rank's record of one request, the legal moves of its state, and what became of it so far."""

from __future__ import annotations

from collections import deque
from enum import StrEnum

import msgspec

from kv_transfer.connector import KvRequest
from kv_transfer.params import KvParams
from rank_scheduler.messages import Extend, FinishReason, Submit, TimelineEntry
from rank_scheduler.ngram import NgramIndex
from rank_scheduler.plan import NO_TOKENS, Int32Array
from rank_scheduler.prefix_hash import ExtraKeys
from rank_scheduler.stop_strings import StopStringMatcher
from rank_scheduler.structured_output import GrammarMatcher


class SequenceState(StrEnum):
    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_KV_LOAD = "waiting_for_kv_load"
    WAITING_FOR_INPUT = "waiting_for_input"
    """A streaming session between two turns; it keeps its slot and blocks as long as there is room."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"

    # An enum's own goes through Python.
    __hash__ = str.__hash__


_S = SequenceState
_LEGAL_MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    _S.WAITING_FOR_GRAMMAR: frozenset({_S.WAITING, _S.FINISHED}),
    _S.WAITING: frozenset({_S.RUNNING, _S.WAITING_FOR_KV_LOAD, _S.FINISHED}),
    _S.WAITING_FOR_KV_LOAD: frozenset({_S.WAITING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.WAITING_FOR_INPUT, _S.FINISHED}),
    # Into WAITING_FOR_INPUT: its turn ended with a token that was still in flight.
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.WAITING_FOR_INPUT, _S.FINISHED}),
    _S.WAITING_FOR_INPUT: frozenset({_S.RUNNING, _S.WAITING, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}


class RequestEvent(StrEnum):
    QUEUED = "queued"
    GRAMMAR_READY = "grammar_ready"
    LOAD_STARTED = "load_started"
    LOAD_FINISHED = "load_finished"
    LOAD_FAILED = "load_failed"
    SCHEDULED = "scheduled"
    RESUMED = "resumed"
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"
    TURN_ENDED = "turn_ended"
    EXTENDED = "extended"
    FINISHED = "finished"


class WaitReason(StrEnum):
    """Why a request is not running."""

    SLOTS = "slots"
    BLOCKS = "blocks"
    BUDGET = "budget"
    PREEMPTION = "preemption"
    """Running ones had to give up blocks in the step, so that nobody was admitted."""
    CADENCE = "cadence"
    ENCODER = "encoder"
    BEHIND = "behind"
    """Others come first, and the step had no room left when they had been served."""
    DRAINING = "draining"
    """Preempted; tokens of steps in flight are still to come."""
    GRAMMAR = "grammar"
    LOAD_CAP = "load_cap"
    LOADING = "loading"
    CONNECTOR = "connector"
    """The KV connector cannot say yet what it could load."""
    INPUT = "input"
    PAUSED = "paused"
    NEW = "new"
    """No step has been planned since it was queued."""


class Obstacle(msgspec.Struct, frozen=True):
    """What kept a request from running when it was last looked at."""

    reason: WaitReason
    figures: dict[str, int] = {}


NEW = Obstacle(WaitReason.NEW)
"""Nothing has been looked at yet."""


# Owner (a router's connection) and the number that the owner gave the request.
SequenceKey = tuple[int, int]

_NUM_FIRST_ENTRIES = 8
_NUM_LAST_ENTRIES = 56


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
    """One request on this rank. While it has a slot, its tokens, counts and blocks live in the batch."""

    __slots__ = (
        "_first_entries",
        "_last_entries",
        "_num_submitted",
        "block_hashes",
        "blocks",
        "cross_blocks",
        "encoder_inputs",
        "extensions",
        "extra_keys",
        "finish_reason",
        "grammar",
        "handed_params",
        "hands_off",
        "has_grammar",
        "is_preempted",
        "is_session",
        "is_watched",
        "key",
        "kv_request",
        "max_tokens",
        "ngram",
        "num_bypasses",
        "num_cached_tokens",
        "num_computed",
        "num_draining",
        "num_external_tokens",
        "num_generated",
        "num_load_failures",
        "num_preemptions",
        "num_prompt_tokens",
        "obstacle",
        "order",
        "pass_number",
        "priority",
        "probe_memo",
        "reads_prefix_cache",
        "request_id",
        "sampling",
        "slot",
        "state",
        "stop_strings",
        "token_ids",
    )

    def __init__(
        self,
        key: SequenceKey,
        submit: Submit,
        token_ids: Int32Array,
        stop_strings: StopStringMatcher | None,
        extra_keys: ExtraKeys | None,
        order: int,
        now: float,
    ) -> None:
        self.key = key
        self.request_id = submit.request_id
        self.priority = submit.priority
        self.order = order
        """Number of arrival on this rank."""
        self.sampling = submit.sampling
        self.max_tokens = submit.sampling.max_tokens
        """Of the present turn."""
        self.reads_prefix_cache = submit.reads_prefix_cache and submit.sampling.num_prompt_logprobs is None
        self.encoder_inputs = submit.encoder_inputs
        self.is_session = submit.is_session
        self.extensions: list[Extend] = []
        """Input that came while a turn was still going on."""
        self.has_grammar = submit.grammar is not None
        self.grammar: GrammarMatcher | None = None
        sampling = submit.sampling
        self.is_watched = bool(sampling.stop_token_ids or sampling.stop or sampling.repetition or submit.grammar)
        """Each of its tokens may end it, or must be told to its grammar."""
        self.stop_strings = stop_strings
        self.extra_keys = extra_keys
        self.kv_request: KvRequest | None = None
        """For the rank's connector; None if there is none."""
        self.hands_off = submit.hands_off
        self.handed_params: KvParams | None = None
        """What the connector has told at the end."""

        self.token_ids = token_ids
        """Known tokens while it has no slot, shape [n]: the prompt, and after a preemption what was generated."""
        self._num_submitted = len(token_ids)
        self.num_prompt_tokens = len(token_ids) - submit.num_generated
        self.num_generated = 0
        """Of the last turn; noted when it has ended."""
        self.block_hashes: list[bytes] = []
        self.blocks: Int32Array | None = None
        """Held without a slot, for or after a KV load; shape [num_groups, columns]."""
        self.cross_blocks: list[int] = []
        self.num_computed = 0
        """Tokens whose KV lies in `blocks`."""
        self.num_external_tokens = 0
        """Of the present load."""
        self.num_load_failures = 0
        self.ngram: NgramIndex | None = None
        self.num_draining = 0
        """Tokens that steps in flight will still bring, after a preemption."""

        self.state = _S.WAITING_FOR_GRAMMAR if self.has_grammar else _S.WAITING
        self.slot = -1
        self.is_preempted = False
        self.num_bypasses = 0
        """How often a later request was admitted while this one, at the head, did not fit."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache or loaded, at first admission."""
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.obstacle = NEW
        self.pass_number = -1
        """Of the waiting pass in which `obstacle` was found."""
        self.probe_memo: tuple[tuple[int, int, int], Obstacle] | None = None
        """Of the latest attempt that lacked blocks: what it depended on, and the obstacle."""
        self._first_entries: list[TimelineEntry] = []
        self._last_entries: deque[TimelineEntry] | None = None
        """Of a story that is longer than the first entries."""
        self.note(RequestEvent.QUEUED, now)

    def max_total(self, max_model_len: int) -> int:
        """Known tokens at which it ends by length, its turn does, or it is handed off."""
        if self.hands_off:
            # As far as it has come elsewhere, and one token more.
            return min(self._num_submitted + 1, max_model_len)
        return min(self.num_prompt_tokens + self.max_tokens, max_model_len)

    def move(self, new: SequenceState) -> None:
        """Raises InvalidTransition, with the sequence's story, unless the table has the move."""
        if new not in _LEGAL_MOVES[self.state]:
            story = tuple(f"{entry.event} at {entry.at:.6f} {entry.cause}".rstrip() for entry in self.timeline())
            raise InvalidTransition(self.key, self.state, new, story)
        self.state = new

    def note(self, event: RequestEvent, now: float, cause: str = "") -> None:
        entry = TimelineEntry(now, event, cause)
        if len(self._first_entries) < _NUM_FIRST_ENTRIES:
            self._first_entries.append(entry)
            return
        if self._last_entries is None:
            self._last_entries = deque(maxlen=_NUM_LAST_ENTRIES)
        self._last_entries.append(entry)

    def timeline(self) -> list[TimelineEntry]:
        """Oldest first; of a long story the middle is missing."""
        return self._first_entries + list(self._last_entries or ())

    def strip(self) -> None:
        """Let go of everything that only a living sequence needs."""
        self.token_ids = NO_TOKENS
        self.block_hashes = []
        self.grammar = self.stop_strings = self.ngram = self.kv_request = self.blocks = None
        self.encoder_inputs = ()
        self.extensions.clear()
