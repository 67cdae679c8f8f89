"""A rank's way out: its routers are told, and it waits until nobody needs it any more.

Routers send nothing new once they have heard that a rank leaves. Connections keep order, so that behind a router's
`LeavingHeard` nothing of its is on the way; when all have said that, no request is left and no block is kept for
others, there is nothing to cut. Without routers there is nobody to wait for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import msgspec

from kv_transfer.connection import Connection
from rank_scheduler.messages import Leaving

logger = logging.getLogger(__name__)

# From one look at what is left to the next.
INTERVAL_S = 0.05


class Draining:
    """Use from the event loop of the connections. Mutable state: when, and which routers have heard it."""

    def __init__(self, routers: Mapping[int, Connection], ask_idle: Callable[[Future[bool]], None]) -> None:
        """`routers`: those that are connected, by owner, as they come and go. `ask_idle` is answered later."""
        self._routers = routers
        self._ask_idle = ask_idle
        self._moves_at: float | None = None
        self._heard: set[int] = set()
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def is_leaving(self) -> bool:
        return self._moves_at is not None

    def greet(self, connection: Connection) -> None:
        """A router has connected."""
        if self._moves_at is not None:
            self._tell(connection, self._moves_at)

    def heard(self, owner: int) -> None:
        self._heard.add(owner)

    def lost(self, owner: int) -> None:
        self._heard.discard(owner)

    async def drain(self, moves_in_s: float, limit_s: float) -> bool:
        """See `RankServer.drain`; several may go on at a time, and the last one says when others take what runs."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._moves_at = asyncio.get_running_loop().time() + moves_in_s
        for connection in list(self._routers.values()):
            self._tell(connection, self._moves_at)
        try:
            async with asyncio.timeout(limit_s):
                while not await self._is_drained():  # noqa: ASYNC110
                    await asyncio.sleep(INTERVAL_S)
        except TimeoutError:
            return False
        finally:
            self._tasks.discard(task)
        return True

    async def close(self) -> None:
        """Nobody waits any longer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _tell(self, connection: Connection, moves_at: float) -> None:
        moves_in_s = max(0.0, moves_at - asyncio.get_running_loop().time())
        connection.send(msgspec.msgpack.encode(Leaving(moves_in_s)))

    async def _is_drained(self) -> bool:
        if not self._routers:
            return True
        if not self._heard.issuperset(self._routers):
            return False
        is_idle: Future[bool] = Future()
        self._ask_idle(is_idle)
        # It is answered sooner or later, whoever still listens.
        return await asyncio.shield(asyncio.wrap_future(is_idle))
