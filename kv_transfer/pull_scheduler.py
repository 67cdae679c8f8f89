"""The deciding half of the `PullConnector`: what is kept for others, and what is fetched from them; pure.

What it wants done goes to the worker half as the metadata of the next plan: `Order`s, in the order in which things
happened. It hears nothing back (the scheduler hears of loads and sends), and needs not to: each ticket is used once,
whether that works or not.

**Producing**: a lease is opened whenever a request with `do_remote_decode` gets blocks, with an id of its own each
time, so that what a reader holds never means the blocks that the request got later. Its end decides: handed off, the
blocks are kept and the ticket names them; otherwise the lease is void. Before, partial tickets name those that are full
and ready. Any other request that is handed off, from a rank that leaves, gets a lease of what it has at its end.
**Consuming**: a ticket is held from the request's arrival on (the worker half heartbeats its lease), until a
load begins, or nothing needs to be loaded, or the request ends. A partial ticket is only used, never held or given
back: its lease is that of a request to come. Of one lease, one load reads at a time, so that what is found here
already by the next one needs not be read again; and who has the whole ticket needs no partial one any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from kv_transfer.connector import ExternalMatch, KvRequest, RequestKey
from kv_transfer.geometry import Geometry
from kv_transfer.params import KvParams
from kv_transfer.pull_orders import (
    AbandonLease,
    AdvanceLease,
    CompleteLease,
    DropTicket,
    HoldTicket,
    LoadBlocks,
    OpenLease,
    Order,
    ProlongLease,
    PullMetadata,
    ReadyLease,
    RejectParams,
    ShowBlocks,
    VoidLease,
)
from kv_transfer.ticket import HandOff, Ticket, Unusable, parse_params


@dataclass(slots=True)
class _Outgoing:
    """A request that is to hand off."""

    num_prompt_tokens: int
    lease_id: int | None = None
    """None: it has no blocks."""
    num_computed_tokens: int = 0
    num_told_tokens: int = 0
    """Of the latest partial ticket."""


_LeaseRef = tuple[str, int]
"""A lease of another rank's: the engine that holds it, and its id there."""


class _Stage(Enum):
    HELD = auto()
    LOADING = auto()
    USED = auto()


@dataclass(slots=True)
class _Incoming:
    """A request with a ticket."""

    ticket: Ticket
    stage: _Stage = _Stage.HELD
    num_local_tokens: int = 0
    """The local hit that was last asked about."""

    @property
    def lease(self) -> _LeaseRef:
        return self.ticket.remote_engine_id, self.ticket.remote_lease_id


