"""Tools in a chat whose template knows nothing of them: told in the system message, calls and results as text.

The form is the one that Hermes models began with and many others have learnt: calls between `<tool_call>` markers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

CALL_OPENING, CALL_CLOSING = "<tool_call>", "</tool_call>"

_INTRODUCTION = (
    "You can call functions. These are the ones that there are, as JSON, one in each line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call a function, write a JSON object with its name and its arguments between markers, and nothing behind it:\n"
    '{opening}\n{{"name": "<the function\'s name>", "arguments": <an object with its arguments>}}\n{closing}'
)


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation in messages that have a role and a text only."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told = _INTRODUCTION.format(tools=lines, opening=CALL_OPENING, closing=CALL_CLOSING)
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = "".join(
        f"\n{CALL_OPENING}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CALL_CLOSING}"
        for call in message.get("tool_calls", ())
    )
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    return plain | {"content": (content + calls).lstrip("\n") if calls else content}
