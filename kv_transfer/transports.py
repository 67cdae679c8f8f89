"""The transports by name, and which one two ranks use: the lane.

A transport is imported when it is made, so that those whose library is not installed cost nothing and say what to
install. With `auto` the order is: `inproc` within a process, `shm` on a host, `nixl` where both have it and there
is RDMA, `tcp` everywhere; a lane that does not connect is followed by the next. Others are used only if named. Each
lane carries the reason for it, to be logged and exported: a lane that is slower than expected is no secret.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kv_transfer.transport import Endpoint, FailureReason, KvTransport, Peer, TransferError

AUTO = "auto"
TRANSPORTS = {
    "inproc": "kv_transfer.inproc_transport:InprocTransport",
    "shm": "kv_transfer.shm_transport:ShmTransport",
    "tcp": "kv_transfer.tcp_transport:TcpTransport",
    "nixl": "kv_transfer.agent_transport:NixlTransport",
    "ucx": "kv_transfer.agent_transport:UcxTransport",
    "mooncake": "kv_transfer.agent_transport:MooncakeTransport",
}
"""Constructors by name: each is called with the cluster's secret."""
AUTO_ORDER = ("inproc", "shm", "nixl", "tcp")


@dataclass(frozen=True, slots=True)
class Lane:
    """A way to a peer that both ends have."""

    endpoint: Endpoint
    reason: str
    """Why this one, and why not those before it."""

    @property
    def transport(self) -> str:
        return self.endpoint.transport


def make_transport(name: str, secret: bytes) -> KvTransport:
    """Raises ValueError for an unknown name, TransferError (`backend`) if its library does not work here."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport is {name!r}; choose {AUTO} or one of {', '.join(TRANSPORTS)}")
    module, constructor = TRANSPORTS[name].split(":")
    try:
        make = getattr(importlib.import_module(module), constructor)
    except ImportError as error:
        message = f"{name} is not usable here: {error}; install serried[{name}], or choose another transport"
        raise TransferError(FailureReason.BACKEND, message) from error
    return cast(KvTransport, make(secret))


def transports_to_start(configured: str) -> tuple[str, ...]:
    """The transports that a rank starts, `auto` or one by name. Raises ValueError for an unknown name."""
    if configured == AUTO:
        return tuple(name for name in AUTO_ORDER if name != "nixl" or has_rdma())
    if configured not in TRANSPORTS:
        raise ValueError(f"transport is {configured!r}; choose {AUTO} or one of {', '.join(TRANSPORTS)}")
    return (configured,)


def has_rdma() -> bool:
    """Whether this host has an RDMA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def choose_lanes(ours: Mapping[str, Endpoint], theirs: Sequence[Endpoint], configured: str) -> list[Lane]:
    """Lanes to try, best first; empty if there is none. `ours`: endpoints of the transports started here, by name."""
    offered = {endpoint.transport: endpoint for endpoint in theirs}
    if configured != AUTO:
        if configured in ours and configured in offered:
            return [Lane(offered[configured], "configured")]
        return []
    lanes: list[Lane] = []
    passed: list[str] = []
    for name in AUTO_ORDER:
        obstacle = _obstacle(name, ours.get(name), offered.get(name))
        if obstacle:
            passed.append(f"{name}: {obstacle}")
        else:
            lanes.append(Lane(offered[name], "; ".join(passed) or "first choice"))
    return lanes


def _obstacle(name: str, ours: Endpoint | None, theirs: Endpoint | None) -> str:
    """Why the lane cannot be; empty if it can."""
    if ours is None or theirs is None:
        return "not started here" if ours is None else "not offered by the peer"
    if name in ("inproc", "shm") and (not ours.host_id or ours.host_id != theirs.host_id):
        return "another process" if name == "inproc" else "another host, network namespace or user"
    return ""


def connect_lane(
    transports: Mapping[str, KvTransport], lanes: Sequence[Lane], timeout_s: float
) -> tuple[KvTransport, Peer, Lane]:
    """Connect by the first lane that works, each within `timeout_s`. Raises TransferError if none does."""
    failures: list[str] = []
    last = TransferError(FailureReason.NO_ROUTE, "no transport is started at both ends")
    for lane in lanes:
        transport = transports[lane.transport]
        try:
            peer = transport.connect(lane.endpoint, timeout_s)
        except TransferError as error:
            failures.append(f"{lane.transport}: {error.message}")
            last = error
            continue
        reasons = [lane.reason, *failures] if failures else [lane.reason]
        return transport, peer, Lane(lane.endpoint, "; ".join(reasons))
    raise TransferError(last.reason, "; ".join(failures) or last.message)
