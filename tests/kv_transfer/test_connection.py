"""Framed connections over loopback sockets; where a peer misbehaves, it is played with bare streams."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kv_transfer import connection as connection_module
from kv_transfer.connection import Connection, Listener, connect
from kv_transfer.wire import (
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    ClientHandshake,
    FrameBuffer,
    Hello,
    ServerHandshake,
    WireError,
    frame,
)
from tests.kv_transfer.test_wire import with_bottomless_field

HOST = "127.0.0.1"
SECRET = b"the cluster's secret"
TIMEOUT_S = 10.0
SHORT_S = 0.05
LARGE = b"l" * 100_000


@pytest.fixture(autouse=True)
def _nothing_unclosed() -> Iterator[None]:
    yield
    gc.collect()  # a forgotten socket or task warns when it goes, and warnings are errors


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run it within a deadline; whatever the event loop could only log, and every task left over, fails it."""

    async def limited() -> None:
        logged: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        async with asyncio.timeout(30):
            await test()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left over: {left}"
        assert not logged

    asyncio.run(limited())


class Peer:
    """A connection whose frames are kept."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        connection.start(self.frames.put_nowait)

    def send(self, *payloads: bytes) -> None:
        for payload in payloads:
            assert self.connection.send(payload)

    async def next(self, count: int = 1) -> list[bytes]:
        async with asyncio.timeout(TIMEOUT_S):
            return [await self.frames.get() for _ in range(count)]

    async def closed(self) -> str:
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.shield(self.connection.closed)


class Service:
    """A listener and whom it let in."""

    def __init__(self) -> None:
        self.port = 0
        self.accepted: asyncio.Queue[Peer] = asyncio.Queue()
        self.listener = Listener(SECRET, self._accept)

    def _accept(self, connection: Connection) -> None:
        self.accepted.put_nowait(Peer(connection))

    async def next(self) -> Peer:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.accepted.get()

    async def connect(self, name: str = "r-1", secret: bytes = SECRET) -> Connection:
        return await connect(HOST, self.port, secret=secret, role="router", name=name)

    async def pair(self) -> tuple[Peer, Peer]:
        """Both ends of a new connection, the client's first."""
        ours = Peer(await self.connect())
        return ours, await self.next()


@asynccontextmanager
async def service() -> AsyncIterator[Service]:
    running = Service()
    running.port = await running.listener.start(HOST)
    try:
        yield running
    finally:
        await running.listener.close()


class Bare:
    """The other end of a socket, without the code under test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._buffer = FrameBuffer()
        self._frames: list[bytes] = []

    async def frame(self) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            while not self._frames:
                data = await self.reader.read(1 << 16)
                assert data, "connection ended"
                self._frames += self._buffer.feed(data)
        return self._frames.pop(0)

    async def rest(self) -> bytes:
        """What comes until the other end closes."""
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionResetError):
                return await self.reader.read()
        return b""

    async def hello(self, secret: bytes = SECRET, name: str = "bare") -> bytes:
        """The answer to the server's challenge."""
        return ClientHandshake(secret, os.urandom(NONCE_BYTES), "router", name).answer(await self.frame())

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@asynccontextmanager
async def bare_client(port: int) -> AsyncIterator[Bare]:
    bare = Bare(*await asyncio.open_connection(HOST, port))
    try:
        yield bare
    finally:
        await bare.close()


@asynccontextmanager
async def bare_server(serve: Callable[[Bare], Awaitable[None]]) -> AsyncIterator[int]:
    """A server that treats its connections with `serve`, one after another; yields its port."""
    served: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bare = Bare(reader, writer)
        try:
            await serve(bare)
        finally:
            await bare.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.get_running_loop().create_task(handle(reader, writer)))

    server = await asyncio.start_server(begin, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*served)
    finally:
        server.close()


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


# ---- frames ----


def test_frames_arrive_in_order_both_ways() -> None:
    async def test() -> None:
        payloads = [b"", *(str(i).encode() * (i % 50) for i in range(500)), b"x" * (3 << 20), b"last"]
        async with service() as running:
            ours, theirs = await running.pair()
            peer = theirs.connection.peer
            assert peer is not None
            assert (peer.role, peer.name) == ("router", "r-1")
            ours.send(*payloads)
            theirs.send(*reversed(payloads))
            assert await theirs.next(len(payloads)) == payloads
            assert await ours.next(len(payloads)) == payloads[::-1]

    run(test)


