"""Bodies that only their second reading, as a chat completion, finds wrong; and the shape of every refusal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from router.api_keys import ApiKey
from tests.router.fake_cluster import MODEL, in_loop, running

USER = {"role": "user", "content": "x"}


def use(name: str, arguments: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": "c", "name": name, "input": {} if arguments is None else arguments}


HOLE = "a nested value"
"""Its place in a body: whatever encodes JSON here has its own limit of depth."""


def nested(depth: int) -> str:
    return '{"a":' * depth + "{}" + "}" * depth


MESSAGES_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a call's name": (
        {"messages": [USER, {"role": "assistant", "content": [use("a b")]}]},
        "messages[1].content[0].name: ",
    ),
    "too many calls": (
        {"messages": [USER, {"role": "assistant", "content": [use("f")] * 129}]},
        "messages[1].content: has 129 calls",
    ),
    "too many results": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}] * 4097}]},
        "messages: ",
    ),
    "one too many with the system's": ({"system": "s", "messages": [USER] * 4096}, "messages: "),
    "the name of the tool choice": ({"tool_choice": {"type": "tool", "name": "a b"}}, "tool_choice.name: "),
}


@in_loop
async def test_messages_that_no_chat_completion_may_have(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            limit = {"max_tokens": 2} if path == "/v1/messages" else {}
            for case, (fields, words) in MESSAGES_CASES.items():
                body = {"model": MODEL, "messages": [USER], **limit, **fields}
                response = await cluster.client.post(path, json=body)
                assert response.status_code == 400, (path, case, response.text)
                assert response.json()["type"] == "error"
                assert response.json()["error"]["message"].startswith(words), (case, response.text)


RESPONSES_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "one too many with the instructions": ({"instructions": "i", "input": [USER] * 4096}, "input"),
    "too many calls": (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 129},
        "input",
    ),
    "a format's name": (
        {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {"type": "object"}}}},
        "text.format.name",
    ),
    "a tool choice": ({"tool_choice": 5}, "tool_choice"),
    "the name of the tool choice": ({"tool_choice": {"type": "function", "name": "a b"}}, "tool_choice.name"),
}


@in_loop
async def test_responses_that_no_chat_completion_may_have(tmp_path: Path) -> None:
    async with running(tmp_path, max_model_len=200_000, num_blocks=1_000_000) as cluster:

        async def refused(fields: dict[str, Any]) -> dict[str, Any]:
            body = {"model": MODEL, "input": "x", "max_output_tokens": 2, **fields}
            response = await cluster.client.post("/v1/responses", json=body)
            assert response.status_code == 400, response.text
            error: dict[str, Any] = response.json()["error"]
            assert error["message"].startswith(f"{error['param']}: ")
            return error

        for case, (fields, param) in RESPONSES_CASES.items():
            assert (await refused(fields))["param"] == param, case
        long = {"model": MODEL, "input": [USER] * 4090, "max_output_tokens": 2}
        stored = (await cluster.client.post("/v1/responses", json=long)).json()["id"]
        assert (await refused({"input": [USER] * 10, "previous_response_id": stored}))["param"] == "input"


@in_loop
async def test_a_tool_choice_is_refused_by_the_path_that_the_client_wrote(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        named = {"type": "function", "function": {"name": "a b"}}
        for choice, param in ((5, "tool_choice"), (named, "tool_choice.function.name"), ({}, "tool_choice.type")):
            assert (await cluster.chat(tool_choice=choice)).json()["error"]["param"] == param


@in_loop
async def test_nested_values_are_answered_or_refused_at_every_depth(tmp_path: Path) -> None:
    """Each place where a value of the client's own is written and read again."""
    async with running(tmp_path, max_model_len=8_192, num_blocks=1_000_000) as cluster:
        chat = {"model": MODEL, "messages": [USER], "max_tokens": 2}
        called = {"role": "assistant", "content": [use("f", HOLE)]}
        tool = {"type": "function", "function": {"name": "f", "parameters": HOLE}}
        output = {"format": {"type": "json_schema", "schema": HOLE}}
        bodies = [
            ("/v1/messages/count_tokens", {"model": MODEL, "messages": [USER], "output_config": output}),
            ("/v1/messages", {**chat, "messages": [USER, called]}),
            ("/v1/messages", {**chat, "tools": [{"name": "f", "input_schema": HOLE}]}),
            ("/v1/chat/completions", {**chat, "tools": [tool]}),
            ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required"}),
            ("/v1/chat/completions", {**chat, "chat_template_kwargs": {"a": HOLE}}),
            ("/v1/chat/completions", {**chat, "guided_json": HOLE}),
        ]
        for depth in [*range(100, 900, 100), *range(900, 1000, 5)]:
            for path, body in bodies:
                content = json.dumps(body).replace(json.dumps(HOLE), nested(depth))
                response = await cluster.client.post(path, content=content)
                assert response.status_code in (200, 400), (depth, path, list(body), response.text)
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": nested(depth)}}
            response = await cluster.client.post(
                "/v1/chat/completions", json={**chat, "messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
            )
            assert response.status_code in (200, 400), (depth, response.text)


@in_loop
async def test_every_refusal_under_messages_has_anthropics_shape(tmp_path: Path, caplog: Any) -> None:
    key = ApiKey(name="a", sha256=hashlib.sha256(b"sk-a").hexdigest())
    async with running(tmp_path, api_keys=(key,)) as cluster:

        def broken(*_: object, **__: object) -> str:
            raise RuntimeError("broken template")

        headers = {"x-api-key": "sk-a"}
        body = {"model": MODEL, "max_tokens": 2, "messages": [USER]}
        answers = [
            (401, "authentication_error", await cluster.client.post("/v1/messages", json=body)),
            (413, "", await cluster.client.post("/v1/messages", content=b"x" * 5_000_000, headers=headers)),
            (405, "", await cluster.client.get("/v1/messages", headers=headers)),
            (404, "not_found_error", await cluster.client.get("/v1/messages/nothing", headers=headers)),
        ]
        cluster.service.tokenizer.render_chat = broken  # type: ignore[method-assign]
        count = {"model": MODEL, "messages": [USER]}
        answers += [
            (500, "api_error", await cluster.client.post("/v1/messages", json=body, headers=headers)),
            (500, "api_error", await cluster.client.post("/v1/messages/count_tokens", json=count, headers=headers)),
        ]
        for status, kind, response in answers:
            assert response.status_code == status, response.text
            assert response.json()["type"] == "error", response.text
            assert response.json()["error"]["type"] == kind or not kind
        chat = await cluster.client.post("/v1/chat/completions", json=body)
        assert chat.json()["error"]["code"] == "invalid_api_key"
