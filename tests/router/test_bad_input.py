"""Whatever a caller sends, the answer is a clear error of the same shape, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fake_cluster import HOST, MODEL, TIMEOUT_S, Cluster, in_loop, running, until

MESSAGES = [{"role": "user", "content": "hi"}]


def check_error(response: httpx.Response, status: int, code: str, *words: str) -> dict[str, Any]:
    """The error, which has the OpenAI shape and says all `words`."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    for word in words:
        assert word in error["message"], error["message"]
    return error


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Cluster]]:
    """One router for the many cases, on a loop that turns only while a case runs."""
    with asyncio.Runner() as runner:
        context = running(tmp_path_factory.mktemp("model"))
        cluster = runner.run(context.__aenter__())
        yield runner, cluster
        runner.run(context.__aexit__(None, None, None))


async def goes_on(cluster: Cluster) -> None:
    assert (await cluster.chat()).status_code == 200


CHAT_CASES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "no messages": ({"messages": None}, "messages", ("list",)),
    "too many messages": ({"messages": MESSAGES * 5000}, "messages", ("at most 4096",)),
    "empty messages": ({"messages": []}, "messages", ("at least 1",)),
    "messages of a wrong type": ({"messages": "hi"}, "messages", ("list", "'hi'")),
    "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", ("'robot'", "'user'")),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content", ("missing",)),
    "null content": ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", ("missing",)),
    "image part": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        ("'image_url'", "only parts of type 'text'"),
    ),
    "unknown message field": (
        {"messages": [{"role": "user", "content": "x", "color": 1}]},
        "messages[0].color",
        ("unknown field",),
    ),
    "tool calls": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
        ("missing",),
    ),
    "template refuses": (
        {"messages": [{"role": "user", "content": "x", "name": "y"}]},
        "messages",
        ("names are unknown here",),
    ),
    "model of a wrong type": ({"model": 5}, "model", ("string",)),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens", ("greater than or equal to 1", "got 0")),
    "max_tokens negative": ({"max_tokens": -5}, "max_tokens", ("got -5",)),
    "max_tokens text": ({"max_tokens": "5"}, "max_tokens", ("integer", "'5'")),
    "max_tokens fraction": ({"max_tokens": 1.5}, "max_tokens", ("integer",)),
    "max_tokens true": ({"max_tokens": True}, "max_tokens", ("integer",)),
    "max_tokens contradicts": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", ("contradicts",)),
    "temperature -1": ({"temperature": -1}, "temperature", ("greater than or equal to 0", "got -1")),
    "temperature 3": ({"temperature": 3}, "temperature", ("less than or equal to 2",)),
    "temperature huge": ({"temperature": 10**400}, "temperature", ()),
    "top_p 0": ({"top_p": 0}, "top_p", ("greater than 0", "got 0")),
    "top_k -2": ({"top_k": -2}, "top_k", ("-1",)),
    "min_p 2": ({"min_p": 2}, "min_p", ("less than or equal to 1",)),
    "seed beyond int64": ({"seed": 2**63}, "seed", ("9223372036854775807",)),
    "n 0": ({"n": 0}, "n", ("got 0",)),
    "n 129": ({"n": 129}, "n", ("less than or equal to 128", "got 129")),
    "n 1000": ({"n": 1000}, "n", ("less than or equal to 128", "got 1000")),
    "100 stop strings": ({"stop": ["x"] * 100}, "stop", ("at most 16", "100")),
    "empty stop string": ({"stop": ["a", ""]}, "stop[1]", ("at least 1",)),
    "stop of a wrong type": ({"stop": 5}, "stop", ("list",)),
    "stop token outside the vocabulary": ({"stop_token_ids": [10**6]}, "stop_token_ids", ("1000000", "vocabulary")),
    "too many stop tokens": ({"stop_token_ids": [1] * 129}, "stop_token_ids", ("at most 128",)),
    "stream of a wrong type": ({"stream": "yes"}, "stream", ("boolean",)),
    "stream_options without stream": ({"stream_options": {"include_usage": True}}, "stream_options", ("stream",)),
    "unknown stream option": ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", ("unknown field",)),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", ("logprobs = true",)),
    "top_logprobs 21": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ("20",)),
    "unknown field": ({"frobnicate": 1}, "frobnicate", ("unknown field",)),
    "response_format": (
        {"response_format": {"type": "xml"}},
        "response_format.type",
        ("'text', 'json_object' or 'json_schema'", "'xml'"),
    ),
    "presence_penalty": ({"presence_penalty": 2.5}, "presence_penalty", ("less than or equal to 2", "2.5")),
}


