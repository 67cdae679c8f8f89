"""A request's sequences on ranks: placed, submitted, handed off, failed over, aborted.

Ownership: from `begin` on a sequence is on one rank, or one task of `_moves` waits for a rank that goes on with it;
`close` ends both.

**Failover.** What a rank computes is a function of the tokens so far and of the sampling parameters, whose randomness
counts positions and not draws. So a sequence whose rank is lost goes to another with its prompt and all tokens that
have come, and goes on as if nothing had happened; its client sees a pause. A rank's last token and its end come in one
frame: either both have been heard, or neither.

**Leaving.** A rank that leaves keeps its sequences until it has had time enough, and then those that nobody else can
take. Others go on by the same rule, and with the KV that the rank hands off, if it can.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from kv_transfer.params import KvParams
from rank_scheduler.messages import End, Prefetch, SamplingParams, Submit
from router.caller import Caller
from router.choice import Choice
from router.control_messages import PoolRole
from router.errors import ApiError, Cause
from router.metrics import FailoverOutcome, RouterMetrics
from router.placement import Leg
from router.placing import Placing
from router.prefix_index import PromptPrefix
from router.protocol import ChatCompletionRequest, CompletionRequest
from router.rank_link import RankLink
from router.rank_pool import RankPool
from router.tokenizer import ChatTokenizer
from router.waiting_line import Turn

logger = logging.getLogger(__name__)

MAX_OUTPUT_ALLOWANCE = 256
"""Its tenant is charged for so many tokens to generate at most: most sequences end earlier than they are asked to."""


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """The same for all requests of a router."""

    stream_interval: int
    """Tokens between two deltas."""
    remote_prefill_min_tokens: int | None
    """Shorter prompts are not worth a prefill rank; None: there are no such ranks."""
    max_failovers: int
    """So often a sequence may lose its rank and go to another."""
    by_priority: bool = False
    """Requests of higher priority are placed first, as their ranks run them."""


@dataclass(slots=True, eq=False)
class _Sequence:
    choice: Choice
    prompt: Submit
    """For a rank that does all."""
    prefix: PromptPrefix
    link: RankLink
    """It was last submitted to this one, under `id_there`."""
    id_there: int = 0
    next_link: RankLink | None = None
    """This one is to go on with it, and its rank fetches KV of it already."""
    kept: tuple[RankLink, int] | None = None
    """Where it was handed off with its KV, and under which id, as long as that may not have been fetched."""
    is_leaving: bool = False
    """Its rank has been asked to hand it off as it stands."""


class Sequences:
    """Of one request. Use from one event loop. `close` is synchronous, so that no cancellation can come between."""

    def __init__(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        request_id: str,
        caller: Caller,
        rules: SequenceRules,
        *,
        tokenizer: ChatTokenizer,
        pool: RankPool,
        metrics: RouterMetrics,
        notify: Callable[[Choice], None],
        on_computed: Callable[[int], None],
    ) -> None:
        """`notify`: a choice has something to take. `on_computed`: so many prompt tokens do not wait any more."""
        self._request = request
        self._request_id = request_id
        self._caller = caller
        self._rules = rules
        self._tokenizer = tokenizer
        self._pool = pool
        self._metrics = metrics
        self._notify = notify
        self._on_computed = on_computed
        self._loop = asyncio.get_running_loop()
        self._sequences: list[_Sequence] = []
        """By their choice's index."""
        self._moves: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def choices(self) -> list[Choice]:
        return [sequence.choice for sequence in self._sequences]

    @property
    def rank_ids(self) -> list[str]:
        """Those that had them last."""
        return sorted({sequence.link.record.rank_id for sequence in self._sequences})

    @property
    def num_begun(self) -> int:
        """How many have been submitted to a rank, ever."""
        return len(self._sequences)

    @property
    def num_moving(self) -> int:
        """How many wait for another rank that goes on with them."""
        return len(self._moves)

    async def place(self, prompt: PromptPrefix) -> tuple[Leg, RankLink]:
        """The rank that begins with this prompt, for all its choices, and whether another goes on. Raises ApiError."""
        return await self._place(prompt, self._request.num_choices)

    async def _place(
        self, prompt: PromptPrefix, num_sequences: int, moved: _Sequence | None = None
    ) -> tuple[Leg, RankLink]:
        """`moved`: it is for this one, which has lost its rank, and goes on behind what it has generated.

        That is a prefill rank only if the one that would best take it whole had too much of it to compute.
        """
        await self._tokenizer.hash_prefix(prompt, self._pool.hashed_block_sizes)
        num_generated = 0 if moved is None else len(moved.choice.generated)
        placing = self._placing(Leg.WHOLE, prompt, num_sequences, num_generated, is_move=moved is not None)
        least, dispatcher = self._rules.remote_prefill_min_tokens, self._pool.dispatcher
        if least is not None and placing.num_tokens >= least and placing.rank_id is None:
            link = dispatcher.peek(placing, needs_room=False)
            if link is None or self._pool.num_uncached_tokens(prompt, link) + num_generated >= least:
                placing.leg = Leg.PREFILL
        return placing.leg, await self._dispatch(placing)

    async def _dispatch(self, placing: Placing) -> RankLink:
        """The rank for it. One that has begun to leave since it gave room, or was lost, gets nothing more."""
        while True:
            link = await self._pool.dispatcher.place(placing)
            if link.is_open and self._pool.ranks.is_member(link.row):
                return link

    def _placing(
        self,
        leg: Leg,
        prompt: PromptPrefix,
        num_sequences: int = 1,
        num_generated: int = 0,
        *,
        is_move: bool,
        preferred: RankLink | None = None,
    ) -> Placing:
        request, caller = self._request, self._caller
        num_tokens = self._pool.least_uncached_tokens(prompt) + num_generated
        allowance = min(request.asked_max_tokens or MAX_OUTPUT_ALLOWANCE, MAX_OUTPUT_ALLOWANCE)
        return Placing(
            leg,
            prompt,
            Turn(
                caller.tenant,
                caller.weight,
                num_tokens + num_sequences * allowance,
                (request.priority or 0) if self._rules.by_priority else 0,
                is_move,
            ),
            self._request_id,
            num_sequences,
            num_generated,
            session_id=caller.session_id,
            rank_id=None if is_move else caller.rank_id,
            preferred=preferred,
        )

    def begin(self, leg: Leg, link: RankLink, token_ids: bytes, prefix: PromptPrefix, sampling: SamplingParams) -> None:
        """One more sequence, on that rank. `token_ids`: its prompt as little-endian int32."""
        choice = Choice(
            len(self._sequences),
            self._tokenizer.tokenizer,
            sampling,
            self._rules.stream_interval,
            self._notify,
            len(token_ids) // 4,
            self._on_computed,
            self._on_handoff,
            self._on_lost,
            self._on_ticket,
            self._on_leave,
        )
        request, asked = self._request, self._request.output_grammar
        submit = Submit(
            0,
            token_ids,
            sampling,
            request_id=self._request_id,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            reads_prefix_cache=not request.skip_reading_prefix_cache,
            grammar=None if asked is None else asked[1],
        )
        sequence = _Sequence(choice, submit, prefix, link)
        self._sequences.append(sequence)
        self._send(sequence, leg, link)

    def close(self) -> None:
        """Abort what still runs, and what moves."""
        self._is_closed = True
        for move in self._moves:
            move.cancel()
        for sequence in self._sequences:
            sequence.link.abort(sequence.id_there)
            # A rank that has been given the ticket releases it itself.
            if sequence.kept == (sequence.link, sequence.id_there):
                self._abandon(sequence)

    def _send(self, sequence: _Sequence, leg: Leg, link: RankLink) -> None:
        """Have this rank compute the prompt, and go on behind what has been generated, or hand off."""
        # With nobody there who could go on, the prefill rank had better keep it.
        hands_off = leg is Leg.PREFILL and link.record.role is PoolRole.PREFILL and self._pool.expects(Leg.DECODE)
        submit = msgspec.structs.replace(
            _with_generated(sequence),
            hands_off=hands_off,
            kv_transfer_params={"do_remote_decode": True} if hands_off else None,
        )
        self._metrics.routed(leg, link.record.role)
        num_uncached = self._num_uncached_tokens(leg, link, sequence.prefix)
        self._submit(sequence, link, submit, num_uncached + len(sequence.choice.generated))

    def _submit(self, sequence: _Sequence, link: RankLink, submit: Submit, num_new_tokens: int) -> None:
        sequence.link, sequence.is_leaving = link, False
        sequence.id_there = link.submit(submit, sequence.choice, num_new_tokens)

    def _num_uncached_tokens(self, leg: Leg, link: RankLink, prefix: PromptPrefix) -> int:
        """Of the prompt, which goes to this rank now."""
        num_uncached = self._pool.num_uncached_tokens(prefix, link)
        self._metrics.placed(leg, link.record.role, prefix.num_tokens, prefix.num_tokens - num_uncached)
        return num_uncached

    # ---- prefill here, decode there ----

    def _on_ticket(self, choice: Choice, ticket: KvParams) -> None:
        """A part of its prompt is computed: the rank that will go on may fetch its KV by now. Nothing depends on it."""
        sequence, num_tokens = self._sequences[choice.index], ticket.get("num_tokens")
        submit = _with_generated(sequence)
        if self._is_closed or not isinstance(num_tokens, int):
            return
        if not submit.reads_prefix_cache or submit.encoder_inputs:
            return
        preferred = sequence.next_link or sequence.link
        placing = self._placing(Leg.DECODE, sequence.prefix, is_move=True, preferred=preferred)
        link = self._pool.dispatcher.peek(placing, needs_room=True)
        if link is None or link is sequence.link:
            return
        sequence.next_link = link
        link.prefetch(Prefetch(submit.token_ids[: 4 * num_tokens], ticket, self._request_id, submit.cache_salt))

    def _on_handoff(self, choice: Choice, end: End) -> None:
        """Its prompt is computed; find a rank that goes on, with the KV that `end` tells where to get."""
        sequence = self._sequences[choice.index]
        sequence.kept = (sequence.link, sequence.id_there) if end.kv_transfer_params else None
        if self._is_closed:
            self._abandon(sequence)
            return
        handed_off_at = self._loop.time()
        leg = Leg.WHOLE if sequence.is_leaving and not end.kv_transfer_params else Leg.DECODE
        preferred, sequence.next_link = sequence.next_link or sequence.link, None
        num_generated = len(choice.generated)
        placing = self._placing(leg, sequence.prefix, 1, num_generated, is_move=True, preferred=preferred)
        link = self._pool.dispatcher.try_now(placing)
        if link is not None:
            self._go_on(sequence, link, end, handed_off_at)
        elif sequence.is_leaving and sequence.link.is_open and not self._pool.has_rank_for(leg):
            self._stay(sequence)
        elif leg is Leg.WHOLE:
            self._start_move(choice, self._place_anew(sequence, FailoverOutcome.LEFT, _left(sequence)))
        else:
            self._start_move(choice, self._move(sequence, placing, end, handed_off_at))

    async def _move(self, sequence: _Sequence, placing: Placing, end: End, handed_off_at: float) -> None:
        try:
            link = await self._place_kept(sequence, placing)
        except ApiError as error:
            sequence.choice.fail(error)
        else:
            self._go_on(sequence, link, end, handed_off_at)

    async def _place_kept(self, sequence: _Sequence, placing: Placing) -> RankLink:
        """Its KV does not expire meanwhile."""
        if sequence.kept is None:
            return await self._dispatch(placing)
        holder, id_there = sequence.kept
        holder.keep(id_there)
        try:
            return await self._dispatch(placing)
        finally:
            holder.let_go(id_there)

    def _go_on(self, sequence: _Sequence, link: RankLink, end: End, handed_off_at: float) -> None:
        params = end.kv_transfer_params
        if sequence.is_leaving and link.record.role is PoolRole.PREFILL:
            # It only hands KV out.
            self._abandon(sequence)
            params = None
        if sequence.is_leaving:
            self._metrics.failover(FailoverOutcome.LEFT_WITH_KV if params else FailoverOutcome.LEFT)
        submit = msgspec.structs.replace(_with_generated(sequence), kv_transfer_params=params)
        num_uncached = self._num_uncached_tokens(Leg.DECODE, link, sequence.prefix)
        sequence.choice.handed_off_at = handed_off_at
        num_new_tokens = 1 if params else num_uncached + len(sequence.choice.generated)
        self._submit(sequence, link, submit, num_new_tokens)

    # ---- its rank leaves ----

    def _on_leave(self, choice: Choice) -> None:
        """It stays where it is as long as nobody else can take it."""
        sequence = self._sequences[choice.index]
        if self._is_closed or choice.is_ended or sequence.is_leaving:
            return
        is_prefill = not choice.generated and sequence.link.record.role is PoolRole.PREFILL
        leg = Leg.PREFILL if is_prefill else Leg.WHOLE
        placing = self._placing(leg, sequence.prefix, 1, len(choice.generated), is_move=True)
        link = self._pool.dispatcher.peek(placing, needs_room=True)
        if link is None:
            return
        sequence.next_link = None
        if choice.generated:
            sequence.is_leaving, sequence.next_link = True, link
            num_uncached = self._pool.num_uncached_tokens(sequence.prefix, link)
            sequence.link.hand_off(sequence.id_there, link, num_uncached + len(choice.generated))
        else:
            # Nothing of it has been heard, and its prompt is computed anew.
            sequence.link.abort(sequence.id_there)
            self._metrics.failover(FailoverOutcome.LEFT)
            self._send(sequence, leg, link)

    def _stay(self, sequence: _Sequence) -> None:
        """All others have gone since it was handed off: its rank has it again, and finds it in its own cache."""
        submit = _with_generated(sequence)
        self._submit(sequence, sequence.link, submit, 1)
        self._abandon(sequence)

    # ---- its rank is lost ----

    def _on_lost(self, choice: Choice, error: ApiError) -> None:
        """Its rank is gone, or has given it up: another goes on, unless that has happened too often."""
        if self._is_closed or choice.is_ended:
            return
        sequence = self._sequences[choice.index]
        sequence.next_link = None
        if choice.num_failovers >= self._rules.max_failovers:
            self._metrics.failover(FailoverOutcome.GIVEN_UP)
            tried = f"; it was moved {choice.num_failovers} times before" if choice.num_failovers else ""
            choice.fail(ApiError(error.cause, f"{error.message}{tried}; send the request again"))
            return
        choice.num_failovers += 1
        if choice.handed_off_at is not None:
            self._abandon(sequence)
            choice.handed_off_at = None
        self._start_move(choice, self._place_anew(sequence, FailoverOutcome.MOVED, error))

    async def _place_anew(self, sequence: _Sequence, outcome: FailoverOutcome, error: ApiError) -> None:
        """Have some rank go on from the tokens so far; `error`: why, and what the client hears if there is none."""
        lost_at = self._loop.time()
        choice = sequence.choice
        try:
            leg, link = await self._place(sequence.prefix, 1, sequence)
        except ApiError as no_rank:
            self._metrics.failover(FailoverOutcome.NO_RANK)
            choice.fail(ApiError(error.cause, f"{error.message}, and {no_rank.message}"))
            return
        self._metrics.failover(outcome)
        logger.info(
            "%s goes on at rank %s behind %d tokens after %.3f s: %s",
            self._request_id,
            link.record.rank_id,
            len(choice.generated),
            self._loop.time() - lost_at,
            error.message,
        )
        self._send(sequence, leg, link)

    def _abandon(self, sequence: _Sequence) -> None:
        """Who was to fetch its KV has gone, or never was."""
        if sequence.kept is not None:
            link, id_there = sequence.kept
            sequence.kept = None
            link.abandon(id_there)

    def _start_move(self, choice: Choice, moving: Coroutine[Any, Any, None]) -> None:
        """Whatever goes wrong with it ends the choice."""

        def ended(move: asyncio.Task[None]) -> None:
            self._moves.discard(move)
            if not move.cancelled() and (error := move.exception()) is not None:
                logger.error("%s could not be moved to another rank", self._request_id, exc_info=error)
                choice.fail(ApiError(Cause.INTERNAL_ERROR, "the request could not be moved to another rank"))

        move = self._loop.create_task(moving)
        self._moves.add(move)
        move.add_done_callback(ended)


def _left(sequence: _Sequence) -> ApiError:
    return ApiError(Cause.RANK_LOST, f"rank {sequence.link.record.rank_id} leaves")


def _with_generated(sequence: _Sequence) -> Submit:
    """The submit of its prompt, and of the tokens that have come."""
    prompt, generated = sequence.prompt, sequence.choice.generated
    if not generated:
        return prompt
    token_ids = prompt.token_ids + struct.pack(f"<{len(generated)}i", *generated)
    # Those of the prompt came before its first token.
    sampling = msgspec.structs.replace(prompt.sampling, num_prompt_logprobs=None)
    return msgspec.structs.replace(prompt, token_ids=token_ids, num_generated=len(generated), sampling=sampling)
