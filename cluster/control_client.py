"""The control actor as the other actors know it: found by name, asked for its address through Ray."""

from __future__ import annotations

from typing import Any

import ray

from cluster.control import CONTROL_NAME, CONTROL_NAMESPACE


class ControlClient:
    """Use in a process that Ray started."""

    def __init__(self) -> None:
        self._actor: Any = ray.get_actor(CONTROL_NAME, namespace=CONTROL_NAMESPACE)

    async def address(self) -> tuple[str, int]:
        """Where the control actor listens now; a restarted one listens elsewhere."""
        host, port = await self._actor.address.remote()
        return host, port

    async def report_failed_start(self, pool: str, error: Exception) -> None:
        """A rank of `pool` could not start. Serve only tries again, and who started the cluster wants the reason."""
        is_final = isinstance(error, ValueError | FileNotFoundError)
        await self._actor.report_failed_start.remote(pool, f"{type(error).__name__}: {error}", is_final)