def test_frames_that_come_with_the_servers_proof() -> None:
    """However large: a server may speak at once, and the client learns of the proof a moment later."""

    async def serve(bare: Bare) -> None:
        handshake = ServerHandshake(SECRET, os.urandom(NONCE_BYTES))
        bare.writer.write(frame(handshake.challenge()))
        _, proof = handshake.accept(await bare.frame())
        bare.writer.write(frame(proof) + frame(b"first") + frame(LARGE) + frame(b"last"))
        assert await bare.frame() == b"heard"

    async def test() -> None:
        async with bare_server(serve) as port:
            connection = await connect(HOST, port, secret=SECRET, role="router", name="r")
            for _ in range(5):
                await asyncio.sleep(0)
            ours = Peer(connection)
            assert await ours.next(3) == [b"first", LARGE, b"last"]
            ours.send(b"heard")
            assert await ours.closed() == "closed by peer"

    run(test)


def test_frames_that_come_with_the_clients_hello() -> None:
    async def test() -> None:
        async with service() as running, bare_client(running.port) as bare:
            bare.writer.write(frame(await bare.hello()) + frame(b"first") + frame(LARGE) + frame(b"last"))
            theirs = await running.next()
            assert await theirs.next(3) == [b"first", LARGE, b"last"]

    run(test)


def test_nothing_is_delivered_after_the_owner_gave_up() -> None:
    """Not even what came in the same packet as the frame that made it give up."""

    async def test() -> None:
        seen: list[bytes] = []

        def accept(connection: Connection) -> None:
            def refuse(payload: bytes) -> None:
                seen.append(payload)
                connection.abort("refused")

            connection.start(refuse)

        listener = Listener(SECRET, accept)
        port = await listener.start(HOST)
        async with bare_client(port) as bare:
            bare.writer.write(frame(await bare.hello()) + frame(b"1") + frame(b"2"))
            await bare.rest()
        async with bare_client(port) as bare:
            bare.writer.write(frame(await bare.hello()))
            await bare.frame()
            bare.writer.write(frame(b"3") + frame(b"4"))
            await bare.rest()
        await listener.close()
        assert seen == [b"1", b"3"]

    run(test)


# ---- ends ----


def test_close_delivers_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT_S", TIMEOUT_S)

    async def test() -> None:
        async with service() as running:
            ours, theirs = await running.pair()
            ours.send(*[LARGE] * 50, b"last")
            ours.connection.close("done")
            assert not ours.connection.send(b"too late")
            assert (await theirs.next(51))[-1] == b"last"
            assert await ours.closed() == "done"
            assert await theirs.closed() == "closed by peer"
            assert not theirs.connection.send(b"nobody there")

    run(test)


def test_close_waits_for_a_peer_that_does_not_read_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT_S", SHORT_S)

    async def test() -> None:
        async with service() as running, bare_client(running.port) as bare:
            bare.writer.write(frame(await bare.hello()))
            theirs = await running.next()
            theirs.send(b"x" * (32 << 20))
            theirs.connection.close("done")
            assert await theirs.closed() == "done"

    run(test)


def test_abort_ends_both_ends_at_once() -> None:
    async def test() -> None:
        async with service() as running:
            ours, theirs = await running.pair()
            ours.send(b"x" * (32 << 20))
            ours.connection.abort("gave up")
            assert not ours.connection.send(b"too late")
            assert await ours.closed() == "gave up"
            assert (await theirs.closed()).startswith("closed by peer")
            ours.connection.close("again")
            ours.connection.abort("again")
            assert await ours.closed() == "gave up"

    run(test)


