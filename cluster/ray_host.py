"""What the driver needs of the Ray that it runs on, be that its own (`own_ray`) or others' too (`existing_ray`).

All calls come from the driver's main thread but `start_serve`, which may take as long as it likes on another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cluster.node_plan import Node


class RayHost(Protocol):
    """Methods raise StartError."""

    environment: Mapping[str, str]
    """For the replicas, besides what they have from their node."""
    outlives_driver: bool
    """Others use it, so that whatever is started here has to be taken down by the driver, also after a failed start."""

    def connect(self) -> None:
        """Connect this process, starting Ray if it is ours."""

    def nodes(self) -> list[Node]:
        """As they were before anything of ours ran there: what a plan is made for."""

    def nodes_now(self) -> list[Node]:
        """What Ray has to give now, also on nodes that have come since, of which no more is known."""

    def start_control(self, actor: Any, *arguments: Any) -> Any:
        """Create the control actor of class `actor`, named; returns its handle."""

    def start_serve(self) -> None:
        """Start Serve and its proxies, or find it. Raises HaProxyError as well."""

    def http_addresses(self) -> list[tuple[str, int]]:
        """Where `/ready` may be asked, the best first; empty as long as no proxy runs."""

    def shut_down(self, serve_ends_by: float, ends_by: float) -> str | None:
        """Take down what was started, and disconnect. Returns, for people, what others go on with after that."""


def by(deadline: float, action: Callable[[], object]) -> bool:
    """Run `action`, but do not wait for it any longer than this. False if it failed, or goes on."""
    done = threading.Event()

    def attempt() -> None:
        with contextlib.suppress(Exception):
            action()
            done.set()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    return done.is_set()
