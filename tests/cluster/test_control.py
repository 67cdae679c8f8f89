"""The control endpoint over real sockets, without Ray."""

import asyncio
import time
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
from router import ledger
from router.amounts import NOTHING, Amounts, Limits
from router.control_messages import (
    Ask,
    Bounds,
    ControlToRouter,
    Granted,
    Members,
    QueueCounts,
    Refused,
    Register,
    Registered,
    Report,
    Resume,
    Return,
    ShuttingDown,
    Tighten,
    Tightened,
)
from tests.cluster.test_membership import record

SECRET = b"s" * 32
TIMEOUT_S = 5.0
ONE = Amounts(1, 0)


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

    async def router(self, name: str, lent: Amounts = NOTHING) -> Client:
        connection = await connect("127.0.0.1", self.port, secret=SECRET, role="router", name=name)
        client = Client(connection, ControlToRouter)
        client.send(Resume(lent))
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
async def cluster(max_num_queued_reqs: int | None = None, **options: Any) -> AsyncIterator[Cluster]:
    scheduler = SchedulerConfig(max_num_queued_reqs=max_num_queued_reqs)
    # Tests tick by themselves.
    endpoint = ControlEndpoint(scheduler, SECRET, clock=lambda: 0.0, tick_interval_s=1000, **options)
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
            assert (await one.next(Bounds)).limits == Limits(2, None)
            one.send(Ask(1, ONE))
            assert await one.next(Granted) == Granted(1, ONE, NOTHING)
            two.send(Ask(1, ONE))
            assert await two.next(Granted) == Granted(1, ONE, NOTHING)
            two.send(Ask(2, ONE))
            refused = await two.next(Refused)
            assert (refused.key, refused.field, refused.limit, refused.current) == (2, "max_num_queued_reqs", 2, 2)
            one.send(Ask(1, Amounts(0, 30)))
            assert await one.next(Granted) == Granted(1, NOTHING, NOTHING)  # no limit, nothing to be lent
            one.send(Report(Amounts(1, 20), Amounts(0, 10)))
            two.send(Return(ONE))
            two.send(Ask(3, ONE))
            assert await two.next(Granted) == Granted(3, ONE, NOTHING)
            two.send(Report(ONE, ONE))
            two.send(Return(Amounts(9, 0)))
            await running.settle(lambda: running.endpoint.ledger.num_ignored == 1)
            running.endpoint.tick()
            counts = await one.next(QueueCounts)
            while counts.num_requests == 0:  # as it was when it connected
                counts = await one.next(QueueCounts)
            assert counts == QueueCounts(2, 20, 1, 0, 1)

    run(test)


def test_idle_amounts_of_one_router_come_to_another() -> None:
    async def test() -> None:
        async with cluster(max_num_queued_reqs=40) as running:
            one, two = await running.router("one"), await running.router("two")
            one.send(Ask(1, ONE))
            granted = await one.next(Granted)
            assert granted.kept.requests > 0
            two.send(Ask(1, Amounts(39, 0)))
            tighten = await one.next(Tighten)
            one.send(Return(granted.kept))
            one.send(Tightened(tighten.serial))
            assert await two.next(Granted) == Granted(1, Amounts(39, 0), NOTHING)

    run(test)


def test_a_router_that_does_not_confirm_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "TIGHTEN_TIMEOUT_S", 0.01)

    async def test() -> None:
        async with cluster(max_num_queued_reqs=40) as running:
            running.endpoint.clock = time.monotonic
            one, two = await running.router("one"), await running.router("two")
            one.send(Ask(1, ONE))
            await one.next(Granted)
            two.send(Ask(1, Amounts(39, 0)))
            assert (await two.next(Refused)).requested == 39

    run(test)


def test_a_restarted_endpoint_lends_nothing_before_its_routers_have_resumed() -> None:
    async def test() -> None:
        async with cluster(max_num_queued_reqs=2, num_routers=2, is_restarted=True) as running:
            one = await running.router("one", ONE)
            one.send(Tightened((await one.next(Tighten)).serial))
            one.send(Ask(2, ONE))
            one.send(Ask(3, ONE))
            two = await running.router("two")
            assert await one.next(Granted) == Granted(2, ONE, NOTHING)
            assert (await one.next(Refused)).key == 3
            await two.next(Members)

    run(test)


