"""What moves blocks of KV from one rank's pool into another's: the interface that every transport implements.

A transport belongs to one rank. It serves its own pool to peers, and pulls blocks of theirs into it. It knows of
blocks only: leases, deadlines of requests and what a block holds are the connector's business, and so is to ask the
peer, after a transfer, whether the blocks were still what they had been (`kv_transfer.pull_worker`).

**Ends.** Every transfer ends with exactly one `TransferEnd`, told through its callback, on a thread of the
transport's, or by the call itself that begins it, before it returns. A transfer that failed may still be written by a
late peer, unless the transport can rule it out (it closed the socket, it killed the process that would have written):
then `is_fenced` is true. Otherwise a second event, `Fenced`, follows when that is ruled out; until then nobody may use
the destination blocks for anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kv_transfer.memory import KvMemory

BlockIds = npt.NDArray[np.int32]


class FailureReason(StrEnum):
    """Why a load failed."""

    PEER_LOST = "peer_lost"
    TIMEOUT = "timeout"
    LEASE_EXPIRED = "lease_expired"
    EPOCH_MISMATCH = "epoch_mismatch"
    """The peer is another process than the one that made the ticket."""
    INCOMPATIBLE = "incompatible"
    NO_ROUTE = "no_route"
    BACKEND = "backend"


class TransferError(Exception):
    """A transport could not do something; `reason` says of which kind, the message what and why."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


def check_block_sizes(ours: int, theirs: int) -> None:
    """Raises TransferError unless blocks have as many bytes here as at the peer's."""
    if ours != theirs:
        raise TransferError(FailureReason.INCOMPATIBLE, f"blocks have {ours} bytes here and {theirs} there")


@dataclass(frozen=True, slots=True)
class TransportCaps:
    cancel_is_fence: bool
    """A cancelled or failed transfer never writes again: `TransferEnd.is_fenced` is always true."""
    same_host: bool
    """Works only between processes of one host."""
    can_push: bool = False
    """It is a `PushTransport`."""
    max_descriptors: int | None = None
    """Blocks that the library underneath takes in one call; the transport cuts longer lists itself."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where and how a peer's pool is reached by one transport; travels in the handshake, after authentication."""

    transport: str
    address: bytes
    """Opaque to all but the transport: a host and port, a socket's name, an agent's metadata."""
    num_blocks: int
    block_size_bytes: int
    host_id: str = ""
    """Equal on processes of one host (its kernel's boot id and network namespace): same-host lanes work there only."""


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """`reason` None: all blocks have arrived."""

    reason: FailureReason | None = None
    message: str = ""
    is_fenced: bool = True
    """Nothing writes into the destination blocks any more."""


OnEnd = Callable[[TransferEnd], None]


class Peer(Protocol):
    """An open way to a peer's pool."""

    endpoint: Endpoint

    def close(self) -> None:
        """Transfers under way fail as `peer_lost`. Idempotent; never blocks for long."""
        ...


class Transfer(Protocol):
    """A pull under way."""

    def cancel(self) -> None:
        """End it as `timeout` if it has not ended yet. Never blocks; the end is told as always. Idempotent."""
        ...


@dataclass(slots=True)
class TransportStats:
    """Sums since the start; read by any thread."""

    num_transfers: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    """Of all transfers, from start to end."""
    failures: dict[str, int] = field(default_factory=dict)
    """By `FailureReason`."""
    num_unfenced: int = 0
    """Transfers that ended without a fence, and have none yet."""


class KvTransport(Protocol):
    """One rank's end. Methods may be called from any thread; none but `connect` and `close` blocks."""

    name: str
    caps: TransportCaps

    def start(self, memory: KvMemory, host: str) -> Endpoint:
        """Serve `memory` to peers; `host` is the address that this rank is known by (never a wildcard).

        Called once, first. Raises TransferError (`backend`) if that does not work here.
        """
        ...

    def connect(self, endpoint: Endpoint, timeout_s: float) -> Peer:
        """Raises TransferError: `no_route`, `timeout`, `incompatible` (other block size, another protocol), …"""
        ...

    def pull(
        self,
        peer: Peer,
        remote_blocks: BlockIds,
        local_blocks: BlockIds,
        timeout_s: float,
        on_end: OnEnd,
        on_fenced: Callable[[], None] | None = None,
    ) -> Transfer:
        """Copy the peer's blocks into ours, pairwise; both of shape [n], n >= 0, local ids all different.

        Ends as `timeout` after `timeout_s`. `on_fenced` follows an end that is not fenced. Ids out of range are
        refused with ValueError for ours, and end the transfer as `backend` for the peer's, with nothing read.
        """
        ...

    def stats(self) -> TransportStats: ...

    def close(self, timeout_s: float) -> None:
        """End all transfers and threads, free everything. Idempotent. Nothing is written after it."""
        ...


class PushTransport(KvTransport, Protocol):
    """A transport by which the holder of blocks may also send them on its own, as they get ready.

    The rank that needs the blocks opens the way (`receive`), and names to the holder, over the control plane, the
    grant that it was given; the holder then sends under that grant, in the order in which the blocks were named.
    Bytes land only where the receiver itself puts them, and on a connection that it owns: its cancel is a fence, as
    for a pull. (A holder that wrote into a peer's memory could not be kept from writing late.)
    """

    def receive(
        self,
        peer: Peer,
        local_blocks: BlockIds,
        timeout_s: float,
        on_grant: Callable[[int], None],
        on_end: OnEnd,
    ) -> Transfer:
        """Have the peer fill these blocks, shape [n], n >= 1, all different, in this order.

        `on_grant` is told, at most once and before the end, under which number the peer may send; on a thread of the
        transport's. Ends as `pull` does; as `peer_lost` if the peer revokes the grant. Ids out of range are refused
        with ValueError.
        """
        ...

    def push(self, grant: int, blocks: BlockIds) -> bool:
        """Send these blocks of ours next, shape [n], to whoever was given `grant`; False: nobody waits any more.

        Never blocks: they are read from the pool soon after, in order. Ids out of range, or more blocks than the
        receiver waits for, are refused with ValueError.
        """
        ...

    def revoke(self, grant: int) -> None:
        """Send nothing more under it: its receive fails. Idempotent, also for grants that are over; never blocks."""
        ...
