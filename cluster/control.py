"""The control endpoint: it knows which ranks live and how many requests the cluster holds.

`ControlEndpoint` is the server, on one event loop, without Ray; `control_actor` puts it into a named Ray actor. Its
state is the ledger and the membership (both pure), and which connection stands for which router or rank; all of it
is rebuilt from those connections when the actor restarts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cluster.inquiries import Inquiries
from cluster.membership import Membership, MembershipError
from kv_transfer.connection import Connection, Listener
from rank_scheduler.config import SchedulerConfig
from router.control_link import LEASE_VALID_S
from router.control_messages import (
    Ask,
    Bounds,
    ControlToRouter,
    Inquiry,
    InquiryReply,
    Members,
    RankToControl,
    Registered,
    Report,
    Resume,
    Return,
    RouterToControl,
    ShuttingDown,
    Tightened,
)
from router.ledger import Ledger, To

logger = logging.getLogger(__name__)


RECOVERY_S = LEASE_VALID_S + 1.0
"""After its restart, until when routers that have not resumed yet may have used what an earlier ledger lent them."""


class ProtocolError(Exception):
    """The peer is authenticated but says what makes no sense at this point."""


@dataclass(slots=True)
class _Router:
    """A connected router; it takes part once it has said what it holds."""

    connection: Connection
    resumed: bool = False


@dataclass(slots=True)
class _Rank:
    """A connected rank; a member once it has registered."""

    connection: Connection
    rank_id: str = ""
    boot_id: str = ""


@dataclass(slots=True)
class ControlEndpoint:
    """Serves routers and ranks. Use from one event loop; `clock` gives seconds that only grow."""

    scheduler: SchedulerConfig
    secret: bytes
    clock: Callable[[], float] = time.monotonic
    tick_interval_s: float = 1.0
    num_routers: int = 0
    """Those that a restarted one waits for before it lends anything, for RECOVERY_S at most; 0: not known."""
    is_restarted: bool = False
    num_malformed: int = 0
    """Connections that were cut for a message that made no sense."""
    membership: Membership = field(default_factory=Membership)
    ledger: Ledger = field(init=False)
    _listener: Listener = field(init=False)
    _routers: dict[str, _Router] = field(default_factory=dict)
    _inquiries: Inquiries = field(default_factory=Inquiries)
    _ranks: dict[str, _Rank] = field(default_factory=dict)
    """By rank id."""
    _wake: asyncio.TimerHandle | None = None
    """When the ledger wants to be woken."""
    _shutting_down: bool = False
    _ticking: asyncio.Task[None] | None = None
    _encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)

    def __post_init__(self) -> None:
        self.ledger = Ledger(
            self.scheduler.max_num_queued_reqs,
            self.scheduler.max_num_queued_tokens,
            now=self.clock(),
            recovery_s=RECOVERY_S if self.is_restarted else 0.0,
            num_routers=self.num_routers,
            secret=os.urandom(32),
        )
        self._listener = Listener(self.secret, self._accept)

    async def start(self, host: str) -> int:
        """Listen on a free port of `host`; returns the port."""
        port = await self._listener.start(host)
        self._ticking = asyncio.create_task(self._tick_forever())
        return port

    async def stop(self) -> None:
        """Close the endpoint and all its connections."""
        if self._ticking is not None:
            self._ticking.cancel()
        if self._wake is not None:
            self._wake.cancel()
        await self._listener.close()

    def begin_shutdown(self) -> int:
        """Tell all routers, and each that connects from now on, to end their streams; returns how many were told."""
        self._shutting_down = True
        return self._broadcast(ShuttingDown())

    def tick(self) -> None:
        """Every `tick_interval_s`: forget routers that did not come back; tell the others the counts.

        By that, they know that this endpoint lives.
        """
        self._inquiries.tick(self.clock())
        forgotten, messages = self.ledger.tick(self.clock())
        for router in forgotten:
            logger.warning("router %s did not come back; what it was lent is free", router)
        self._answer(messages)
        self._broadcast(self.ledger.counts())

    def check_integrity(self) -> None:
        """Raises AssertionError if the ledger, the membership or the connections contradict each other."""
        self.ledger.check_integrity()
        self.membership.check_integrity()
        members = {record.rank_id: record.boot_id for record in self.membership.records()}
        connected = {rank_id: rank.boot_id for rank_id, rank in self._ranks.items()}
        assert members == connected, f"members {members}, connected ranks {connected}"

    def snapshot(self) -> dict[str, Any]:
        """What the cluster looks like from here, in plain values."""
        return {
            "members": [msgspec.to_builtins(record) for record in self.membership.records()],
            "counts": msgspec.to_builtins(self.ledger.counts()),
            "num_routers": sum(router.resumed for router in self._routers.values()),
            "num_malformed": self.num_malformed,
            "num_refused_connections": self._listener.num_refused,
            "num_ignored": self.ledger.num_ignored,
        }

    def _accept(self, connection: Connection) -> None:
        assert connection.peer is not None
        match connection.peer.role:
            case "router":
                self._accept_router(connection, connection.peer.name)
            case "rank":
                self._accept_rank(connection)
            case role:
                self.num_malformed += 1
                connection.abort(f"unknown role {role!r}")

    # ---- routers ----

    def _accept_router(self, connection: Connection, name: str) -> None:
        router = _Router(connection)
        previous = self._routers.get(name)
        self._routers[name] = router
        if previous is not None:
            previous.connection.abort("the same router has connected again")
        decoder = msgspec.msgpack.Decoder(RouterToControl)

        def lost(_: asyncio.Future[str]) -> None:
            if self._routers.get(name) is router:
                del self._routers[name]
                # Resumed or not: an earlier connection, which this one replaced, may have left holdings.
                self._answer(self.ledger.router_lost(name, self.clock()))
                self._pass_on(self._inquiries.router_lost(name))

        connection.closed.add_done_callback(lost)
        connection.start(
            lambda payload: self._guard(connection, lambda: self._from_router(name, router, decoder.decode(payload)))
        )

    def _from_router(self, name: str, router: _Router, message: RouterToControl) -> None:
        now = self.clock()
        match message:
            case Resume(lent):
                if router.resumed:
                    raise ProtocolError("a router resumes once per connection")
                router.resumed = True
                self._send(router.connection, Bounds(self.ledger.limits))
                self._answer(self.ledger.resume(name, lent, now))
                self._send(router.connection, Members(self.membership.records()))
                self._send(router.connection, self.ledger.counts())
                if self._shutting_down:
                    self._send(router.connection, ShuttingDown())
            case _ if not router.resumed:
                raise ProtocolError(f"{type(message).__name__} before Resume")
            case Ask():
                self._answer(self.ledger.ask(name, message, now))
            case Return(amounts):
                self._answer(self.ledger.returned(name, amounts, now))
            case Tightened(serial):
                self._answer(self.ledger.tightened(name, serial, now))
            case Report(taken, drained):
                self.ledger.reported(name, taken, drained, now)
            case Inquiry():
                others = [other for other, each in self._routers.items() if each.resumed and other != name]
                self._pass_on(self._inquiries.ask(name, message, others, now))
            case InquiryReply(number, is_yes):
                self._pass_on(self._inquiries.replied(name, number, is_yes))

    def _pass_on(self, messages: Sequence[tuple[str, ControlToRouter]]) -> None:
        for name, message in messages:
            router = self._routers.get(name)
            if router is not None and router.resumed:
                self._send(router.connection, message)

    def _answer(self, messages: list[To]) -> None:
        """Send what the ledger says, and see to it that it is woken in time."""
        self._pass_on(messages)
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if (at := self.ledger.wakes_at) is not None:
            delay_s = max(0.0, at - self.clock())
            self._wake = asyncio.get_running_loop().call_later(delay_s, self._wake_ledger)

    def _wake_ledger(self) -> None:
        self._wake = None
        self._answer(self.ledger.wake(self.clock()))

    # ---- ranks ----

    def _accept_rank(self, connection: Connection) -> None:
        rank = _Rank(connection)
        decoder = msgspec.msgpack.Decoder(RankToControl)

        def lost(_: asyncio.Future[str]) -> None:
            if self._ranks.get(rank.rank_id) is rank:
                del self._ranks[rank.rank_id]
                self.membership.lost(rank.rank_id, rank.boot_id)
                logger.warning("rank %s is gone: %s", rank.rank_id, connection.closed.result())
                self._announce_members()

        connection.closed.add_done_callback(lost)
        connection.start(
            lambda payload: self._guard(connection, lambda: self._from_rank(rank, decoder.decode(payload)))
        )

    def _from_rank(self, rank: _Rank, message: RankToControl) -> None:
        if rank.rank_id:
            raise ProtocolError(f"{rank.rank_id} registers a second time on one connection")
        version = self.membership.version
        admitted = self.membership.register(message.record)
        rank.rank_id, rank.boot_id = admitted.rank_id, admitted.boot_id
        previous = self._ranks.get(admitted.rank_id)
        self._ranks[admitted.rank_id] = rank
        if previous is not None:
            previous.connection.abort("the same rank has connected again")
        self._send(rank.connection, Registered(admitted.rank_id))
        logger.info("rank %s registered: pid %d, %s:%d", admitted.rank_id, admitted.pid, admitted.host, admitted.port)
        if self.membership.version != version:
            self._announce_members()

    def _announce_members(self) -> None:
        self._broadcast(Members(self.membership.records()))

    # ---- connections ----

    def _guard(self, connection: Connection, handle: Callable[[], None]) -> None:
        """Run `handle`; a message that makes no sense ends its connection, and nothing else."""
        if connection.closed.done():
            return
        try:
            handle()
        except (msgspec.DecodeError, RecursionError, MembershipError, ProtocolError) as error:
            self.num_malformed += 1
            peer = connection.peer
            logger.warning("cut off %s %s: %s", peer.role if peer else "?", peer.name if peer else "?", error)
            connection.abort(f"message refused: {error}")

    def _send(self, connection: Connection, message: ControlToRouter | Registered) -> None:
        connection.send(self._encoder.encode(message))

    def _broadcast(self, message: ControlToRouter) -> int:
        payload = self._encoder.encode(message)
        routers = [router for router in self._routers.values() if router.resumed]
        return sum(router.connection.send(payload) for router in routers)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self.tick_interval_s)
            self.tick()
