"""What the deciding half of the `PullConnector` asks of the moving half: a plan's metadata, in the order of events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.connector import RequestKey
from kv_transfer.ticket import Ticket
from kv_transfer.transport import BlockIds


@dataclass(frozen=True, slots=True)
class OpenLease:
    lease_id: int
    key: RequestKey


@dataclass(frozen=True, slots=True)
class ShowBlocks:
    """The blocks of a lease, for those who send or mirror them; an `AdvanceLease` follows."""

    lease_id: int
    block_ids: npt.NDArray[np.int32]
    """All that the request holds, shape [num_groups, columns]; 0 where a group has none."""
    first_column: int
    """What lies before it has been computed, and shown, by earlier steps."""


@dataclass(frozen=True, slots=True)
class AdvanceLease:
    """Once this plan's step has been computed, so many tokens are complete."""

    lease_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ReadyLease:
    """Earlier steps have computed so many tokens: they are complete."""

    lease_id: int
    num_tokens: int
    block_ids: npt.NDArray[np.int32]
    """As in `ShowBlocks`; no columns if nobody sends or mirrors them."""


@dataclass(frozen=True, slots=True)
class VoidLease:
    """The blocks are given up: this plan, or a later one, may write into them."""

    lease_id: int
    why: str


@dataclass(frozen=True, slots=True)
class CompleteLease:
    """The request has ended, its blocks are kept: a `SendFinished` is due."""

    lease_id: int
    key: RequestKey
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AbandonLease:
    """Nobody will ask for what is kept of this request."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class ProlongLease:
    """Somebody will ask for what is kept of this request, but nobody can yet."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class HoldTicket:
    """Keep the ticket's lease alive until it is loaded or dropped."""

    key: RequestKey
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Use the ticket that is held: a `LoadFinished` is due. All arrays have shape [n]."""

    key: RequestKey
    remote_blocks: BlockIds
    """If `is_pushed`, their cells in the holder's table: column * num_groups + group."""
    local_blocks: BlockIds
    complete_at: npt.NDArray[np.int32]
    """With how many of the ticket's tokens each remote block is complete; ascending."""
    num_local_tokens: int
    """Valid whatever becomes of the load."""
    misfit: str = ""
    """Why the load must fail: its blocks cannot be paired, and there are none. (The holder may say more.)"""
    is_pushed: bool = False
    """The holder is told where the blocks go, and sends them."""


@dataclass(frozen=True, slots=True)
class DropTicket:
    """The request needs no (more) remote KV: end its load, if there is one, and give the lease back."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class RejectParams:
    """A request came with params that say nothing usable; to be told and counted."""

    key: RequestKey
    message: str


Order = (
    OpenLease
    | ShowBlocks
    | AdvanceLease
    | ReadyLease
    | VoidLease
    | CompleteLease
    | AbandonLease
    | ProlongLease
    | HoldTicket
    | LoadBlocks
    | DropTicket
    | RejectParams
)
PullMetadata = tuple[Order, ...]
