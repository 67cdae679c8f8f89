"""The control endpoint over real sockets, without Ray."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from cluster.control import ControlEndpoint
from cluster.control_actor import ControlActor
from kv_transfer.connection import Connection, connect
from kv_transfer.wire import WireError
from rank_scheduler.config import SchedulerConfig
from router.control_messages import (
    Acquire,
    ControlToRouter,
    Granted,
    Holding,
    Members,
    PrefillDone,
    QueueCounts,
    Refused,
    Register,
    Registered,
    Release,
    Resume,
    ShuttingDown,
)
from tests.cluster.test_membership import record

SECRET = b"s" * 32
TIMEOUT_S = 5.0


class Client:
    """A peer that keeps what it is told."""

    def __init__(self, connection: Connection, kind: Any) -> None:
        self.connection = connection
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        connection.start(lambda payload: self.inbox.put_nowait(msgspec.msgpack.decode(payload, type=kind)))

    def send(self, message: object) -> None:
        assert self.connection.send(msgspec.msgpack.encode(message))

    async def next(self, kind: type[Any]) -> Any:
        """The next message of this kind, others skipped."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                message = await self.inbox.get()
                if isinstance(message, kind):
                    return message

    async def closed(self) -> str:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.connection.closed


class Cluster:
    def __init__(self, endpoint: ControlEndpoint, port: int) -> None:
        self.endpoint = endpoint
        self.port = port
        self.now = 0.0

    async def router(self, name: str, holdings: list[Holding] | None = None) -> Client:
        connection = await connect("127.0.0.1", self.port, secret=SECRET, role="router", name=name)
        client = Client(connection, ControlToRouter)
        client.send(Resume(holdings or []))
        return client

    async def rank(self, boot_id: str) -> Client:
        connection = await connect("127.0.0.1", self.port, secret=SECRET, role="rank", name=boot_id)
        client = Client(connection, Registered)
        client.send(Register(record(boot_id)))
        return client

    async def settle(self, condition: Callable[[], bool]) -> None:
        """Let the event loop run until the sockets have brought about `condition`."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110 - what is awaited has no event to wait for
                await asyncio.sleep(0)


@asynccontextmanager
async def cluster(max_num_queued_reqs: int | None = None) -> AsyncIterator[Cluster]:
    scheduler = SchedulerConfig(max_num_queued_reqs=max_num_queued_reqs)
    # Tests tick by themselves.
    endpoint = ControlEndpoint(scheduler, SECRET, tick_interval_s=1000)
    running = Cluster(endpoint, await endpoint.start("127.0.0.1"))
    endpoint.clock = lambda: running.now
    try:
        yield running
        endpoint.check_integrity()
    finally:
        await endpoint.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(limited())


def test_routers_see_ranks_come_and_go() -> None:
    async def test() -> None:
        async with cluster() as running:
            router = await running.router("r")
            assert (await router.next(Members)).ranks == []
            first, second = await running.rank("a"), await running.rank("b")
            assert (await first.next(Registered)).rank_id == "mixed/0"
            assert (await second.next(Registered)).rank_id == "mixed/1"
            assert [rank.rank_id for rank in (await router.next(Members)).ranks] == ["mixed/0"]
            assert [rank.rank_id for rank in (await router.next(Members)).ranks] == ["mixed/0", "mixed/1"]
            first.connection.abort("killed")
            assert [rank.boot_id for rank in (await router.next(Members)).ranks] == ["b"]
            third = await running.rank("c")
            assert (await third.next(Registered)).rank_id == "mixed/0"
            late = await running.router("late")
            assert [rank.boot_id for rank in (await late.next(Members)).ranks] == ["c", "b"]

    run(test)


def test_a_rank_that_reconnects_keeps_its_id_and_routers_are_not_disturbed() -> None:
    async def test() -> None:
        async with cluster() as running:
            old = await running.rank("a")
            await old.next(Registered)
            router = await running.router("r")
            await router.next(Members)
            new = await running.rank("a")
            assert (await new.next(Registered)).rank_id == "mixed/0"
            await old.closed()
            await running.settle(lambda: len(running.endpoint.snapshot()["members"]) == 1)
            assert not any(isinstance(message, Members) for message in router.inbox._queue)  # type: ignore[attr-defined]

    run(test)


def test_requests_are_counted_across_routers() -> None:
    async def test() -> None:
        async with cluster(max_num_queued_reqs=2) as running:
            one, two = await running.router("one"), await running.router("two")
            one.send(Acquire(1, 1, 0))
            assert await one.next(Granted) == Granted(1)
            two.send(Acquire(1, 1, 0))
            assert await two.next(Granted) == Granted(1)
            two.send(Acquire(2, 1, 0))
            refused = await two.next(Refused)
            assert (refused.key, refused.field, refused.limit, refused.current) == (2, "max_num_queued_reqs", 2, 2)
            one.send(Acquire(1, 0, 30))
            await one.next(Granted)
            one.send(PrefillDone(1, 10))
            one.send(Release(99))
            two.send(Release(1))
            two.send(Acquire(3, 1, 0))
            assert await two.next(Granted) == Granted(3)
            running.endpoint.tick()
            assert await one.next(QueueCounts) == QueueCounts(2, 20, 1, 0, 1)

    run(test)


def test_counts_are_announced_only_when_changed() -> None:
    async def test() -> None:
        async with cluster() as running:
            router = await running.router("r")
            await running.settle(lambda: running.endpoint.snapshot()["num_routers"] == 1)
            running.endpoint.tick()
            router.send(Acquire(1, 1, 0))
            await running.settle(lambda: running.endpoint.ledger.counts().num_requests == 1)
            running.endpoint.tick()
            running.endpoint.tick()
            running.endpoint.begin_shutdown()
            announced = []
            while not isinstance(message := await router.next(object), ShuttingDown):
                announced += [message.num_requests] if isinstance(message, QueueCounts) else []
            assert announced == [0, 1]

    run(test)


def test_what_a_lost_router_held_is_free_after_its_grace_unless_it_comes_back() -> None:
    async def test() -> None:
        async with cluster(max_num_queued_reqs=5) as running:
            router = await running.router("r")
            for key in (1, 2):
                router.send(Acquire(key, 1, 0))
                await router.next(Granted)
            router.connection.abort("cut")
            await running.settle(lambda: running.endpoint.snapshot()["num_routers"] == 0)
            back = await running.router("r", [Holding(2, 1, 0)])
            assert (await back.next(QueueCounts)).num_requests == 1
            running.now += 1000
            running.endpoint.tick()
            assert running.endpoint.ledger.counts().num_requests == 1
            back.connection.abort("cut for good")
            await running.settle(lambda: running.endpoint.snapshot()["num_routers"] == 0)
            running.endpoint.tick()
            assert running.endpoint.ledger.counts().num_requests == 1
            running.now += 1000
            running.endpoint.tick()
            assert running.endpoint.ledger.counts().num_requests == 0

    run(test)


def test_holdings_are_not_counted_for_ever_if_the_newer_connection_dies_before_it_says_anything() -> None:
    async def test() -> None:
        async with cluster() as running:
            old = await running.router("r", [Holding(1, 1, 0)])
            await old.next(Members)
            new = await connect("127.0.0.1", running.port, secret=SECRET, role="router", name="r")
            new.start(lambda _: None)
            await old.closed()
            new.abort("the router dies")
            await running.settle(lambda: not running.endpoint._routers)
            assert running.endpoint.ledger.counts().num_requests == 1
            running.now += 1000
            running.endpoint.tick()
            assert running.endpoint.ledger.counts().num_requests == 0

    run(test)


def test_a_newer_connection_of_the_same_router_replaces_the_older() -> None:
    async def test() -> None:
        async with cluster() as running:
            old = await running.router("r", [Holding(1, 1, 0)])
            await old.next(Members)
            new = await running.router("r", [Holding(1, 1, 0), Holding(2, 1, 0)])
            await new.next(Members)
            await old.closed()
            running.now += 1000
            running.endpoint.tick()
            assert running.endpoint.ledger.counts().num_requests == 2
            assert running.endpoint.snapshot()["num_routers"] == 1

    run(test)


@pytest.mark.parametrize(
    "payload",
    [
        b"garbage",
        b"",
        msgspec.msgpack.encode({"type": "no such message"}),
        msgspec.msgpack.encode(Register(record("x"))),
        msgspec.msgpack.encode(Resume([])),
        msgspec.msgpack.encode({"type": "acquire", "key": "one", "num_requests": 1, "num_tokens": 0}),
        b"\x82\xa4type\xa6resume\xa1x" + b"\x91" * 5000 + b"\xc0",
    ],
)
def test_a_router_that_talks_nonsense_is_cut_off_and_the_others_are_not(payload: bytes) -> None:
    async def test() -> None:
        async with cluster() as running:
            good, bad = await running.router("good"), await running.router("bad")
            await bad.next(Members)
            bad.connection.send(payload)
            await bad.closed()
            assert running.endpoint.num_malformed == 1
            good.send(Acquire(1, 1, 0))
            assert await good.next(Granted) == Granted(1)

    run(test)


def test_a_router_must_first_say_what_it_holds() -> None:
    async def test() -> None:
        async with cluster() as running:
            connection = await connect("127.0.0.1", running.port, secret=SECRET, role="router", name="r")
            client = Client(connection, ControlToRouter)
            client.send(Acquire(1, 1, 0))
            await client.closed()
            assert running.endpoint.num_malformed == 1
            assert running.endpoint.ledger.counts().num_requests == 0

    run(test)


def test_a_rank_that_talks_nonsense_is_no_member_any_more() -> None:
    async def test() -> None:
        async with cluster() as running:
            rank = await running.rank("a")
            await rank.next(Registered)
            rank.send(Register(record("a")))
            await rank.closed()
            await running.settle(lambda: running.endpoint.snapshot()["members"] == [])
            assert running.endpoint.num_malformed == 1

    run(test)


def test_the_snapshot_tells_what_was_ignored_and_refused() -> None:
    async def test() -> None:
        async with cluster() as running:
            router = await running.router("r")
            router.send(Release(99))
            router.send(Acquire(1, 1, 0))
            await router.next(Granted)
            with pytest.raises(WireError):
                await connect("127.0.0.1", running.port, secret=b"x" * 32, role="router", name="r")
            await running.settle(lambda: running.endpoint.snapshot()["num_refused_connections"] == 1)
            assert running.endpoint.snapshot()["num_ignored"] == 1

    run(test)


def test_a_failed_start_of_the_endpoint_is_tried_again() -> None:
    async def test() -> None:
        actor = ControlActor(SchedulerConfig(), SECRET, "192.0.2.1")  # reserved for documentation
        with pytest.raises(OSError, match=r"192\.0\.2\.1"):
            await actor.address()
        actor._host = "127.0.0.1"
        first, second = await asyncio.gather(actor.address(), actor.address())
        assert first == second
        await actor._endpoint.stop()

    run(test)


def test_unknown_roles_and_wrong_secrets_get_nothing() -> None:
    async def test() -> None:
        async with cluster() as running:
            stranger = Client(
                await connect("127.0.0.1", running.port, secret=SECRET, role="tourist", name="t"), ControlToRouter
            )
            await stranger.closed()
            with pytest.raises(WireError):
                await connect("127.0.0.1", running.port, secret=b"x" * 32, role="router", name="r")
            assert running.endpoint.snapshot()["num_routers"] == 0

    run(test)


def test_shutdown_reaches_present_and_later_routers() -> None:
    async def test() -> None:
        async with cluster() as running:
            router = await running.router("r")
            await router.next(Members)
            assert running.endpoint.begin_shutdown() == 1
            await router.next(ShuttingDown)
            late = await running.router("late")
            await late.next(ShuttingDown)

    run(test)
