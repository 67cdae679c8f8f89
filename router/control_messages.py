"""What routers and ranks say to the cluster's control actor, which holds the ledger and the membership.

Ranks register and are members as long as their connection lives. Routers hold queue counts under keys of their
own choosing (unique per router process); a router that (re)connects first says what it holds, so that a
restarted control actor learns the counts from those who own them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class PoolRole(StrEnum):
    """What the ranks of a pool are for."""

    MIXED = "mixed"
    PREFILL = "prefill"
    """Compute prompts, up to the first token, for others to go on."""
    DECODE = "decode"
    """Go on with what prefill ranks have computed; short prompts they compute themselves."""


class RankRecord(msgspec.Struct, frozen=True):
    """A live rank, as routers see it."""

    rank_id: str
    """`<pool>/<index>`, given by the control actor; an index is reused only after its holder is gone."""
    pool: str
    boot_id: str
    """New for every process: a rank that comes back under the same id is another one."""
    host: str
    port: int
    pid: int
    node_id: str
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    """Usable blocks (the null block not counted)."""
    block_size: int
    role: PoolRole = PoolRole.MIXED


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Rank → control, first message. `record.rank_id`: the id it had before, or ""; `Registered` says which it has."""

    record: RankRecord


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    rank_id: str


class Holding(msgspec.Struct, frozen=True, array_like=True):
    key: int
    num_requests: int
    num_tokens: int


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Router → control, first message: everything that this router holds (nothing, in a new process)."""

    holdings: list[Holding]


class Acquire(msgspec.Struct, frozen=True, tag="acquire"):
    """Router → control: add to what `key` holds, all or nothing. Answered by `Granted` or `Refused`.

    A request is counted when it arrives (`num_requests` = its number of sequences, no tokens), and its prompt
    tokens once they are known; a refusal of the second leaves the first in place, and the router releases it.
    """

    key: int
    num_requests: int
    num_tokens: int


class PrefillDone(msgspec.Struct, frozen=True, tag="prefill_done"):
    """Router → control: `num_tokens` of `key`'s prompt tokens no longer wait."""

    key: int
    num_tokens: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Router → control: the request has ended. A release for an unknown key is ignored."""

    key: int


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    key: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    key: int
    field: str
    """The limit that would be exceeded: `max_num_queued_reqs` or `max_num_queued_tokens`."""
    limit: int
    current: int
    requested: int
    retry_after_s: float


class Members(msgspec.Struct, frozen=True, tag="members"):
    """Control → router: all live ranks, on connect and after each change."""

    ranks: list[RankRecord]


class QueueCounts(msgspec.Struct, frozen=True, tag="queue_counts"):
    """Control → router, at most once a second when changed: the cluster's counts, for `/metrics`."""

    num_requests: int
    num_tokens: int
    num_refused_requests: int
    num_refused_tokens: int
    num_ignored: int = 0
    """Messages, of any router, that were late, doubled or made no sense."""


class ShuttingDown(msgspec.Struct, frozen=True, tag="shutting_down"):
    """Control → router: end every stream with an error event and refuse what comes."""


RankToControl = Register
ControlToRank = Registered
RouterToControl = Resume | Acquire | PrefillDone | Release
ControlToRouter = Granted | Refused | Members | QueueCounts | ShuttingDown