def test_an_oversize_frame_ends_the_connection() -> None:
    async def test() -> None:
        async with service() as running, bare_client(running.port) as bare:
            bare.writer.write(frame(await bare.hello()))
            theirs = await running.next()
            bare.writer.write((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
            assert f"announced a frame of {MAX_FRAME_BYTES + 1} bytes" in await theirs.closed()

    run(test)


def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_SEND_BUFFER_BYTES", 1 << 20)

    async def test() -> None:
        async with service() as running, bare_client(running.port) as bare:
            bare.writer.write(frame(await bare.hello()))
            deaf = await running.next()
            ours, theirs = await running.pair()
            num_sent = 0
            while deaf.connection.send(LARGE):
                num_sent += 1
                assert num_sent < 1000, "far more than the limit and the kernel's buffers"
                theirs.send(LARGE)
                assert await ours.next() == [LARGE]
            assert "left more than 1048576 bytes unread" in await deaf.closed()
            theirs.send(b"unharmed")
            assert await ours.next() == [b"unharmed"]

    run(test)


# ---- listener ----


@pytest.mark.parametrize("sent", [b"", b"\x10", b"\x40\0\0\0half a hello"])
def test_who_does_not_finish_the_handshake_is_cut_off(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_TIMEOUT_S", SHORT_S)

    async def test() -> None:
        async with service() as running, bare_client(running.port) as bare:
            await bare.frame()
            bare.writer.write(sent)
            assert await bare.rest() == b""
            assert running.listener.num_refused == 1
            assert running.accepted.empty()

    run(test)


def test_who_leaves_during_the_handshake_is_forgotten() -> None:
    async def test() -> None:
        async with service() as running:
            async with bare_client(running.port) as bare:
                hello = frame(await bare.hello())
                bare.writer.write(hello[: len(hello) // 2])
            async with asyncio.timeout(TIMEOUT_S):
                while not running.listener.num_refused:  # noqa: ASYNC110 - the listener tells nobody
                    await asyncio.sleep(0)
            assert running.accepted.empty()

    run(test)


async def _garbage(bare: Bare) -> bytes:
    return b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n"


async def _framed_garbage(bare: Bare) -> bytes:
    return frame(b"\xc1" * 20)


async def _large_frame(bare: Bare) -> bytes:
    return (1 << 20).to_bytes(4, "little") + b"x" * 5000


async def _wrong_secret(bare: Bare) -> bytes:
    return frame(await bare.hello(secret=b"another"))


async def _changed_name(bare: Bare) -> bytes:
    hello = msgspec.msgpack.decode(await bare.hello(), type=Hello)
    return frame(msgspec.msgpack.encode(msgspec.structs.replace(hello, name="somebody else")))


async def _bottomless(bare: Bare) -> bytes:
    return frame(with_bottomless_field(await bare.hello()))


async def _proof_instead(bare: Bare) -> bytes:
    return frame(ServerHandshake(SECRET, os.urandom(NONCE_BYTES)).challenge())


@pytest.mark.parametrize(
    "attack",
    [_garbage, _framed_garbage, _large_frame, _wrong_secret, _changed_name, _bottomless, _proof_instead],
)
def test_a_bad_client_is_refused_and_disturbs_nobody(attack: Callable[[Bare], Awaitable[bytes]]) -> None:
    async def test() -> None:
        async with service() as running, bare_client(running.port) as bare:
            ours, theirs = await running.pair()
            bare.writer.write(await attack(bare))
            await bare.rest()
            assert running.listener.num_refused == 1
            ours.send(b"still here")
            assert await theirs.next() == [b"still here"]
            await running.pair()
            assert running.accepted.empty()

    run(test)


def test_a_replayed_hello_is_refused() -> None:
    async def test() -> None:
        async with service() as running:
            async with bare_client(running.port) as bare:
                hello = frame(await bare.hello())
                bare.writer.write(hello)
                await running.next()
            async with bare_client(running.port) as bare:
                bare.writer.write(hello)
                await bare.rest()
            assert running.listener.num_refused == 1
            assert running.accepted.empty()

    run(test)


def test_closing_the_listener_closes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT_S", SHORT_S)

    async def test() -> None:
        running = Service()
        running.port = await running.listener.start(HOST)
        async with bare_client(running.port) as silent, bare_client(running.port) as deaf:
            await silent.frame()
            deaf.writer.write(frame(await deaf.hello()))
            unread = await running.next()
            unread.send(b"x" * (32 << 20))
            ours, theirs = await running.pair()
            await running.listener.close()
            assert theirs.connection.closed.result() == "server closed"
            assert unread.connection.closed.result() == "server closed"
            assert await ours.closed() == "closed by peer"
            assert await silent.rest() == b""
            with pytest.raises(OSError, match="Connect"):
                await running.connect()
            await running.listener.close()
            running.port = await running.listener.start(HOST)
            await running.pair()
            await running.listener.close()

    run(test)


def test_many_clients_at_once() -> None:
    async def test() -> None:
        names = [f"r-{i}" for i in range(100)]
        async with service() as running:
            clients = [Peer(connection) for connection in await asyncio.gather(*map(running.connect, names))]
            for name, ours in zip(names, clients, strict=True):
                ours.send(name.encode())
            for theirs in [await running.next() for _ in names]:
                peer = theirs.connection.peer
                assert peer is not None
                assert await theirs.next() == [peer.name.encode()]
                theirs.send(b"hello " + peer.name.encode())
            for name, ours in zip(names, clients, strict=True):
                assert await ours.next() == [b"hello " + name.encode()]
            clients[0].connection.close()
            assert await clients[0].closed() == "closed"
            clients[1].send(b"still here")
        for ours in clients[1:]:
            assert (await ours.closed()).startswith("closed by peer")

    run(test)


# ---- connect ----


def test_nobody_listens() -> None:
    async def test() -> None:
        with pytest.raises(ConnectionRefusedError):
            await connect(HOST, unused_port(), secret=SECRET, role="router", name="r")

    run(test)


def test_wrong_secret() -> None:
    async def test() -> None:
        async with service() as running:
            with pytest.raises(WireError, match="connection ended during the handshake"):
                await running.connect(secret=b"another")

    run(test)


def test_a_server_that_says_nothing() -> None:
    async def serve(bare: Bare) -> None:
        assert await bare.rest() == b""

    async def test() -> None:
        async with bare_server(serve) as port:
            with pytest.raises(TimeoutError):
                await connect(HOST, port, secret=SECRET, role="router", name="r", timeout_s=SHORT_S)

    run(test)


def test_connect_is_cancelled() -> None:
    async def test() -> None:
        greeted = asyncio.Event()

        async def serve(bare: Bare) -> None:
            bare.writer.write(frame(ServerHandshake(SECRET, os.urandom(NONCE_BYTES)).challenge()))
            await bare.frame()
            greeted.set()
            assert await bare.rest() == b""

        async with bare_server(serve) as port:
            connecting = asyncio.create_task(connect(HOST, port, secret=SECRET, role="router", name="r"))
            async with asyncio.timeout(TIMEOUT_S):
                await greeted.wait()
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting

    run(test)


@pytest.mark.parametrize("answer", [b"", b"\x10\0", b"\xff\xff\xff\xff", frame(b"\xc1"), frame(b"x" * 4000)])
def test_a_server_that_talks_nonsense(answer: bytes) -> None:
    async def serve(bare: Bare) -> None:
        bare.writer.write(answer)

    async def test() -> None:
        async with bare_server(serve) as port:
            with pytest.raises(WireError):
                await connect(HOST, port, secret=SECRET, role="router", name="r")

    run(test)


def test_an_impostor() -> None:
    async def serve(bare: Bare) -> None:
        handshake = ServerHandshake(SECRET, os.urandom(NONCE_BYTES))
        bare.writer.write(frame(handshake.challenge()))
        await bare.frame()
        other = ClientHandshake(b"another", os.urandom(NONCE_BYTES), "router", "r")
        _, proof = ServerHandshake(b"another", b"n" * NONCE_BYTES).accept(
            other.answer(ServerHandshake(b"another", b"n" * NONCE_BYTES).challenge())
        )
        bare.writer.write(frame(proof) + frame(b"trust me"))
        await bare.rest()

    async def test() -> None:
        async with bare_server(serve) as port:
            with pytest.raises(WireError, match="the server does not hold the cluster secret"):
                await connect(HOST, port, secret=SECRET, role="router", name="r")

    run(test)
