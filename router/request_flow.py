"""A request's life in the router: counted, tokenized, placed, submitted, streamed, ended.

Ownership: a flow owns its key in the queue counts and its sequences on the rank from `begin` on; `close`, which
its owner calls exactly where the request ends, gives both back, whatever happened before. `close` is synchronous,
so that no cancellation can come between.

**Failover.** What a rank computes is a function of the tokens so far and of the sampling parameters, whose randomness
counts positions and not draws. So a sequence whose rank is lost goes to another with its prompt and all tokens that
have come, and goes on as if nothing had happened; its client sees a pause. A rank's last token and its end come in one
frame: either both have been heard, or neither.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from kv_transfer.params import KvParams
from rank_scheduler.messages import End, Prefetch, SamplingParams, Submit
from router.choice import Choice, Delta
from router.control_link import ControlLink
from router.control_messages import PoolRole
from router.errors import ApiError, Cause, invalid
from router.explanation import InRouter, RouterStage
from router.grammar_check import GrammarChecker
from router.metrics import FailoverOutcome, RouterMetrics
from router.placement import Leg
from router.prefix_index import PromptPrefix
from router.protocol import (
    DEFAULT_COMPLETION_MAX_TOKENS,
    MAX_NUM_PROMPT_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
)
from router.rank_link import RankLink
from router.rank_pool import RankPool
from router.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

_UINT64 = (1 << 64) - 1


class RequestFlow:
    """One request. `begin`, then `next` until `is_finished`, and `close` in a `finally`."""

    def __init__(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        *,
        request_id: str,
        tokenizer: ChatTokenizer,
        grammar_checker: GrammarChecker,
        control: ControlLink,
        pool: RankPool,
        metrics: RouterMetrics,
        max_model_len: int,
        policy: str,
        stream_interval: int,
        remote_prefill_min_tokens: int | None,
        max_failovers: int,
        on_close: Callable[[RequestFlow], None],
    ) -> None:
        """`request_id`: the answer's public id; `policy`: the ranks' scheduling policy.

        `remote_prefill_min_tokens`: shorter prompts are not worth a prefill rank; None: there are no such ranks.
        `max_failovers`: so often a sequence may lose its rank and go to another.
        """
        self.request = request
        self.num_prompt_tokens = 0
        self.request_id = request_id
        self._policy = policy
        self._stream_interval = stream_interval
        self._remote_prefill_min_tokens = remote_prefill_min_tokens
        self._max_failovers = max_failovers
        self._tokenizer = tokenizer
        self._grammar_checker = grammar_checker
        self._control = control
        self._pool = pool
        self._metrics = metrics
        self._max_model_len = max_model_len
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._arrived_at = self._loop.time()
        self._key: int | None = None
        self._stage = RouterStage.ADMISSION
        self._choices: list[Choice] = []
        self._submits: list[Submit] = []
        """Of each choice, its prompt, for a rank that does all."""
        self._prefixes: list[PromptPrefix] = []
        """Of each choice's prompt."""
        self._places: dict[int, tuple[RankLink, int]] = {}
        """Choice → the link that it was last submitted to, and its id there."""
        self._next_links: dict[int, RankLink] = {}
        """Choice → the link that is to go on with it, and whose rank fetches KV of it already."""
        self._moves: set[asyncio.Task[None]] = set()
        """Each waits for a rank that goes on with a choice. Owned by the flow until `close`."""
        self._num_open = 0
        self._dirty: list[Choice] = []
        self._wake = asyncio.Event()
        self._error: ApiError | None = None
        self._is_closed = False
        metrics.num_in_flight.inc()

    @property
    def is_finished(self) -> bool:
        """All choices have ended, and their last deltas have been taken."""
        return self._num_open == 0 and not self._dirty and self._error is None

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_generated_tokens for choice in self._choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, each prompt counted once, as the prompt tokens are."""
        firsts = self._choices[:: self.request.num_choices]
        return sum(choice.num_cached_tokens for choice in firsts)

    async def begin(self) -> None:
        """Everything up to the submit. Raises ApiError if the request is refused."""
        request = self.request
        self._check_vocabulary(request.stop_token_ids or (), "stop_token_ids")
        self._check_policy()
        self._key = self._control.new_key()
        await self._control.acquire(self._key, request.num_sequences, 0)
        if (asked := request.output_grammar) is not None:
            self._stage = RouterStage.FORMAT_CHECK
            await self._grammar_checker.check(asked[1], asked[0])
            self._raise_error()
        self._stage = RouterStage.TOKENIZATION
        prompts = await self._tokenize()
        self.num_prompt_tokens = sum(map(len, prompts))
        max_tokens = [self._max_tokens(prompt) for prompt in prompts]
        for prompt in prompts:
            self._check_vocabulary(prompt, "prompt")
        num_tokens = self.num_prompt_tokens * request.num_choices
        self._check_size(num_tokens)
        self._stage = RouterStage.ADMISSION
        await self._control.acquire(self._key, 0, num_tokens)
        self._stage = RouterStage.PLACEMENT
        seed = request.seed if request.seed is not None else int.from_bytes(os.urandom(8), "little")
        for prompt_index, prompt in enumerate(prompts):
            token_ids = struct.pack(f"<{len(prompt)}i", *prompt)
            salt = request.cache_salt or ""
            prefix = PromptPrefix(token_ids, salt, is_read=not request.skip_reading_prefix_cache)
            leg, link = await self._place(prefix)
            self._raise_error()
            # Equal prompts of one request answer alike under a given seed, as they would if sent one by one;
            # without one, every choice is its own draw.
            base = seed if request.seed is not None else seed + prompt_index * request.num_choices
            for choice_index in range(request.num_choices):
                sampling = self._sampling((base + choice_index) & _UINT64, max_tokens[prompt_index])
                self._submit(leg, link, token_ids, prefix, sampling)

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
        num_sequences = self.request.num_sequences - len(self._choices) + len(self._moves)
        if num_sequences == 0:
            return None
        figures = {"num_sequences": num_sequences}
        match self._stage:
            case RouterStage.ADMISSION:
                message = "waits for the control actor to count it in the cluster's queue"
            case RouterStage.FORMAT_CHECK:
                message = "waits for its output format to be checked"
            case RouterStage.TOKENIZATION:
                message = "waits for its prompt's tokens"
            case RouterStage.PLACEMENT:
                figures |= self._pool.figures()
                message = (
                    f"waits for a rank with room: {figures['num_ranks_known']} known, "
                    f"{figures['num_ranks_connected']} connected, {figures['num_ranks_with_room']} with room"
                )
        return InRouter(self._stage, message, figures, self.num_prompt_tokens, self._arrived_at, self._loop.time())

    def fail(self, error: ApiError) -> None:
        """End the request from outside; its owner's next wait raises `error`."""
        self._error = self._error or error
        self._wake.set()

    def close(self, error: ApiError | None) -> None:
        """Abort what still runs, release the counts, count the outcome (`error` None: finished). Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for move in self._moves:
            move.cancel()
        for link, request_id in self._places.values():
            link.abort(request_id)
        if self._key is not None:
            self._control.release(self._key)
        self._metrics.num_in_flight.dec()
        if error is None:
            self._metrics.finished(self._loop.time() - self._arrived_at)
        elif self._places:
            self._metrics.dropped(error)
        else:
            self._metrics.rejected(error)
        self._on_close(self)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _place(self, prompt: PromptPrefix, num_generated: int = 0) -> tuple[Leg, RankLink]:
        """The rank that begins with this prompt, and what has been generated behind it, and whether another goes on.

        That is a prefill rank only if the one that would best take it whole had too much of it to compute.
        """
        await self._tokenizer.hash_prefix(prompt, self._pool.hashed_block_sizes)
        least = self._remote_prefill_min_tokens
        if least is None or prompt.num_tokens + num_generated < least:
            return Leg.WHOLE, await self._pool.pick(Leg.WHOLE, prompt)
        link = self._pool.find(Leg.WHOLE, prompt)
        if link is not None and self._pool.num_uncached_tokens(prompt, link) + num_generated < least:
            return Leg.WHOLE, link
        return Leg.PREFILL, await self._pool.pick(Leg.PREFILL, prompt)

    def _submit(
        self, leg: Leg, link: RankLink, token_ids: bytes, prefix: PromptPrefix, sampling: SamplingParams
    ) -> None:
        num_tokens = len(token_ids) // 4
        choice = Choice(
            len(self._choices),
            self._tokenizer.tokenizer,
            sampling,
            self._stream_interval,
            self._notify,
            partial(self._prefill_done, num_tokens),
            self._on_handoff,
            self._on_lost,
            self._on_ticket,
        )
        self._choices.append(choice)
        self._num_open += 1
        request, asked = self.request, self.request.output_grammar
        prepared = Submit(
            0,
            token_ids,
            sampling,
            request_id=self.request_id,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            reads_prefix_cache=not request.skip_reading_prefix_cache,
            grammar=None if asked is None else asked[1],
        )
        self._submits.append(prepared)
        self._prefixes.append(prefix)
        self._send(choice, leg, link)

    def _send(self, choice: Choice, leg: Leg, link: RankLink) -> None:
        """Have this rank compute the prompt, and go on behind what has been generated, or hand off."""
        # With nobody there who could go on, the prefill rank had better keep it.
        hands_off = leg is Leg.PREFILL and link.record.role is PoolRole.PREFILL and self._pool.expects(Leg.DECODE)
        prepared = msgspec.structs.replace(
            self._with_generated(choice),
            hands_off=hands_off,
            kv_transfer_params={"do_remote_decode": True} if hands_off else None,
        )
        self._metrics.routed(leg, link.record.role)
        num_uncached = self._num_uncached_tokens(leg, link, self._prefixes[choice.index])
        num_new_tokens = num_uncached + len(choice.generated)
        self._places[choice.index] = (link, link.submit(prepared, choice, num_new_tokens))

    def _with_generated(self, choice: Choice) -> Submit:
        """The submit of its prompt, and of the tokens that have come."""
        first, generated = self._submits[choice.index], choice.generated
        if not generated:
            return first
        token_ids = first.token_ids + struct.pack(f"<{len(generated)}i", *generated)
        return msgspec.structs.replace(first, token_ids=token_ids, num_generated=len(generated))

    def _num_uncached_tokens(self, leg: Leg, link: RankLink, prefix: PromptPrefix) -> int:
        """Of the prompt, which goes to this rank now."""
        num_uncached = self._pool.num_uncached_tokens(prefix, link)
        self._metrics.placed(leg, link.record.role, prefix.num_tokens, prefix.num_tokens - num_uncached)
        return num_uncached

    def _on_ticket(self, choice: Choice, ticket: KvParams) -> None:
        """A part of its prompt is computed: the rank that will go on may fetch its KV by now. Nothing depends on it."""
        submitted, num_tokens = self._with_generated(choice), ticket.get("num_tokens")
        if self._is_closed or not isinstance(num_tokens, int):
            return
        if not submitted.reads_prefix_cache or submitted.encoder_inputs:
            return
        now_at, _ = self._places[choice.index]
        prefix = self._prefixes[choice.index]
        link = self._pool.find(Leg.DECODE, prefix, self._next_links.get(choice.index, now_at))
        if link is None or link is now_at:
            return
        self._next_links[choice.index] = link
        token_ids = submitted.token_ids[: 4 * num_tokens]
        link.prefetch(Prefetch(token_ids, ticket, self.request_id, submitted.cache_salt))

    def _on_handoff(self, choice: Choice, end: End) -> None:
        """Its prompt is computed; find a rank that goes on, with the KV that `end` tells where to get."""
        if self._is_closed:
            return
        handed_off_at = self._loop.time()
        before, _ = self._places[choice.index]
        before = self._next_links.pop(choice.index, before)
        link = self._pool.find(Leg.DECODE, self._prefixes[choice.index], before)
        if link is not None:
            self._go_on(choice, link, end, handed_off_at)
            return
        self._start_move(choice, self._move(choice, before, end, handed_off_at))

    def _start_move(self, choice: Choice, moving: Coroutine[Any, Any, None]) -> None:
        """Whatever goes wrong with it ends the choice."""

        def ended(move: asyncio.Task[None]) -> None:
            self._moves.discard(move)
            if not move.cancelled() and (error := move.exception()) is not None:
                logger.error("%s could not be moved to another rank", self.request_id, exc_info=error)
                choice.fail(ApiError(Cause.INTERNAL_ERROR, "the request could not be moved to another rank"))

        move = self._loop.create_task(moving)
        self._moves.add(move)
        move.add_done_callback(ended)

    async def _move(self, choice: Choice, before: RankLink, end: End, handed_off_at: float) -> None:
        try:
            link = await self._pool.pick(Leg.DECODE, self._prefixes[choice.index], before)
        except ApiError as error:
            choice.fail(error)
        else:
            self._go_on(choice, link, end, handed_off_at)

    def _go_on(self, choice: Choice, link: RankLink, end: End, handed_off_at: float) -> None:
        prepared = msgspec.structs.replace(self._with_generated(choice), kv_transfer_params=end.kv_transfer_params)
        num_uncached = self._num_uncached_tokens(Leg.DECODE, link, self._prefixes[choice.index])
        num_new_tokens = 1 if end.kv_transfer_params else num_uncached + len(choice.generated)
        choice.handed_off_at = handed_off_at
        self._places[choice.index] = (link, link.submit(prepared, choice, num_new_tokens))

    def _on_lost(self, choice: Choice, error: ApiError) -> None:
        """Its rank is gone, or has given it up: another goes on, unless that has happened too often."""
        if self._is_closed or choice.is_ended:
            return
        self._next_links.pop(choice.index, None)
        if choice.num_failovers >= self._max_failovers:
            self._metrics.failover(FailoverOutcome.GIVEN_UP)
            tried = f"; it was moved {choice.num_failovers} times before" if choice.num_failovers else ""
            choice.fail(ApiError(error.cause, f"{error.message}{tried}; send the request again"))
            return
        choice.num_failovers += 1
        choice.handed_off_at = None
        self._start_move(choice, self._fail_over(choice, error))

    async def _fail_over(self, choice: Choice, error: ApiError) -> None:
        lost_at = self._loop.time()
        try:
            leg, link = await self._place(self._prefixes[choice.index], len(choice.generated))
        except ApiError as no_rank:
            self._metrics.failover(FailoverOutcome.NO_RANK)
            choice.fail(ApiError(error.cause, f"{error.message}, and {no_rank.message}"))
            return
        self._metrics.failover(FailoverOutcome.MOVED)
        logger.info(
            "%s goes on at rank %s behind %d tokens after %.3f s: %s",
            self.request_id,
            link.record.rank_id,
            len(choice.generated),
            self._loop.time() - lost_at,
            error.message,
        )
        self._send(choice, leg, link)

    def _notify(self, choice: Choice) -> None:
        self._dirty.append(choice)
        self._wake.set()

    def _prefill_done(self, num_tokens: int) -> None:
        if self._key is not None and not self._is_closed:
            self._control.prefill_done(self._key, num_tokens)

    def _observe(self, choice: Choice, num_tokens: int, now: float) -> None:
        if choice.last_delta_at is None:
            if choice.index == 0:
                self._metrics.time_to_first_token.observe(now - self._arrived_at)
        elif num_tokens:
            self._metrics.inter_token_latency.observe((now - choice.last_delta_at) / num_tokens)
            if choice.handed_off_at is not None:
                self._metrics.handoff.observe(now - choice.handed_off_at)
                choice.handed_off_at = None
        choice.last_delta_at = now

    async def _tokenize(self) -> list[list[int]]:
        request = self.request
        if isinstance(request, ChatCompletionRequest):
            messages = [message.for_template() for message in request.messages]
            text = self._tokenizer.render_chat(
                messages, add_generation_prompt=request.add_generation_prompt is not False
            )
            prompts = [await self._encode(text, add_special_tokens=False)]
        else:
            prompts = []
            for prompt in request.prompt:
                if isinstance(prompt, str):
                    prompt = await self._encode(prompt, add_special_tokens=True)
                prompts.append(prompt)
        self._raise_error()
        return prompts

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Raises ApiError, without the work, if it is far too long for the model."""
        at_least = self._tokenizer.min_num_tokens(text)
        if at_least >= self._max_model_len:
            raise self._too_long(f"has {len(text)} characters, which make {at_least} tokens or more")
        return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_size(self, num_tokens: int) -> None:
        """`num_tokens`: of the prompts of all sequences."""
        if num_tokens > MAX_NUM_PROMPT_TOKENS:
            raise invalid(
                f"n: {self.num_prompt_tokens} prompt tokens for each of {self.request.num_choices} choices are "
                f"{num_tokens} tokens, at most {MAX_NUM_PROMPT_TOKENS} are allowed in one request; lower n, or send "
                "fewer or shorter prompts",
                "n" if self.request.num_choices > 1 else self._prompt_param,
            )

    @property
    def _prompt_param(self) -> str:
        return "messages" if isinstance(self.request, ChatCompletionRequest) else "prompt"

    def _too_long(self, size: str) -> ApiError:
        return ApiError(
            Cause.CONTEXT_LENGTH_EXCEEDED,
            f"{self._prompt_param}: {size}, the model's maximum length is {self._max_model_len} tokens "
            "including at least one generated; shorten it",
            self._prompt_param,
        )

    def _check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._tokenizer.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            unknown = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise invalid(f"{param}: token id {unknown} is not in the model's vocabulary of {vocab_size}", param)

    def _check_policy(self) -> None:
        if self.request.priority and self._policy != "priority":
            raise invalid(
                f"priority: {self.request.priority} means nothing under this server's scheduling policy "
                f"{self._policy!r}; leave it out, or have the server run with policy 'priority'",
                "priority",
            )

    def _max_tokens(self, prompt: Sequence[int]) -> int:
        """Tokens to generate for `prompt`. Raises ApiError if the model has no room for that, or for `min_tokens`."""
        most, least = self._most_tokens(prompt), self.request.min_tokens or 0
        if least > most:
            raise invalid(
                f"min_tokens: {least} is more than the {most} tokens that are generated at most; lower it, or raise "
                f"{self.request.max_tokens_param} if the model has room",
                "min_tokens",
            )
        return most

    def _most_tokens(self, prompt: Sequence[int]) -> int:
        request = self.request
        param = self._prompt_param
        if not prompt:
            raise invalid(f"{param}: has no tokens; at least one is needed", param)
        room = self._max_model_len - len(prompt)
        asked = request.asked_max_tokens
        if room < 1:
            raise self._too_long(f"has {len(prompt)} tokens")
        if asked is None:
            return room if isinstance(request, ChatCompletionRequest) else min(DEFAULT_COMPLETION_MAX_TOKENS, room)
        if asked > room:
            raise ApiError(
                Cause.CONTEXT_LENGTH_EXCEEDED,
                f"{request.max_tokens_param}: {asked} together with the {len(prompt)} tokens of {param} exceeds the "
                f"model's maximum length of {self._max_model_len} tokens; ask for at most {room}",
                request.max_tokens_param,
            )
        return asked

    def _sampling(self, seed: int, max_tokens: int) -> SamplingParams:
        request = self.request
        return SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            temperature=1.0 if request.temperature is None else float(request.temperature),
            top_p=1.0 if request.top_p is None else float(request.top_p),
            top_k=max(0, request.top_k or 0),
            min_p=0.0 if request.min_p is None else float(request.min_p),
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            num_logprobs=request.num_logprobs,
            min_tokens=request.min_tokens or 0,
            repetition=request.repetition,
        )
