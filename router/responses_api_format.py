"""Answers as OpenAI's Responses API writes them: output items, and streams of numbered events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rank_scheduler.messages import TokenLogprobs
from router.call_text import Arguments, CallBegun, Event, Text
from router.choice import Delta
from router.errors import ApiError
from router.formats import Answer, ShownPrompt, openai_error, token_logprobs
from router.protocol import ChatCompletionRequest
from router.responses_api_protocol import NamedFunction, ResponsesRequest
from router.tokenizer import ChatTokenizer
from router.tool_calls import ToolCalls, new_call_id

OnDone = Callable[[dict[str, Any], dict[str, Any]], None]
"""Hears of the whole response, and of the assistant's message, before they are sent."""


class ResponsesFormat:
    """`/v1/responses`. One choice only."""

    def __init__(
        self,
        asked: ResponsesRequest,
        chat: ChatCompletionRequest,
        request_id: str,
        model: str,
        tokenizer: ChatTokenizer,
        on_done: OnDone,
    ) -> None:
        self.request_id = request_id
        self.prompts: list[ShownPrompt] = []
        self.num_prompt_tokens = 0
        self._asked = asked
        self._model = model
        self._tokenizer = tokenizer
        self._on_done = on_done
        self._created_at = int(time.time())
        self._calls = ToolCalls(chat, tokenizer) if chat.usable_tools else None
        self._sequence_number = 0
        self._output: list[dict[str, Any]] = []
        self._is_open = False
        """More of the last item may come."""
        self._finish_reason: str | None = None

    def opening(self, index: int) -> bytes:
        response = self._response("in_progress", None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunk(self, delta: Delta) -> bytes:
        is_end = delta.finish_reason is not None
        self._finish_reason = delta.finish_reason
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        events = []
        for event in self._events(delta.text, is_end):
            events.append(self._of_stream(event, logprobs))
            logprobs = []
        return b"".join(events)

    def closing(self, usage: Mapping[str, Any]) -> bytes:
        events = self._close_item()
        response = self._done(usage)
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        response = self._response("failed", None)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def error_body(self, error: ApiError) -> bytes:
        return openai_error(error)

    def body(self, answers: Sequence[Answer], usage: Mapping[str, Any]) -> bytes:
        (answer,) = answers
        self._finish_reason = answer.finish_reason
        logprobs = self._logprobs(answer.token_ids, answer.logprobs)
        for event in self._events("".join(answer.text), True):
            self._of_stream(event, logprobs)
            logprobs = []
        self._close_item()
        return msgspec.json.encode(self._done(usage))

    def _events(self, text: str, is_end: bool) -> list[Event]:
        if self._calls is not None:
            return self._calls.events(text, is_end=is_end)
        return [Text(text)] if text else []

    def _of_stream(self, event: Event, logprobs: list[dict[str, Any]]) -> bytes:
        match event:
            case Text(text):
                begun = b"" if self._is_open and self._output[-1]["type"] == "message" else self._begin_message()
                part = self._output[-1]["content"][0]
                part["text"] += text
                part["logprobs"] += logprobs
                return begun + self._item_event(
                    "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
                )
            case CallBegun(name=name):
                call = {"call_id": new_call_id("call"), "name": name, "arguments": "", "status": "in_progress"}
                return self._begin_item({"type": "function_call", "id": new_call_id("fc"), **call})
            case Arguments(text=text):
                self._output[-1]["arguments"] += text
                return self._item_event("response.function_call_arguments.delta", delta=text)

    def _begin_message(self) -> bytes:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"type": "message", "id": new_call_id("msg"), "status": "in_progress", "role": "assistant"}
        begun = self._begin_item({**item, "content": []})
        self._output[-1]["content"] = [part]
        return begun + self._item_event("response.content_part.added", content_index=0, part=part)

    def _begin_item(self, item: dict[str, Any]) -> bytes:
        closed = self._close_item()
        self._output.append(item)
        self._is_open = True
        return closed + self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _close_item(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._output[-1]
        item["status"] = "incomplete" if self._finish_reason == "length" else "completed"
        if item["type"] == "message":
            part = item["content"][0]
            text, logprobs = part["text"], part["logprobs"]
            done = self._item_event("response.output_text.done", content_index=0, text=text, logprobs=logprobs)
            done += self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            arguments, name = item["arguments"], item["name"]
            done = self._item_event("response.function_call_arguments.done", arguments=arguments, name=name)
        return done + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """One of the last item."""
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(event))

    def _done(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        status = "incomplete" if self._finish_reason == "length" else "completed"
        response = self._response(status, usage)
        self._on_done(response, self._message())
        return response

    def _message(self) -> dict[str, Any]:
        """The answer as a chat's message."""
        texts = [item["content"][0]["text"] for item in self._output if item["type"] == "message"]
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in self._output
            if item["type"] == "function_call"
        ]
        return {"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}

    def _response(self, status: str, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        asked = self._asked
        choice = asked.tool_choice
        is_cut = status == "incomplete"
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._model,
            "output": self._output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": asked.store is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"}} if asked.text is None else _plain(asked.text),
            "tool_choice": _plain(choice) if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": [_shown_tool(tool) for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": asked.truncation or "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": asked.user,
            "metadata": asked.metadata or {},
        }

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        if not self._asked.wants_logprobs:
            return []
        return token_logprobs(self._tokenizer.table, token_ids, logprobs)


def _plain(model: Any) -> dict[str, Any]:
    fields: dict[str, Any] = model.model_dump(by_alias=True, exclude_none=True)
    form = fields.get("format")
    if form is not None and isinstance(form.get("schema"), str):
        form["schema"] = msgspec.json.decode(form["schema"])
    return fields


def _shown_tool(tool: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)}
    if isinstance(fields["parameters"], str):
        fields["parameters"] = msgspec.json.decode(fields["parameters"])
    return fields


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
