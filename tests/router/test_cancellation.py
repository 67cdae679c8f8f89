"""Requests that nobody wants any more: what they held is free, wherever they are, and their client hears it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api_keys import ApiKey
from tests.router.fake_cluster import HOST, MODEL, Cluster, in_loop, running, until
from tests.router.test_api_keys import KEYS, bearer
from tests.router.test_bad_input import check_error
from tests.router.test_faults import open_stream

NAMED = {"x-request-id": "mine"}
ID = "cmpl-mine"


async def start(cluster: Cluster, **fields: Any) -> asyncio.Task[httpx.Response]:
    body = {"model": MODEL, "prompt": "hi", **fields}
    return asyncio.create_task(cluster.client.post("/v1/completions", json=body, headers=NAMED))


async def cancel(cluster: Cluster) -> None:
    response = await cluster.client.delete(f"/v1/requests/{ID}")
    assert (response.status_code, response.json()) == (200, {"id": ID, "cancelled": True})


async def is_cancelled(cluster: Cluster, asked: asyncio.Task[httpx.Response]) -> None:
    response = await asked
    check_error(response, 499, "cancelled", ID)
    assert response.headers["x-request-id"] == ID
    await until(cluster.is_idle)
    assert cluster.counted("serried_refused") == {"cancelled": 1}
    response = await cluster.client.delete(f"/v1/requests/{ID}")
    assert check_error(response, 404, "not_found", ID, "0 others")["param"] == "id"


@in_loop
async def test_a_request_in_the_queue(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_reqs=10, acquire_timeout_s=20.0) as cluster:
        cluster.control.is_mute = True
        asked = await start(cluster)
        await until(lambda: len(cluster.service._arriving) == 1)
        await cancel(cluster)
        check_error(await asked, 499, "cancelled", ID)
        await until(cluster.is_idle)
        cluster.control.is_mute = False


@in_loop
async def test_a_request_that_is_being_tokenized(tmp_path: Path) -> None:
    async with running(tmp_path, max_model_len=20_000) as cluster:
        may_go_on = threading.Event()
        encode = cluster.service.tokenizer._encode

        def slow(text: str, add_special_tokens: bool) -> list[int]:
            may_go_on.wait()
            return encode(text, add_special_tokens)

        cluster.service.tokenizer._encode = slow  # type: ignore[method-assign]
        try:
            asked = await start(cluster, prompt="x" * 10_000)
            await until(lambda: len(cluster.service._flows) == 1)
            await cancel(cluster)
            await is_cancelled(cluster, asked)
        finally:
            may_go_on.set()
        assert cluster.ranks[0].submits == []


@in_loop
async def test_a_request_that_waits_for_a_rank(tmp_path: Path) -> None:
    async with running(tmp_path, num_ranks=0, rank_wait_timeout_s=20.0) as cluster:
        asked = await start(cluster)
        await until(lambda: cluster.taken.tokens == 2)
        await cancel(cluster)
        await is_cancelled(cluster, asked)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_request_on_a_rank(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 0
        asked = await start(cluster, stream=stream, n=2)
        await until(lambda: len(rank.submits) == 2)
        await cancel(cluster)
        await until(lambda: sorted(rank.aborts) == [1, 2])
        await is_cancelled(cluster, asked)


@in_loop
async def test_a_stream_that_has_begun_ends_with_the_error(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 3
        body = {"model": MODEL, "prompt": "hi", "stream": True}
        async with cluster.client.stream("POST", "/v1/completions", json=body, headers=NAMED) as response:
            await until(lambda: rank.allowance == 0)
            await cancel(cluster)
            events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-2]) in ("H", "He", "Hel")
        assert json.loads(events[-2])["error"]["code"] == "cancelled"
        assert events[-1] == "[DONE]"
        await until(lambda: rank.aborts == [1])


@pytest.mark.parametrize("how", ["cancelled", "deadline", "shut down"])
@in_loop
async def test_one_whose_client_does_not_read_holds_nothing_either(tmp_path: Path, how: str) -> None:
    async with running(tmp_path, reply="x" * 200) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 128 * 100
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, (HOST, cluster.port))
            content = json.dumps({"prompt": "hi", "max_tokens": 200, "n": 128, "logprobs": 20, "stream": True}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\ncontent-length: %d\r\n"
            head += b"x-request-deadline-ms: 3600000\r\n\r\n"
            await loop.sock_sendall(client, head % len(content) + content)
            await until(lambda: rank.allowance == 0)
            [flow] = cluster.service._flows
            # Nothing is taken any more: the answer waits for its client.
            await until(lambda: any(choice.last_delta_at is not None for choice in flow._sequences.choices))
            match how:
                case "cancelled":
                    await cancel(cluster)
                case "deadline":
                    assert flow._expiry is not None
                    flow._expiry._run()
                case "shut down":
                    cluster.service.shut_down()
            await until(lambda: len(rank.aborts) == 128)
            await until(cluster.is_idle)
            assert rank.live == {}


@pytest.mark.parametrize("num_tokens", [0, 3])
@in_loop
async def test_a_client_that_leaves(tmp_path: Path, num_tokens: int) -> None:
    async with running(tmp_path, reply="x" * 200) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = num_tokens
        reader, writer = await open_stream(cluster, stream=True)
        if num_tokens:
            await reader.readuntil(b"data: ")
        else:
            await until(lambda: len(rank.submits) == 1)
        writer.close()
        await until(lambda: rank.aborts == [1] and cluster.is_idle())


@in_loop
async def test_a_client_that_leaves_while_it_queues(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_reqs=10, acquire_timeout_s=20.0) as cluster:
        cluster.control.is_mute = True
        _, writer = await open_stream(cluster)
        await until(lambda: len(cluster.service._arriving) == 1)
        writer.close()
        await until(lambda: not cluster.service._arriving and cluster.is_idle())
        assert cluster.counted("serried_refused") == {"client_gone": 1}
        cluster.control.is_mute = False


@in_loop
async def test_ids_that_are_none(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        for bad in ("mine", "cmpl-" + "x" * 200, "cmpl-%20", "x/y"):
            check_error(await cluster.client.delete(f"/v1/requests/{bad}"), 400, "invalid_request")


@in_loop
async def test_requests_of_others_are_not_found(tmp_path: Path) -> None:
    keys: tuple[ApiKey, ...] = KEYS
    async with running(tmp_path, api_keys=keys) as cluster:
        cluster.ranks[0].allowance = 0
        body = {"model": MODEL, "prompt": "hi"}
        headers = NAMED | bearer("secret-1")
        asked = asyncio.create_task(cluster.client.post("/v1/completions", json=body, headers=headers))
        await until(lambda: len(cluster.ranks[0].submits) == 1)
        url = f"/v1/requests/{ID}"
        check_error(await cluster.client.delete(url), 401, "invalid_api_key")
        check_error(await cluster.client.delete(url, headers=bearer("secret-3")), 404, "not_found")
        assert cluster.ranks[0].aborts == []
        assert (await cluster.client.delete(url, headers=bearer("secret-2"))).status_code == 200
        check_error(await asked, 499, "cancelled")


@in_loop
async def test_without_the_control_actor_others_cannot_be_asked(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        await cluster.control.stop()
        await until(lambda: not cluster.service.control.is_connected)
        response = await cluster.client.delete(f"/v1/requests/{ID}")
        check_error(response, 503, "admission_unavailable", "others could not be asked", "try again")
        await cluster.control.start()
