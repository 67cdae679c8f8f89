"""The control actor as the other actors know it: found by name, asked for its address through Ray."""

from __future__ import annotations

import socket
from typing import Any

import ray

from cluster.control_actor import CONTROL_NAME, CONTROL_NAMESPACE
from cluster.environment import LOOPBACK


class ControlClient:
    """Use in a process that Ray started."""

    def __init__(self) -> None:
        self._actor: Any = ray.get_actor(CONTROL_NAME, namespace=CONTROL_NAMESPACE)

    async def address(self) -> tuple[str, int]:
        """Where the control actor listens now; a restarted one listens elsewhere."""
        host, port = await self._actor.address.remote()
        return host, port

    async def report_failed_start(self, part: str, error: Exception) -> None:
        """A `part` could not start. Serve only tries again, and who started the cluster wants the reason."""
        is_final = isinstance(error, ValueError | FileNotFoundError)
        node = ray.util.get_node_ip_address()
        where = "" if node == LOOPBACK else f"on node {node} ({socket.gethostname()}): "
        await self._actor.report_failed_start.remote(part, f"{where}{type(error).__name__}: {error}", is_final)
