"""Grammars as llguidance takes them, and the check that refuses a wrong one before it is queued.

llguidance follows rules and references by recursion, as deep as a text may make them; on a thread with a stack of
the usual size a long chain of rules ends the process. So it sees texts of bounded size only, and parses them on
threads that were started within `large_stacks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from rank_scheduler.messages import Grammar, GrammarKind
from router.errors import invalid

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 64 << 10
"""Of a grammar's text in UTF-8. Every sequence of a request carries it to its rank."""
MAX_LARK_BYTES = 16 << 10
"""Of one in Lark: the time for a token grows with the square of the rules that it can be in at once."""
MAX_MULTIPLE_OF = 10_000
"""Of a schema's `multipleOf`, without its decimal point: the time to compile grows with its square."""
CHECK_TIMEOUT_S = 2.0

# 64 KiB of rules or references that refer to each other need less than 64 MiB; only what is used is real memory.
_STACK_BYTES = 128 << 20
# The size is the whole process's until it is set back.
_stack_size_lock = threading.Lock()
_MAX_REASON_CHARACTERS = 400
_NUM_REMEMBERED = 256


def llguidance_grammar(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises ValueError, with the reason, where that already shows a fault."""
    text = grammar.text
    num_bytes, limit = len(text.encode()), MAX_LARK_BYTES if grammar.kind is GrammarKind.LARK else MAX_GRAMMAR_BYTES
    if num_bytes > limit:
        raise ValueError(f"it has {num_bytes} bytes, at most {limit} are allowed")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = _parsed(text)
            if not isinstance(schema, dict):
                raise ValueError(f"a schema must be a JSON object, this is a {type(schema).__name__}")
            _check_multiples(schema)
            return LLMatcher.grammar_from_json_schema(text)
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case GrammarKind.CHOICE:
            choices = _parsed(text)
            if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
                raise ValueError("choices must be a list of strings, not empty")
            # Lark's string literals are JSON's.
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(text)


def parser_limits() -> LLParserLimits:
    """llguidance's own limits, without its inner state in messages."""
    return LLParserLimits(verbose_errors=False)


def shown_reason(message: str) -> str:
    """What llguidance says, in a length that fits an answer."""
    reason = message.split("\n<state>")[0].strip().rstrip(".")
    if reason.startswith("NoExtension"):
        return "no output matches it"
    return reason if len(reason) <= _MAX_REASON_CHARACTERS else f"{reason[:_MAX_REASON_CHARACTERS]}…"


@contextlib.contextmanager
def large_stacks() -> Iterator[None]:
    """Threads that are started meanwhile may hand texts of callers to llguidance."""
    with _stack_size_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(usual)


class GrammarChecker:
    """Checks callers' grammars on a thread of its own. Use from one event loop; its owner closes it."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")
        with large_stacks():
            self._worker.submit(int)  # starts its only thread

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises ApiError, which names the field `param` and what is wrong with it.

        What cannot be checked, or not in time, passes: the rank, which compiles it, has the last word.
        """
        fault = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                fault = await asyncio.get_running_loop().run_in_executor(self._worker, _fault, grammar)
        if fault:
            raise invalid(f"{param}: {fault}; correct or simplify it", param)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)


@lru_cache(_NUM_REMEMBERED)
def _fault(grammar: Grammar) -> str:
    """What is wrong with a grammar, for any vocabulary; empty: nothing that shows before it is compiled."""
    try:
        return shown_reason(LLMatcher.validate_grammar(llguidance_grammar(grammar), limits=parser_limits()))
    except ValueError as error:
        return str(error)
    except BaseException:  # a panic of llguidance's is no Exception
        logger.exception("llguidance cannot check a grammar of %d characters", len(grammar.text))
        return ""


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _check_multiples(schema: dict[str, Any]) -> None:
    """Raises ValueError for a `multipleOf` that llguidance would compile for minutes, or for ever."""
    pending: list[Any] = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            pending += node.values()
            value = node.get("multipleOf")
            if isinstance(value, int | float) and not isinstance(value, bool):
                _, digits, exponent = Decimal(str(value)).as_tuple()
                if not isinstance(exponent, int):
                    raise ValueError(f"multipleOf {value} is no number")
                steps = int("".join(map(str, digits))) * 10 ** max(0, min(exponent, 9))
                if steps > MAX_MULTIPLE_OF:
                    raise ValueError(
                        f"multipleOf {value} is too fine to be compiled, at most {MAX_MULTIPLE_OF} (of the last "
                        "decimal place) is supported"
                    )
