"""One router's parts put together: what it is told (`RouterSettings`), and what it starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from router.admitted import Admitted
from router.api_keys import ApiKey
from router.caller import ANYBODY, Caller
from router.control_link import ControlAddress, ControlLink
from router.control_messages import Inquired, InquiryAction, QueueCounts
from router.errors import ApiError, Cause
from router.explanation import RequestExplanation, check_request_id, put_together
from router.grammar_check import GrammarChecker
from router.idempotency import KeyedAnswers
from router.metrics import RankFigures, RouterMetrics
from router.placement_policies import load_policy
from router.preparation import Preparation
from router.protocol import ChatCompletionRequest, CompletionRequest
from router.rank_pool import RankPool
from router.request_flow import FlowParts, RequestFlow
from router.response_store import ResponseStore
from router.retry_alias import Headers, with_retry_alias
from router.sequences import SequenceRules
from router.session_affinity import SessionAffinity
from router.shared_answer import SharedAnswer
from router.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 2.0
INQUIRY_TIMEOUT_S = 1.0
"""Of all other routers; they answer at once."""


class RouterSettings(BaseModel):
    """What a router needs to know before it starts; frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_name: str = Field(min_length=1, description="The name that requests ask for.")
    model_dir: Path = Field(description="Directory with tokenizer.json and tokenizer_config.json.")
    max_model_len: int = Field(ge=2, description="Tokens of a prompt and its answer together.")
    max_body_bytes: int = Field(default=4 << 20, ge=1, description="Size of a request's body.")
    body_timeout_s: float = Field(default=60.0, gt=0, description="From a request's headers to the end of its body.")
    api_keys: tuple[ApiKey, ...] = Field(
        default=(), description="Of which clients must send one; none: all are let in."
    )
    send_timeout_s: float = Field(
        default=60.0, gt=0, description="A client that reads nothing for so long counts as gone."
    )
    acquire_timeout_s: float = Field(default=2.0, gt=0, description="Wait for the control actor's answer.")
    policy: str = Field(default="fcfs", description="The ranks' scheduling policy; `priority` lets requests have one.")
    rank_wait_timeout_s: float = Field(default=5.0, ge=0, description="Wait for a rank when there is none.")
    stream_interval: int = Field(
        default=1, ge=1, description="Tokens between a stream's events; the first and the last are sent at once."
    )
    remote_prefill_min_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Prompts of which so many tokens are missing on decode ranks are computed on a prefill rank. "
        "None: there are no such ranks.",
    )
    placement: str = Field(default="prefix", description="The policy of placement, see `placement_policies`.")
    pd_fallback: bool = Field(default=True, description="Any rank takes any part of a request, rather than none.")
    max_failovers: int = Field(default=2, ge=0, description="So often a sequence that loses its rank goes to another.")
    default_deadline_s: float | None = Field(
        default=None, gt=0, description="Of requests that do not say theirs. None: they may take any time."
    )
    idempotency_ttl_s: float = Field(default=600.0, gt=0, description="So long answers with a key are kept.")
    idempotency_max_bytes: int = Field(default=64 << 20, ge=0, description="Of all that are kept; the oldest go first.")
    tenant_weights: dict[str, float] = Field(default={}, description="Of those whose weight is not 1.")
    rank_silence_timeout_s: float = Field(
        default=10.0, gt=0, description="A rank that sends nothing for so long counts as lost; it should every second."
    )
    explain_timeout_s: float = Field(
        default=10.0, gt=0, description="Wait for a rank's answer to why a request waits; it comes after its step."
    )


