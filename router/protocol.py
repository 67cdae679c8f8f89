"""What callers may ask: the request bodies, checked strictly, every refusal naming field, value and limit.

Fields of the OpenAI API (and of common servers) that serried does not implement are accepted with the value that
means "not used" and refused by name otherwise; a field that nobody knows is refused as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from pydantic import BeforeValidator, Field, SkipValidation, ValidationError

from rank_scheduler.messages import Grammar, Repetition
from router.errors import ApiError, invalid
from router.output_format import OutputFormatFields, Strict
from router.tools import MAX_NUM_TOOLS, NamedTool, Tool, ToolCall, ToolChoice, forced_grammar

MAX_NUM_MESSAGES = 4_096
MAX_NUM_SEQUENCES = 128
"""Of one request: prompts × choices."""
MAX_NUM_PROMPT_TOKENS = 1 << 20
"""Of one request, over all its sequences.

They are submitted in one go. With them, its stop strings, its grammar and MAX_NUM_SEQUENCES, no request comes near
`connection.MAX_SEND_BUFFER_BYTES`, beyond which a rank's connection, and with it everybody's stream, is cut.
"""
MAX_TOKENIZE_CHARACTERS = 1 << 19
MAX_NUM_DETOKENIZE_TOKENS = 1 << 17
"""Of /tokenize and /detokenize, which admission does not count: about the context of a 128k model."""
MAX_NUM_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1_024
MAX_NUM_STOP_TOKEN_IDS = 128
MAX_NUM_LOGPROBS = 20
MAX_NUM_BIASES = 1_024
MAX_BIAS = 100
MAX_NUM_ALLOWED_TOKEN_IDS = 1_024
MAX_NUM_BAD_WORDS = 128
MAX_NUM_METADATA = 16
MAX_CACHE_SALT_CHARACTERS = 256
DEFAULT_COMPLETION_MAX_TOKENS = 16

_SHOWN_CHARACTERS = 80

# Field → values that mean "not used".
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
_UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "refusal": (),
}


def _texts(value: Any) -> Any:
    """A string or a list of strings → list."""
    return [] if value is None else [value] if isinstance(value, str) else value


def _content(value: Any) -> Any:
    """A message's content: a string, or text parts, which are joined by line ends."""
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"part {index} has type {kind!r}; only parts of type 'text' are supported")
        if not isinstance(part.get("text"), str) or len(part) != 2:
            raise ValueError(f"part {index} must be {{'type': 'text', 'text': <string>}}")
        texts.append(part["text"])
    return "\n".join(texts)


def _prompts(value: Any) -> Any:
    """A string, strings, token ids, or lists of token ids → list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists, not empty")
    prompts = [value] if _is_token_ids(value) else value
    if len(prompts) > MAX_NUM_SEQUENCES:
        raise ValueError(f"has {len(prompts)} prompts, at most {MAX_NUM_SEQUENCES} are allowed")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not _is_token_ids(prompt):
            raise ValueError(f"prompt {index} is neither a string nor a list of token ids")
    return prompts


def _is_token_ids(value: Any) -> bool:
    # A list may have millions of ids, so no loop in Python.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _biases(value: Any) -> Any:
    """Token id → bias, with the ids as text, which JSON's keys are."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object, from token ids to biases")
    if len(value) > MAX_NUM_BIASES:
        raise ValueError(f"has {len(value)} tokens, at most {MAX_NUM_BIASES} are allowed")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise ValueError(f"{key[:_SHOWN_CHARACTERS]!r} is no token id; keys are token ids, such as '42'")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"the bias of token {key} must be a number from -{MAX_BIAS} to {MAX_BIAS}")
        biases[int(key)] = float(bias)
    return biases


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: Literal[False, None] = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_NUM_TOOLS)

    def for_template(self) -> dict[str, Any]:
        fields = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return {"content": ""} | fields


def _check_messages(messages: list[Message]) -> None:
    for index, message in enumerate(messages):
        wrong = None
        if message.tool_calls and message.role != "assistant":
            wrong = "tool_calls", f"only an assistant's message may have them, and this one's role is {message.role!r}"
        elif message.tool_call_id is not None and message.role != "tool":
            wrong = "tool_call_id", f"only a tool's message may have one, and this one's role is {message.role!r}"
        elif message.content is None and not message.tool_calls:
            wrong = "content", "required field is missing; only an assistant's message with tool_calls may be without"
        if wrong is not None:
            path = f"messages[{index}].{wrong[0]}"
            raise invalid(f"{path}: {wrong[1]}", path)


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class RepetitionDetection(Strict):
    """As in `Repetition`."""

    max_pattern_size: int = Field(ge=1, le=1024)
    min_count: int = Field(ge=2, le=1024)
    min_pattern_size: int = Field(default=1, ge=1, le=1024)


