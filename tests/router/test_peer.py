"""A kept connection survives whatever connecting to it and using it raises."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kv_transfer.connection import Connection, Listener, connect
from router.peer import PeerFault, keep_connected
from tests.router.fake_cluster import HOST, SECRET, in_loop, until


@pytest.mark.parametrize("error", [RecursionError("deep"), AttributeError("a mistake of ours"), OverflowError()])
@in_loop
async def test_what_fails_is_counted_logged_once_and_tried_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(SECRET, lambda _: None)
    port = await listener.start(HOST)
    faults: Counter[PeerFault] = Counter()
    used: list[Connection] = []

    async def open_connection() -> Connection:
        if faults[PeerFault.UNREACHABLE] < 2:
            raise error
        return await connect(HOST, port, secret=SECRET, role="router", name="r")

    async def use(connection: Connection) -> str:
        used.append(connection)
        if len(used) < 3:
            raise error
        return await asyncio.shield(connection.closed)

    keeping = asyncio.create_task(
        keep_connected(
            "the peer",
            open_connection,
            use,
            is_wanted=lambda: True,
            max_backoff_s=1.0,
            count=lambda fault: faults.update([fault]),
        )
    )
    await until(lambda: len(used) == 3)
    assert faults == {PeerFault.UNREACHABLE: 2, PeerFault.UNEXPECTED: 2}
    await until(lambda: used[0].closed.done() and used[1].closed.done())
    assert not used[2].closed.done()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await used[2].closed
    await listener.close()
    assert caplog.text.count("trying on") == 1


@in_loop
async def test_it_ends_when_it_is_no_longer_wanted() -> None:
    listener = Listener(SECRET, lambda connection: connection.close("go"))
    port = await listener.start(HOST)
    wanted = [True]

    async def use(connection: Connection) -> str:
        wanted.clear()
        return await asyncio.shield(connection.closed)

    await keep_connected(
        "the peer",
        lambda: connect(HOST, port, secret=SECRET, role="router", name="r"),
        use,
        is_wanted=lambda: bool(wanted),
        max_backoff_s=60.0,
        count=lambda fault: None,
    )
    await listener.close()
