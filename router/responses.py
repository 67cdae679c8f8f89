"""A generation request's answer, as an ASGI response: SSE or one body, errors included, clients' departures noticed.

Headers are sent with the first token, so that whatever fails before it is answered with a status of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.choice import Delta
from router.errors import ApiError, Cause, CountedError
from router.formats import DONE, Answer, Format, ShownPrompt, usage
from router.request_flow import RequestFlow
from router.timed_send import ClientTooSlow

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """Opens a flow for the request, runs it to its end and closes it, whatever that end is."""

    def __init__(self, open_flow: Callable[[], RequestFlow], form: Format) -> None:
        super().__init__()
        self._open_flow = open_flow
        self._form = form
        self._id_header = {"x-request-id": form.request_id}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        flow = self._open_flow()
        outcome = ApiError(Cause.CLIENT_GONE, "the client closed the connection")
        try:
            await _until_disconnect(
                self._stream(flow, send) if flow.request.stream else self._answer(flow, send), receive
            )
        except ClientTooSlow:
            pass  # it counts as gone; the server closes its connection, since the answer is not whole
        except Exception as error:
            outcome = ApiError(Cause.INTERNAL_ERROR, f"internal error: {type(error).__name__}")
            raise CountedError from error
        finally:
            flow.close(outcome)

    # Both close the flow before they send the last bytes, so that who has seen the end of one request finds its
    # place free for the next.

    async def _answer(self, flow: RequestFlow, send: Send) -> None:
        try:
            await flow.begin()
            self._show_prompts(flow)
            answers = [Answer() for _ in range(flow.num_choices)]
            while not flow.is_finished:
                for delta in await flow.next():
                    answers[delta.index].add(delta)
        except ApiError as error:
            await self._refuse(flow, error, send)
            return
        flow.close(None)
        await _send_body(200, self._form.body(answers, _usage(flow)), self._id_header, send)

    async def _stream(self, flow: RequestFlow, send: Send) -> None:
        form, wants_logprobs = self._form, flow.request.num_logprobs is not None
        try:
            await flow.begin()
            self._show_prompts(flow)
            deltas = await flow.next()
        except ApiError as error:
            await self._refuse(flow, error, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS + _raw(self._id_header)})
        begun: set[int] = set()
        try:
            while not flow.is_finished:
                if data := self._events(deltas, begun, wants_logprobs):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                deltas = await flow.next()
        except ApiError as error:
            flow.close(error)
            tail = b"data: " + error.body() + b"\n\n"
        else:
            flow.close(None)
            tail = self._events(deltas, begun, wants_logprobs)
            if flow.request.include_usage:
                tail += form.usage_chunk(_usage(flow))
        await send({"type": "http.response.body", "body": tail + DONE, "more_body": False})

    def _show_prompts(self, flow: RequestFlow) -> None:
        if flow.request.shows_prompt:
            prompts = [prompt for prompt in flow.prompts for _ in range(flow.request.num_choices)]
            self._form.prompts = [
                ShownPrompt(prompt.text, prompt.token_ids, flow.prompt_logprobs(index))
                for index, prompt in enumerate(prompts)
            ]

    async def _refuse(self, flow: RequestFlow, error: ApiError, send: Send) -> None:
        flow.close(error)
        await _send_body(error.status, error.body(), self._id_header | error.headers(), send)

    def _events(self, deltas: list[Delta], begun: set[int], wants_logprobs: bool) -> bytes:
        """The deltas as SSE; those that have nothing to show yet (text held back) are left out."""
        form = self._form
        events = []
        for delta in deltas:
            if delta.index not in begun:
                begun.add(delta.index)
                events.append(form.opening(delta.index))
            if delta.text or delta.finish_reason is not None or (wants_logprobs and delta.token_ids):
                events.append(form.chunk(delta))
        return b"".join(events)


def _usage(flow: RequestFlow) -> dict[str, object]:
    return usage(flow.num_prompt_tokens, flow.num_generated_tokens, flow.num_cached_tokens)


async def _until_disconnect(work: Coroutine[None, None, None], receive: Receive) -> None:
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
