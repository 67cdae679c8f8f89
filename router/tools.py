"""Functions that a chat's model may call, as a request declares them, and what that says of the output's form."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from rank_scheduler.messages import Grammar, GrammarKind
from router.output_format import SchemaText, Strict

MAX_NUM_TOOLS = 128
_NAME = "^[a-zA-Z0-9_.-]{1,64}$"
_ANY_PARAMETERS = '{"type":"object"}'


class Function(Strict):
    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters_text: SchemaText | None = Field(default=None, alias="parameters")
    strict: bool | None = None
    """Arguments of a call that `tool_choice` demands keep to the parameters in any case."""

    @property
    def schema_text(self) -> str:
        return self.parameters_text or _ANY_PARAMETERS


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        function = self.function
        return {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": json.loads(function.schema_text),
            },
        }


class NamedFunction(Strict):
    name: str = Field(pattern=_NAME)


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Strict):
    name: str = Field(pattern=_NAME)
    arguments: str
    """As JSON text."""


class ToolCall(Strict):
    """In an assistant's message: a call that was made."""

    id: str = Field(min_length=1, max_length=128)
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """With the arguments as templates want them: as values, where they are JSON."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


def _tool_choice(value: Any) -> Any:
    if not isinstance(value, dict | NamedTool) and value not in ("none", "auto", "required"):
        raise ValueError("must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': <name>}}")
    return value


def _choice_kind(value: Any) -> str:
    return "word" if isinstance(value, str) else "named"


ToolChoice = Annotated[
    Annotated[str, Tag("word")] | Annotated[NamedTool, Tag("named")],
    Discriminator(_choice_kind),
    BeforeValidator(_tool_choice),
]


def forced_grammar(tools: list[Tool], choice: str | NamedTool | None, *, is_parallel: bool) -> Grammar | None:
    """What the output must be where `choice` demands a call; None: it does not.

    For a named function that is its arguments alone, for `required` a list of calls (`CallList` reads it).
    """
    if isinstance(choice, NamedTool):
        function = next(tool.function for tool in tools if tool.function.name == choice.function.name)
        return Grammar(GrammarKind.JSON_SCHEMA, function.schema_text)
    if choice != "required":
        return None
    calls = ",".join(
        f'{{"type":"object","properties":{{"name":{{"const":{json.dumps(tool.function.name)}}},'
        f'"arguments":{tool.function.schema_text}}},"required":["name","arguments"],"additionalProperties":false}}'
        for tool in tools
    )
    most = "" if is_parallel else ',"maxItems":1'
    return Grammar(GrammarKind.JSON_SCHEMA, f'{{"type":"array","minItems":1{most},"items":{{"anyOf":[{calls}]}}}}')
