"""Headers, URLs and bodies that are too large or too slow, and bytes that are no HTTP: one clear answer, no harm."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from router.http_edge import MAX_HEADER_BYTES, MAX_NUM_HEADERS, MAX_URL_BYTES
from tests.router.fake_cluster import HOST, Cluster, in_loop, running
from tests.router.test_bad_input import check_error, goes_on


@in_loop
async def test_headers_have_limits(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        many = [(f"x-{i}", "y") for i in range(MAX_NUM_HEADERS)]
        response = await cluster.client.get("/health", headers=many)
        check_error(response, 431, "headers_too_large", str(MAX_NUM_HEADERS), str(MAX_HEADER_BYTES))
        # (The server itself may refuse what comes in one line.)
        large = [(f"x-{i}", "y" * 8000) for i in range(9)]
        check_error(await cluster.client.get("/health", headers=large), 431, "headers_too_large")
        assert (await cluster.client.get("/health", headers=many[:100])).status_code == 200
        await goes_on(cluster)


@in_loop
async def test_urls_have_a_limit(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        response = await cluster.client.get("/v1/models/" + "x" * MAX_URL_BYTES)
        check_error(response, 414, "url_too_long", str(MAX_URL_BYTES))
        response = await cluster.client.get("/health", params={"x": "y" * MAX_URL_BYTES})
        check_error(response, 414, "url_too_long")
        await goes_on(cluster)


@in_loop
async def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path, body_timeout_s=0.1) as cluster:
        reader, writer = await asyncio.open_connection(HOST, cluster.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 408 " in head
        error = json.loads(await reader.read())["error"]
        assert error["code"] == "body_timeout"
        assert "0.1 s" in error["message"]
        assert "1 bytes" in error["message"]
        writer.close()
        # One that is whole in time may be answered as slowly as it takes.
        cluster.ranks[0].allowance = 0
        waiting = asyncio.create_task(cluster.complete())
        await asyncio.wait([waiting], timeout=0.3)
        assert not waiting.done()
        cluster.ranks[0].allow(float("inf"))
        assert (await waiting).status_code == 200


NO_HTTP: dict[str, bytes] = {
    "nothing": b"",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "no version": b"GET /health\r\n\r\n",
    "an unknown version": b"GET /health HTTP/9.9\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nhost x\r\n\r\n",
    "a null in a header": b"GET /health HTTP/1.1\r\nhost: x\x00y\r\n\r\n",
    "no ASCII in the URL": b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    "two lengths": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    "a length that is none": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n{}",
    "a huge length": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: " + b"9" * 30 + b"\r\n\r\n{}",
    "length and chunks": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n",
    "a chunk that is none": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "a method that is none": b"\r\n\r\n\x00\x01\x02 / HTTP/1.1\r\n\r\n",
    "an upgrade": b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    "cut off": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-le",
}  # fmt: skip


async def spoken(cluster: Cluster, data: bytes) -> bytes:
    """What comes back for these bytes until the server closes, or for a while if it waits for more."""
    reader, writer = await asyncio.open_connection(HOST, cluster.port)
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("case", NO_HTTP)
@in_loop
async def test_what_is_no_http(tmp_path: Path, case: str) -> None:
    async with running(tmp_path) as cluster:
        answer = await spoken(cluster, NO_HTTP[case])
        assert b" 500 " not in answer
        assert b"smuggled" not in answer
        await goes_on(cluster)
