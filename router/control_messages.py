"""What routers and ranks say to the cluster's control actor, which holds the ledger and the membership.

Ranks register and are members as long as their connection lives. Routers are lent shares of the queue limits
(`router.ledger`, `router.lease`); a router that (re)connects first says what it was lent, so that a restarted control
actor learns that from those who have it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from router.amounts import Amounts, Limits


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
    block_size_bytes: int = 0
    """What is moved of a block when it is loaded elsewhere; 0: nothing is."""
    max_num_batched_tokens: int = 2048
    """Most tokens of one of its steps."""
    max_num_inflight_kv_loads: int = 0
    """So many it takes beyond `max_num_seqs` if their KV is loaded, to have them ready when a slot is free."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one sequence in a step, if it is not alone; 0: no limit."""
    short_prefill_tokens: int = 0
    """Prompts that lack at most so many are not cut by that."""


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Rank → control, first message. `record.rank_id`: the id it had before, or ""; `Registered` says which it has."""

    record: RankRecord


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    rank_id: str


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Router → control, first message: what this router has been lent (nothing, in a new process)."""

    lent: Amounts


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Router → control: `key` wants to hold this as well, all or nothing. Answered by `Granted` or `Refused`.

    A request is counted when it arrives (as many as it has sequences, no tokens), and its prompt tokens once they are
    known; a refusal of the second leaves the first in place, and the router puts it back.
    """

    key: int
    amounts: Amounts
    token: str = ""
    """What an earlier refusal gave, or the alias that it was asked under: a retry."""
    alias: str = ""
    """Under which a retry may come that does not send the token."""


class Return(msgspec.Struct, frozen=True, tag="return"):
    """Router → control: it has this idle, and needs it no more."""

    amounts: Amounts


class Tightened(msgspec.Struct, frozen=True, tag="tightened"):
    """Router → control, to `Tighten`: nothing is idle any more; what was, has been returned before."""

    serial: int


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Router → control, soon after a change: what it holds, and what has left its queue since the last one."""

    taken: Amounts
    drained: Amounts


class Bounds(msgspec.Struct, frozen=True, tag="bounds"):
    """Control → router, first message: the cluster's limits."""

    limits: Limits


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    key: int
    lent: Amounts
    """What was asked for, as far as limits bound it, and more, to be kept idle for others."""
    kept: Amounts
    """So much may be idle from now on."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    key: int
    field: str
    """The limit that would be exceeded: `max_num_queued_reqs` or `max_num_queued_tokens`."""
    limit: int
    current: int
    requested: int
    retry_after_s: float
    token: str = ""
    """For a retry at that time, which goes before others; none if there is no promise that far ahead."""


class Tighten(msgspec.Struct, frozen=True, tag="tighten"):
    """Control → router: return what is idle, and keep nothing idle from now on. Answered by `Tightened`."""

    serial: int


class Members(msgspec.Struct, frozen=True, tag="members"):
    """Control → router: all live ranks, on connect and after each change."""

    ranks: list[RankRecord]


class QueueCounts(msgspec.Struct, frozen=True, tag="queue_counts"):
    """Control → router, once a second: the cluster's counts, as the routers reported them."""

    num_requests: int
    num_tokens: int
    num_refused_requests: int
    num_refused_tokens: int
    num_ignored: int = 0
    """Messages, of any router, that were late, doubled or made no sense."""


class InquiryAction(StrEnum):
    """What a router asks the others to do, or to say; the answer is yes or no."""

    CANCEL = "cancel"
    """End the request of this public id. Yes: it was there."""
    OWNS_KEY = "owns_key"
    """Yes: an answer under this idempotency key (its digest) is there, or on its way."""


class Inquiry(msgspec.Struct, frozen=True, tag="inquiry"):
    """Router → control: ask all other routers. Answered by `InquiryAnswer`, with the `query` given here."""

    query: int
    action: InquiryAction
    subject: str
    account: str
    """Whose subject it has to be."""


class Inquired(msgspec.Struct, frozen=True, tag="inquired"):
    """Control → router: another one asks this. Answered by `InquiryReply`."""

    number: int
    asker: str
    action: InquiryAction
    subject: str
    account: str


class InquiryReply(msgspec.Struct, frozen=True, tag="inquiry_reply"):
    """Router → control, to `Inquired`."""

    number: int
    is_yes: bool


class InquiryAnswer(msgspec.Struct, frozen=True, tag="inquiry_answer"):
    """Control → router, to `Inquiry`: one has said yes, or nobody."""

    query: int
    is_yes: bool
    num_asked: int
    """Routers besides the asker."""


class ShuttingDown(msgspec.Struct, frozen=True, tag="shutting_down"):
    """Control → router: end every stream with an error event and refuse what comes."""


RankToControl = Register
ControlToRank = Registered
RouterToControl = Resume | Ask | Return | Tightened | Report | Inquiry | InquiryReply
ControlToRouter = Bounds | Granted | Refused | Tighten | Members | QueueCounts | Inquired | InquiryAnswer | ShuttingDown