@pytest.mark.parametrize("case", CHAT_CASES)
def test_bad_chat_requests(shared: tuple[asyncio.Runner, Cluster], case: str) -> None:
    runner, cluster = shared
    fields, param, words = CHAT_CASES[case]
    body = {"model": MODEL, "messages": MESSAGES, **fields}

    async def run() -> None:
        num_submits = len(cluster.ranks[0].submits)
        response = await cluster.client.post("/v1/chat/completions", content=json.dumps(body))
        assert check_error(response, 400, "invalid_request", *words)["param"] == param
        assert len(cluster.ranks[0].submits) == num_submits
        await goes_on(cluster)

    runner.run(asyncio.wait_for(run(), TIMEOUT_S))


COMPLETION_CASES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "empty prompt": ({"prompt": ""}, "prompt", ("no tokens",)),
    "no prompts": ({"prompt": []}, "prompt", ("not empty",)),
    "mixed prompts": ({"prompt": ["a", 5]}, "prompt", ("prompt 1",)),
    "empty among prompts": ({"prompt": ["a", ""]}, "prompt", ("no tokens",)),
    "token outside the vocabulary": ({"prompt": [1, 5000]}, "prompt", ("5000", "vocabulary")),
    "negative token": ({"prompt": [-1]}, "prompt", ("-1",)),
    "huge token": ({"prompt": [2**80]}, "prompt", ("vocabulary",)),
    "too many prompts": ({"prompt": ["a"] * 129}, "prompt", ("129", "128")),
    "too many sequences": ({"prompt": ["a", "b"], "n": 65}, "n", ("65", "2 prompts", "130 sequences", "at most 128")),
    "logprobs 21": ({"logprobs": 21}, "logprobs", ("20",)),
    "logprobs true": ({"logprobs": True}, "logprobs", ("integer",)),
    "prompt_logprobs 21": ({"prompt_logprobs": 21}, "prompt_logprobs", ("20",)),
    "prompt_logprobs in a stream": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ("stream",)),
    "suffix": ({"suffix": "x"}, "suffix", ("not supported",)),
    "best_of as a switch": ({"best_of": True}, "best_of", ("not supported",)),
    "best_of": ({"best_of": 3}, "best_of", ("not supported",)),
    "messages": ({"messages": MESSAGES}, "messages", ("unknown field",)),
}


@pytest.mark.parametrize("case", COMPLETION_CASES)
def test_bad_completion_requests(shared: tuple[asyncio.Runner, Cluster], case: str) -> None:
    runner, cluster = shared
    fields, param, words = COMPLETION_CASES[case]

    async def run() -> None:
        response = await cluster.client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **fields})
        assert check_error(response, 400, "invalid_request", *words)["param"] == param
        await goes_on(cluster)

    runner.run(asyncio.wait_for(run(), TIMEOUT_S))


BODIES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "nothing": (b"", ("not valid JSON",)),
    "not JSON": (b"hello", ("not valid JSON",)),
    "cut JSON": (b'{"model": "small", "messages": [', ("not valid JSON",)),
    "a list": (b"[1, 2]", ("must be a JSON object",)),
    "null": (b"null", ("must be a JSON object",)),
    "NaN": (b'{"model": "small", "messages": [], "temperature": NaN}', ("not valid JSON",)),
    "Infinity": (b'{"model": "small", "messages": [], "temperature": Infinity}', ("not valid JSON",)),
    "1e999": (b'{"model": "small", "messages": [], "temperature": 1e999}', ()),
    "invalid UTF-8": (b'{"model": "small", "messages": [{"role":"user","content":"\xff\xfe"}]}', ("UTF-8",)),
    "lone surrogate": (b'{"model": "small", "messages": [{"role":"user","content":"\\ud800"}]}', ("not valid JSON",)),
    "very deep": (b'{"model": ' + b"[" * 200_000, ("nested too deeply",)),
}  # fmt: skip


