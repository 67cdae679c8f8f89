"""The fields by which a request says what form its output must have, each of them read as one `Grammar`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from rank_scheduler.messages import Grammar, GrammarKind
from router.grammar_check import MAX_GRAMMAR_BYTES, MAX_LARK_BYTES

MAX_NUM_CHOICES = 4_096
MAX_NUM_LEVELS = 200
"""Of a value that is read again later, by readers that go into it by recursion."""


class Strict(BaseModel):
    """What callers send is never converted, and has no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def check(self) -> None:
        """Raises ApiError where fields contradict each other."""


def as_text(value: Any) -> str:
    """JSON in the order it was written in, which is the order of the output's keys."""
    if not _is_within(value, MAX_NUM_LEVELS):
        raise ValueError(f"is nested too deeply; at most {MAX_NUM_LEVELS} levels are allowed")
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _is_within(value: Any, num_levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return num_levels > 0 and all(_is_within(each, num_levels - 1) for each in inner)


def _bounded(text: str, limit: int = MAX_GRAMMAR_BYTES) -> str:
    num_bytes = len(text.encode())
    if num_bytes > limit:
        raise ValueError(f"has {num_bytes} bytes, at most {limit} are allowed; shorten it")
    return text


def _schema(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be a JSON schema, as an object")
    return _bounded(as_text(value))


def _schema_or_text(value: Any) -> Any:
    if not isinstance(value, str):
        return _schema(value)
    try:
        is_object = isinstance(json.loads(_bounded(value)), dict)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be a JSON schema, as an object or as its text: {error}") from None
    if not is_object:
        raise ValueError("must be a JSON schema, which is an object")
    return value


def _regex(value: Any) -> Any:
    if value == "":
        raise ValueError("must not be empty")
    return _bounded(value) if isinstance(value, str) else value


def _lark(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise ValueError("must not be empty")
    return _bounded(value, MAX_LARK_BYTES) if isinstance(value, str) else value


def _choices(value: Any) -> Any:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise ValueError("must be a list of strings, none of them empty, one at least")
    if len(value) > MAX_NUM_CHOICES:
        raise ValueError(f"has {len(value)} choices, at most {MAX_NUM_CHOICES} are allowed")
    return _bounded(as_text(value))


# Each is the text of a `Grammar` once it is checked.
_SCHEMA = {"type": "object", "title": "JSON schema"}
SchemaText = Annotated[str, BeforeValidator(_schema), WithJsonSchema(_SCHEMA)]
SchemaOrText = Annotated[
    str, BeforeValidator(_schema_or_text), WithJsonSchema({"anyOf": [_SCHEMA, {"type": "string"}]})
]
Regex = Annotated[str, BeforeValidator(_regex)]
Lark = Annotated[str, BeforeValidator(_lark)]
Choices = Annotated[
    str, BeforeValidator(_choices), WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 1})
]


class JsonSchemaFormat(Strict):
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_text: SchemaText = Field(alias="schema")
    strict: bool | None = None
    """The output is held to the schema in any case."""


class ResponseFormat(Strict):
    """OpenAI's way."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema', and with no other type")
        return self

    def grammar(self) -> Grammar | None:
        if self.json_schema is not None:
            return Grammar(GrammarKind.JSON_SCHEMA, self.json_schema.schema_text)
        return Grammar(GrammarKind.JSON_OBJECT) if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """vLLM's way: exactly one of the fields."""

    json_text: SchemaOrText | None = Field(default=None, alias="json")
    regex: Regex | None = None
    choice: Choices | None = None
    grammar_text: Lark | None = Field(default=None, alias="grammar")
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = (self.json_text, self.regex, self.choice, self.grammar_text, self.json_object or None)
        if sum(value is not None for value in given) != 1:
            raise ValueError("must have exactly one of json, regex, choice, grammar and json_object = true")
        return self

    def grammar(self) -> tuple[str, Grammar]:
        """The field that is given, and its meaning."""
        if self.json_text is not None:
            return "json", Grammar(GrammarKind.JSON_SCHEMA, self.json_text)
        if self.regex is not None:
            return "regex", Grammar(GrammarKind.REGEX, self.regex)
        if self.choice is not None:
            return "choice", Grammar(GrammarKind.CHOICE, self.choice)
        if self.grammar_text is not None:
            return "grammar", Grammar(GrammarKind.LARK, self.grammar_text)
        return "json_object", Grammar(GrammarKind.JSON_OBJECT)


class OutputFormatFields(Strict):
    """What a request with an output format may have. At most one way is used."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Lark | None = None

    def grammars(self) -> list[tuple[str, Grammar]]:
        """What the output must match, by the path of the field that says so."""
        found = []
        if self.response_format is not None and (grammar := self.response_format.grammar()) is not None:
            path = "response_format" if self.response_format.json_schema is None else "response_format.json_schema"
            found.append((path, grammar))
        if self.structured_outputs is not None:
            name, grammar = self.structured_outputs.grammar()
            found.append((f"structured_outputs.{name}", grammar))
        for name, kind, text in (
            ("guided_json", GrammarKind.JSON_SCHEMA, self.guided_json),
            ("guided_regex", GrammarKind.REGEX, self.guided_regex),
            ("guided_choice", GrammarKind.CHOICE, self.guided_choice),
            ("guided_grammar", GrammarKind.LARK, self.guided_grammar),
        ):
            if text is not None:
                found.append((name, Grammar(kind, text)))
        return found
