"""OpenAI's Responses API: what callers may ask, and the chat completion that means the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from router.errors import invalid
from router.output_format import SchemaText, Strict
from router.protocol import MAX_NUM_LOGPROBS, MAX_NUM_MESSAGES, MAX_NUM_METADATA, ChatCompletionRequest, validated
from router.tools import MAX_NUM_TOOLS

_NAME = "^[a-zA-Z0-9_.-]{1,64}$"


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[list[InputText], BeforeValidator(_parts)]


class InputMessage(Strict):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def for_chat(self) -> dict[str, Any]:
        return {"role": self.role, "content": "\n".join(part.text for part in self.content)}


class FunctionCall(Strict):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=128)
    name: str = Field(pattern=_NAME)
    arguments: str
    id: str | None = None
    status: str | None = None

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


class FunctionCallOutput(Strict):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=128)
    output: Parts
    id: str | None = None
    status: str | None = None

    def for_chat(self) -> dict[str, Any]:
        text = "\n".join(part.text for part in self.output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": text}


Item = Annotated[InputMessage | FunctionCall | FunctionCallOutput, Field(discriminator="type")]


def _items(value: Any) -> Any:
    """A text is the user's message; an item with a role and no type is a message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in value]


class FunctionTool(Strict):
    type: Literal["function"]
    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: SchemaText | None = None
    strict: bool | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str = Field(pattern=_NAME)


def _choice_kind(value: Any) -> str:
    return "named" if isinstance(value, dict | NamedFunction) else "word"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedFunction, Tag("named")],
    Discriminator(_choice_kind),
]


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_text: SchemaText | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: None = None


class StreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Strict):
    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_items)] = Field(min_length=1, max_length=MAX_NUM_MESSAGES)
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, min_length=1, max_length=256)
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_NUM_LOGPROBS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_NUM_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=MAX_NUM_METADATA
    )
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    background: Literal[False] | None = None
    reasoning: None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)

    def check(self) -> None:
        form = None if self.text is None else self.text.format
        if form is not None and (form.type == "json_schema") != (form.schema_text is not None):
            raise invalid("text.format.schema: goes with type 'json_schema', and with no other type", "text.format")
        if self.top_logprobs and not self.wants_logprobs:
            raise invalid(
                f"top_logprobs: {self.top_logprobs} asks for include = ['message.output_text.logprobs'] as well",
                "top_logprobs",
            )

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def new_messages(self) -> list[dict[str, Any]]:
        """What this request adds to the conversation; its instructions are not part of that."""
        return _with_calls_together([item.for_chat() for item in self.input])

    def chat(self, earlier: Sequence[dict[str, Any]]) -> ChatCompletionRequest:
        """The chat completion that means the same behind `earlier` messages. Raises ApiError."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages = [*system, *earlier, *self.new_messages()]
        _check_size(messages)
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": bool(self.stream),
            "seed": self.seed,
            "user": self.user,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
        if isinstance(self.tool_choice, NamedFunction):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _chat_format(self.text.format)
        return validated(fields, ChatCompletionRequest)


def _check_size(messages: list[dict[str, Any]]) -> None:
    if len(messages) > MAX_NUM_MESSAGES:
        raise invalid(
            f"input: with instructions and what came before, these are {len(messages)} messages, at most "
            f"{MAX_NUM_MESSAGES} are allowed; leave out the oldest",
            "input",
        )
    num_calls = max(len(message.get("tool_calls") or ()) for message in messages)
    if num_calls > MAX_NUM_TOOLS:
        raise invalid(
            f"input: has {num_calls} function_calls in a row, at most {MAX_NUM_TOOLS} are allowed; leave some out",
            "input",
        )


def _with_calls_together(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls that follow one another, and the assistant's text before them, are one message."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        before = joined[-1] if joined else {}
        if message.get("tool_calls") and before.get("role") == "assistant":
            joined[-1] = before | {"tool_calls": [*before.get("tool_calls", ()), *message["tool_calls"]]}
        else:
            joined.append(message)
    return joined


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if tool.parameters is not None:
        function["parameters"] = json.loads(tool.parameters)
    return {"type": "function", "function": function}


def _chat_format(form: TextFormat) -> dict[str, Any]:
    if form.schema_text is None:
        return {"type": form.type}
    schema = {"name": form.name or "output", "schema": json.loads(form.schema_text), "strict": form.strict}
    return {"type": "json_schema", "json_schema": schema}
