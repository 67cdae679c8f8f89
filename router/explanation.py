"""Where a request is and why, put together from what the ranks and this router know of it; pure.

Ranks tell times on clocks of their own. An answer's `now` and its arrival here tie them to the router's clock, so that
a request's sequences on several ranks share one timeline, to within the time that an answer travels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from rank_scheduler.messages import Explained
from router.errors import invalid

MAX_REQUEST_ID_CHARACTERS = 137  # of which 128 may be the client's
_REQUEST_ID = re.compile(r"(chatcmpl|cmpl|resp|msg)-[\x21-\x7e]+")

IN_ROUTER = "in_router"
"""State of sequences that no rank has yet."""
ARRIVED = "ARRIVED"


class RouterStage(StrEnum):
    """What a request waits for before a rank has it."""

    ADMISSION = "admission"
    """The control actor has not counted it yet."""
    FORMAT_CHECK = "format_check"
    """Its output format is being checked, one after another in a router."""
    TOKENIZATION = "tokenization"
    PLACEMENT = "placement"
    """No rank that it may go to has room for it, or it is not its turn."""


WAITS_FOR_ADMISSION = "waits for the control actor to count it in the cluster's queue"


@dataclass(frozen=True, slots=True)
class InRouter:
    """Sequences of a request that are still in this router."""

    stage: RouterStage
    message: str
    figures: dict[str, int]
    num_prompt_tokens: int
    """0 as long as it is not known."""
    arrived_at: float
    now: float
    """Both on the router's clock."""
    position: int | None = None
    """How many are before it in the line for room, if it is in it."""


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What a rank said to `Explain`; `explained` is None if it said nothing in time."""

    rank_id: str
    explained: Explained | None
    received_at: float
    """On the router's clock."""


class TimelineEvent(msgspec.Struct, frozen=True):
    event: str
    cause: str
    at_s: float
    """Since the request's first event."""
    age_s: float
    """Before the answer of whoever told it."""


class ExplainedSequence(msgspec.Struct, frozen=True, kw_only=True):
    rank: str | None
    state: str
    reason: str
    message: str
    figures: dict[str, int]
    position: int | None
    """Requests before it in its queue, if it is in one."""
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    timeline: list[TimelineEvent]


class RequestExplanation(msgspec.Struct, frozen=True):
    """The body of `GET /v1/requests/{id}/explain`."""

    id: str
    ranks: list[str]
    """Those that know the request."""
    ranks_without_answer: list[str]
    sequences: list[ExplainedSequence]


def check_request_id(request_id: str) -> None:
    """Raises ApiError for what can be no answer's id."""
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise invalid(
            f"id: has {len(request_id)} characters, at most {MAX_REQUEST_ID_CHARACTERS} are allowed; "
            "give the id of an answer",
            "id",
        )
    if not _REQUEST_ID.fullmatch(request_id):
        raise invalid(
            f"id: {request_id!r} is not the id of an answer, which begins with chatcmpl-, cmpl-, resp- or msg-; "
            "take it from the answer's `id` or its header x-request-id",
            "id",
        )


def put_together(request_id: str, in_router: InRouter | None, answers: Sequence[RankAnswer]) -> RequestExplanation:
    """One explanation, those sequences first that no rank has; it has none if nobody knows the request."""
    starts = [] if in_router is None else [in_router.arrived_at]
    for answer in answers:
        if answer.explained is not None:
            offset = answer.received_at - answer.explained.now
            starts += [entry.at + offset for known in answer.explained.explanations for entry in known.timeline]
    start = min(starts, default=0.0)
    sequences = [] if in_router is None else [_still_here(in_router, start)]
    for answer in answers:
        if answer.explained is not None:
            sequences += _on_rank(answer.rank_id, answer.explained, answer.received_at, start)
    return RequestExplanation(
        request_id,
        [answer.rank_id for answer in answers if answer.explained is not None and answer.explained.explanations],
        [answer.rank_id for answer in answers if answer.explained is None],
        sequences,
    )


def _still_here(in_router: InRouter, start: float) -> ExplainedSequence:
    arrived = _event(ARRIVED, "", in_router.arrived_at - start, in_router.now - in_router.arrived_at)
    return ExplainedSequence(
        rank=None,
        state=IN_ROUTER,
        reason=str(in_router.stage),
        message=in_router.message,
        figures=in_router.figures,
        position=in_router.position,
        num_prompt_tokens=in_router.num_prompt_tokens,
        timeline=[arrived],
    )


def _on_rank(rank_id: str, explained: Explained, received_at: float, start: float) -> list[ExplainedSequence]:
    offset = received_at - explained.now
    return [
        ExplainedSequence(
            rank=rank_id,
            state=known.state,
            reason=known.reason,
            message=known.message,
            figures=known.figures,
            position=known.position if known.position >= 0 else None,
            num_prompt_tokens=known.num_prompt_tokens,
            num_computed_tokens=known.num_computed_tokens,
            num_generated_tokens=known.num_generated_tokens,
            num_cached_tokens=known.num_cached_tokens,
            num_preemptions=known.num_preemptions,
            timeline=[
                _event(entry.event, entry.cause, entry.at + offset - start, explained.now - entry.at)
                for entry in known.timeline
            ],
        )
        for known in explained.explanations
    ]


def _event(event: str, cause: str, at_s: float, age_s: float) -> TimelineEvent:
    return TimelineEvent(event, cause, round(at_s, 6), round(age_s, 6))
