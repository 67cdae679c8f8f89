"""The deadline of a client that does not read, on a clock that moves only when told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.types import Message

from router.timed_send import ClientTooSlow, TimedSend
from tests.router.fake_cluster import in_loop

MESSAGE = {"type": "http.response.body", "body": b"x", "more_body": True}
TIMEOUT_S = 5.0


class Client:
    """Reads while `reads` is set. `wait` moves the loop's clock."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.num_taken = 0
        loop = asyncio.get_running_loop()
        self._now = loop.time()
        clock: Callable[[], float] = lambda: self._now  # noqa: E731
        loop.time = clock  # type: ignore[method-assign]

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.num_taken += 1

    async def wait(self, seconds: float) -> None:
        self._now += seconds
        for _ in range(5):
            await asyncio.sleep(0)


@in_loop
async def test_a_message_that_is_not_taken_ends_the_answer() -> None:
    client = Client()
    send = TimedSend(client.send, TIMEOUT_S)
    sending = asyncio.create_task(send(MESSAGE))
    await client.wait(0)
    await client.wait(TIMEOUT_S - 1)
    assert not sending.done()
    await client.wait(1)
    with pytest.raises(ClientTooSlow, match="5 s"):
        await sending
    assert client.num_taken == 0
    send.close()


@in_loop
async def test_only_the_message_being_sent_counts() -> None:
    client = Client()
    send = TimedSend(client.send, TIMEOUT_S)
    client.reads.set()
    await send(MESSAGE)
    await client.wait(3 * TIMEOUT_S)  # nothing to send for long
    await send(MESSAGE)
    await client.wait(TIMEOUT_S / 2)
    client.reads.clear()
    sending = asyncio.create_task(send(MESSAGE))
    await client.wait(0)
    await client.wait(TIMEOUT_S - 1)
    assert not sending.done()
    client.reads.set()
    await sending
    assert client.num_taken == 3
    send.close()


@in_loop
async def test_another_end_of_the_task_stays_what_it_is() -> None:
    client = Client()
    send = TimedSend(client.send, TIMEOUT_S)
    sending = asyncio.create_task(send(MESSAGE))
    await client.wait(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    send.close()
