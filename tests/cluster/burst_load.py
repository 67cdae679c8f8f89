"""A router's part in the strictness runs: bursts of requests over its real `ControlLink`, each written down."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from router.control_link import ControlAddress, ControlLink
from router.errors import ApiError, Cause
from router.peer import PeerFault
from tests.cluster.holdings import Event, Journal


class BurstLoad:
    """Use from one event loop. A quarter of the refused come back when they were told."""

    def __init__(self, address: ControlAddress, secret: bytes, name: str, journal: Path, burst: int) -> None:
        """`burst`: requests at once, on average."""
        self.num_attempts = 0
        self._burst = burst
        self._random = random.Random(name)
        self._journal = Journal(journal)
        self._link = ControlLink(
            address,
            secret,
            name,
            acquire_timeout_s=2.0,
            on_members=lambda ranks: None,
            on_shutting_down=lambda: None,
            on_inquired=lambda inquired: False,
            count=self._count,
        )
        self._retries: set[asyncio.Task[None]] = set()
        self._is_done = False

    def start(self) -> None:
        self._link.start()

    async def run(self) -> None:
        """Bursts until `stop`, and then until all has ended."""
        while not self._is_done:
            size = self._random.randint(1, 2 * self._burst)
            await asyncio.gather(*(self._attempt("") for _ in range(size)))
            await asyncio.sleep(self._random.random() * 0.05)
        for task in self._retries:
            task.cancel()
        await asyncio.gather(*self._retries, return_exceptions=True)

    def stop(self) -> None:
        self._is_done = True

    async def close(self) -> None:
        await self._link.close()
        self._journal.close()

    async def _attempt(self, token: str) -> None:
        if self._is_done:
            return
        key, number = self._link.new_key(), self._random.choice([1, 1, 1, 2])
        self.num_attempts += 1
        self._journal.write(Event.ASKED, key, number)
        try:
            await self._link.acquire(key, number, 0, retry_token=token)
        except ApiError as error:
            is_refusal = error.cause is Cause.MAX_NUM_QUEUED_REQS
            self._journal.write(Event.REFUSED if is_refusal else Event.FAILED, key, number)
            self._link.release(key)
            token = error.headers().get("x-serried-retry-token", "")
            if token and self._random.random() < 0.25:
                retry = asyncio.get_running_loop().create_task(self._come_back(error.retry_after_s or 0.0, token))
                self._retries.add(retry)
                retry.add_done_callback(self._retries.discard)
            return
        self._journal.write(Event.ADMITTED, key, number)
        try:
            await asyncio.sleep(self._random.expovariate(1 / 0.03))
        finally:
            self._journal.write(Event.RETURNING, key, number)
            self._link.release(key)

    async def _come_back(self, delay_s: float, token: str) -> None:
        await asyncio.sleep(delay_s)
        await self._attempt(token)

    def _count(self, fault: PeerFault) -> None:
        pass