@pytest.mark.parametrize("case", BODIES)
def test_bad_bodies(shared: tuple[asyncio.Runner, Cluster], case: str) -> None:
    runner, cluster = shared
    body, words = BODIES[case]

    async def run() -> None:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            check_error(await cluster.client.post(path, content=body), 400, "invalid_request", *words)
        await goes_on(cluster)

    runner.run(asyncio.wait_for(run(), TIMEOUT_S))


@in_loop
async def test_values_that_mean_not_used_are_accepted(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        response = await cluster.chat(
            tools=None, tool_choice="none", response_format={"type": "text"}, logit_bias={}, presence_penalty=0.0,
            frequency_penalty=0, user="u", stop=None, seed=None, n=None, stream=False, stream_options=None,
            max_tokens=None, logprobs=False, top_logprobs=None, temperature=None, parallel_tool_calls=True,
        )  # fmt: skip
        assert response.status_code == 200, response.text


@in_loop
async def test_prompts_longer_than_the_model(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        error = check_error(await cluster.complete("x" * 256), 400, "context_length_exceeded", "256")
        assert error["param"] == "prompt"
        check_error(await cluster.chat("x" * 300), 400, "context_length_exceeded", "256")
        error = check_error(
            await cluster.complete("x" * 200, max_tokens=57), 400, "context_length_exceeded", "57", "200", "256", "56"
        )
        assert error["param"] == "max_tokens"
        error = check_error(await cluster.chat(max_completion_tokens=256), 400, "context_length_exceeded")
        assert error["param"] == "max_completion_tokens"
        assert (await cluster.complete("x" * 200, max_tokens=56)).status_code == 200
        await goes_on(cluster)


@in_loop
async def test_a_text_that_can_never_fit_is_not_encoded(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        encoded: list[int] = []
        encode = cluster.service.tokenizer._encode

        def watched(text: str, add_special_tokens: bool) -> list[int]:
            encoded.append(len(text))
            return encode(text, add_special_tokens)

        cluster.service.tokenizer._encode = watched  # type: ignore[method-assign]
        # The longest token of the tests' tokenizer, <|im_start|>, has 12 characters.
        huge = "x" * 1_000_000
        error = check_error(await cluster.complete(huge), 400, "context_length_exceeded", "1000000", "83334", "256")
        assert error["param"] == "prompt"
        error = check_error(await cluster.chat(huge), 400, "context_length_exceeded", "256")
        assert error["param"] == "messages"
        check_error(await cluster.complete(["a", huge]), 400, "context_length_exceeded", "256")
        assert encoded == [1]
        check_error(await cluster.complete("<|im_start|>" * 255 + "x"), 400, "context_length_exceeded", "256 tokens")
        assert (await cluster.complete("<|im_start|>" * 255)).status_code == 200
        await goes_on(cluster)


@in_loop
async def test_the_prompt_tokens_of_one_request_are_limited(tmp_path: Path) -> None:
    async with running(tmp_path, max_model_len=20_000, num_blocks=1_000_000) as cluster:
        error = check_error(
            await cluster.complete([5] * 8193, n=128, max_tokens=1), 400, "invalid_request",
            "8193", "128", "1048704", "1048576",
        )  # fmt: skip
        assert error["param"] == "n"
        error = check_error(await cluster.complete([[5] * 15_000] * 70), 400, "invalid_request", "1050000", "1048576")
        assert error["param"] == "prompt"
        assert cluster.ranks[0].submits == []
        await goes_on(cluster)


@in_loop
async def test_a_request_at_the_limit_leaves_other_streams_alive(tmp_path: Path) -> None:
    async with running(tmp_path, max_model_len=20_000, num_blocks=1_000_000) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 1
        async with cluster.client.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "hi", "stream": True}
        ) as response:
            lines = response.aiter_lines()
            assert "H" in await anext(lines)
            stop = ["\U0001f9ff" * 1024] * 16
            large = asyncio.create_task(cluster.complete([5] * 8192, n=128, max_tokens=1, stop=stop))
            await until(lambda: len(rank.submits) == 129)
            rank.allow(float("inf"))
            assert (await large).status_code == 200
            assert [line async for line in lines][-2] == "data: [DONE]"
        assert len(rank.connections) == 1


@in_loop
async def test_token_routes_have_limits(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        post = cluster.client.post
        error = check_error(
            await post("/detokenize", json={"tokens": [5] * 131_073}), 400, "invalid_request", "131072", "131073"
        )
        assert error["param"] == "tokens"
        assert (await post("/detokenize", json={"tokens": [64] * 131_072})).json() == {"prompt": "a" * 131_072}
        text = "x" * 524_289
        error = check_error(await post("/tokenize", json={"prompt": text}), 400, "invalid_request", "524288", "524289")
        assert error["param"] == "prompt"
        messages = [{"role": "user", "content": text}]
        error = check_error(await post("/tokenize", json={"messages": messages}), 400, "invalid_request", "524288")
        assert error["param"] == "messages"
        answer = (await post("/tokenize", json={"prompt": text[1:], "return_token_strs": True})).json()
        assert answer["count"] == 524_288
        assert set(answer["token_strs"]) == {"x"}


@in_loop
async def test_unknown_models_and_routes(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        assert (
            check_error(await cluster.chat(model="other"), 404, "model_not_found", "'other'", MODEL)["param"] == "model"
        )
        assert (await cluster.client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
        unnamed = await cluster.client.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert unnamed.json()["model"] == MODEL
        check_error(await cluster.client.get("/v1/nothing"), 404, "not_found", "/v1/nothing")
        for path in ("/v1/embeddings", "/v1/audio/speech", "/v1/images/generations", "/v1/rerank"):
            check_error(await cluster.client.post(path, json={}), 404, "not_found", path, MODEL, "only")
        wrong = await cluster.client.get("/v1/completions")
        check_error(wrong, 405, "method_not_allowed", "POST")
        assert wrong.headers["allow"] == "POST"
        await goes_on(cluster)


@in_loop
async def test_a_large_body_is_refused_by_its_announcement(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        reader, writer = await asyncio.open_connection(HOST, cluster.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 413 " in head
        assert b"connection: close" in head
        assert b"body_too_large" in await reader.read()
        writer.close()
        await goes_on(cluster)


@in_loop
async def test_a_client_that_sends_all_of_a_large_body_sees_the_refusal(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        body = json.dumps({"model": MODEL, "prompt": "x" * 10_000_000})
        response = await cluster.client.post("/v1/completions", content=body)
        check_error(response, 413, "body_too_large", "4194304")

        async def in_pieces() -> Any:
            for _ in range(100):
                yield b"x" * 100_000

        response = await cluster.client.post("/v1/completions", content=in_pieces())
        check_error(response, 413, "body_too_large", "4194304")
        await goes_on(cluster)


@in_loop
async def test_a_client_that_leaves_within_its_body_is_forgotten(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        _, writer = await asyncio.open_connection(HOST, cluster.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        await goes_on(cluster)
        sock: socket.socket = writer.get_extra_info("socket")
        assert sock.fileno() >= 0
        writer.close()
        await writer.wait_closed()
        await goes_on(cluster)


@in_loop
async def test_an_internal_error_has_the_same_shape(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path) as cluster:

        def broken(*_: object, **__: object) -> str:
            raise RuntimeError("broken template")

        whole = cluster.service.tokenizer.render_chat
        cluster.service.tokenizer.render_chat = broken  # type: ignore[method-assign]
        response = await cluster.chat()
        error = check_error(response, 500, "internal_error", response.headers["x-request-id"])
        assert "broken template" not in error["message"]
        assert "broken template" in caplog.text
        await until(cluster.is_idle)
        check_error(await cluster.client.post("/tokenize", json={"messages": MESSAGES}), 500, "internal_error")
        assert cluster.counted("serried_refused") == {"internal_error": 2}
        cluster.service.tokenizer.render_chat = whole  # type: ignore[method-assign]
        await goes_on(cluster)


@in_loop
async def test_every_refusal_is_counted_once(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        client = cluster.client
        refusals = {
            "not_found": client.get("/nowhere"),
            "method_not_allowed": client.get("/v1/completions"),
            "body_too_large": client.post("/v1/completions", content=b"x" * 5_000_000),
            "model_not_found": client.get("/v1/models/other"),
            "context_length_exceeded": cluster.complete("x" * 256),
            "invalid_request": client.post("/detokenize", json={"tokens": "x"}),
        }
        for cause, refusal in refusals.items():
            assert (await refusal).json()["error"]["code"] == cause
        assert cluster.counted("serried_refused") == dict.fromkeys(refusals, 1)
        assert cluster.counted("serried_requests") == {"rejected": len(refusals)}
