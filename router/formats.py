"""Deltas as the bytes of OpenAI's answers: SSE chunks, encoded by hand around a fixed prefix, and whole bodies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rank_scheduler.messages import TokenLogprobs
from router.choice import Delta
from router.detokenizer import TokenTable
from router.errors import ApiError
from router.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest
from router.tokenizer import ChatTokenizer
from router.tool_calls import ToolCalls

DONE = b"data: [DONE]\n\n"
_Tokens = Sequence[tuple[int, TokenLogprobs | None]]
"""Tokens, each with its logprobs; the first one of a prompt has none."""
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Answer:
    """A choice's deltas put together."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """What an answer may show of its prompt."""

    text: str
    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs]
    """By index, of all tokens but the first; filled until the choice has a token."""


class Format(Protocol):
    """How one endpoint writes its answers. One object per request."""

    request_id: str
    """The answer's id, the request's public name."""
    prompts: list[ShownPrompt]
    """By choice; set before anything is written, where the request wants to see them."""
    num_prompt_tokens: int
    """Set before anything is written."""

    def opening(self, index: int) -> bytes:
        """What a choice's stream begins with."""
        ...

    def chunk(self, delta: Delta) -> bytes:
        """One SSE event."""
        ...

    def closing(self, usage: Mapping[str, Any]) -> bytes:
        """What a stream ends with."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What a stream ends with that failed."""
        ...

    def error_body(self, error: ApiError) -> bytes:
        """The body instead of an answer."""
        ...

    def body(self, answers: Sequence[Answer], usage: Mapping[str, Any]) -> bytes:
        """The whole answer of a request that does not stream."""
        ...


def openai_error(error: ApiError) -> bytes:
    return error.body()


def usage(num_prompt_tokens: int, num_generated_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """Tokens of all prompts, each counted once, and of all choices (end-of-sequence and stop tokens included)."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated_tokens,
        "total_tokens": num_prompt_tokens + num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def token_logprobs(
    table: TokenTable, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """One entry per token, each with the most likely ones there."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        data = table[token_id]
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}

    return [
        {
            **token(token_id, entry.logprob),
            "top_logprobs": [
                token(top_id, logprob) for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


class _Format:
    _object: str
    _chunk_object: str

    def __init__(self, request: GenerateRequest, request_id: str, model: str, tokenizer: ChatTokenizer) -> None:
        """`request_id`: the answer's id; `model`: its name in answers."""
        self._table = tokenizer.table
        self._wants_logprobs = request.num_logprobs is not None
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self.prompts: list[ShownPrompt] = []
        self.num_prompt_tokens = 0
        self._include_usage = request.include_usage
        self.request_id = request_id
        self._head = {"id": self.request_id, "created": int(time.time()), "model": model}
        self._usage_null: dict[str, Any] = {"usage": None} if request.include_usage else {}
        head = _encode({**self._head, "object": self._chunk_object, **self._usage_null, "choices": []})
        self._prefix = b"data: " + head.removesuffix(b"]}")
        self._suffix = b"]}\n\n"

    def _event(self, choice: bytes) -> bytes:
        return self._prefix + choice + self._suffix

    def closing(self, usage: Mapping[str, Any]) -> bytes:
        if not self._include_usage:
            return DONE
        event = _encode({**self._head, "object": self._chunk_object, "choices": [], "usage": usage})
        return b"data: " + event + b"\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + self.error_body(error) + b"\n\n" + DONE

    def error_body(self, error: ApiError) -> bytes:
        return openai_error(error)

    def _body(
        self, choices: list[dict[str, Any]], usage: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> bytes:
        return _encode({**self._head, "object": self._object, "choices": choices, "usage": usage, **(more or {})})

    def _prompt_logprobs(self, index: int) -> list[dict[str, Any] | None]:
        """One entry per token of the prompt, from token ids to what is known of them; None for the first."""
        shown = self.prompts[index]
        return [
            None
            if (entry := shown.logprobs.get(place)) is None
            else {
                str(candidate): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": self._table[candidate].decode(errors="replace"),
                }
                # The prompt's own token last: it has its rank, also where it is one of the most likely.
                for candidate, logprob, rank in (
                    *zip(entry.top_ids, entry.top_logprobs, range(1, len(entry.top_ids) + 1), strict=True),
                    (token_id, entry.logprob, entry.rank),
                )
            }
            for place, token_id in enumerate(shown.token_ids)
        ]


class ChatFormat(_Format):
    """`/v1/chat/completions`."""

    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatCompletionRequest, request_id: str, model: str, tokenizer: ChatTokenizer) -> None:
        super().__init__(request, request_id, model, tokenizer)
        self._request = request
        self._tokenizer = tokenizer
        self._calls: dict[int, ToolCalls] = {}
        """Of each choice, where the model may call tools."""

    def opening(self, index: int) -> bytes:
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._event(_encode(choice))

    def chunk(self, delta: Delta) -> bytes:
        if self._request.usable_tools:
            return self._chunks_with_calls(delta)
        if not self._wants_logprobs and delta.finish_reason is None:
            return self._event(
                b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
                % (delta.index, _encode(delta.text))
            )
        return self._event(
            _encode(
                {
                    "index": delta.index,
                    "delta": {"content": delta.text} if delta.text else {},
                    "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
                    "finish_reason": delta.finish_reason,
                    **({} if delta.finish_reason is None else {"stop_reason": delta.stop_reason}),
                }
            )
        )

    def body(self, answers: Sequence[Answer], usage: Mapping[str, Any]) -> bytes:
        more = {"prompt_logprobs": self._prompt_logprobs(0)} if self._wants_prompt_logprobs else {}
        return self._body([self._choice(index, answer) for index, answer in enumerate(answers)], usage, more)

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(answer.text), "refusal": None}
        finish_reason = answer.finish_reason
        if self._request.usable_tools:
            calls = ToolCalls(self._request, self._tokenizer)
            message |= calls.message("".join(answer.text))
            finish_reason = calls.finish_reason(finish_reason)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.token_ids, answer.logprobs),
            "finish_reason": finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def _chunks_with_calls(self, delta: Delta) -> bytes:
        """As many as there are pieces of text and of calls; the last one has the reason of the end."""
        calls = self._calls.get(delta.index)
        if calls is None:
            calls = self._calls[delta.index] = ToolCalls(self._request, self._tokenizer)
        is_end = delta.finish_reason is not None
        pieces = calls.pieces(delta.text, is_end=is_end)
        if is_end or (self._wants_logprobs and delta.token_ids and not pieces):
            pieces.append({})
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        events = []
        for place, piece in enumerate(pieces, 1):
            choice = {"index": delta.index, "delta": piece, "logprobs": logprobs, "finish_reason": None}
            if is_end and place == len(pieces):
                choice |= {"finish_reason": calls.finish_reason(delta.finish_reason), "stop_reason": delta.stop_reason}
            logprobs = None  # told with the first
            events.append(self._event(_encode(choice)))
        return b"".join(events)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return {"content": token_logprobs(self._table, token_ids, logprobs), "refusal": None}


