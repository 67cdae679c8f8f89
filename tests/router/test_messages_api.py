"""Anthropic's Messages API, as its own client uses it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.router.fake_cluster import HOST, MODEL, Cluster, in_loop, running
from tests.router.small_tokenizer import IM_END

TOOLS: list[Any] = [
    {"name": "get_weather", "description": "Of a city.", "input_schema": {"type": "object"}},
    {"name": "now", "input_schema": {"type": "object"}},
]
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
HI: list[Any] = [{"role": "user", "content": "hi"}]
CALLS = (
    'Hm.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


@contextlib.asynccontextmanager
async def served(
    tmp_path: Path, reply: str = "Hello, world!", **options: Any
) -> AsyncIterator[tuple[Cluster, anthropic.AsyncAnthropic]]:
    async with (
        running(tmp_path, reply=reply, **({"max_model_len": 4096} | options)) as cluster,
        anthropic.AsyncAnthropic(base_url=f"http://{HOST}:{cluster.port}", api_key="none", max_retries=0) as client,
    ):
        yield cluster, client


async def answers(client: anthropic.AsyncAnthropic, **fields: Any) -> anthropic.types.Message:
    """The answer, the same whole and from a stream."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": HI, **fields}
    whole = await client.messages.create(**body)
    async with client.messages.stream(**body) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        streamed = await stream.get_final_message()
    assert text == "".join(block.text for block in whole.content if block.type == "text")

    def shown(message: anthropic.types.Message) -> Any:
        blocks = [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]
        return blocks, message.stop_reason, message.stop_sequence, message.role, message.usage.output_tokens

    assert shown(streamed) == shown(whole)
    return whole


@in_loop
async def test_text(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, client):
        message = await answers(
            client, system="Be short.", metadata={"user_id": "u1"}, extra_body={"temperature": 0.5, "top_k": 3}
        )
        assert [block.type for block in message.content] == ["text"]
        assert (message.content[0].text, message.stop_reason) == ("Hello, world!", "end_turn")
        assert message.id.startswith("msg_") or message.id.startswith("msg-")
        text = await cluster.service.tokenizer.decode(cluster.ranks[0].prompt())
        assert text == f"<|im_start|>system\nBe short.{IM_END}\n<|im_start|>user\nhi{IM_END}\n<|im_start|>assistant\n"
        sampling = cluster.ranks[0].submits[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 3, 300)
        usage = message.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(cluster.ranks[0].prompt())
        assert usage.output_tokens == len("Hello, world!") + 1


@in_loop
async def test_how_it_stops(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        message = await answers(client, stop_sequences=["wor"])
        assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
            "Hello, ",
            "stop_sequence",
            "wor",
        )
        message = await answers(client, max_tokens=4)
        assert (message.content[0].text, message.stop_reason) == ("Hell", "max_tokens")


@in_loop
async def test_tools(tmp_path: Path) -> None:
    async with served(tmp_path, reply=CALLS) as (cluster, client):
        message = await answers(client, tools=TOOLS)
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        assert [(b.name, b.input) for b in message.content[1:]] == [("get_weather", {"city": "Köln"}), ("now", {})]
        message = await answers(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert len(message.content) == 2
        conversation = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [block.model_dump() for block in message.content]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And?"},
                    {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "7 degrees"},
                ],
            },
        ]
        await answers(client, tools=TOOLS, messages=conversation)
        text = await cluster.service.tokenizer.decode(cluster.ranks[0].prompt())
        _, _, assistant, result, user, _ = text.split(f"{IM_END}\n")
        assert assistant.endswith('{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>')
        assert result == "<|im_start|>user\n<tool_response>\n7 degrees\n</tool_response>"
        assert user == "<|im_start|>user\nAnd?"


@in_loop
async def test_a_demanded_tool(tmp_path: Path) -> None:
    async with served(tmp_path, reply='{"city": "Bonn"}') as (cluster, client):
        message = await answers(client, tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"})
        assert [(block.type, block.input) for block in message.content] == [("tool_use", {"city": "Bonn"})]
        assert cluster.ranks[0].submits[-1].grammar is not None


@in_loop
async def test_an_output_of_a_schema(tmp_path: Path) -> None:
    async with served(tmp_path, reply="{}") as (cluster, client):
        schema = {"type": "object", "properties": {"b": {}, "a": {}}}
        await answers(client, output_config={"format": {"type": "json_schema", "schema": schema}})
        grammar = cluster.ranks[0].submits[-1].grammar
        assert grammar is not None
        assert json.loads(grammar.text) == schema


@in_loop
async def test_an_answer_goes_on_within_the_assistants_last_message(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, client):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]
        await answers(client, messages=messages)
        text = await cluster.service.tokenizer.decode(cluster.ranks[0].prompt())
        assert text.endswith("<|im_start|>assistant\nIt is")


@in_loop
async def test_counting_tokens(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, client):
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        counted = await client.messages.count_tokens(model=MODEL, messages=messages, tools=TOOLS)
        assert not cluster.ranks[0].submits
        await answers(client, messages=messages, tools=TOOLS)
        assert counted.input_tokens == len(cluster.ranks[0].prompt())


@in_loop
async def test_errors_have_its_shape(tmp_path: Path) -> None:
    async with served(tmp_path, max_num_queued_reqs=0) as (_, client):
        with pytest.raises(anthropic.ServiceUnavailableError) as overloaded:
            await answers(client)
        assert overloaded.value.body["error"]["type"] == "overloaded_error"
        assert "retry-after" in overloaded.value.response.headers
    async with served(tmp_path) as (_, client):
        for fields, words in (
            ({"max_tokens": 0}, "max_tokens"),
            ({"frobnicate": 1}, "frobnicate: unknown field"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
            (
                {"messages": [{"role": "user", "content": [USE]}]},
                "messages[0].content[0]: tool_use belongs to the role 'assistant', not to 'user'",
            ),
            ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
            ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: 'x' is none of the tools"),
        ):
            body = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]} | fields
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.post("/v1/messages", body=body, cast_to=object)
            assert refused.value.body["type"] == "error"
            assert refused.value.body["error"]["type"] == "invalid_request_error"
            assert words in refused.value.body["error"]["message"]
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.count_tokens(model="x", messages=[{"role": "user", "content": "hi"}])
        assert unknown.value.body["error"]["type"] == "not_found_error"
