"""What a router and a rank say to each other: one TCP connection per pair, one frame per step.

A router submits requests under numbers of its own choosing (`id`, unique per connection) and may abort them.
A rank answers each accepted request with tokens in `StepFrame`s until exactly one `End` for that id; after it
the id means nothing any more, and late aborts for it are ignored. When the connection closes, the rank aborts
everything that came over it, and the router treats every id without an `End` as lost with the rank.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

# A rank keeps these in arrays: what does not fit must be refused with the message, not in the middle of a step.
Int63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to pick tokens and when to stop; validated by whoever builds it (the router's HTTP layer)."""

    seed: Annotated[int, msgspec.Meta(ge=0)]
    """Unsigned 64-bit key of the request's randomness; position is the counter."""
    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: Int63 = 0
    """0 means off."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: Int63 | None = None
    """None: no logprobs; 0: the chosen token's only; k: the k most likely as well."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one generated token under the unmodified distribution."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Router → rank: run this request."""

    id: Int63
    token_ids: bytes
    """The prompt as little-endian int32."""
    sampling: SamplingParams


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Router → rank: the client is gone. Answered by an `End` with reason ABORT if the request still lives."""

    id: Int63


class End(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last word on a request. Its tokens, if any in this step, stand in the same frame."""

    id: int
    reason: FinishReason
    stop_reason: str | int | None = None
    """The matched stop string, or the matched stop token id; None for end-of-sequence and all other reasons."""
    message: str = ""
    """For ERROR: what went wrong and what the caller may do."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""


class RankLoad(msgspec.Struct, frozen=True, array_like=True):
    """A rank's live figures, sent with every frame and at least once a second."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens still to be computed, of running and waiting requests."""
    num_free_blocks: int = 0
    num_blocks: int = 0
    """Usable blocks of the pool (the null block is not counted)."""
    num_steps: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens computed (cache hits not included)."""
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    num_prefix_hits: int = 0


class StepFrame(msgspec.Struct, frozen=True, tag="step", omit_defaults=True):
    """Rank → router: everything that one step brought for the requests of this connection."""

    load: RankLoad
    ids: list[int] = []
    """Request of each token; a request may occur more than once."""
    tokens: list[int] = []
    logprobs: dict[int, TokenLogprobs] = {}
    """Index into `tokens` → its logprobs, for requests that asked."""
    ends: list[End] = []
    first_token_ids: list[int] = []
    """Requests whose prompt became fully computed in this step."""


RouterToRank = Submit | Abort
RankToRouter = StepFrame