class GenerateRequest(OutputFormatFields):
    """What chat and text completions have in common."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[_StopString], Field(max_length=MAX_NUM_STOP_STRINGS), BeforeValidator(_texts)] = Field(
        default=[]
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=MAX_NUM_STOP_TOKEN_IDS)
    n: int | None = Field(default=None, ge=1, le=MAX_NUM_SEQUENCES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    repetition_detection: RepetitionDetection | None = None
    priority: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_CACHE_SALT_CHARACTERS)
    skip_reading_prefix_cache: bool | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    logit_bias: Annotated[dict[int, float] | None, SkipValidation, BeforeValidator(_biases)] = None
    allowed_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, max_length=MAX_NUM_ALLOWED_TOKEN_IDS
    )
    bad_words: Annotated[list[_StopString], Field(max_length=MAX_NUM_BAD_WORDS), BeforeValidator(_texts)] = Field(
        default=[]
    )
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_NUM_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    add_special_tokens: bool | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=MAX_NUM_METADATA
    )
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_choices

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_logprobs(self) -> int | None:
        """As in `SamplingParams`."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As in `SamplingParams`."""
        return self.prompt_logprobs

    @property
    def shows_prompt(self) -> bool:
        """The answer has something of the prompt."""
        return self.num_prompt_logprobs is not None

    @property
    def output_grammar(self) -> tuple[str, Grammar] | None:
        """The field that says what the output must match, and its meaning."""
        return next(iter(self.grammars()), None)

    @property
    def repetition(self) -> Repetition | None:
        asked = self.repetition_detection
        if asked is None:
            return None
        return Repetition(asked.max_pattern_size, asked.min_count, asked.min_pattern_size)

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def max_tokens_param(self) -> str:
        return "max_tokens"

    def check(self) -> None:
        """Raises ApiError where fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options: allowed only with stream = true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid(
                f"prompt_logprobs: {self.prompt_logprobs} is not possible with stream = true; leave one of them out",
                "prompt_logprobs",
            )
        if self.truncate_prompt_tokens == 0:
            raise invalid(
                "truncate_prompt_tokens: must be 1 or more, or -1 for as many as the model has room for, got 0",
                "truncate_prompt_tokens",
            )
        grammars = self.grammars()
        if len(grammars) > 1:
            first, second = grammars[0][0], grammars[1][0]
            raise invalid(f"{second}: {first} already says what the output must look like; give one of them", second)
        asked = self.repetition_detection
        if asked is not None and asked.min_pattern_size > asked.max_pattern_size:
            path = "repetition_detection.min_pattern_size"
            raise invalid(
                f"{path}: {asked.min_pattern_size} is more than max_pattern_size {asked.max_pattern_size}; "
                "lower it, or raise max_pattern_size",
                path,
            )


def _check_tools(tools: Sequence[Tool] | None) -> list[str]:
    """Their names."""
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise invalid(f"tools: the function {twice!r} is there twice; rename one", "tools")
    return names


def _check_goes_on(continue_final_message: bool | None, add_generation_prompt: bool | None) -> None:
    if continue_final_message and add_generation_prompt:
        raise invalid(
            "continue_final_message: true goes on within the last message, add_generation_prompt begins a new one; "
            "give one of them",
            "continue_final_message",
        )


class ChatCompletionRequest(GenerateRequest):
    messages: list[Message] = Field(min_length=1, max_length=MAX_NUM_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_NUM_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_NUM_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def usable_tools(self) -> list[Tool]:
        """Those that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    def grammars(self) -> list[tuple[str, Grammar]]:
        forced = forced_grammar(self.usable_tools, self.tool_choice, is_parallel=self.parallel_tool_calls is not False)
        return super().grammars() + ([] if forced is None else [("tool_choice", forced)])

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check(self) -> None:
        _check_messages(self.messages)
        names = _check_tools(self.tools)
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise invalid("tool_choice: demands a call, and there are no tools; give tools", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise invalid(
                f"tool_choice: {self.tool_choice.function.name!r} is none of the tools ({', '.join(names)})",
                "tool_choice",
            )
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid(f"top_logprobs: {self.top_logprobs} asks for logprobs = true as well", "top_logprobs")
        _check_goes_on(self.continue_final_message, self.add_generation_prompt)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid(
                f"max_tokens: {self.max_tokens} contradicts max_completion_tokens {self.max_completion_tokens}; "
                "give one of them",
                "max_tokens",
            )


class CompletionRequest(GenerateRequest):
    prompt: Annotated[list[str | list[int]], SkipValidation, BeforeValidator(_prompts)]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_NUM_LOGPROBS)
    echo: bool | None = None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def shows_prompt(self) -> bool:
        return bool(self.echo) or super().shows_prompt

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.num_sequences > MAX_NUM_SEQUENCES:
            raise invalid(
                f"n: {self.num_choices} choices for each of {self.num_prompts} prompts (field prompt) are "
                f"{self.num_sequences} sequences, at most {MAX_NUM_SEQUENCES} are allowed in one request; lower n, or "
                "send the prompts in several requests",
                "n",
            )


