"""Starts Ray's head node with those of its processes that a run needs.

The autoscaler's monitor, the log monitor and the dashboard's server have no work here: there is one node, no output
is forwarded, the dashboard is off. Ray starts them nevertheless and waits for the last, and it has no setting against
that; without them a start takes 10 % less of the processor and 0.2 GB less memory (measured on two cores).
"""

from __future__ import annotations

from pathlib import Path

import ray
from ray._private.node import Node

_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")


def start_ray(temp_dir: Path, num_cpus: int) -> None:
    """Start a Ray of our own on this machine, below `temp_dir`, and connect to it."""
    for name in _UNUSED:
        assert hasattr(Node, name), f"another version of Ray: see what Node.{name} is called now"
        setattr(Node, name, _start_nothing)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        # Nothing of size goes through Ray's object store; this is about the least it accepts.
        object_store_memory=100 << 20,
        _temp_dir=str(temp_dir),
    )


def _start_nothing(_: Node, **__: object) -> None:
    pass
