"""Answers as Anthropic's Messages API writes them: content blocks, and streams of named events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.call_text import Arguments, CallBegun, Event, Text
from router.choice import Delta
from router.errors import ApiError
from router.formats import Answer, ShownPrompt
from router.protocol import ChatCompletionRequest
from router.tokenizer import ChatTokenizer
from router.tool_calls import ToolCalls, new_call_id

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ApiError) -> bytes:
    """The error in this API's shape."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


class MessagesFormat:
    """`/v1/messages`. One choice only."""

    def __init__(self, request: ChatCompletionRequest, request_id: str, model: str, tokenizer: ChatTokenizer) -> None:
        self.request_id = request_id
        self.prompts: list[ShownPrompt] = []
        self.num_prompt_tokens = 0
        self._model = model
        self._calls = ToolCalls(request, tokenizer) if request.usable_tools else None
        self._num_blocks = 0
        self._open_block: str | None = None
        """What kind the last block of the stream is of, while more of it may come."""
        self._end: tuple[str | None, str | None] = None, None

    def opening(self, index: int) -> bytes:
        message = self._message([], (None, None), {"input_tokens": self.num_prompt_tokens, "output_tokens": 0})
        return _event("message_start", message=message)

    def chunk(self, delta: Delta) -> bytes:
        is_end = delta.finish_reason is not None
        if is_end:
            self._end = self._stop_of(delta)
        return b"".join(self._of_stream(event) for event in self._events(delta.text, is_end))

    def closing(self, usage: Mapping[str, Any]) -> bytes:
        reason, sequence = self._end
        return (
            self._close_block()
            + _event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=_usage(usage))
            + _event("message_stop")
        )

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"

    def error_body(self, error: ApiError) -> bytes:
        return anthropic_error(error)

    def body(self, answers: Sequence[Answer], usage: Mapping[str, Any]) -> bytes:
        (answer,) = answers
        blocks: list[dict[str, Any]] = []
        for event in self._events("".join(answer.text), True):
            match event:
                case Text(text):
                    if blocks and blocks[-1]["type"] == "text":
                        blocks[-1]["text"] += text
                    else:
                        blocks.append({"type": "text", "text": text})
                case CallBegun(name=name):
                    blocks.append({"type": "tool_use", "id": new_call_id("toolu"), "name": name, "input": ""})
                case Arguments(text=text):
                    blocks[-1]["input"] += text
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = _object(block["input"])
        return msgspec.json.encode(self._message(blocks, self._stop_of(answer), _usage(usage)))

    def _message(
        self, content: list[dict[str, Any]], stop: tuple[str | None, str | None], usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop[0],
            "stop_sequence": stop[1],
            "usage": usage,
        }

    def _events(self, text: str, is_end: bool) -> list[Event]:
        if self._calls is not None:
            return self._calls.events(text, is_end=is_end)
        return [Text(text)] if text else []

    def _stop_of(self, end: Delta | Answer) -> tuple[str | None, str | None]:
        """`stop_reason` and `stop_sequence`."""
        if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        reason = end.finish_reason if self._calls is None else self._calls.finish_reason(end.finish_reason)
        return _STOP_REASONS.get(reason or "", "end_turn"), None

    def _of_stream(self, event: Event) -> bytes:
        match event:
            case Text(text):
                begin = b"" if self._open_block == "text" else self._begin_block({"type": "text", "text": ""})
                return begin + self._block_delta({"type": "text_delta", "text": text})
            case CallBegun(name=name):
                return self._begin_block({"type": "tool_use", "id": new_call_id("toolu"), "name": name, "input": {}})
            case Arguments(text=text):
                return self._block_delta({"type": "input_json_delta", "partial_json": text})

    def _begin_block(self, block: dict[str, Any]) -> bytes:
        closed = self._close_block()
        self._open_block = block["type"]
        self._num_blocks += 1
        return closed + _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close_block(self) -> bytes:
        if self._open_block is None:
            return b""
        self._open_block = None
        return _event("content_block_stop", index=self._num_blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Cached tokens are not among the input tokens here."""
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


def _object(text: str) -> Any:
    """Arguments as a value; what was cut off, or is no JSON, as text under a key of its own."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"incomplete_json": text}
