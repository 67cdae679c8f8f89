"""Tickets: what a request's `kv_transfer_params` say to a `PullConnector`.

A router marks a request whose KV another rank will need (`do_remote_decode`), and gives that other rank what the
first one's connector has answered: where it is, which lease holds the KV, and in which of its blocks it lies. While
the prompt is still being computed, partial tickets tell the same of the blocks that are full by then. All are flat
maps that travel through routers; here they are read into types. Reading is strict and never raises: params that say
anything else are `Unusable`, with the reason, and the request is served without them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from kv_transfer.params import KvParams

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class HandOff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV of this request's prompt is to be kept for another rank."""

    do_remote_decode: bool
    do_remote_prefill: bool = False


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV of the first `num_tokens` tokens of this request lies with another rank."""

    do_remote_prefill: bool
    do_remote_decode: bool = False
    remote_engine_id: _Name
    """The very process: one that has been started anew since is another."""
    remote_host: _Name
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_lease_id: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    remote_block_ids: list[_BlockId]
    """One group after another, each with `num_columns` ids; 0 where a group needs no block. None if `is_pushed`."""
    num_groups: _Count
    num_tokens: _Count
    block_size: _Count
    fingerprint: _Name
    """Of the geometry (`kv_transfer.geometry.Geometry.fingerprint`)."""
    is_partial: bool = False
    """More is to come, under the same lease: who reads by this ticket reads ahead, and does not end the lease."""
    is_pushed: bool = False
    """The holder sends the blocks to who says where they go; if also `is_partial`, as they are computed."""

    @property
    def num_columns(self) -> int:
        return -(-self.num_tokens // self.block_size)

    def table(self) -> npt.NDArray[np.int32]:
        """The remote blocks of one that is not pushed, shape [num_groups, num_columns]."""
        return np.array(self.remote_block_ids, np.int32).reshape(self.num_groups, self.num_columns)

    def params(self) -> KvParams:
        return msgspec.structs.asdict(self)


@dataclass(frozen=True, slots=True)
class Unusable:
    """Params that this connector cannot act upon."""

    message: str


def parse_params(params: Mapping[str, object]) -> HandOff | Ticket | Unusable:
    """What non-empty params say."""
    try:
        if params.get("do_remote_prefill") is not True:
            hand_off = msgspec.convert(dict(params), HandOff)
            if not hand_off.do_remote_decode:
                return Unusable("kv_transfer_params: neither do_remote_prefill nor do_remote_decode is true")
            return hand_off
        ticket = msgspec.convert(dict(params), Ticket)
    except msgspec.ValidationError as error:
        return Unusable(f"kv_transfer_params: {error}")
    if ticket.do_remote_decode:
        return Unusable("kv_transfer_params: do_remote_prefill and do_remote_decode are both true; set one")
    num_expected = 0 if ticket.is_pushed else ticket.num_groups * ticket.num_columns
    if len(ticket.remote_block_ids) != num_expected:
        return Unusable(
            f"kv_transfer_params: remote_block_ids has {len(ticket.remote_block_ids)} ids; {ticket.num_tokens} tokens "
            f"in blocks of {ticket.block_size} take {num_expected} in {ticket.num_groups} group(s)"
            f"{', since they are pushed' if ticket.is_pushed else ''}"
        )
    return ticket
