"""A generation request's answer, as ASGI messages: SSE or one body, errors included, clients' departures noticed.

Headers are sent with the first token, so that whatever fails before it is answered with a status of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.choice import Delta
from router.errors import ApiError, Cause, CountedError
from router.formats import Answer, Format, ShownPrompt, openai_error, usage
from router.request_flow import RequestFlow
from router.timed_send import ClientTooSlow

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_CLIENT_GONE = ApiError(Cause.CLIENT_GONE, "the client closed the connection")


OpenFlow = Callable[[], Awaitable[tuple[RequestFlow, Format]]]


class Generation:
    """Opens a flow for a request, runs it to its end and closes it, whatever that end is."""

    def __init__(
        self,
        request_id: str,
        open_flow: OpenFlow,
        count: Callable[[ApiError], None],
        error_body: Callable[[ApiError], bytes] = openai_error,
        note: Callable[[dict[str, object]], None] = lambda figures: None,
    ) -> None:
        """`request_id`: the answer's public id.

        `open_flow` may raise ApiError, which `count` hears of; what comes later is the flow's to count. `note` hears
        the figures of the end.
        """
        self._note = note
        self._id_header = {"x-request-id": request_id}
        self._open_flow = open_flow
        self._count = count
        self._error_body = error_body

    async def run(self, send: Send, before: Callable[[], Awaitable[None]] | None = None) -> bool:
        """Send the answer, or the refusal; whether the answer is whole. Whoever cancels this says that nobody reads.

        `before`, which comes first, may raise ApiError as well.
        """
        try:
            if before is not None:
                await before()
            flow, form = await self._open_flow()
        except ApiError as error:
            self._count(error)
            self._note({"cause": str(error.cause)})
            await _send_body(error.status, self._error_body(error), self._id_header | error.headers(), send)
            return False
        except asyncio.CancelledError:
            self._count(_CLIENT_GONE)
            self._note({"cause": str(Cause.CLIENT_GONE)})
            raise
        outcome = _CLIENT_GONE
        try:
            return await (_stream if flow.request.stream else _answer)(flow, form, send)
        except ClientTooSlow:
            raise
        except Exception as error:
            outcome = ApiError(Cause.INTERNAL_ERROR, f"internal error: {type(error).__name__}")
            raise CountedError from error
        finally:
            flow.close(outcome)
            self._note(flow.figures())


class GenerationResponse(Response):
    """One that lasts as long as its client is there."""

    def __init__(self, send_answer: Callable[[Send], Coroutine[None, None, object]]) -> None:
        super().__init__()
        self._send_answer = send_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One that is too slow counts as gone; the server closes its connection, since the answer is not whole.
        with contextlib.suppress(ClientTooSlow):
            await until_disconnect(self._send_answer(send), receive)


# Both close the flow before they send the last bytes, so that who has seen the end of one request finds its
# place free for the next.


async def _answer(flow: RequestFlow, form: Format, send: Send) -> bool:
    try:
        await flow.begin()
        _begin_form(flow, form)
        answers = [Answer() for _ in range(flow.num_choices)]
        while not flow.is_finished:
            for delta in await flow.next():
                answers[delta.index].add(delta)
    except ApiError as error:
        await _refuse(flow, form, error, send)
        return False
    flow.close(None)
    await _send_body(200, form.body(answers, _usage(flow)), _id_header(form), send)
    return True


async def _stream(flow: RequestFlow, form: Format, send: Send) -> bool:
    wants_logprobs = flow.request.num_logprobs is not None
    try:
        await flow.begin()
        _begin_form(flow, form)
        deltas = await flow.next()
    except ApiError as error:
        await _refuse(flow, form, error, send)
        return False
    await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS + _raw(_id_header(form))})
    begun: set[int] = set()
    is_whole = False
    try:
        while not flow.is_finished:
            if data := _events(form, deltas, begun, wants_logprobs):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            deltas = await flow.next()
    except ApiError as error:
        flow.close(error)
        tail = form.failure(error)
    else:
        flow.close(None)
        is_whole = True
        tail = _events(form, deltas, begun, wants_logprobs) + form.closing(_usage(flow))
    await send({"type": "http.response.body", "body": tail, "more_body": False})
    return is_whole


def _begin_form(flow: RequestFlow, form: Format) -> None:
    form.num_prompt_tokens = flow.num_prompt_tokens
    if flow.request.shows_prompt:
        prompts = [prompt for prompt in flow.prompts for _ in range(flow.request.num_choices)]
        form.prompts = [
            ShownPrompt(prompt.text, prompt.token_ids, flow.prompt_logprobs(index))
            for index, prompt in enumerate(prompts)
        ]


async def _refuse(flow: RequestFlow, form: Format, error: ApiError, send: Send) -> None:
    flow.close(error)
    await _send_body(error.status, form.error_body(error), _id_header(form) | error.headers(), send)


def _events(form: Format, deltas: list[Delta], begun: set[int], wants_logprobs: bool) -> bytes:
    """The deltas as SSE; those that have nothing to show yet (text held back) are left out."""
    events = []
    for delta in deltas:
        if delta.index not in begun:
            begun.add(delta.index)
            events.append(form.opening(delta.index))
        if delta.text or delta.finish_reason is not None or (wants_logprobs and delta.token_ids):
            events.append(form.chunk(delta))
    return b"".join(events)


def _id_header(form: Format) -> dict[str, str]:
    return {"x-request-id": form.request_id}


def _usage(flow: RequestFlow) -> dict[str, object]:
    return usage(flow.num_prompt_tokens, flow.num_generated_tokens, flow.num_cached_tokens)


async def until_disconnect(work: Coroutine[None, None, object], receive: Receive) -> None:
    """Run `work`, or as much of it as there is time for until the client goes away. Its exceptions are raised."""
    loop = asyncio.get_running_loop()
    working = loop.create_task(work)
    watching = loop.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(status: int, body: bytes, headers: dict[str, str], send: Send) -> None:
    headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    await send({"type": "http.response.start", "status": status, "headers": _raw(headers)})
    await send({"type": "http.response.body", "body": body})


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