class TokenizeRequest(Strict):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_NUM_MESSAGES)
    add_special_tokens: bool | None = None
    """Default: true for `prompt`, false for `messages` (whose template has them)."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_NUM_TOOLS)
    return_token_strs: bool = False

    @property
    def begins_answer(self) -> bool:
        return self.add_generation_prompt is not False and not self.continue_final_message

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt: give either prompt or messages", "prompt")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if self.messages is None and getattr(self, name):
                raise invalid(f"{name}: belongs to messages, not to prompt; leave it out", name)
        _check_messages(self.messages or [])
        _check_tools(self.tools)
        _check_goes_on(self.continue_final_message, self.add_generation_prompt)


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]] = Field(max_length=MAX_NUM_DETOKENIZE_TOKENS)

    def check(self) -> None:
        pass


RequestT = TypeVar("RequestT", bound=Strict)


def parse(body: bytes, kind: type[RequestT]) -> RequestT:
    """The checked request in `body`. Raises ApiError, which names what is wrong."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the request body is not valid JSON in UTF-8: {error}") from None
    except RecursionError:
        raise invalid("the request body is nested too deeply") from None
    if not isinstance(fields, dict):
        raise invalid(f"the request body must be a JSON object, got {_shown(fields)}")
    _strip_unused(fields, kind.model_fields, _UNSUPPORTED, "")
    messages = fields.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _strip_unused(message, Message.model_fields, _UNSUPPORTED_IN_MESSAGES, f"messages[{index}].")
    return validated(fields, kind)


def validated(fields: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """The request with these fields, checked. Raises ApiError."""
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error, fields) from None
    request.check()
    return request


def _strip_unused(
    fields: dict[str, Any], known: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], path: str
) -> None:
    """Take out unsupported fields that are not used; raise ApiError for those that are, and for unknown ones."""
    for name in [name for name in fields if name not in known]:
        value = fields[name]
        if name not in unsupported:
            raise invalid(f"{_shown_name(path + name)}: unknown field; remove it", _shown_name(path + name))
        unused = [*unsupported[name], fields.get("n", 1)] if name == "best_of" else unsupported[name]
        is_unused = any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in unused)
        if value is not None and not is_unused:
            raise invalid(f"{path}{name}: not supported, got {_shown(value)}; leave it out", path + name)
        del fields[name]


def _refusal(error: ValidationError, fields: dict[str, Any]) -> ApiError:
    """The first thing that is wrong, as path, reason and value."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = _path(first["loc"], fields, is_missing=first["type"] == "missing")
    if first["type"] == "missing":
        return invalid(f"{path}: required field is missing", path)
    if first["type"] == "extra_forbidden":
        return invalid(f"{_shown_name(path)}: unknown field; remove it", _shown_name(path))
    reason = first["msg"].removeprefix("Value error, ")
    return invalid(f"{path}: {reason[:1].lower()}{reason[1:]}, got {_shown(first['input'])}", path)


def _path(location: Sequence[int | str], fields: dict[str, Any], *, is_missing: bool) -> str:
    """Where in `fields` that is. A location names the kinds of a union as well, which callers know nothing of."""
    path, value = "", cast(Any, fields)
    for index, part in enumerate(location):
        is_there = 0 <= part < len(value) if isinstance(value, list) and isinstance(part, int) else False
        is_there |= isinstance(value, dict) and part in value
        if is_there:
            value = value[part]
        elif not (is_missing and index == len(location) - 1):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _shown(value: Any) -> str:
    if isinstance(value, list | dict | str) and len(value) > _SHOWN_CHARACTERS:
        return f"a {type(value).__name__} of length {len(value)}"
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _shown_name(name: str) -> str:
    return name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…"
