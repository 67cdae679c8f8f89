"""The control actor: the endpoint of `control` as a Ray actor that is named, restarted by Ray, and found by its name.

Ray's actor calls carry only what happens rarely: asking for the address, shutdown, a look at the whole.

On a Ray cluster that goes on without serried, the actor is also what a run leaves behind in the worst case. It belongs
to the driver by a lease that the driver renews; when nobody has for `LEASE_S`, it takes the application down, then
itself. Everything runs on the actor's event loop but that removal, which has a thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any

from cluster.control import ControlEndpoint
from rank_scheduler.config import SchedulerConfig

logger = logging.getLogger(__name__)

CONTROL_NAME = "control"
CONTROL_NAMESPACE = "serried"
LEASE_S = 60.0
RENEWAL_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class FailedStart:
    """A rank or a router whose constructor raised."""

    part: str
    """Which: `rank of pool NAME`, or `router`."""
    reason: str
    is_final: bool
    """Trying again cannot help: what is wrong is the configuration or the model."""


def _was_reconstructed() -> bool:
    """Whether Ray has started this actor anew, after it had died."""
    import ray

    return ray.is_initialized() and bool(ray.get_runtime_context().was_current_actor_reconstructed)


class ControlActor:
    def __init__(
        self, scheduler: SchedulerConfig, secret: bytes, num_routers: int, host: str | None, owner: str | None = None
    ) -> None:
        """`host`: where to listen; None: on the address of the node that this incarnation is on.

        `owner`: the driver that renews the lease, for people; None: the actor ends with Ray. `num_routers`: as many
        are expected to come back after a restart of this actor.
        """
        self._endpoint = ControlEndpoint(scheduler, secret, num_routers=num_routers, is_restarted=_was_reconstructed())
        self._host = host
        self._port: int | None = None
        self._start_lock = asyncio.Lock()
        self._failed_starts: list[FailedStart] = []
        self._owner = owner
        self._stops_serve = False
        self._lease_end: asyncio.TimerHandle | None = None
        self._removal: asyncio.Task[None] | None = None

    async def address(self) -> tuple[str, int]:
        """Where the endpoint listens, in this incarnation of the actor."""
        if self._lease_end is None:
            # Of an incarnation that came after the driver's death, ranks and routers are the first to hear.
            self._begin_lease()
        async with self._start_lock:
            if self._host is None:
                import ray

                self._host = ray.util.get_node_ip_address()
            if self._port is None:
                self._port = await self._endpoint.start(self._host)
            return self._host, self._port

    async def renew(self, stops_serve: bool) -> None:
        """The driver lives. `stops_serve`: Serve was started for this run, and ends with it unless others use it."""
        self._stops_serve = stops_serve
        self._begin_lease()

    async def owner(self) -> str | None:
        """The driver that this actor belongs to."""
        return self._owner

    async def begin_shutdown(self) -> int:
        """Routers end every stream with an error event and refuse what comes; returns how many were told."""
        return self._endpoint.begin_shutdown()

    async def report_failed_start(self, part: str, reason: str, is_final: bool) -> None:
        """A rank or a router could not start; `is_final`: nor would another attempt."""
        self._failed_starts.append(FailedStart(part, reason, is_final))

    async def snapshot(self) -> dict[str, Any]:
        """Members, counts and connections, in plain values; this process; the failed starts, oldest first."""
        return {**self._endpoint.snapshot(), "pid": os.getpid(), "failed_starts": self._failed_starts}

    async def check_integrity(self) -> None:
        """Raises AssertionError if the books are wrong."""
        self._endpoint.check_integrity()

    def _begin_lease(self) -> None:
        if self._owner is None:
            return
        if self._lease_end is not None:
            self._lease_end.cancel()
        self._lease_end = asyncio.get_running_loop().call_later(LEASE_S, self._end_lease)

    def _end_lease(self) -> None:
        logger.warning("%s has been silent for %.0f s: removing what it started", self._owner, LEASE_S)
        self._removal = asyncio.create_task(self._remove_all())

    async def _remove_all(self) -> None:
        import ray

        from cluster.removal import remove_application

        self._endpoint.begin_shutdown()
        try:
            await asyncio.to_thread(remove_application, self._stops_serve)
        finally:
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
