"""OpenAI's Responses API, as its own client uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from router.errors import ApiError
from router.response_store import KEEP_S, MAX_NUM_RESPONSES, ResponseStore
from tests.router.fake_cluster import MODEL, Cluster, in_loop, running, until
from tests.router.small_tokenizer import IM_END

REPLY = "Hello, world!"
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": None},
    {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": None},
]
CALLS = (
    'Hm.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
OPTIONS: dict[str, Any] = {"max_model_len": 4096}


def items(response: Any) -> list[Any]:
    """The output, without ids that are new each time."""
    plain = [
        item.model_dump(exclude_none=True, exclude={"id", "call_id", "parsed_arguments"}) for item in response.output
    ]
    for item in plain:
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return plain


async def answers(cluster: Cluster, **fields: Any) -> Any:
    """The response, the same whole and from a stream, whose events are numbered and nested as they should."""
    body: dict[str, Any] = {"model": MODEL, "input": "hi", **fields}
    whole = await cluster.openai.responses.create(**body)
    async with cluster.openai.responses.stream(**body) as stream:
        events = [event async for event in stream]
    streamed = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done == [item.id for item in streamed.output]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == streamed.output_text
    assert items(streamed) == items(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


async def prompt_text(cluster: Cluster) -> str:
    return await cluster.service.tokenizer.decode(cluster.ranks[0].prompt())


@in_loop
async def test_text(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, **OPTIONS) as cluster:
        response = await answers(
            cluster, instructions="Be short.", temperature=0.5, max_output_tokens=50, metadata={"a": "b"}
        )
        assert (response.output_text, response.status, response.error) == (REPLY, "completed", None)
        assert (response.instructions, response.temperature, response.metadata) == ("Be short.", 0.5, {"a": "b"})
        text = await prompt_text(cluster)
        assert text == f"<|im_start|>system\nBe short.{IM_END}\n<|im_start|>user\nhi{IM_END}\n<|im_start|>assistant\n"
        sampling = cluster.ranks[0].submits[0].sampling
        assert (sampling.temperature, sampling.max_tokens) == (0.5, 50)
        assert response.usage.input_tokens == len(cluster.ranks[0].prompt())
        assert response.usage.output_tokens == len(REPLY) + 1


@in_loop
async def test_one_that_is_cut(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, **OPTIONS) as cluster:
        response = await answers(cluster, max_output_tokens=4)
        assert (response.output_text, response.status) == ("Hell", "incomplete")
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"


@in_loop
async def test_logprobs(tmp_path: Path) -> None:
    async with running(tmp_path, reply="Hi", **OPTIONS) as cluster:
        response = await answers(cluster, include=["message.output_text.logprobs"], top_logprobs=2)
        logprobs = response.output[0].content[0].logprobs
        assert [entry.token for entry in logprobs] == ["H", "i"]
        assert [len(entry.top_logprobs) for entry in logprobs] == [2, 2]


@in_loop
async def test_tools_and_the_conversation_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, reply=CALLS, **OPTIONS) as cluster:
        response = await answers(cluster, input="Weather?", tools=TOOLS)
        assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
        calls = response.output[1:]
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [("get_weather", {"city": "Köln"}), ("now", {})]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"result {n}"}
            for n, call in enumerate(calls)
        ]
        await answers(cluster, previous_response_id=response.id, input=results, tools=TOOLS)
        by_id = await prompt_text(cluster)
        whole = [
            {"role": "user", "content": "Weather?"},
            *[item.model_dump(exclude_none=True) for item in response.output],
            *results,
        ]
        await answers(cluster, input=whole, tools=TOOLS)
        assert await prompt_text(cluster) == by_id
        _, user, assistant, first, second, _ = by_id.split(f"{IM_END}\n")
        assert user == "<|im_start|>user\nWeather?"
        assert assistant.count("<tool_call>") == 2
        assert assistant.startswith("<|im_start|>assistant\nHm.\n<tool_call>")
        assert first == "<|im_start|>user\n<tool_response>\nresult 0\n</tool_response>"
        assert second == "<|im_start|>user\n<tool_response>\nresult 1\n</tool_response>"


@in_loop
async def test_outputs_of_a_form(tmp_path: Path) -> None:
    async with running(tmp_path, reply="{}", **OPTIONS) as cluster:
        schema = {"type": "object", "properties": {"b": {}, "a": {}}}
        form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
        response = await answers(cluster, text={"format": form})
        assert response.text.format.schema_ == schema
        grammar = cluster.ranks[0].submits[-1].grammar
        assert grammar is not None
        assert json.loads(grammar.text) == schema
        await answers(cluster, tools=TOOLS, tool_choice={"type": "function", "name": "now"})
        assert items(await answers(cluster, tools=TOOLS, tool_choice={"type": "function", "name": "now"})) == [
            {"type": "function_call", "name": "now", "arguments": "{}", "status": "completed"}
        ]


@in_loop
async def test_what_is_stored(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, **OPTIONS) as cluster:
        client = cluster.openai.responses
        response = await client.create(model=MODEL, input="hi")
        assert (await client.retrieve(response.id)).output_text == REPLY
        unstored = await client.create(model=MODEL, input="hi", store=False)
        await client.delete(response.id)
        for gone in (response.id, unstored.id):
            with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
                await client.retrieve(gone)
            with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
                await client.create(model=MODEL, input="hi", previous_response_id=gone)


@in_loop
async def test_one_is_cancelled(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, **OPTIONS) as cluster:
        cluster.ranks[0].allowance = 2
        stream = await cluster.openai.responses.create(model=MODEL, input="hi", stream=True)
        events = aiter(stream)
        created = await anext(events)
        cancelled = await cluster.openai.responses.cancel(created.response.id)
        assert cancelled.status == "cancelled"
        rest = [event async for event in events]
        assert rest[-1].type == "response.failed"
        await until(lambda: not cluster.ranks[0].live)
        with pytest.raises(openai.NotFoundError):
            await cluster.openai.responses.cancel(created.response.id)


@in_loop
async def test_refused(tmp_path: Path) -> None:
    async with running(tmp_path, **OPTIONS) as cluster:
        for fields, param in (
            ({"input": []}, "input"),
            ({"input": [{"role": "user"}]}, "input[0].content"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
            ({"background": True}, "background"),
            ({"frobnicate": 1}, "frobnicate"),
            ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await cluster.openai.responses.create(model=MODEL, extra_body={"input": "hi", **fields})
            assert refused.value.param == param
        assert not cluster.ranks[0].submits


def test_the_store_is_bounded() -> None:
    now = 0.0
    store = ResponseStore(lambda: now)
    for n in range(MAX_NUM_RESPONSES + 1):
        store.put({"id": f"r{n}"}, [], "a")
    for name, account in (("r0", "a"), ("r1", "b")):
        with pytest.raises(ApiError):
            store.get(name, account)
    assert store.get("r1", "a").response == b'{"id":"r1"}'
    now = KEEP_S
    with pytest.raises(ApiError, match="60 minutes"):
        store.get("r1", "a")
    store.put({"id": "r1"}, [], "a")
    assert len(store._responses) == 1
    assert store._num_bytes == len(b'{"id":"r1"}') + len(b"[]")
