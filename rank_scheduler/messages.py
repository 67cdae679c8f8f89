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

from kv_transfer.params import KvParams

# A rank keeps these in arrays: what does not fit must be refused with the message, not in the middle of a step.
Int63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Repetition(msgspec.Struct, frozen=True):
    """End a request whose output repeats itself: the last `min_count` stretches of one length are equal."""

    max_pattern_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    min_count: Annotated[int, msgspec.Meta(ge=2, le=1024)]
    min_pattern_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    """Any JSON object; `text` is empty."""
    REGEX = "regex"
    CHOICE = "choice"
    """`text` is a JSON list of strings."""
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True):
    """What the whole output must match, from its first token to its end-of-sequence token."""

    kind: GrammarKind
    text: str = ""


class EncoderInput(msgspec.Struct, frozen=True):
    """One multimodal item of a prompt, or the encoder's whole input of an encoder-decoder model."""

    identifier: bytes
    """Equal identifiers mean equal content: what is encoded once is not encoded again."""
    offset: Int63
    """First prompt position that its embeddings stand at; 0 for an encoder-decoder model."""
    length: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    """How many embeddings it has."""
    data: bytes = b""


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
    num_prompt_logprobs: Int63 | None = None
    """Of the prompt's own tokens, all but the first. Its prompt is computed anew for that, cached or not."""
    min_tokens: Int63 = 0
    """Until so many are generated, the sampler does not pick end-of-sequence or stop tokens."""
    repetition: Repetition | None = None
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that occur in prompt or output, multiplies negative ones."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it occurs in the output."""
    presence_penalty: float = 0.0
    """Taken once."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these are picked; empty: all may be."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids that do not occur in this order."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one token under the unmodified distribution."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0
    """Of a prompt's token: 1 for the most likely one. 0: not asked."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of consecutive tokens of a prompt. After a preemption some come again, with the same values."""

    first: Int63
    """Index in the prompt of the first one; at least 1."""
    tokens: list[TokenLogprobs]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    HANDOFF = "handoff"
    """Another rank goes on: its prompt is computed and its first token sampled, or its router wants it moved."""
    ABORT = "abort"
    ERROR = "error"


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """Router → rank: run this request."""

    id: Int63
    token_ids: bytes
    """The prompt as little-endian int32."""
    sampling: SamplingParams
    request_id: str = ""
    """The request's public name, to ask for with `Explain`; its sequences share it."""
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """Lower goes first, where the rank's policy is `priority`."""
    cache_salt: str = ""
    """Prefixes are shared only among requests of one salt."""
    reads_prefix_cache: bool = True
    grammar: Grammar | None = None
    encoder_inputs: tuple[EncoderInput, ...] = ()
    """In order of offset, not overlapping."""
    is_session: bool = False
    """A streaming session: a stop ends only the turn, and `Extend` goes on with the same KV."""
    kv_transfer_params: KvParams | None = None
    """For the rank's KV connector."""
    num_generated: Int63 = 0
    """How many of the last `token_ids` are no prompt but were generated elsewhere: this rank goes on behind them.

    Limits, stops, penalties and randomness count as if it had generated them itself.
    """
    hands_off: bool = False
    """Compute the prompt and sample one token, then end with HANDOFF, unless that token ends the request anyway."""


class Extend(msgspec.Struct, frozen=True, tag="extend", omit_defaults=True):
    """Router → rank: the next input of a streaming session. One that still generates takes it after its turn."""

    id: Int63
    token_ids: bytes = b""
    """Follows what was computed so far; empty only with `is_last`."""
    max_tokens: int = 1
    """Of the coming turn."""
    is_last: bool = False
    """The session ends with the coming turn, or at once if there are no tokens."""


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch", omit_defaults=True):
    """Router → rank: a request that begins like this will come; what of its KV is not here may be fetched by now.

    Never answered, and never a duty: the rank does it if it has room to spare.
    """

    token_ids: bytes
    """As of a `Submit`: those whose KV can be fetched."""
    kv_transfer_params: KvParams
    """From `StepFrame.tickets` of the rank that computes it."""
    request_id: str = ""
    cache_salt: str = ""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Router → rank: the client is gone. Answered by an `End` with reason ABORT if the request still lives.

    If it was handed off, nobody will fetch its KV.
    """

    id: Int63


class HandOff(msgspec.Struct, frozen=True, tag="hand_off"):
    """Router → rank: another rank goes on with this one. Answered by an `End` with reason HANDOFF, if it still lives.

    That names its KV, if there is a connector through which others can fetch it.
    """

    id: Int63


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """Router → rank: no rank has room yet to go on with these, which were handed off. Others are ignored."""

    ids: list[Int63]


class LeavingHeard(msgspec.Struct, frozen=True, tag="leaving_heard"):
    """Router → rank: after `Leaving`; no `Submit` follows on this connection."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Rank → router: send no new work. Answered by `LeavingHeard`. A later one replaces it."""

    moves_in_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    """What still runs here then is to go on elsewhere, wherever there is a rank for it."""


class Explain(msgspec.Struct, frozen=True, tag="explain"):
    """Router → rank: what of this request, living or lately ended, whoever sent it? Answered by one `Explained`."""

    query: Int63
    request_id: str