class CompletionFormat(_Format):
    """`/v1/completions`."""

    _object = "text_completion"
    _chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest, request_id: str, model: str, tokenizer: ChatTokenizer) -> None:
        super().__init__(request, request_id, model, tokenizer)
        self._echoes = bool(request.echo)
        self._offsets: dict[int, int] = {}
        """Choice → characters of its tokens so far."""

    def opening(self, index: int) -> bytes:
        if not self._echoes:
            return b""
        logprobs = self._logprobs(index, self._echoed_tokens(index)) if self._wants_logprobs else None
        choice = {"index": index, "text": self.prompts[index].text, "logprobs": logprobs, "finish_reason": None}
        return self._event(_encode(choice))

    def chunk(self, delta: Delta) -> bytes:
        if not self._wants_logprobs and delta.finish_reason is None:
            return self._event(
                b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (delta.index, _encode(delta.text))
            )
        return self._event(_encode(self._choice(delta.index, delta.text, delta)))

    def body(self, answers: Sequence[Answer], usage: Mapping[str, Any]) -> bytes:
        choices = []
        for index, answer in enumerate(answers):
            text = "".join(answer.text)
            if self._echoes:
                choice = self._choice(index, self.prompts[index].text + text, answer, self._echoed_tokens(index))
            else:
                choice = self._choice(index, text, answer)
            if self._wants_prompt_logprobs:
                choice["prompt_logprobs"] = self._prompt_logprobs(index)
            choices.append(choice)
        return self._body(choices, usage)

    def _choice(self, index: int, text: str, source: Delta | Answer, echoed: _Tokens = ()) -> dict[str, Any]:
        tokens = [*echoed, *zip(source.token_ids, source.logprobs, strict=self._wants_logprobs)]
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens) if self._wants_logprobs else None,
            "finish_reason": source.finish_reason,
            "stop_reason": source.stop_reason,
        }

    def _echoed_tokens(self, index: int) -> _Tokens:
        shown = self.prompts[index]
        return [(token_id, shown.logprobs.get(place)) for place, token_id in enumerate(shown.token_ids)]

    def _logprobs(self, index: int, tokens: _Tokens) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        offsets = []
        for token_id, _ in tokens:
            offsets.append(offset)
            offset += len(self._text(token_id))
        self._offsets[index] = offset
        return {
            "tokens": [self._text(token_id) for token_id, _ in tokens],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for _, entry in tokens],
            "top_logprobs": [
                None
                if entry is None
                else {
                    self._text(top_id): _finite(logprob)
                    for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
                }
                for _, entry in tokens
            ],
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        """A token's text; one that is part of a character shows its bytes, so that no two look alike."""
        data = self._table[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    """JSON has no infinity; -9999 stands for it, as in other servers."""
    return max(logprob, -9999.0)
