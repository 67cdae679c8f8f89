"""A request's life in the router: counted, tokenized, placed, streamed, ended.

Ownership: a flow owns its key in the queue counts and its sequences on ranks (`sequences`) from `begin` on; `close`,
which its owner calls exactly where the request ends, gives both back, whatever happened before. `close` is
synchronous, so that no cancellation can come between.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

from rank_scheduler.messages import TokenLogprobs
from router.admitted import Admitted
from router.caller import Caller
from router.choice import Choice, Delta
from router.control_link import ControlLink
from router.errors import ApiError, deadline_exceeded
from router.explanation import WAITS_FOR_ADMISSION, InRouter, RouterStage
from router.grammar_check import GrammarChecker
from router.metrics import RouterMetrics
from router.prefix_index import PromptPrefix
from router.preparation import Preparation, Prompt
from router.protocol import ChatCompletionRequest, CompletionRequest
from router.rank_pool import RankPool
from router.sequences import SequenceRules, Sequences
from router.tokenizer import ChatTokenizer

_UINT64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FlowParts:
    """What all requests of a router go through."""

    tokenizer: ChatTokenizer
    grammar_checker: GrammarChecker
    control: ControlLink
    pool: RankPool
    metrics: RouterMetrics
    rules: SequenceRules
    max_model_len: int
    policy: str
    """The ranks' scheduling policy."""