class RouterService:
    """Everything behind one router's HTTP surface. Use from one event loop.

    Raises ValueError, with what is missing, if `model_dir` does not hold a tokenizer, or there is no such policy.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.tokenizer = ChatTokenizer(settings.model_dir)
        self._grammar_checker = GrammarChecker()
        self._policy = SessionAffinity(load_policy(settings.placement))
        self.metrics = RouterMetrics(self._rank_figures, self._queue_counts)
        self.is_shutting_down = False
        self.answers: KeyedAnswers[SharedAnswer] = KeyedAnswers(
            settings.idempotency_ttl_s, settings.idempotency_max_bytes
        )
        """By idempotency key."""
        self._name = ""
        self.responses = ResponseStore()
        self._control: ControlLink | None = None
        self._pool: RankPool | None = None
        self._parts: FlowParts | None = None
        self._flows: set[RequestFlow] = set()
        self._arriving: set[Admitted] = set()
        """Before they are flows: those that wait for their place in the queue."""
        self._secret = b""
        self._is_drained = asyncio.Event()

    @property
    def control(self) -> ControlLink:
        if self._control is None:
            raise RuntimeError("RouterService.start has not been called")
        return self._control

    @property
    def pool(self) -> RankPool:
        if self._pool is None:
            raise RuntimeError("RouterService.start has not been called")
        return self._pool

    async def start(self, control_address: ControlAddress, secret: bytes, name: str) -> None:
        """Connect to the control actor and, as they appear, to all ranks; returns at once. `name`: unique per process.

        `control_address` gives host and port anew for each attempt; what it raises means "not now".
        """
        settings = self.settings
        self._secret = secret
        self._name = name
        self._pool = RankPool(
            secret,
            name,
            policy=self._policy,
            wait_timeout_s=settings.rank_wait_timeout_s,
            silence_timeout_s=settings.rank_silence_timeout_s,
            count=partial(self.metrics.peer_fault, "rank"),
            falls_back=settings.pd_fallback,
            by_priority=settings.policy == "priority",
            observe_wait=self.metrics.placement_wait.observe,
        )
        dispatcher = self._pool.dispatcher
        self.metrics.watch_line(lambda: dispatcher.num_waiting, lambda: dispatcher.num_waiting_tokens)
        self._control = ControlLink(
            control_address,
            secret,
            name,
            acquire_timeout_s=settings.acquire_timeout_s,
            on_members=self._pool.reconcile,
            on_shutting_down=self.shut_down,
            on_inquired=self._on_inquired,
            count=partial(self.metrics.peer_fault, "control"),
        )
        self._parts = FlowParts(
            tokenizer=self.tokenizer,
            grammar_checker=self._grammar_checker,
            control=self._control,
            pool=self._pool,
            metrics=self.metrics,
            rules=SequenceRules(
                stream_interval=settings.stream_interval,
                remote_prefill_min_tokens=settings.remote_prefill_min_tokens,
                max_failovers=settings.max_failovers,
                by_priority=settings.policy == "priority",
            ),
            max_model_len=settings.max_model_len,
            policy=settings.policy,
        )
        self._control.start()

    async def admit(self, request_id: str, caller: Caller, headers: Headers, body: bytes) -> Admitted:
        """Take a place in the queue for one request, whose body has come but is not parsed yet: refusing is cheap.

        Raises ApiError if there is none, with the time when there will be. The caller of this releases the place, or
        hands it to `open_flow` together with `Admitted.caller`, by which its retries are known. `request_id` is the
        public one, of the answer. `headers`: names in lower case.
        """
        if self.is_shutting_down:
            raise _shutting_down()
        caller = with_retry_alias(caller, headers, body, self._secret)
        caller = replace(caller, deadline_s=caller.deadline_s or self.settings.default_deadline_s)
        admitted = Admitted(self.control.new_key(), request_id, caller, self.control)
        self._arriving.add(admitted)
        try:
            await admitted.acquire()
        except BaseException:
            admitted.release()
            raise
        finally:
            self._arriving.discard(admitted)
        return admitted

    def open_flow(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        request_id: str,
        caller: Caller = ANYBODY,
        admitted: Admitted | None = None,
    ) -> RequestFlow:
        """A new request's flow; its opener closes it. Raises ApiError when shutting down.

        `request_id` is the public one, of the answer. `admitted` is not its giver's any more, whatever this raises.
        """
        if self.is_shutting_down:
            if admitted is not None:
                admitted.release()
            raise _shutting_down()
        if self._parts is None:
            raise RuntimeError("RouterService.start has not been called")
        tenant = caller.tenant or request.user or ""
        caller = replace(
            caller,
            tenant=tenant,
            weight=self.settings.tenant_weights.get(tenant, 1.0),
            deadline_s=caller.deadline_s or self.settings.default_deadline_s,
        )
        flow = RequestFlow(request, request_id, caller, self._parts, admitted, on_close=self._on_flow_closed)
        self._flows.add(flow)
        return flow

    async def prompt_tokens(self, request: ChatCompletionRequest) -> list[int]:
        """Of the prompt that this conversation makes. Raises ApiError if it cannot be one."""
        settings = self.settings
        preparation = Preparation(request, self.tokenizer, max_model_len=settings.max_model_len, policy=settings.policy)
        (prompt,) = await preparation.prompts()
        return prompt.token_ids

    async def explain(self, request_id: str) -> RequestExplanation:
        """Where a request is, whoever's, by its public id, and why. Raises ApiError if nobody knows it."""
        check_request_id(request_id)
        flow = next((flow for flow in self._flows if flow.request_id == request_id), None)
        arriving = next((each for each in self._arriving if each.request_id == request_id), None)
        # One that no rank has seen yet is not to wait for ranks' answers.
        is_only_here = arriving is not None or (flow is not None and flow.num_choices == 0)
        answers = [] if is_only_here else await self.pool.explain(request_id, self.settings.explain_timeout_s)
        in_router = flow.in_router() if flow in self._flows else None
        if arriving is not None:
            in_router = arriving.in_router()
        explanation = put_together(request_id, in_router, answers)
        if explanation.sequences:
            return explanation
        silent = explanation.ranks_without_answer
        if silent or not answers:
            raise ApiError(
                Cause.NO_RANK_AVAILABLE,
                f"id: {request_id} may be on a rank that could not be asked: {len(answers)} ranks are connected, "
                f"without an answer after {self.settings.explain_timeout_s:g} s: {', '.join(silent) or 'none'}; "
                "ask again",
                "id",
            )
        raise ApiError(
            Cause.NOT_FOUND,
            f"id: {request_id} is known neither to this router nor to any of {len(answers)} ranks: it ended a while "
            "ago, or waits in another router, or never was; check the id, and ask again if it has no answer yet",
            "id",
        )

    async def cancel(self, request_id: str, account: str) -> None:
        """End the request of this public id, in whichever router it is. Raises ApiError if nobody of them has it.

        Only those of `account` are found, since ids are their clients' to choose.
        """
        check_request_id(request_id)
        if self._cancel_here(request_id, account):
            return
        answer = await self.control.inquiries.ask(InquiryAction.CANCEL, request_id, account, INQUIRY_TIMEOUT_S)
        if answer is None:
            raise ApiError(
                Cause.ADMISSION_UNAVAILABLE,
                f"id: {request_id} is not in this router, and the others could not be asked within "
                f"{INQUIRY_TIMEOUT_S:g} s; try again",
                "id",
            )
        if not answer.is_yes:
            raise ApiError(
                Cause.NOT_FOUND,
                f"id: {request_id} is neither in this router nor in one of {answer.num_asked} others: it has ended, or "
                "never was; there is nothing to cancel",
                "id",
            )

    async def begin_keyed(self, key: str) -> None:
        """Raises ApiError if another router has the answer to this idempotency key, or is about to.

        One that cannot be asked in time is taken not to.
        """
        answer = await self.control.inquiries.ask(InquiryAction.OWNS_KEY, key, "", INQUIRY_TIMEOUT_S)
        if answer is not None and answer.is_yes:
            raise ApiError(
                Cause.IDEMPOTENCY_IN_PROGRESS,
                "idempotency-key: another router has its answer, or is about to; send the request again until it "
                "reaches that one",
                "idempotency-key",
            )
        self.answers.claimed(key)

    def _cancel_here(self, request_id: str, account: str) -> bool:
        """Whether it was here."""
        error = ApiError(Cause.CANCELLED, f"{request_id} was cancelled by DELETE /v1/requests/{request_id}")
        here: list[RequestFlow | Admitted] = [*self._flows, *self._arriving]
        found = [each for each in here if each.request_id == request_id and each.caller.account == account]
        for each in found:
            each.fail(error)
        return bool(found)

    def _on_inquired(self, inquired: Inquired) -> bool:
        match inquired.action:
            case InquiryAction.CANCEL:
                return self._cancel_here(inquired.subject, inquired.account)
            case InquiryAction.OWNS_KEY:
                now = asyncio.get_running_loop().time()
                return self.answers.is_owned(inquired.subject, against=self._name < inquired.asker, now=now)

    def shut_down(self) -> None:
        """End every stream with an error event, and refuse what comes. Idempotent."""
        if not self.is_shutting_down:
            logger.info("shutting down, %d requests in flight", len(self._flows))
        self.is_shutting_down = True
        for flow in list(self._flows):
            flow.fail(_shutting_down())
        if self._control is not None:
            self._control.refuse_pending(_shutting_down())

    async def stop(self) -> None:
        """Shut down, give requests a moment to say so to their clients, close all connections. Idempotent."""
        self.shut_down()
        if self._flows:
            # Their releases and aborts are to go out before the connections close.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_TIMEOUT_S):
                    await self._is_drained.wait()
        if self._control is not None:
            await self._control.close()
        if self._pool is not None:
            await self._pool.close()
        self.tokenizer.close()
        self._grammar_checker.close()

    def readiness(self) -> tuple[bool, dict[str, object]]:
        """Whether requests can be served (by one rank at least), and the figures that say why."""
        num_ranks = 0 if self._pool is None else len(self._pool.links)
        is_connected = self._control is not None and self._control.is_connected
        is_ready = is_connected and num_ranks > 0 and not self.is_shutting_down
        return is_ready, {
            "ready": is_ready,
            "control_connected": is_connected,
            "num_ranks_connected": num_ranks,
            "shutting_down": self.is_shutting_down,
        }

    def check_integrity(self) -> None:
        """Raises AssertionError unless everything agrees; when idle, nothing may be held."""
        self.pool.check_integrity()
        self.answers.check_integrity()
        if not self._flows:
            assert self.control.num_holdings == 0, f"{self.control.num_holdings} keys are held by no request"
            assert self.pool.num_live == 0, f"{self.pool.num_live} sequences belong to no request"

    def _on_flow_closed(self, flow: RequestFlow) -> None:
        self._flows.discard(flow)
        if self.is_shutting_down and not self._flows:
            self._is_drained.set()

    def _rank_figures(self) -> list[RankFigures]:
        links = [] if self._pool is None else self._pool.links
        return [RankFigures(link.record, link.load, link.kv_transfer) for link in links]

    def _queue_counts(self) -> QueueCounts:
        return QueueCounts(0, 0, 0, 0) if self._control is None else self._control.counts


def _shutting_down() -> ApiError:
    return ApiError(Cause.SHUTTING_DOWN, "the server is shutting down; try again later")
