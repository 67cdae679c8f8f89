"""Anthropic's Messages API: what callers may ask, and the chat completion that means the same."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from router.errors import invalid
from router.output_format import SchemaText, Strict, as_text
from router.protocol import (
    MAX_NUM_MESSAGES,
    MAX_NUM_STOP_STRINGS,
    MAX_STOP_CHARACTERS,
    ChatCompletionRequest,
    validated,
)
from router.tools import MAX_NUM_TOOLS

_NAME = "^[a-zA-Z0-9_-]{1,64}$"
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CacheControl(Strict):
    """Accepted: prefixes are cached in any case."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: None = None


class DirectCaller(Strict):
    """The model itself."""

    type: Literal["direct"]


def _input(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError("must be an object, the call's arguments by name")
    return as_text(value)


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=128)
    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    input_text: Annotated[str, BeforeValidator(_input), WithJsonSchema({"type": "object"})] = Field(alias="input")
    caller: DirectCaller | None = None
    toolset_name: None = None


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=128)
    content: Annotated[list[TextBlock], BeforeValidator(_blocks)] = Field(default=[])
    is_error: bool | None = None
    toolset_name: None = None


AnyBlock = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class MessageParam(Strict):
    role: Literal["user", "assistant"]
    content: Annotated[list[AnyBlock], BeforeValidator(_blocks)]


class ToolParam(Block):
    name: str = Field(pattern=_NAME)
    description: str | None = None
    input_schema: SchemaText
    type: Literal["custom"] | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: bool | None = None
    """Arguments are streamed as they come in any case."""


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_text: SchemaText = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None


class ToolChoiceParam(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, pattern=_NAME)
    disable_parallel_tool_use: bool | None = None


class Metadata(Strict):
    user_id: str | None = Field(default=None, max_length=256)


class Thinking(Strict):
    type: Literal["disabled"]


class CountTokensRequest(Block):
    """What the prompt is made of."""

    model: str
    messages: list[MessageParam] = Field(min_length=1, max_length=MAX_NUM_MESSAGES)
    system: Annotated[list[TextBlock] | None, BeforeValidator(_blocks)] = None
    tools: list[ToolParam] | None = Field(default=None, max_length=MAX_NUM_TOOLS)
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def check(self) -> None:
        for index, message in enumerate(self.messages):
            for place, block in enumerate(message.content):
                wanted = {ToolUseBlock: "assistant", ToolResultBlock: "user"}.get(type(block), message.role)
                if wanted != message.role:
                    path = f"messages[{index}].content[{place}]"
                    raise invalid(
                        f"{path}: {block.type} belongs to the role {wanted!r}, not to {message.role!r}",
                        path,
                    )
            num_calls = sum(isinstance(block, ToolUseBlock) for block in message.content)
            if num_calls > MAX_NUM_TOOLS:
                path = f"messages[{index}].content"
                raise invalid(f"{path}: has {num_calls} calls, at most {MAX_NUM_TOOLS} are allowed", path)
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise invalid("tool_choice.name: goes with type 'tool', and with no other type", "tool_choice.name")

    def chat(self) -> ChatCompletionRequest:
        """The chat completion that means the same. Raises ApiError."""
        return validated(self._chat_fields(), ChatCompletionRequest)

    def _chat_fields(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": _text(self.system)})
        for message in self.messages:
            messages += _chat_messages(message)
        if len(messages) > MAX_NUM_MESSAGES:
            raise invalid(
                f"messages: with the system's, and each result of a tool as one, these are {len(messages)}, at most "
                f"{MAX_NUM_MESSAGES} are allowed; leave out the oldest",
                "messages",
            )
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            named = {"type": "function", "function": {"name": self.tool_choice.name}}
            fields["tool_choice"] = _TOOL_CHOICES.get(self.tool_choice.type, named)
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.output_config is not None and (form := self.output_config.format) is not None:
            schema = {"name": "output", "schema": json.loads(form.schema_text)}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            # The answer goes on within a last message that is the assistant's own.
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return fields


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]] = Field(
        default=[], max_length=MAX_NUM_STOP_STRINGS
    )
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=2**31 - 1)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def _chat_fields(self) -> dict[str, Any]:
        return super()._chat_fields() | {
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": bool(self.stream),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "user": None if self.metadata is None else self.metadata.user_id,
        }


def _text(blocks: list[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _chat_messages(message: MessageParam) -> list[dict[str, Any]]:
    """One of the assistant's stays one; results of tools in a user's come first, as messages of their own."""
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input_text},
        }
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    if message.role == "assistant":
        return [{"role": "assistant", "content": _text(texts), **({"tool_calls": calls} if calls else {})}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in message.content
        if isinstance(block, ToolResultBlock)
    ]
    return results + ([{"role": "user", "content": _text(texts)}] if texts or not results else [])


def _chat_tool(tool: ToolParam) -> dict[str, Any]:
    parameters = json.loads(tool.input_schema)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}
