"""The router's connection to the control actor: its lease of the queue limits, who the ranks are, the cluster's counts.

Mutable state: the lease (what it was lent, what requests hold of that) and `_pending` (asked for, not answered). A
request that finds enough idle in the lease is admitted without a message, also while the control actor is away, for
`LEASE_VALID_S`. On reconnect the control actor learns from `Resume` what was lent, and what is pending is asked again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from kv_transfer.connection import Connection, connect
from router.amounts import NOTHING, Amounts
from router.control_messages import (
    Ask,
    Bounds,
    ControlToRouter,
    Granted,
    Inquired,
    InquiryAnswer,
    InquiryReply,
    Members,
    QueueCounts,
    RankRecord,
    Refused,
    Report,
    Resume,
    Return,
    RouterToControl,
    ShuttingDown,
    Tighten,
    Tightened,
)
from router.errors import ApiError, Cause
from router.inquiries import Inquiries
from router.lease import Lease
from router.peer import UNDECODABLE, PeerFault, keep_connected

MAX_BACKOFF_S = 1.0
ADDRESS_TIMEOUT_S = 10.0
LEASE_VALID_S = 5.0
"""How long idle amounts may be used after the control actor was last heard, which speaks once a second."""
REPORT_DELAY_S = 0.05
"""What the router holds is told this long after it has changed."""

ControlAddress = Callable[[], Awaitable[tuple[str, int]]]


@dataclass(slots=True)
class _Pending:
    ask: Ask
    answer: asyncio.Future[Refused | None]
    """None: granted."""


class ControlLink:
    """Use from one event loop. A key is taken from `new_key`, filled by `acquire` and emptied by `release`, once."""

    def __init__(
        self,
        address: ControlAddress,
        secret: bytes,
        name: str,
        *,
        acquire_timeout_s: float,
        on_members: Callable[[list[RankRecord]], None],
        on_shutting_down: Callable[[], None],
        on_inquired: Callable[[Inquired], bool],
        count: Callable[[PeerFault], None],
    ) -> None:
        """`on_inquired` says yes or no to what another router asks."""
        self.inquiries = Inquiries(self._send)
        self.counts = QueueCounts(0, 0, 0, 0)
        """The cluster's, as last heard."""
        self._address = address
        self._secret = secret
        self._name = name
        self._acquire_timeout_s = acquire_timeout_s
        self._on_members = on_members
        self._on_shutting_down = on_shutting_down
        self._on_inquired = on_inquired
        self._count = count
        self._keys = itertools.count(1)
        self._lease = Lease(LEASE_VALID_S)
        self._drained = NOTHING
        """Since the last report."""
        self._report: asyncio.TimerHandle | None = None
        self._pending: dict[int, _Pending] = {}
        self._connection: Connection | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ControlToRouter] = msgspec.msgpack.Decoder(ControlToRouter)
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def num_holdings(self) -> int:
        return self._lease.num_holdings

    @property
    def taken(self) -> Amounts:
        """What this router's requests hold."""
        return self._lease.taken

    def start(self) -> None:
        """Connect, and stay connected until `close`."""
        keeping = keep_connected(
            "the control actor",
            self._connect,
            self._use,
            is_wanted=lambda: True,
            max_backoff_s=MAX_BACKOFF_S,
            count=self._count,
        )
        self._keeper = asyncio.get_running_loop().create_task(keeping, name="control link")

    async def close(self) -> None:
        """Close the connection, and give back what is idle. What is pending is refused."""
        self.refuse_pending(ApiError(Cause.SHUTTING_DOWN, "the router is shutting down"))
        self._tighten()
        if self._report is not None:
            self._report.cancel()
            self._send_report()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def new_key(self) -> int:
        return next(self._keys)

    async def acquire(
        self, key: int, num_requests: int, num_tokens: int, *, retry_token: str | None = None, alias: str | None = None
    ) -> None:
        """Count this under `key`. Raises ApiError if a limit refuses it, or nobody answers in time.

        `retry_token`: what an earlier refusal gave, or its `alias`, under which this one's can be found in turn.
        Whatever this raises, the caller still owns `key` and releases it.
        """
        loop, amounts = asyncio.get_running_loop(), Amounts(num_requests, num_tokens)
        if self._lease.take(key, amounts, loop.time()):
            self._changed()
            return
        pending = self._pending[key] = _Pending(Ask(key, amounts, retry_token or "", alias or ""), loop.create_future())
        self._send(pending.ask)
        try:
            async with asyncio.timeout(self._acquire_timeout_s):
                refused = await pending.answer
        except TimeoutError:
            if self._connection is not None:
                self._count(PeerFault.SILENT)
                # It answers in well under a second; a silent one is hung or unreachable.
                self._connection.abort(f"no answer to an ask within {self._acquire_timeout_s:g} s")
            raise ApiError(
                Cause.ADMISSION_UNAVAILABLE,
                f"the cluster's queue counts could not be reached within {self._acquire_timeout_s:g} s; try again",
            ) from None
        finally:
            self._pending.pop(key, None)
        if refused is not None:
            raise _refusal(refused)

    def computed(self, key: int, num_tokens: int) -> None:
        """`num_tokens` of `key`'s prompt tokens no longer wait."""
        self._put_back(key, num_tokens)

    def release(self, key: int) -> None:
        """Everything under `key` is free. Idempotent."""
        self._put_back(key, None)

    def _put_back(self, key: int, num_tokens: int | None) -> None:
        less = self._lease.put_back(key, num_tokens)
        if less == NOTHING:
            return
        self._drained = self._drained.plus(less)
        self._changed()
        self._return_surplus()

    def _tighten(self) -> None:
        surplus = self._lease.tighten()
        if surplus != NOTHING:
            self._send(Return(surplus))

    def _return_surplus(self) -> None:
        surplus = self._lease.surplus()
        if surplus != NOTHING:
            self._send(Return(surplus))

    def _changed(self) -> None:
        if self._report is None:
            self._report = asyncio.get_running_loop().call_later(REPORT_DELAY_S, self._send_report)

    def _send_report(self) -> None:
        self._report = None
        if self._connection is not None:
            self._send(Report(self._lease.taken, self._drained))
            self._drained = NOTHING

    def refuse(self, key: int, error: ApiError) -> None:
        """The wait of `acquire` for this key, if there is one, ends with `error`."""
        pending = self._pending.get(key)
        if pending is not None and not pending.answer.done():
            pending.answer.set_exception(error)

    def refuse_pending(self, error: ApiError) -> None:
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)

    def _send(self, message: RouterToControl) -> bool:
        """Whether the control actor is there."""
        return self._connection is not None and self._connection.send(self._encoder.encode(message))

    async def _connect(self) -> Connection:
        async with asyncio.timeout(ADDRESS_TIMEOUT_S):
            host, port = await self._address()
        return await connect(host, port, secret=self._secret, role="router", name=self._name)

    async def _use(self, connection: Connection) -> str:
        try:
            self._begin(connection)
            return await asyncio.shield(connection.closed)
        finally:
            self._connection = None

    def _begin(self, connection: Connection) -> None:
        """First say what was lent, then ask again what was not answered."""
        self._connection = connection
        self._lease.lost(asyncio.get_running_loop().time())
        self._send(Resume(self._lease.lent))
        self._changed()
        for pending in self._pending.values():
            if not pending.answer.done():
                self._send(pending.ask)
        connection.start(self._on_frame)

    def _on_frame(self, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
        except UNDECODABLE as error:
            self._count(PeerFault.MALFORMED)
            if self._connection is not None:
                self._connection.abort(f"the control actor sent what is no message: {error}")
            return
        self._lease.heard(asyncio.get_running_loop().time())
        match message:
            case Bounds(limits):
                self._lease.bounded_by(limits)
            case Granted(key, lent, kept):
                pending = self._pending.get(key)
                is_wanted = pending is not None and not pending.answer.done()
                wanted = pending.ask.amounts if pending is not None else NOTHING
                self._lease.granted(key if is_wanted else None, wanted, lent, kept)
                self._return_surplus()
                self._changed()
                self._on_answer(key, None)
            case Refused(key=key):
                self._on_answer(key, message)
            case Tighten(serial):
                self._tighten()
                self._send(Tightened(serial))
            case Members(ranks=ranks):
                self._on_members(ranks)
            case QueueCounts():
                self.counts = message
            case Inquired(number=number):
                self._send(InquiryReply(number, self._on_inquired(message)))
            case InquiryAnswer():
                if not self.inquiries.answered(message):
                    self._count(PeerFault.STALE)
            case ShuttingDown():
                self._on_shutting_down()

    def _on_answer(self, key: int, refused: Refused | None) -> None:
        pending = self._pending.get(key)
        if pending is None or pending.answer.done():
            self._count(PeerFault.STALE)  # given up meanwhile
        else:
            pending.answer.set_result(refused)


def _refusal(refused: Refused) -> ApiError:
    cause = Cause(refused.field)
    noun = "requests" if cause is Cause.MAX_NUM_QUEUED_REQS else "prompt tokens"
    message = (
        f"{refused.field}: the queue has {refused.current} {noun}, this one would add {refused.requested}, "
        f"the limit is {refused.limit}"
    )
    if refused.requested > refused.limit:
        message += f"; alone it exceeds the limit, so ask for no more than {refused.limit} {noun} at once"
    else:
        message += f"; try again in {math.ceil(refused.retry_after_s)} s"
    return ApiError(cause, message, retry_after_s=refused.retry_after_s, retry_token=refused.token or None)
