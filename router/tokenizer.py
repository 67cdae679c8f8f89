"""A model's tokenizer and chat template, without `transformers`: its import takes longer than all else at start-up.

The template runs in the same kind of sandbox, with the same names, as in `transformers`
(`utils/chat_template_utils.py`), since checkpoints are written for that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from router.call_text import CallReader, TaggedCalls
from router.detokenizer import token_table
from router.errors import invalid
from router.prefix_index import PromptPrefix
from router.token_lengths import TokenLengths
from router.tool_prompt import CALL_CLOSING, CALL_OPENING, with_tools

T = TypeVar("T")

# Beyond these an encode or a decode would hold up the event loop by more than a few milliseconds.
LONG_TEXT_CHARACTERS = 2_000
LONG_NUM_TOKENS = 2_000
# Hashing takes a fraction of what encoding takes.
LONG_NUM_PROMPT_TOKENS = 8_000
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTokenizer:
    """Text ↔ token ids, and messages → text. `model_dir` holds tokenizer.json and tokenizer_config.json.

    Raises ValueError, with what is missing, if the directory does not hold a tokenizer.
    """

    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"model_dir: {model_dir} has no tokenizer.json; give a Hugging Face checkpoint directory")
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.table = token_table(self.tokenizer)
        self.vocab_size = int(
            _read_json(model_dir / "config.json").get("vocab_size")
            or self.tokenizer.get_vocab_size(with_added_tokens=True)
        )
        """Ids the model knows; it may have more rows than the tokenizer has tokens."""
        config = _read_json(model_dir / "tokenizer_config.json")
        self._special_tokens = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
        self._template_source = _template_source(model_dir, config)
        self._template = None if self._template_source is None else _compile(self._template_source)
        self._template_variables = _variables(self._template_source or "")
        self._lengths = TokenLengths(self.tokenizer)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. A long one is encoded in the worker thread."""
        return await self._run(len(text) > LONG_TEXT_CHARACTERS, partial(self._encode, text, add_special_tokens))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all `token_ids`, special tokens included. Many are decoded in the worker thread."""
        return await self._run(len(token_ids) > LONG_NUM_TOKENS, partial(self._decode, token_ids))

    async def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's text; bytes that are no character on their own are U+FFFD. Many: in the worker thread."""
        return await self._run(len(token_ids) > LONG_NUM_TOKENS, partial(self._token_strs, token_ids))

    async def hash_prefix(self, prompt: PromptPrefix, block_sizes: Iterable[int]) -> None:
        """Have the prompt's hashes made now. Many: in the worker thread."""
        for block_size in block_sizes:
            await self._run(prompt.num_tokens > LONG_NUM_PROMPT_TOKENS, partial(prompt.hashes, block_size))

    def min_num_tokens(self, text: str) -> int:
        """`text` has at least so many tokens; found without encoding it."""
        return self._lengths.min_num_tokens(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages as the text that the model was trained on. Raises ApiError if the template refuses them.

        `continue_final_message`: the text ends where the last message's content does, without what closes it.
        `variables`: for the template, by name.
        """
        if self._template is None or self._template_source is None:
            raise invalid(
                "messages: this model has no chat template (chat_template in tokenizer_config.json, or "
                "chat_template.jinja); use /v1/completions",
                "messages",
            )
        if "developer" not in self._template_source:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in map(dict, messages)]
        shown = [dict(message) for message in messages]
        if not self.has_tool_template:
            shown = with_tools(shown, tools)
        own: dict[str, Any] = {
            "messages": shown,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "tools": list(tools) or None,
            "documents": None,
            **self._special_tokens,
        }
        for name in variables or ():
            if name in own:
                raise invalid(
                    f"chat_template_kwargs: {name!r} is set by the server; leave it out", "chat_template_kwargs"
                )
        try:
            text = self._template.render(**own, **(variables or {}))
        except jinja2.TemplateError as error:
            raise invalid(f"messages: the model's chat template refuses them: {error}", "messages") from None
        except RecursionError:
            raise invalid("messages: are nested too deeply for the model's chat template", "messages") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
            raise invalid(
                f"messages: the model's chat template cannot render them ({type(error).__name__}: {error}); "
                "check roles and their order",
                "messages",
            ) from None
        return _cut_behind(text, messages[-1]["content"]) if continue_final_message else text

    @property
    def has_tool_template(self) -> bool:
        """The model's template shows tools, calls and their results; else they are told as text."""
        return "tools" in self._template_variables

    def call_reader(self) -> CallReader:
        """For the calls in this model's text."""
        source = self._template_source or ""
        if self.has_tool_template and CALL_OPENING not in source and "<|start_header_id|>" in source:
            return TaggedCalls("", "")  # Llama 3
        return TaggedCalls(CALL_OPENING, CALL_CLOSING)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _run(self, in_worker: bool, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work) if in_worker else work()

    # The batch calls are the ones that let other threads run meanwhile.

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encodings = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encodings[0].ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)[0])

    def _token_strs(self, token_ids: Sequence[int]) -> list[str]:
        table = self.table
        return [table[token_id].decode(errors="replace") for token_id in token_ids]


def _cut_behind(text: str, content: str) -> str:
    """`text` up to the end of `content`, the last message's; templates may strip it."""
    wanted = content if content in text else content.strip()
    begin = text.rfind(wanted)
    if not wanted or begin < 0:
        raise invalid(
            "continue_final_message: the chat template does not show the last message's content as it is; give it a "
            "content, or leave continue_final_message out",
            "continue_final_message",
        )
    return text[: begin + len(wanted)]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model_dir: {path} is not valid JSON: {error}") from None
    return content


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )


def _variables(source: str) -> set[str]:
    """What a template asks its caller for."""
    return jinja2.meta.find_undeclared_variables(_environment().parse(source))


def _compile(source: str) -> jinja2.Template:
    environment = _environment()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    strftime_now: Callable[[str], str] = lambda pattern: datetime.now().strftime(pattern)  # noqa: E731
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"model_dir: the chat template does not compile: {error} (line {error.lineno})") from None
