"""The router's connection to the control actor: what it holds, who the ranks are, what the cluster's counts are.

Mutable state: `_holdings` (granted and not released: the truth that a `Resume` carries) and `_pending` (asked, not
answered). While disconnected, releases change only `_holdings`; on reconnect the control actor learns all from the
`Resume`, and what is pending is asked again after it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from kv_transfer.connection import Connection, connect
from router.control_messages import (
    Acquire,
    ControlToRouter,
    Granted,
    Holding,
    Members,
    PrefillDone,
    QueueCounts,
    RankRecord,
    Refused,
    Release,
    Resume,
    RouterToControl,
    ShuttingDown,
)
from router.errors import ApiError, Cause
from router.peer import UNDECODABLE, PeerFault, keep_connected

MAX_BACKOFF_S = 1.0
ADDRESS_TIMEOUT_S = 10.0

ControlAddress = Callable[[], Awaitable[tuple[str, int]]]


@dataclass(slots=True)
class _Held:
    num_requests: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Pending:
    acquire: Acquire
    answer: asyncio.Future[Granted | Refused]


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
        count: Callable[[PeerFault], None],
    ) -> None:
        self.counts = QueueCounts(0, 0, 0, 0)
        """The cluster's, as last heard."""
        self._address = address
        self._secret = secret
        self._name = name
        self._acquire_timeout_s = acquire_timeout_s
        self._on_members = on_members
        self._on_shutting_down = on_shutting_down
        self._count = count
        self._keys = itertools.count(1)
        self._holdings: dict[int, _Held] = {}
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
        return len(self._holdings)

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
        """Close the connection. What is pending is refused."""
        self.refuse_pending(ApiError(Cause.SHUTTING_DOWN, "the router is shutting down"))
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def new_key(self) -> int:
        return next(self._keys)

    async def acquire(self, key: int, num_requests: int, num_tokens: int) -> None:
        """Count this under `key`. Raises ApiError if a limit refuses it, or nobody answers in time.

        Whatever this raises, the caller still owns `key` and releases it.
        """
        answer: asyncio.Future[Granted | Refused] = asyncio.get_running_loop().create_future()
        acquire = Acquire(key, num_requests, num_tokens)
        # Stays, if this is given up, until `release` undoes what may have been granted meanwhile.
        self._pending[key] = _Pending(acquire, answer)
        self._send(acquire)
        try:
            async with asyncio.timeout(self._acquire_timeout_s):
                verdict = await answer
        except TimeoutError:
            if self._connection is not None:
                self._count(PeerFault.SILENT)
                # It answers in well under a millisecond; a silent one is hung or unreachable.
                self._connection.abort(f"no answer to an acquire within {self._acquire_timeout_s:g} s")
            raise ApiError(
                Cause.ADMISSION_UNAVAILABLE,
                f"the cluster's queue counts could not be reached within {self._acquire_timeout_s:g} s; try again",
            ) from None
        if isinstance(verdict, Refused):
            raise _refusal(verdict)

    def prefill_done(self, key: int, num_tokens: int) -> None:
        """`num_tokens` of `key`'s prompt tokens no longer wait."""
        held = self._holdings.get(key)
        if held is not None and held.num_tokens:
            held.num_tokens -= min(num_tokens, held.num_tokens)
            self._send(PrefillDone(key, num_tokens))

    def release(self, key: int) -> None:
        """Everything under `key` is free. Idempotent."""
        pending = self._pending.pop(key, None)
        held = self._holdings.pop(key, None)
        if pending is not None or held is not None:
            self._send(Release(key))

    def refuse_pending(self, error: ApiError) -> None:
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)

    def _send(self, message: RouterToControl) -> None:
        if self._connection is not None:
            self._connection.send(self._encoder.encode(message))

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
        """First say what is held, then ask again what was not answered."""
        self._connection = connection
        self._send(Resume([Holding(key, held.num_requests, held.num_tokens) for key, held in self._holdings.items()]))
        for pending in self._pending.values():
            if not pending.answer.done():
                self._send(pending.acquire)
        connection.start(self._on_frame)

    def _on_frame(self, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
        except UNDECODABLE as error:
            self._count(PeerFault.MALFORMED)
            if self._connection is not None:
                self._connection.abort(f"the control actor sent what is no message: {error}")
            return
        match message:
            case Granted(key=key) | Refused(key=key):
                self._on_answer(key, message)
            case Members(ranks=ranks):
                self._on_members(ranks)
            case QueueCounts():
                self.counts = message
            case ShuttingDown():
                self._on_shutting_down()

    def _on_answer(self, key: int, message: Granted | Refused) -> None:
        pending = self._pending.pop(key, None)
        if pending is None:
            return  # released meanwhile
        if isinstance(message, Granted):
            held = self._holdings.setdefault(key, _Held())
            held.num_requests += pending.acquire.num_requests
            held.num_tokens += pending.acquire.num_tokens
        if not pending.answer.done():
            pending.answer.set_result(message)


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
    return ApiError(cause, message, retry_after_s=refused.retry_after_s)
