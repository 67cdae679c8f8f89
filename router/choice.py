"""One choice of a request: the sequence that a rank runs for it, as the router sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from kv_transfer.params import KvParams
from rank_scheduler.messages import End, FinishReason, PromptLogprobs, SamplingParams, TokenLogprobs
from router.detokenizer import IncrementalDetokenizer, StopText
from router.errors import ApiError, Cause, invalid

_UNKNOWN_LOGPROBS = TokenLogprobs(float("-inf"))


@dataclass(slots=True)
class Delta:
    """What a choice has gained since its last delta."""

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    """Those whose text belongs to the answer (an end-of-sequence or stop token does not)."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token in `token_ids`, if asked for."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """Filled by its rank's link, in callbacks; emptied by its request's task.

    A link calls `add_token`, `computed`, `prefill_done` and `take_ticket` any number of times and then exactly one of
    `finish` and `lose`. When its rank hands it off, or is lost, another link goes on with it.
    The task hears of the first token at once, then of every `stream_interval` tokens, and of the end.
    """

    __slots__ = (
        "_detokenizer",
        "_logprobs",
        "_min_tokens",
        "_num_prompt_tokens",
        "_num_taken_tokens",
        "_num_waiting_tokens",
        "_on_computed",
        "_on_handoff",
        "_on_leave",
        "_on_lost",
        "_on_ticket",
        "_stop_text",
        "_stream_interval",
        "_tokens",
        "_wants_logprobs",
        "_was_handed_off",
        "end",
        "error",
        "generated",
        "handed_off_at",
        "index",
        "is_dirty",
        "is_prefilled",
        "last_delta_at",
        "notify",
        "num_cached_tokens",
        "num_failovers",
        "prompt_logprobs",
    )

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        stream_interval: int,
        notify: Callable[[Choice], None],
        num_prompt_tokens: int,
        on_computed: Callable[[int], None],
        on_handoff: Callable[[Choice, End], None],
        on_lost: Callable[[Choice, ApiError], None],
        on_ticket: Callable[[Choice, KvParams], None],
        on_leave: Callable[[Choice], None],
    ) -> None:
        self.index = index
        self.end: End | None = None
        self.error: ApiError | None = None
        self.generated: list[int] = []
        """All its tokens so far, wherever they came from."""
        self.num_cached_tokens = 0
        """Prompt tokens that the rank which computed the prompt found in its prefix cache."""
        self.num_failovers = 0
        """How often it has lost its rank."""
        self.is_prefilled = False
        self.is_dirty = False
        self.last_delta_at: float | None = None
        self.handed_off_at: float | None = None
        """Since when it waits for the first token of the rank that goes on with it."""
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}
        """Of the prompt's tokens, by index, where they are asked for: complete once it has a token."""
        self.notify = notify
        self._num_waiting_tokens = num_prompt_tokens
        """Of its prompt; those that have been computed once wait no more, though another rank computes them again."""
        self._num_prompt_tokens = num_prompt_tokens
        self._on_computed = on_computed
        self._on_handoff = on_handoff
        self._on_lost = on_lost
        self._on_ticket = on_ticket
        self._on_leave = on_leave
        self._stream_interval = stream_interval
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._wants_logprobs = sampling.num_logprobs is not None
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop_text = StopText(sampling.stop) if sampling.stop else None
        self._min_tokens = sampling.min_tokens
        self._num_taken_tokens = 0
        self._was_handed_off = False

    @property
    def num_generated_tokens(self) -> int:
        return len(self.generated)

    @property
    def is_ended(self) -> bool:
        return self.end is not None or self.error is not None

    def add_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._tokens.append(token_id)
        self.generated.append(token_id)
        if self._wants_logprobs:
            self._logprobs.append(logprobs or _UNKNOWN_LOGPROBS)
        if not self.is_prefilled:
            self.prefill_done()
        if not self.is_dirty and (len(self.generated) == 1 or len(self._tokens) >= self._stream_interval):
            self.is_dirty = True
            self.notify(self)

    def take_prompt_logprobs(self, part: PromptLogprobs) -> None:
        self.prompt_logprobs.update(enumerate(part.tokens, part.first))

    def take_ticket(self, ticket: KvParams) -> None:
        """Where KV of its prompt can be fetched by now, though its rank still computes it."""
        self._on_ticket(self, ticket)

    def leave(self) -> None:
        """Its rank would rather have another go on with it. Said again from time to time, as long as it is there."""
        self._on_leave(self)

    def computed(self, num_tokens: int) -> None:
        """So many of its prompt's tokens are."""
        num_more = self._num_waiting_tokens - max(0, self._num_prompt_tokens - num_tokens)
        if num_more > 0:
            self._num_waiting_tokens -= num_more
            self._on_computed(num_more)

    def prefill_done(self) -> None:
        if not self.is_prefilled:
            self.is_prefilled = True
            self.computed(self._num_prompt_tokens)

    def finish(self, end: End, rank_id: str) -> None:
        """The rank's last word."""
        if end.reason is FinishReason.HANDOFF:
            if not self._was_handed_off:
                self.num_cached_tokens = end.num_cached_tokens
            self._was_handed_off = True
            self._on_handoff(self, end)
        elif end.reason is FinishReason.ERROR and end.is_request_fault:
            self.fail(invalid(end.message))
        elif end.reason is FinishReason.ERROR:
            self.fail(ApiError(Cause.RANK_ERROR, f"rank {rank_id} could not finish the request: {end.message}"))
        elif end.reason is FinishReason.ABORT:
            self.lose(ApiError(Cause.RANK_LOST, f"rank {rank_id} stopped the request {end.message}".rstrip()))
        else:
            if not self._was_handed_off:
                self.num_cached_tokens = end.num_cached_tokens
            self.end = end
            self._mark_dirty()

    def lose(self, error: ApiError) -> None:
        """Its rank will not go on with it; `error` says why."""
        self._on_lost(self, error)

    def fail(self, error: ApiError) -> None:
        if not self.is_ended:
            self.error = error
            self._mark_dirty()

    def take_delta(self) -> Delta:
        """Everything since the last call, as text. After an `error` there is no more."""
        self.is_dirty = False
        token_ids, self._tokens = self._tokens, []
        logprobs, self._logprobs = self._logprobs, []
        end = self.end
        if end is not None and end.reason is FinishReason.STOP and not isinstance(end.stop_reason, str):
            del token_ids[-1:]  # the end-of-sequence or stop token, which the rank sends with its End
            del logprobs[len(token_ids) :]
        stop_text = self._stop_text
        if stop_text is None:
            text = self._detokenizer.step(token_ids)
        else:
            step, feed = self._detokenizer.step, stop_text.feed
            # The rule of the rank's scheduler: the last of `min_tokens` may already complete a stop string.
            first = self._num_taken_tokens + 1
            text = "".join(
                [feed(step([token_id]), may_stop=n >= self._min_tokens) for n, token_id in enumerate(token_ids, first)]
            )
            self._num_taken_tokens += len(token_ids)
        if end is None:
            return Delta(self.index, text, token_ids, logprobs)
        stopped = isinstance(end.stop_reason, str)
        if stop_text is not None:
            text += stop_text.end(stopped)
        if not stopped:
            text += self._detokenizer.flush()
        return Delta(self.index, text, token_ids, logprobs, str(end.reason), end.stop_reason)

    def _mark_dirty(self) -> None:
        if not self.is_dirty:
            self.is_dirty = True
            self.notify(self)
