"""The router's own HTTP server over real sockets, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import own_http
from cluster.own_http import OwnHttpServer
from router.http_api import build_app
from router.http_edge import MAX_HEADER_BYTES, MAX_NUM_HEADERS, MAX_URL_BYTES
from tests.e2e.system import free_port
from tests.router.fake_cluster import HOST, MODEL, Cluster, in_loop, until
from tests.router.fake_cluster import running as running_router
from tests.router.test_http_limits import NO_HTTP


def certificate(directory: Path) -> tuple[str, str]:
    """A self-signed one for the loopback, and its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return str(cert), str(key)


@contextlib.asynccontextmanager
async def running(tmp_path: Path, num_servers: int = 1, **settings: Any) -> AsyncIterator[tuple[Cluster, int]]:
    """A router with one more way in: so many own servers on one port."""
    tls = {name: settings.pop(name, None) for name in ("cert_file", "key_file")}
    port = free_port()
    async with running_router(tmp_path, **settings) as cluster, contextlib.AsyncExitStack() as stack:
        for _ in range(num_servers):
            server = OwnHttpServer(build_app(cluster.service), host=HOST, port=port, **tls)
            await server.start()
            stack.push_async_callback(server.stop)
        yield cluster, port


def request(path: str, body: dict[str, Any] | None = None, headers: bytes = b"") -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    method = b"GET" if body is None else b"POST"
    head = b"%b %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n"
    return head % (method, path.encode(), len(content), headers) + content


async def spoken(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@in_loop
async def test_it_serves_and_streams(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, port), httpx.AsyncClient(base_url=f"http://{HOST}:{port}") as client:
        assert (await client.get("/ready")).status_code == 200
        response = await client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "stream": True})
        assert response.text.endswith("data: [DONE]\n\n")
        assert "server" not in response.headers


@in_loop
async def test_several_share_a_port_and_go_on_without_one_that_ends(tmp_path: Path) -> None:
    port = free_port()
    async with running_router(tmp_path) as cluster:
        app = build_app(cluster.service)
        first, second = (OwnHttpServer(app, host=HOST, port=port, cert_file=None, key_file=None) for _ in range(2))
        await first.start()
        await second.start()
        for server in (first, second):
            for _ in range(20):
                assert b" 200 " in await spoken(port, request("/health"))
            await server.stop()
            if server is first:
                continue
        with pytest.raises(ConnectionRefusedError):
            await spoken(port, request("/health"))


@in_loop
async def test_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    async with running(tmp_path, cert_file=cert, key_file=key) as (_, port):
        context = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(base_url=f"https://{HOST}:{port}", verify=context) as client:
            response = await client.post("/v1/completions", json={"model": MODEL, "prompt": "hi"})
            assert response.json()["choices"][0]["text"] == "Hello, world!"
        async with httpx.AsyncClient(base_url=f"https://{HOST}:{port}") as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")
        assert b" 200 " not in await spoken(port, request("/health"))


def test_a_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    for files in ((cert, cert), (key, key), (cert, "/nowhere"), ("/nowhere", key)):
        with pytest.raises(ValueError, match=r"router.tls_cert_file .*give PEM files"):
            OwnHttpServer(lambda: None, host=HOST, port=1, cert_file=files[0], key_file=files[1])  # type: ignore[arg-type, misc]


@in_loop
async def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        server = OwnHttpServer(
            lambda: None,  # type: ignore[arg-type, misc]
            host=HOST,
            port=taken.getsockname()[1],
            cert_file=None,
            key_file=None,
        )
        with pytest.raises(OSError, match="in use"):
            await server.start()


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (request("/health", headers=b"x: y\r\n" * (MAX_NUM_HEADERS + 1)), 431, "headers_too_large"),
        (request("/health", headers=b"x: " + b"y" * MAX_HEADER_BYTES + b"\r\n"), 431, "headers_too_large"),
        (request("/" + "x" * MAX_URL_BYTES), 414, "url_too_long"),
        (b"no HTTP\r\n\r\n", 400, "invalid_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_request"),
    ],
)
@in_loop
async def test_what_is_refused_before_it_is_whole(tmp_path: Path, data: bytes, status: int, code: str) -> None:
    async with running(tmp_path) as (_, port):
        head, _, body = (await spoken(port, data)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in head
        assert json.loads(body)["error"]["code"] == code
        assert b" 200 " in await spoken(port, request("/health"))


@pytest.mark.parametrize("case", NO_HTTP)
@in_loop
async def test_what_is_no_http(tmp_path: Path, case: str) -> None:
    async with running(tmp_path) as (_, port):
        answer = await spoken(port, NO_HTTP[case])
        assert b" 500 " not in answer
        assert b"smuggled" not in answer
        assert b" 200 " in await spoken(port, request("/health"))


@in_loop
async def test_headers_that_do_not_come_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_http, "HEADER_TIMEOUT_S", 0.1)
    async with running(tmp_path) as (_, port):
        for data in (b"", b"GET /health HTTP/1.1\r\nhost:"):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(data)
            assert b" 408 " in await reader.read()
            writer.close()


@in_loop
async def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path) -> None:
    async with running(tmp_path, reply="x" * 200, send_timeout_s=0.2) as (cluster, port):
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, (HOST, port))
            fields = {"prompt": "hi", "max_tokens": 200, "n": 128, "logprobs": 20, "stream": True}
            await loop.sock_sendall(client, request("/v1/completions", fields))
            await until(lambda: cluster.counted("serried_refused") == {"client_gone": 1})
            await until(cluster.is_idle)
            # Reset, and not only closed behind what it has not read.
            with pytest.raises(ConnectionResetError):
                await _read_to_the_end(client)


async def _read_to_the_end(client: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(client, 1 << 16):
        pass
