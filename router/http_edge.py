"""The outermost layer of the HTTP surface: keys, limits, deadlines of slow clients, ids, errors nobody else answered.

Plain ASGI, since the layers that frameworks offer copy bodies and hide disconnects. What is refused here is refused by
its headers; of its body no more is read than lets the client see the answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access_log import AccessLog
from router.api_keys import ApiKey, ApiKeys
from router.errors import ApiError, Cause, CountedError
from router.request_headers import Headers, single
from router.timed_send import ClientTooSlow, TimedSend

logger = logging.getLogger(__name__)

MAX_NUM_HEADERS = 128
MAX_HEADER_BYTES = 64 << 10
"""Of all names and values together."""
MAX_URL_BYTES = 16 << 10
# How long, and for how much, a refused body is read and thrown away, so that a client which sends before it reads
# gets to see the answer instead of a reset connection.
LINGER_S = 1.0
LINGER_BYTES = 64 << 20
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request before its body is: `scope["state"]["arrival"]`."""

    request_id: str
    """The client's name for it, or one that was made up."""
    at: float
    """By the event loop's clock."""
    api_key: ApiKey | None
    figures: dict[str, object] = field(default_factory=dict)
    """For the access log; who answers the request fills them in."""

    @property
    def account(self) -> str:
        """Whose requests it may join and cancel."""
        return "" if self.api_key is None else self.api_key.account


class _Refused(Exception):
    """By its headers, or because its body is too large or too slow. It passes through the application's handlers."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error)
        self.error = error


class HttpEdge:
    """ASGI middleware around the whole application. `count` hears of each request that ends here."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: ApiKeys,
        max_body_bytes: int,
        body_timeout_s: float,
        send_timeout_s: float,
        count: Callable[[ApiError], None],
        access_log: AccessLog,
        error_body: Callable[[str, ApiError], bytes],
    ) -> None:
        """`error_body`: of an answer under this path."""
        self._app = app
        self._access_log = access_log
        self._api_keys = api_keys
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._send_timeout_s = send_timeout_s
        self._count = count
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope["headers"])
        has_started = False
        status = 499
        arrival: Arrival | None = None
        cause: Cause | None = None
        timed_send = TimedSend(send, self._send_timeout_s, scope.get("state", {}).get("cut"))

        async def send_with_id(message: Message) -> None:
            nonlocal has_started, status
            if message["type"] == "http.response.start":
                has_started = True
                status = message["status"]
                given = message.get("headers", ())
                if not any(name == b"x-request-id" for name, _ in given):  # a generation's is its public id
                    message["headers"] = [*given, (b"x-request-id", request_id)]
            await timed_send(message)

        arrived_at = asyncio.get_running_loop().time()
        try:
            try:
                arrival = Arrival(request_id.decode(), arrived_at, self._check(scope))
                scope.setdefault("state", {})["arrival"] = arrival
                await self._app(scope, self._limited(receive, arrived_at + self._body_timeout_s), send_with_id)
            except _Refused as refused:
                cause = refused.error.cause
                if not has_started:
                    body = self._error_body(scope["path"], refused.error)
                    await self._refuse(refused.error, body, receive, send_with_id)
        except ClientTooSlow as too_slow:
            cause = Cause.CLIENT_GONE
            self._count(ApiError(Cause.CLIENT_GONE, str(too_slow)))  # the server closes the connection
        except Exception as failure:
            cause = Cause.INTERNAL_ERROR
            logger.exception("request %s failed", request_id.decode())
            error = ApiError(
                Cause.INTERNAL_ERROR, f"internal error; the router's log says more under {request_id.decode()}"
            )
            if not isinstance(failure, CountedError):
                self._count(error)
            if has_started:
                raise  # the server cuts the connection, which tells the client that the answer is not whole
            body = self._error_body(scope["path"], error)
            await send_with_id(_start(error, body, close=False))
            await send_with_id({"type": "http.response.body", "body": body})
        finally:
            timed_send.close()
            if self._access_log.is_on:
                fields: dict[str, object] = {
                    "request_id": request_id.decode(),
                    "client": (scope.get("client") or ("",))[0],
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "cause": None if cause is None else str(cause),
                    "account": "" if arrival is None else arrival.account,
                }
                if arrival is not None:
                    fields |= arrival.figures
                self._access_log.write(fields, asyncio.get_running_loop().time() - arrived_at)

    def _check(self, scope: Scope) -> ApiKey | None:
        """Everything but the body. Raises _Refused."""
        headers: Headers = scope["headers"]
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > MAX_NUM_HEADERS or num_bytes > MAX_HEADER_BYTES:
            error = ApiError(
                Cause.HEADERS_TOO_LARGE,
                f"headers: {len(scope['headers'])} with {num_bytes} bytes are refused; send up to {MAX_NUM_HEADERS} "
                f"with {MAX_HEADER_BYTES} bytes",
            )
            raise _Refused(error)
        num_bytes = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        if num_bytes > MAX_URL_BYTES:
            error = ApiError(Cause.URL_TOO_LONG, f"url: has {num_bytes} bytes; ask with up to {MAX_URL_BYTES}")
            raise _Refused(error)
        try:
            authorization, x_api_key = single(headers, "authorization"), single(headers, "x-api-key")
            api_key = self._api_keys.check(scope["path"], authorization, x_api_key)
            announced = single(headers, "content-length") or b"0"
        except ApiError as refusal:
            raise _Refused(refusal) from None
        if not announced.isdigit() or int(announced) > self._max_body_bytes:
            raise self._body_too_large(announced.decode("latin-1"))
        return api_key

    def _limited(self, receive: Receive, deadline: float) -> Receive:
        """`receive` that raises _Refused where the body is too large, or is not there in time."""
        num_received = 0
        is_whole = False

        async def receive_limited() -> Message:
            nonlocal num_received, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                error = ApiError(
                    Cause.BODY_TIMEOUT,
                    f"the request body is not whole after {self._body_timeout_s:g} s: {num_received} bytes have come",
                )
                raise _Refused(error) from None
            num_received += len(message.get("body", b""))
            if num_received > self._max_body_bytes:
                raise self._body_too_large(f"more than {num_received}")
            is_whole = not message.get("more_body", False)
            return message

        return receive_limited

    def _body_too_large(self, num_bytes: str) -> _Refused:
        return _Refused(
            ApiError(
                Cause.BODY_TOO_LARGE, f"the request body has {num_bytes} bytes, the limit is {self._max_body_bytes}"
            )
        )

    async def _refuse(self, error: ApiError, body: bytes, receive: Receive, send: Send) -> None:
        self._count(error)
        await send(_start(error, body, close=True))
        await send({"type": "http.response.body", "body": body, "more_body": True})
        num_discarded = 0
        try:
            async with asyncio.timeout(LINGER_S):
                while num_discarded < LINGER_BYTES:
                    message = await receive()
                    num_discarded += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _request_id(headers: Headers) -> bytes:
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _start(error: ApiError, body: bytes, *, close: bool) -> Message:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
    if close:
        headers.append((b"connection", b"close"))
    return {"type": "http.response.start", "status": error.status, "headers": headers}
