"""Keeps a server that Serve starts in every replica on the loopback.

Each replica listens for other deployments' calls on all interfaces, without authentication, and unpickles what comes:
whoever reaches that port runs code here. serried sends nothing that way, and Serve has no setting for the address.
"""

from __future__ import annotations

from typing import Any

from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica

from cluster.environment import LOOPBACK


def keep_on_loopback() -> None:
    """Call it in a replica's constructor: Serve opens the port when that has returned."""
    assert replica.add_port_to_grpc_server, "another version of Ray Serve: see where it opens its gRPC port now"
    replica.add_port_to_grpc_server = _add_loopback_port


def _add_loopback_port(server: Any, address: str) -> int:
    port = address.rpartition(":")[2]
    bound: int = add_port_to_grpc_server(server, f"{LOOPBACK}:{port}")
    return bound
