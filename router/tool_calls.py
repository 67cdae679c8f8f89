"""One choice's calls of tools, as OpenAI's answers show them."""

from __future__ import annotations

import uuid
from typing import Any

from router.call_text import Arguments, ArgumentsOnly, CallBegun, CallList, CallReader, Event, Text
from router.protocol import ChatCompletionRequest
from router.tokenizer import ChatTokenizer
from router.tools import NamedTool


class ToolCalls:
    """Fed with the choice's text, in one go (`message`) or as it comes (`pieces`)."""

    def __init__(self, request: ChatCompletionRequest, tokenizer: ChatTokenizer) -> None:
        choice = request.tool_choice
        self._is_parallel = request.parallel_tool_calls is not False
        self._reader: CallReader
        if isinstance(choice, NamedTool):
            self._reader = ArgumentsOnly(choice.function.name)
        elif choice == "required":
            self._reader = CallList()
        else:
            self._reader = tokenizer.call_reader()
        self._has_calls = False

    def pieces(self, text: str, *, is_end: bool) -> list[dict[str, Any]]:
        """The `delta`s of a stream that this text brings."""
        return [piece for event in self.events(text, is_end=is_end) if (piece := self._piece(event)) is not None]

    def message(self, text: str) -> dict[str, Any]:
        """The fields of a whole answer's message."""
        content, calls = "", list[dict[str, Any]]()
        for event in self.events(text, is_end=True):
            match event:
                case Text(more):
                    content += more
                case CallBegun(name=name):
                    calls.append(_begun(name))
                case Arguments(text=more):
                    calls[-1]["function"]["arguments"] += more
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self._has_calls and reason == "stop" else reason

    def events(self, text: str, *, is_end: bool) -> list[Event]:
        """What this text brings, calls that are not wanted left out."""
        events = self._reader.feed(text)
        if is_end:
            events += self._reader.end()
        if not self._is_parallel:
            events = [event for event in events if isinstance(event, Text) or event.index == 0]
        self._has_calls |= any(isinstance(event, CallBegun) for event in events)
        return events

    def _piece(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Text(text):
                return {"content": text}
            case CallBegun(index, name):
                return {"tool_calls": [{"index": index, **_begun(name)}]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def new_call_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def _begun(name: str) -> dict[str, Any]:
    return {"id": new_call_id("call"), "type": "function", "function": {"name": name, "arguments": ""}}
