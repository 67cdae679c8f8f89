"""Tools in chats: told to the model, called by it, demanded of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rank_scheduler.messages import GrammarKind
from router.errors import ApiError
from router.protocol import ChatCompletionRequest, parse
from tests.router.fake_cluster import MODEL, Cluster, in_loop, running
from tests.router.small_tokenizer import IM_END

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = 'Hm.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TWO = f'{CALL}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'
OPTIONS: dict[str, Any] = {"max_model_len": 4096}


async def message_of(cluster: Cluster, **fields: Any) -> tuple[Any, str]:
    """The answer's message and the reason of its end, the same from a whole answer and from a stream."""
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    whole = (await cluster.openai.chat.completions.create(**body)).choices[0]
    async with cluster.openai.chat.completions.stream(**body) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert (streamed.message.content or None) == (whole.message.content or None)
    calls, again = whole.message.tool_calls or [], streamed.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        (call.function.name, call.function.arguments) for call in again
    ]
    assert len({call.id for call in [*calls, *again]}) == len(calls) + len(again)
    return whole.message, whole.finish_reason


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@in_loop
async def test_calls_and_text(tmp_path: Path) -> None:
    async with running(tmp_path, reply=TWO, **OPTIONS) as cluster:
        message, reason = await message_of(cluster)
        assert message.content == "Hm."
        assert calls_of(message) == [("get_weather", {"city": "Köln"}), ("now", {})]
        assert reason == "tool_calls"
        message, _ = await message_of(cluster, parallel_tool_calls=False)
        assert calls_of(message) == [("get_weather", {"city": "Köln"})]
        # Nobody reads calls where the model was told of no tools.
        message, reason = await message_of(cluster, tool_choice="none")
        assert (message.content, message.tool_calls, reason) == (TWO, None, "stop")


@in_loop
async def test_text_only(tmp_path: Path) -> None:
    async with running(tmp_path, reply="It <is> 7.", **OPTIONS) as cluster:
        message, reason = await message_of(cluster, logprobs=True)
        assert (message.content, message.tool_calls, reason) == ("It <is> 7.", None, "stop")


@in_loop
async def test_logprobs_of_calls_are_told_once(tmp_path: Path) -> None:
    async with running(tmp_path, reply=CALL, **OPTIONS) as cluster:
        response = await cluster.chat(tools=TOOLS, logprobs=True, stream=True)
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        shown = [event["choices"][0].get("logprobs") for event in events]
        tokens = [entry["token"] for logprobs in shown if logprobs for entry in logprobs["content"]]
        assert len(tokens) == len(CALL.encode())


@in_loop
async def test_a_demanded_call(tmp_path: Path) -> None:
    async with running(tmp_path, reply='{"city": "Bonn"}', **OPTIONS) as cluster:
        message, reason = await message_of(cluster, tool_choice=NAMED)
        assert calls_of(message) == [("get_weather", {"city": "Bonn"})]
        assert reason == "tool_calls"
        grammar = cluster.ranks[0].submits[-1].grammar
        assert grammar is not None
        assert (grammar.kind, json.loads(grammar.text)) == (GrammarKind.JSON_SCHEMA, CITY)
    reply = '[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Bonn"}}]'
    async with running(tmp_path, reply=reply, **OPTIONS) as cluster:
        message, reason = await message_of(cluster, tool_choice="required")
        assert calls_of(message) == [("now", {}), ("get_weather", {"city": "Bonn"})]
        assert (message.content, reason) == (None, "tool_calls")
        grammar = cluster.ranks[0].submits[-1].grammar
        assert grammar is not None
        schema = json.loads(grammar.text)
        assert "maxItems" not in schema
        assert [each["properties"]["name"] for each in schema["items"]["anyOf"]] == [
            {"const": "get_weather"},
            {"const": "now"},
        ]
        await message_of(cluster, tool_choice="required", parallel_tool_calls=False)
        grammar = cluster.ranks[0].submits[-1].grammar
        assert grammar is not None
        assert json.loads(grammar.text)["maxItems"] == 1


@in_loop
async def test_a_model_without_a_template_for_tools_is_told_as_text(tmp_path: Path) -> None:
    async with running(tmp_path, **OPTIONS) as cluster:
        messages = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"tz": "é"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        ]
        body = {"model": MODEL, "messages": messages, "tools": TOOLS}
        response = await cluster.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        text = await cluster.service.tokenizer.decode(cluster.ranks[0].prompt())
        system, user, assistant, result, _ = text.split(f"{IM_END}\n")
        assert system.startswith("<|im_start|>system\nBe short.\n\nYou can call functions.")
        assert '{"name": "get_weather", "description": "Of a city.", "parameters": {"type": "object"' in system
        assert user == "<|im_start|>user\nWeather?"
        assert assistant == (
            '<|im_start|>assistant\n<tool_call>\n{"name": "now", "arguments": {"tz": "é"}}\n</tool_call>'
        )
        assert result == "<|im_start|>user\n<tool_response>\n12:00\n</tool_response>"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required field is missing"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools", "the function 'now' is there twice; rename one"),
        ({"tools": [TOOLS[1]] * 129}, "tools", "at most 128"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'required'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools; give tools"),
        (
            {"tools": TOOLS[1:], "tool_choice": NAMED},
            "tool_choice",
            "'get_weather' is none of the tools (now)",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "response_format already says",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required field is missing"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, None, ""),
        (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]},
            "messages[0].tool_call_id",
            "only a tool's message may have one",
        ),
    ],
)
def test_refused(fields: dict[str, Any], param: str | None, words: str) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    if param is None:
        parse(body, ChatCompletionRequest)
        return
    with pytest.raises(ApiError) as caught:
        parse(body, ChatCompletionRequest)
    assert caught.value.param == param
    assert words in caught.value.message