def test_counts_are_announced_with_every_tick() -> None:
    async def test() -> None:
        async with cluster() as running:
            router = await running.router("r")
            await running.settle(lambda: running.endpoint.snapshot()["num_routers"] == 1)
            running.endpoint.tick()
            router.send(Report(ONE, NOTHING))
            await running.settle(lambda: running.endpoint.ledger.counts().num_requests == 1)
            running.endpoint.tick()
            running.endpoint.tick()
            running.endpoint.begin_shutdown()
            announced = []
            while not isinstance(message := await router.next(object), ShuttingDown):
                announced += [message.num_requests] if isinstance(message, QueueCounts) else []
            assert announced == [0, 0, 1, 1]

    run(test)


def test_what_a_lost_router_was_lent_is_free_after_its_grace_unless_it_comes_back() -> None:
    async def test() -> None:
        async with cluster(max_num_queued_reqs=5) as running:
            router = await running.router("r")
            for key in (1, 2):
                router.send(Ask(key, ONE))
                await router.next(Granted)
            router.connection.abort("cut")
            await running.settle(lambda: running.endpoint.snapshot()["num_routers"] == 0)
            back = await running.router("r", ONE)
            await back.next(Members)
            assert running.endpoint.ledger.lent == ONE
            running.now += 1000
            running.endpoint.tick()
            assert running.endpoint.ledger.lent == ONE
            back.connection.abort("cut for good")
            await running.settle(lambda: running.endpoint.snapshot()["num_routers"] == 0)
            running.endpoint.tick()
            assert running.endpoint.ledger.lent == ONE
            running.now += 1000
            running.endpoint.tick()
            assert running.endpoint.ledger.lent == NOTHING

    run(test)


def test_a_loan_is_not_counted_for_ever_if_the_newer_connection_dies_before_it_says_anything() -> None:
    async def test() -> None:
        async with cluster(max_num_queued_reqs=9) as running:
            old = await running.router("r", ONE)
            await old.next(Members)
            new = await connect("127.0.0.1", running.port, secret=SECRET, role="router", name="r")
            new.start(lambda _: None)
            await old.closed()
            new.abort("the router dies")
            await running.settle(lambda: not running.endpoint._routers)
            assert running.endpoint.ledger.lent == ONE
            running.now += 1000
            running.endpoint.tick()
            assert running.endpoint.ledger.lent == NOTHING

    run(test)


def test_a_newer_connection_of_the_same_router_replaces_the_older() -> None:
    async def test() -> None:
        async with cluster(max_num_queued_reqs=9) as running:
            old = await running.router("r", ONE)
            await old.next(Members)
            new = await running.router("r", Amounts(2, 0))
            await new.next(Members)
            await old.closed()
            running.now += 1000
            running.endpoint.tick()
            assert running.endpoint.ledger.lent == Amounts(2, 0)
            assert running.endpoint.snapshot()["num_routers"] == 1

    run(test)


@pytest.mark.parametrize(
    "payload",
    [
        b"garbage",
        b"",
        msgspec.msgpack.encode({"type": "no such message"}),
        msgspec.msgpack.encode(Register(record("x"))),
        msgspec.msgpack.encode(Resume(NOTHING)),
        msgspec.msgpack.encode({"type": "ask", "key": "one", "amounts": [1, 0]}),
        msgspec.msgpack.encode({"type": "ask", "key": 1, "amounts": [1, 0, 2]}),
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
            good.send(Ask(1, ONE))
            assert await good.next(Granted) == Granted(1, NOTHING, NOTHING)

    run(test)


def test_a_router_must_first_say_what_it_holds() -> None:
    async def test() -> None:
        async with cluster() as running:
            connection = await connect("127.0.0.1", running.port, secret=SECRET, role="router", name="r")
            client = Client(connection, ControlToRouter)
            client.send(Ask(1, ONE))
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
            router.send(Tightened(99))
            router.send(Ask(1, ONE))
            await router.next(Granted)
            with pytest.raises(WireError):
                await connect("127.0.0.1", running.port, secret=b"x" * 32, role="router", name="r")
            await running.settle(lambda: running.endpoint.snapshot()["num_refused_connections"] == 1)
            assert running.endpoint.snapshot()["num_ignored"] == 1

    run(test)


def test_a_failed_start_of_the_endpoint_is_tried_again() -> None:
    async def test() -> None:
        actor = ControlActor(SchedulerConfig(), SECRET, 1, "192.0.2.1")  # reserved for documentation
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