class PullScheduler:
    """The scheduler half of one rank."""

    def __init__(
        self,
        *,
        engine_id: str,
        host: str,
        port: Callable[[], int | None],
        geometry: Geometry,
        produces: bool,
        consumes: bool,
        first_lease_id: int = 1,
        pushes: bool = False,
        shows_blocks: bool = False,
    ) -> None:
        """`port` is asked when tickets are made: None while the worker half does not listen.

        Lease ids count from `first_lease_id`. Another one for each process protects those who give every process the
        same engine id: tickets of the last one do not fit. `pushes`: holders send blocks, here and at all peers;
        `shows_blocks`: the worker half must know which blocks its leases are for, as it must if it pushes.
        """
        self._engine_id = engine_id
        self._host = host
        self._port = port
        self._geometry = geometry
        self._fingerprint = geometry.fingerprint()
        self._produces = produces
        self._consumes = consumes
        self._pushes = pushes
        self._shows_blocks = shows_blocks or pushes
        self._outgoing: dict[RequestKey, _Outgoing] = {}
        self._incoming: dict[RequestKey, _Incoming] = {}
        self._read_ahead: set[_LeaseRef] = set()
        """Leases that somebody with a partial ticket is reading."""
        self._claimed: set[_LeaseRef] = set()
        """Leases of those that came with the whole ticket."""
        self._orders: list[Order] = []
        self._first_lease_id = self._next_lease_id = first_lease_id

    def on_new_request(self, request: KvRequest) -> None:
        if not request.params:
            return
        parsed = parse_params(request.params)
        if isinstance(parsed, HandOff) and not self._produces:
            parsed = Unusable("kv_transfer_params: do_remote_decode is true, and this rank's kv_role is kv_consumer")
        if isinstance(parsed, Ticket) and not self._consumes:
            parsed = Unusable("kv_transfer_params: do_remote_prefill is true, and this rank's kv_role is kv_producer")
        if isinstance(parsed, Ticket) and parsed.is_pushed is not self._pushes:
            ours, theirs = ("push", "pull") if self._pushes else ("pull", "push")
            parsed = Unusable(
                f"kv_transfer_params: a ticket of a rank with mode {theirs!r}, and this one has {ours!r}; set the same "
                "mode in kv_connector_extra_config of all ranks"
            )
        if isinstance(parsed, Ticket) and parsed.num_tokens > len(request.token_ids):
            parsed = Unusable(
                f"kv_transfer_params: num_tokens is {parsed.num_tokens}, and the request has {len(request.token_ids)}"
            )
        match parsed:
            case HandOff():
                self._outgoing[request.key] = _Outgoing(len(request.token_ids))
            case Ticket():
                incoming = self._incoming[request.key] = _Incoming(parsed)
                if not parsed.is_partial:
                    self._claimed.add(incoming.lease)
                    self._orders.append(HoldTicket(request.key, parsed))
            case Unusable(message):
                self._orders.append(RejectParams(request.key, message))

    def may_load_async(self, request: KvRequest) -> bool:
        incoming = self._incoming.get(request.key)
        return incoming is not None and incoming.stage is _Stage.HELD

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> ExternalMatch | None:
        incoming = self._incoming.get(request.key)
        if incoming is None or incoming.stage is not _Stage.HELD:
            return ExternalMatch(0, False)
        incoming.num_local_tokens = num_computed_tokens
        if incoming.ticket.is_partial and incoming.lease in self._claimed:
            return ExternalMatch(0, False)
        if incoming.lease in self._read_ahead:
            return None
        # A hit that ends within a block ends in one that this rank will write itself.
        if num_computed_tokens % self._geometry.block_size:
            return ExternalMatch(0, False)
        num_tokens = max(0, incoming.ticket.num_tokens - num_computed_tokens)
        return ExternalMatch(num_tokens, num_tokens > 0)

    def update_state_after_alloc(
        self, request: KvRequest, block_ids: npt.NDArray[np.int32], num_external_tokens: int
    ) -> None:
        key = request.key
        if (outgoing := self._outgoing.get(key)) is not None and outgoing.lease_id is None:
            outgoing.lease_id = self._open(key)
        incoming = self._incoming.get(key)
        if incoming is None:
            return
        if incoming.stage is _Stage.HELD and num_external_tokens > 0:
            incoming.stage = _Stage.LOADING
            if incoming.ticket.is_partial:
                self._read_ahead.add(incoming.lease)
                self._orders.append(HoldTicket(key, incoming.ticket))
            self._orders.append(self._load(key, incoming, block_ids))
        elif incoming.stage is _Stage.HELD:
            self._drop(key, incoming)
        else:
            self._used(incoming)

    def request_computed(self, key: RequestKey, num_tokens: int, block_ids: npt.NDArray[np.int32]) -> None:
        outgoing = self._outgoing.get(key)
        if outgoing is not None and outgoing.lease_id is not None and num_tokens > outgoing.num_computed_tokens:
            if self._shows_blocks:
                first_column = outgoing.num_computed_tokens // self._geometry.block_size
                num_columns = -(-num_tokens // self._geometry.block_size)
                # The scheduler goes on writing into its table.
                self._orders.append(ShowBlocks(outgoing.lease_id, block_ids[:, :num_columns].copy(), first_column))
            outgoing.num_computed_tokens = num_tokens
            self._orders.append(AdvanceLease(outgoing.lease_id, num_tokens))

    def partial_ticket(self, key: RequestKey, num_tokens: int, block_ids: npt.NDArray[np.int32]) -> KvParams | None:
        outgoing = self._outgoing.get(key)
        if outgoing is None or num_tokens > outgoing.num_computed_tokens:
            return None
        if self._pushes:
            # One ticket for all that is to come: where the blocks lie is nobody's business but this rank's.
            num_tokens = outgoing.num_prompt_tokens
        num_full = num_tokens - num_tokens % self._geometry.block_size
        if num_full <= outgoing.num_told_tokens:
            return None
        ticket = self._ticket(outgoing, num_full, block_ids, is_partial=True)
        if ticket is None:
            return None
        outgoing.num_told_tokens = num_full
        return ticket.params()

    def request_preempted(self, key: RequestKey) -> None:
        if (outgoing := self._outgoing.get(key)) is not None:
            self._void(outgoing, "its request was preempted")
        if (incoming := self._incoming.get(key)) is not None and incoming.stage is not _Stage.USED:
            self._drop(key, incoming)

    def build_connector_meta(self) -> PullMetadata | None:
        orders, self._orders = tuple(self._orders), []
        return orders or None

    def request_finished(
        self, request: KvRequest, block_ids: npt.NDArray[np.int32], *, hands_off: bool
    ) -> tuple[bool, KvParams | None]:
        key = request.key
        if (incoming := self._incoming.pop(key, None)) is not None:
            if incoming.stage is not _Stage.USED:
                self._drop(key, incoming)
            if not incoming.ticket.is_partial:
                self._claimed.discard(incoming.lease)
        outgoing = self._outgoing.pop(key, None)
        if outgoing is None and hands_off and request.num_computed_tokens and block_ids.shape[1]:
            outgoing = self._opened_late(request, block_ids)
        if outgoing is None:
            return False, None
        ticket = self._ticket(outgoing, outgoing.num_computed_tokens, block_ids) if hands_off else None
        if ticket is None:
            self._void(outgoing, "its request has ended without handing off")
            return False, None
        self._orders.append(CompleteLease(ticket.remote_lease_id, key, ticket.num_tokens))
        return True, ticket.params()

    def still_wanted(self, key: RequestKey) -> None:
        self._orders.append(ProlongLease(key))

    def abandoned(self, key: RequestKey) -> None:
        self._orders.append(AbandonLease(key))

    def has_pending_work(self) -> bool:
        return bool(self._orders)

    def check_integrity(self) -> None:
        lease_ids = [outgoing.lease_id for outgoing in self._outgoing.values() if outgoing.lease_id is not None]
        assert len(lease_ids) == len(set(lease_ids)), "two requests share a lease"
        assert all(self._first_lease_id <= lease_id < self._next_lease_id for lease_id in lease_ids)
        assert all(o.lease_id is not None or not o.num_computed_tokens for o in self._outgoing.values())
        assert not self._outgoing.keys() & self._incoming.keys(), "a request comes and goes"
        ahead = [i.lease for i in self._incoming.values() if i.ticket.is_partial and i.stage is _Stage.LOADING]
        assert sorted(ahead) == sorted(self._read_ahead), "a lease is read ahead by nobody, or twice"

    # ---- inside ----

    def _open(self, key: RequestKey) -> int:
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        self._orders.append(OpenLease(lease_id, key))
        return lease_id

    def _opened_late(self, request: KvRequest, block_ids: npt.NDArray[np.int32]) -> _Outgoing:
        """For one that has computed what it has without a lease."""
        num_tokens = request.num_computed_tokens
        num_columns = -(-num_tokens // self._geometry.block_size) if self._shows_blocks else 0
        outgoing = _Outgoing(len(request.token_ids), self._open(request.key), num_tokens)
        assert outgoing.lease_id is not None
        self._orders.append(ReadyLease(outgoing.lease_id, num_tokens, block_ids[:, :num_columns].copy()))
        return outgoing

    def _load(self, key: RequestKey, incoming: _Incoming, block_ids: npt.NDArray[np.int32]) -> LoadBlocks:
        """Pairs of blocks beyond the local hit, those that are complete first in front."""
        ticket, num_local = incoming.ticket, incoming.num_local_tokens
        if misfit := self._misfit(ticket, block_ids):
            nothing = np.zeros(0, np.int32)
            return LoadBlocks(key, nothing, nothing, nothing, num_local, misfit)
        first = num_local // ticket.block_size
        local = block_ids[:, first : ticket.num_columns]
        if ticket.is_pushed:
            cells = np.arange(first * len(local), ticket.num_columns * len(local), dtype=np.int32)
            remote, is_there = cells.reshape(-1, len(local)).T, local != 0
        else:
            remote = ticket.table()[:, first:]
            is_there = (remote != 0) & (local != 0)
        ends = (np.arange(remote.shape[1], dtype=np.int32) + first + 1) * ticket.block_size
        ends = np.minimum(ends, ticket.num_tokens)
        columns, groups = np.nonzero(is_there.T)
        return LoadBlocks(
            key,
            remote[groups, columns],
            local[groups, columns],
            ends[columns],
            num_local,
            is_pushed=ticket.is_pushed,
        )

    def _misfit(self, ticket: Ticket, block_ids: npt.NDArray[np.int32]) -> str:
        """Why the ticket's blocks cannot be paired with these; empty if they can."""
        if ticket.fingerprint != self._fingerprint:
            return "the ticket is for another geometry than this rank's"
        theirs, ours = (ticket.block_size, ticket.num_groups), (self._geometry.block_size, len(block_ids))
        if theirs != ours or block_ids.shape[1] < ticket.num_columns:
            return (
                f"the ticket is for {ticket.num_columns} columns of {ticket.num_groups} blocks of {ticket.block_size} "
                f"tokens, and {block_ids.shape[1]} of {ours[1]} of {ours[0]} are to be filled"
            )
        return ""

    def _drop(self, key: RequestKey, incoming: _Incoming) -> None:
        # What was never held is not to be given back.
        if not (incoming.ticket.is_partial and incoming.stage is _Stage.HELD):
            self._orders.append(DropTicket(key))
        self._used(incoming)

    def _used(self, incoming: _Incoming) -> None:
        if incoming.ticket.is_partial and incoming.stage is _Stage.LOADING:
            self._read_ahead.discard(incoming.lease)
        incoming.stage = _Stage.USED

    def _void(self, outgoing: _Outgoing, why: str) -> None:
        if outgoing.lease_id is not None:
            self._orders.append(VoidLease(outgoing.lease_id, why))
        outgoing.lease_id, outgoing.num_computed_tokens, outgoing.num_told_tokens = None, 0, 0

    def _ticket(
        self, outgoing: _Outgoing, num_tokens: int, block_ids: npt.NDArray[np.int32], *, is_partial: bool = False
    ) -> Ticket | None:
        """What another rank needs, or None: there is nothing to hand off, or nobody could fetch it."""
        port, block_size = self._port(), self._geometry.block_size
        num_columns = -(-num_tokens // block_size)
        if outgoing.lease_id is None or port is None or not num_tokens:
            return None
        if block_ids.shape[1] < num_columns and not (self._pushes and is_partial):
            return None
        return Ticket(
            do_remote_prefill=True,
            remote_engine_id=self._engine_id,
            remote_host=self._host,
            remote_port=port,
            remote_lease_id=outgoing.lease_id,
            remote_block_ids=[] if self._pushes else block_ids[:, :num_columns].ravel().tolist(),
            num_groups=len(block_ids),
            num_tokens=num_tokens,
            block_size=block_size,
            fingerprint=self._fingerprint,
            is_partial=is_partial,
            is_pushed=self._pushes,
        )