class WatchPrefixes(msgspec.Struct, frozen=True, tag="watch_prefixes"):
    """Router → rank: which prefixes are in your cache? Answered by a snapshot, and changes from then on.

    Sent anew, and answered anew, by a router that has missed some.
    """


class PrefixEvents(msgspec.Struct, frozen=True, array_like=True):
    """Which hashes became findable, or ceased to be, since the one numbered `seq` - 1.

    Hashes are as `prefix_chain.pack` makes them. Set semantics: what is known already may be told again.
    """

    seq: Int63
    stored: bytes = b""
    removed: bytes = b""


class PrefixSnapshot(msgspec.Struct, frozen=True, tag="prefix_snapshot", omit_defaults=True):
    """Rank → router: all hashes that are findable, in one or more parts without a frame between them.

    The next events have the number `seq` + 1. An empty cache has one part.
    """

    seq: Int63
    hashes: bytes = b""
    is_first: bool = True
    is_last: bool = True


class End(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last word on a request. Its tokens, if any in this step, stand in the same frame."""

    id: int
    reason: FinishReason
    stop_reason: str | int | None = None
    """The matched stop string, or the matched stop token id; None for end-of-sequence and all other reasons."""
    message: str = ""
    """For ERROR: what went wrong and what the caller may do."""
    is_request_fault: bool = False
    """For ERROR: the same request would fail again; it must be changed."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    pooled: bytes = b""
    """The output of a pooling model, little-endian float32."""
    kv_transfer_params: KvParams | None = None
    """From the rank's KV connector, for the one of the rank that goes on."""


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
    num_deferred: int = 0
    """Requests that wait for something else than a turn: a grammar, a KV load, their next input."""
    num_loads: int = 0
    """KV loads in progress, and done but not yet running."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that were verified, and those of them that were right."""
    estimated_flops: float = 0.0
    estimated_bytes: float = 0.0
    """Of all steps so far, from the model's shape."""
    busy_s: float = 0.0
    """Time within steps so far."""
    num_prefetched_tokens: int = 0
    """Tokens whose KV was loaded before the request that needs it had come."""
    num_step_tokens: int = 0
    """Tokens that the next step computes if one more sequence comes: of each as many as a step gives it then."""


class KvTransferLoad(msgspec.Struct, frozen=True, array_like=True):
    """Figures of a rank's KV connector since its start, sent once a second."""

    num_loads: int = 0
    """Asynchronous loads that ended well."""
    num_loaded_bytes: int = 0
    load_failures: dict[str, int] = {}
    """By reason."""
    load_seconds: list[int] = []
    """How many loads took at most so long, by bound (`LOAD_SECONDS_BOUNDS`), and how many took longer."""
    load_seconds_sum: float = 0.0
    num_leases: int = 0
    num_expired_leases: int = 0
    num_quarantined_blocks: int = 0
    lanes: dict[str, int] = {}
    """Loads by transport."""


class StepFrame(msgspec.Struct, frozen=True, tag="step", omit_defaults=True):
    """Rank → router: everything that one step brought for the requests of this connection."""

    load: RankLoad
    ids: list[int] = []
    """Request of each token; a request may occur more than once."""
    tokens: list[int] = []
    logprobs: dict[int, TokenLogprobs] = {}
    """Index into `tokens` → its logprobs, for requests that asked."""
    ends: list[End] = []
    turn_ends: list[End] = []
    """Turns of streaming sessions that ended; the session itself lives on."""
    first_token_ids: list[int] = []
    """Requests whose prompt became fully computed in this step."""
    computed: dict[int, int] = {}
    """Request whose prompt is computed in part by now → how many of its tokens, those from a prefix cache included."""
    tickets: dict[int, KvParams] = {}
    """Request that will be handed off → where KV of its prompt can be fetched that is complete by now.

    `num_tokens` in it says of how many tokens. Each one of a request tells of more than the one before, or of other
    blocks.
    """
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """Request → those of the tokens behind the positions that this step computed, for requests that asked."""
    kv_transfer: KvTransferLoad | None = None
    """None: nothing new, or no connector."""
    prefixes: PrefixEvents | None = None
    """For those who watch."""


class TimelineEntry(msgspec.Struct, frozen=True):
    """Something that happened to a request."""

    at: float
    """Seconds on the rank's monotonic clock."""
    event: str
    cause: str = ""


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence's present and past on one rank."""

    state: str
    timeline: list[TimelineEntry]
    """Oldest first; bounded, so the middle of a long story is missing."""
    reason: str = ""
    """Why a waiting request is not running: a `WaitReason`."""
    message: str = ""
    """The same for people, with figures."""
    figures: dict[str, int] = {}
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    position: int = -1
    """Requests before it in its queue; -1 if it is in none."""


class Explained(msgspec.Struct, frozen=True, tag="explained"):
    """Rank → router: answers an `Explain`; ids that the rank does not remember are missing."""

    query: int
    now: float
    """The rank's monotonic clock."""
    explanations: list[Explanation]
    """One per sequence of the request on this rank, in order of arrival; empty if none is remembered."""


RouterToRank = Submit | Extend | Prefetch | Abort | HandOff | Keep | LeavingHeard | Explain | WatchPrefixes
RankToRouter = StepFrame | Explained | PrefixSnapshot | Leaving
