"""The HTTP server of a router that listens itself, with no proxy of Serve's in front (`router.http_server: own`).

Routers of one node share host and port (SO_REUSEPORT): the kernel gives each connection to one of them, and to others
from the moment at which one dies. It runs on the router's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from router.errors import ApiError, Cause
from router.http_edge import MAX_HEADER_BYTES, MAX_NUM_HEADERS, MAX_URL_BYTES

HEADER_TIMEOUT_S = 30.0
"""From a connection's begin, or the first byte of a further request, to the end of its headers."""
KEEP_ALIVE_S = 75
STOP_TIMEOUT_S = 2
BACKLOG = 2048
_NO_LINGER = struct.pack("ii", 1, 0)


class OwnHttpServer:
    """`start` once, then `stop`."""

    def __init__(self, app: ASGIApp, *, host: str, port: int, cert_file: str | None, key_file: str | None) -> None:
        """Raises ValueError, with what is wrong, if the certificate or its key cannot be used."""
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=_Protocol,
            ws="none",
            loop="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            backlog=BACKLOG,
            ssl_certfile=cert_file,
            ssl_keyfile=key_file,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ValueError(
                f"router.tls_cert_file {cert_file}, router.tls_key_file {key_file}: {error}; give PEM files that "
                "belong together, on every router's node"
            ) from error
        self._server = _Server(config)
        self._host, self._port = host, port
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises OSError where that is not possible."""
        listener = _listener(self._host, self._port)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="HTTP server")
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise OSError(f"the HTTP server on {self._host}:{self._port} has ended")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Take no more connections; those with a request have a moment for its end."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


def _listener(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the actor's business."""
        yield


class _Protocol(HttpToolsProtocol):
    """Bounds what comes before a request is whole enough to be anybody's, and refuses it in the API's form."""

    _num_headers = 0
    _num_bytes = 0
    _header_deadline: asyncio.TimerHandle | None = None
    _refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_headers()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = self._num_bytes = 0
        self.scope["state"]["cut"] = self._cut
        self._await_headers()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(ApiError(Cause.URL_TOO_LONG, f"url: has more than {MAX_URL_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_headers += 1
        self._num_bytes += len(name) + len(value)
        if self._num_headers > MAX_NUM_HEADERS or self._num_bytes > MAX_HEADER_BYTES:
            limits = f"{MAX_NUM_HEADERS} with {MAX_HEADER_BYTES} bytes"
            self._refuse(ApiError(Cause.HEADERS_TOO_LARGE, f"headers: more than {limits}; send up to that"))

    def on_headers_complete(self) -> None:
        self._have_headers()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._answer(self._refusal or ApiError(Cause.INVALID_REQUEST, "this is no valid HTTP/1.1 request"))

    def _cut(self) -> None:
        """Reset the connection: a plain end waits for a client that does not read, with all that is on its way."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        self._refusal = error
        raise ValueError(error.message)  # which has the parser give up, and ends in `send_400_response`

    def _answer(self, error: ApiError) -> None:
        self._have_headers()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of another answer
            return
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _await_headers(self) -> None:
        self._have_headers()
        self._header_deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._headers_late)

    def _have_headers(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _headers_late(self) -> None:
        self._answer(ApiError(Cause.BODY_TIMEOUT, f"the request's headers did not come within {HEADER_TIMEOUT_S:g} s"))

    def shutdown(self) -> None:
        super().shutdown()
        self._have_headers()
