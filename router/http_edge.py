"""The outermost layer of the HTTP surface: body limit, send deadline, request ids, errors nobody else has answered.

Plain ASGI, since the layers that frameworks offer copy bodies and hide disconnects.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import ApiError, Cause, CountedError
from router.timed_send import ClientTooSlow, TimedSend

logger = logging.getLogger(__name__)

# How long, and for how much, a refused body is read and thrown away, so that a client which sends before it reads
# gets to see the answer instead of a reset connection.
LINGER_S = 1.0
LINGER_BYTES = 64 << 20
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class _BodyTooLarge(Exception):
    pass


class HttpEdge:
    """ASGI middleware around the whole application. `count` hears of each request that ends here."""

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: int, send_timeout_s: float, count: Callable[[ApiError], None]
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._send_timeout_s = send_timeout_s
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        state["arrived_at"] = asyncio.get_running_loop().time()
        has_started = False
        num_received = 0
        timed_send = TimedSend(send, self._send_timeout_s)

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                given = message.get("headers", ())
                if not any(name == b"x-request-id" for name, _ in given):  # a generation's is its public id
                    message["headers"] = [*given, (b"x-request-id", request_id)]
            await timed_send(message)

        async def receive_limited() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_body_bytes:
                raise _BodyTooLarge
            return message

        try:
            announced = headers.get(b"content-length", b"0")
            if not announced.isdigit() or int(announced) > self._max_body_bytes:
                await self._refuse_body(announced.decode("latin-1"), receive, send_with_id)
                return
            await self._app(scope, receive_limited, send_with_id)
        except _BodyTooLarge:
            if not has_started:
                await self._refuse_body(f"more than {num_received}", receive, send_with_id)
        except ClientTooSlow as too_slow:
            self._count(ApiError(Cause.CLIENT_GONE, str(too_slow)))  # the server closes the connection
        except Exception as failure:
            logger.exception("request %s failed", request_id.decode())
            error = ApiError(
                Cause.INTERNAL_ERROR, f"internal error; the router's log says more under {request_id.decode()}"
            )
            if not isinstance(failure, CountedError):
                self._count(error)
            if has_started:
                raise  # the server cuts the connection, which tells the client that the answer is not whole
            await send_with_id(_start(error, close=False))
            await send_with_id({"type": "http.response.body", "body": error.body()})
        finally:
            timed_send.close()

    async def _refuse_body(self, num_bytes: str, receive: Receive, send: Send) -> None:
        error = ApiError(
            Cause.BODY_TOO_LARGE, f"the request body has {num_bytes} bytes, the limit is {self._max_body_bytes}"
        )
        self._count(error)
        await send(_start(error, close=True))
        await send({"type": "http.response.body", "body": error.body(), "more_body": True})
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


def _start(error: ApiError, *, close: bool) -> Message:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(error.body())).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
    if close:
        headers.append((b"connection", b"close"))
    return {"type": "http.response.start", "status": error.status, "headers": headers}