class RequestFlow:
    """One request. `begin`, then `next` until `is_finished`, and `close` in a `finally`."""

    def __init__(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        request_id: str,
        caller: Caller,
        parts: FlowParts,
        admitted: Admitted | None,
        *,
        on_close: Callable[[RequestFlow], None],
    ) -> None:
        """`request_id`: the answer's public id. `admitted` is the flow's from now on."""
        self.request = request
        self.request_id = request_id
        self.caller = caller
        self.num_prompt_tokens = 0
        self.prompts: list[Prompt] = []
        """Known once `begin` has returned."""
        self._control = parts.control
        self._pool = parts.pool
        self._metrics = parts.metrics
        self._grammar_checker = parts.grammar_checker
        self._tokenizer = parts.tokenizer
        self._preparation = Preparation(
            request, parts.tokenizer, max_model_len=parts.max_model_len, policy=parts.policy
        )
        self._sequences = Sequences(
            request,
            request_id,
            caller,
            parts.rules,
            tokenizer=parts.tokenizer,
            pool=parts.pool,
            metrics=parts.metrics,
            notify=self._notify,
            on_computed=self._computed,
        )
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._arrived_at = self._loop.time() if caller.arrived_at is None else caller.arrived_at
        self._num_admitted = 0 if admitted is None else 1
        self._key: int | None = None if admitted is None else admitted.take_over()
        self._stage = RouterStage.ADMISSION
        self._num_open = 0
        self._dirty: list[Choice] = []
        self._wake = asyncio.Event()
        self._error: ApiError | None = None
        self._beginning: asyncio.Timeout | None = None
        """While `begin` runs: what `fail` interrupts it by."""
        self._expiry = self._expire_within(caller.deadline_s)
        self._is_closed = False
        self._outcome: ApiError | None = None
        self._admitted_at: float | None = None
        self._placed_at: float | None = None
        self._first_token_at: float | None = None
        parts.metrics.num_in_flight.inc()

    @property
    def is_finished(self) -> bool:
        """All choices have ended, and their last deltas have been taken."""
        return self._num_open == 0 and not self._dirty and self._error is None

    @property
    def num_choices(self) -> int:
        return self._sequences.num_begun

    def prompt_logprobs(self, index: int) -> dict[int, TokenLogprobs]:
        """Of the prompt of this choice, by the index of the token; complete once the choice has a token."""
        return self._sequences.choices[index].prompt_logprobs

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_generated_tokens for choice in self._sequences.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, each prompt counted once, as the prompt tokens are."""
        firsts = self._sequences.choices[:: self.request.num_choices]
        return sum(choice.num_cached_tokens for choice in firsts)

    async def begin(self) -> None:
        """Everything up to the submit. Raises ApiError if the request is refused, or fails meanwhile."""
        self._raise_error()
        try:
            async with asyncio.timeout(None) as self._beginning:
                await self._begin()
        except TimeoutError:
            self._raise_error()
            raise
        finally:
            self._beginning = None

    async def _begin(self) -> None:
        request, preparation = self.request, self._preparation
        preparation.check()
        await self._acquire(request.num_sequences - self._num_admitted, 0)
        self._admitted_at = self._loop.time()
        if (asked := request.output_grammar) is not None:
            self._stage = RouterStage.FORMAT_CHECK
            await self._grammar_checker.check(asked[1], asked[0])
        self._stage = RouterStage.TOKENIZATION
        prompts = self.prompts = await preparation.prompts()
        self.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._stage = RouterStage.ADMISSION
        await self._acquire(0, self.num_prompt_tokens * request.num_choices)
        self._stage = RouterStage.PLACEMENT
        seed = request.seed if request.seed is not None else int.from_bytes(os.urandom(8), "little")
        for prompt_index, prompt in enumerate(prompts):
            token_ids = struct.pack(f"<{len(prompt.token_ids)}i", *prompt.token_ids)
            salt = request.cache_salt or ""
            prefix = PromptPrefix(token_ids, salt, is_read=not request.skip_reading_prefix_cache)
            leg, link = await self._sequences.place(prefix)
            # One that came before may have failed meanwhile, and with it the request.
            self._raise_error()
            # Equal prompts of one request answer alike under a given seed, as they would if sent one by one;
            # without one, every choice is its own draw.
            base = seed if request.seed is not None else seed + prompt_index * request.num_choices
            for choice_index in range(request.num_choices):
                self._num_open += 1
                sampling = preparation.sampling((base + choice_index) & _UINT64, prompt.max_tokens)
                self._sequences.begin(leg, link, token_ids, prefix, sampling)
        self._placed_at = self._loop.time()

    async def _acquire(self, num_requests: int, num_tokens: int) -> None:
        if self._key is None:
            self._key = self._control.new_key()
        if num_requests or num_tokens:
            caller = self.caller
            await self._control.acquire(
                self._key, num_requests, num_tokens, retry_token=caller.retry_token, alias=caller.retry_alias
            )

    async def next(self) -> list[Delta]:
        """What has come since the last call; waits until there is something. Raises ApiError if the request failed.

        Deltas that came before a failure are returned first.
        """
        self._raise_error()
        while not self._dirty:
            self._wake.clear()
            await self._wake.wait()
            self._raise_error()
        dirty, self._dirty = self._dirty, []
        now = self._loop.time()
        deltas = []
        for choice in dirty:
            delta = choice.take_delta()
            if delta.token_ids or delta.finish_reason is not None:
                self._observe(choice, len(delta.token_ids), now)
                deltas.append(delta)
            if choice.is_ended:
                self._num_open -= 1
                self._error = self._error or choice.error
        if not deltas:
            self._raise_error()
        return deltas

    def in_router(self) -> InRouter | None:
        """What those sequences wait for that no rank has yet; None if there are none."""
        num_sequences = self.request.num_sequences - self._sequences.num_begun + self._sequences.num_moving
        if num_sequences == 0:
            return None
        figures, position = {"num_sequences": num_sequences}, None
        match self._stage:
            case RouterStage.ADMISSION:
                message = WAITS_FOR_ADMISSION
            case RouterStage.FORMAT_CHECK:
                message = "waits for its output format to be checked"
            case RouterStage.TOKENIZATION:
                message = "waits for its prompt's tokens"
            case RouterStage.PLACEMENT:
                figures |= self._pool.figures()
                message = "is about to be given to a rank"
                if place := next(iter(self._pool.dispatcher.find(self.request_id)), None):
                    message, position = str(place), place.num_before
                    figures |= place.figures()
        now = self._loop.time()
        return InRouter(self._stage, message, figures, self.num_prompt_tokens, self._arrived_at, now, position)

    def figures(self) -> dict[str, object]:
        """What is worth a line in a log once it is closed; moments in seconds since its arrival."""
        moments = {"admitted_s": self._admitted_at, "placed_s": self._placed_at, "first_token_s": self._first_token_at}
        return {
            "cause": None if self._outcome is None else str(self._outcome.cause),
            "tenant": self.caller.tenant,
            "stream": bool(self.request.stream),
            **{name: None if at is None else round(at - self._arrived_at, 6) for name, at in moments.items()},
            "num_sequences": self.request.num_sequences,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_generated_tokens": self.num_generated_tokens,
            "ranks": self._sequences.rank_ids,
            "num_failovers": sum(choice.num_failovers for choice in self._sequences.choices),
        }

    def fail(self, error: ApiError) -> None:
        """End the request from outside; its owner's wait, in `begin` or `next`, raises `error` at once.

        What it holds is free at once, even while its owner waits for a client that does not read.
        """
        self._error = self._error or error
        self._free()
        self._wake.set()
        if self._beginning is not None and not self._beginning.expired():
            self._beginning.reschedule(self._loop.time())

    def close(self, error: ApiError | None) -> None:
        """Abort what still runs, release the counts, count the outcome (`error` None: finished). Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._outcome = error
        if self._expiry is not None:
            self._expiry.cancel()
        self._free()
        self._metrics.num_in_flight.dec()
        if error is None:
            self._metrics.finished(self._loop.time() - self._arrived_at)
        elif self._sequences.num_begun:
            self._metrics.dropped(error)
        else:
            self._metrics.rejected(error)
        self._on_close(self)

    def _free(self) -> None:
        """Idempotent; what `begin` gets within the turn of the loop in which it is interrupted is for a second call."""
        self._sequences.close()
        if self._key is not None:
            self._control.release(self._key)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _expire_within(self, deadline_s: float | None) -> asyncio.TimerHandle | None:
        if deadline_s is None:
            return None
        error = deadline_exceeded(deadline_s)
        expires_at = self._arrived_at + deadline_s
        if expires_at <= self._loop.time():
            self._error = error
            return None
        return self._loop.call_at(expires_at, self.fail, error)

    def _notify(self, choice: Choice) -> None:
        self._dirty.append(choice)
        self._wake.set()

    def _computed(self, num_tokens: int) -> None:
        if self._key is not None and not self._is_closed:
            self._control.computed(self._key, num_tokens)

    def _observe(self, choice: Choice, num_tokens: int, now: float) -> None:
        if choice.last_delta_at is None:
            if self._first_token_at is None:
                self._first_token_at = now
            if choice.index == 0:
                self._metrics.time_to_first_token.observe(now - self._arrived_at)
        elif num_tokens:
            self._metrics.inter_token_latency.observe((now - choice.last_delta_at) / num_tokens)
            if choice.handed_off_at is not None:
                self._metrics.handoff.observe(now - choice.handed_off_at)
                choice.handed_off_at = None
        choice.last_delta_at = now
