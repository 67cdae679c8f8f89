"""The leases under which a rank's KV is read by other ranks; pure, owned by one thread.

A lease stands for the blocks of one request, and has at most one reader (an engine). Beside it others, or the same
one, may **read ahead** while the request is being computed: that takes nothing from the lease and does not prolong it.

    open ──(complete)──▶ complete ──▶ gone        confirmed, released, abandoned, expired
      └──────(void)─────────────────▶ gone        its request lost its blocks, or ended otherwise

Open: the request is being computed, and the lease lives as long as it does; what is ready may be read. Complete: the
request has ended, its blocks are kept for the reader, and the clock runs: `lease_s`, extended by heartbeats. Every
lease that became complete ends with exactly one `SendFinished`, whatever else happens.

**Why no reader takes wrong KV for right.** A reader uses nothing before its `confirm` is answered with yes, which
happens only while the lease is in this table. Blocks change their content only after the lease has left it:

- After completion, they are given up by the scheduler upon `SendFinished`, which is returned by the very call that
  removes the lease.
- Before, they are given up because of a preemption, an end or a failed step. The scheduler that gives them up says so
  in the metadata of its next plan, and no earlier plan can use them anew. `PullWorker.handle_preemptions` gets that
  metadata before the runner copies, zeroes or computes anything for this plan, and before a load begins with it; when
  it returns, the lease cannot be confirmed any more, though this table may hear of it later. Who has confirmed before
  has read everything before, while it was right: it keeps a copy of what these tokens' KV is, whatever becomes of the
  original. Who has not is denied, and drops what it has read.
- While a prompt is computed its later blocks are written, but never those tokens that are ready. (Where a group gives
  blocks up as its window slides, the scheduler asks for no partial tickets.)

A pushed block is read, by the holder itself, after its tokens are ready, and judged by the same confirmation: it is
sent before the reader has it, and so before the reader asks. In a mirror (`KvMemory.is_mirror`) a block changes only
when it is brought there for another request, or loaded, which both come after `handle_preemptions`.

Ids are never used again, so a lease that is in the table has been there all the time since its ticket was made.

A lease that its reader gives back while it is open stays until its request has ended, since only then blocks are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from kv_transfer.connector import RequestKey, SendFinished

# Of how many leases it is remembered why they ended.
NUM_REMEMBERED = 4096


@dataclass(slots=True)
class Lease:
    lease_id: int
    key: RequestKey
    num_ready_tokens: int = 0
    reader: str | None = None
    """The engine that reads, or will read."""
    is_acquired: bool = False
    """Its reader has begun, and is told of what happens."""
    is_complete: bool = False
    deadline: float = 0.0
    """Of a complete one; while it is open, what heartbeats have asked for."""
    ended: str = ""
    """Why, if its reader is done with it although it is not complete."""


@dataclass(frozen=True, slots=True)
class ReadyNotice:
    """Tell `reader` how much is ready."""

    reader: str
    lease_id: int
    num_ready_tokens: int


@dataclass(frozen=True, slots=True)
class GoneNotice:
    """Tell `reader` that the lease has ended, and why."""

    reader: str
    lease_id: int
    message: str


LeaseAction = SendFinished | ReadyNotice | GoneNotice


class LeaseTable:
    """All leases of one process. Methods that may have consequences return them as actions."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: dict[int, Lease] = {}
        self._endings: OrderedDict[int, str] = OrderedDict()
        """Why the latest leases ended."""
        self.num_expired = 0
        self.num_complete = 0
        """Leases that are complete now."""

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def lease_ids(self) -> Collection[int]:
        """Those that are held."""
        return self._leases.keys()

    # ---- the request's side ----

    def open(self, lease_id: int, key: RequestKey) -> None:
        """A request that will hand off has got blocks. Ids are unique and never used again."""
        assert lease_id not in self._leases, f"lease {lease_id} is opened twice"
        self._leases[lease_id] = Lease(lease_id, key)

    def advance(self, lease_id: int, num_ready_tokens: int) -> list[LeaseAction]:
        """A step has been computed: so many tokens are complete."""
        lease = self._leases.get(lease_id)
        if lease is None or num_ready_tokens <= lease.num_ready_tokens:
            return []
        lease.num_ready_tokens = num_ready_tokens
        if lease.reader is None or not lease.is_acquired or lease.ended:
            return []
        return [ReadyNotice(lease.reader, lease_id, num_ready_tokens)]

    def void(self, lease_id: int, why: str) -> list[LeaseAction]:
        """The request loses its blocks, or what it has computed cannot be relied upon."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return []
        return self._remove(lease, why)

    def complete(self, lease_id: int, key: RequestKey, num_tokens: int, now: float) -> list[LeaseAction]:
        """The request has ended, its blocks are kept, and `num_tokens` tokens of theirs may be read."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return [SendFinished(key)]  # it has become void: nobody reads them
        lease.is_complete = True
        self.num_complete += 1
        if lease.ended:
            return self._remove(lease, lease.ended, by_reader=True)
        if lease.num_ready_tokens < num_tokens:
            return self._remove(lease, f"only {lease.num_ready_tokens} of its {num_tokens} tokens were computed")
        lease.deadline = max(lease.deadline, now + self._lease_s)
        return []

    def prolong(self, key: RequestKey, now: float) -> None:
        """Its reader is not known yet, but will come."""
        for lease in self._leases.values():
            if lease.key == key and lease.is_complete:
                lease.deadline = max(lease.deadline, now + self._lease_s)

    def abandon(self, key: RequestKey) -> list[LeaseAction]:
        """Whoever was to read what is kept of this request has gone."""
        leases = [lease for lease in self._leases.values() if lease.key == key and lease.is_complete]
        return [action for lease in leases for action in self._remove(lease, "its request was given up")]

    # ---- the reader's side ----

    def acquire(self, lease_id: int, reader: str) -> int | str:
        """Begin to read: how many tokens are ready, or why not."""
        lease = self._of(lease_id, reader)
        if isinstance(lease, str):
            return lease
        lease.reader, lease.is_acquired = reader, True
        return lease.num_ready_tokens

    def num_ready(self, lease_id: int) -> int | str:
        """How many tokens can be read ahead, or why none can."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return self._endings.get(lease_id, "there is no such lease")
        return lease.ended or lease.num_ready_tokens

    def confirm_ahead(self, lease_id: int, num_tokens: int) -> str:
        """So many have been read ahead: why they must not be used (empty: they may). Nothing follows."""
        ready = self.num_ready(lease_id)
        if isinstance(ready, str):
            return ready
        return f"{num_tokens} tokens were read, and {ready} are ready" if num_tokens > ready else ""

    def heartbeat(self, lease_id: int, reader: str, now: float) -> bool:
        """Extend it; False: it is not held for this reader."""
        lease = self._of(lease_id, reader)
        if isinstance(lease, str):
            return False
        lease.reader = reader
        lease.deadline = max(lease.deadline, now + self._lease_s)
        return True

    def confirm(self, lease_id: int, reader: str, num_tokens: int) -> tuple[str, list[LeaseAction]]:
        """`num_tokens` tokens have been read: why they must not be used (empty: they may), and what follows."""
        lease = self._of(lease_id, reader)
        if isinstance(lease, str):
            return lease, []
        if lease.reader is None or not lease.is_acquired:
            return "it was never acquired", []
        if num_tokens > lease.num_ready_tokens:
            return f"{num_tokens} tokens were read, and {lease.num_ready_tokens} are ready", []
        return "", self._end(lease, "its reader has confirmed")

    def release(self, lease_id: int, reader: str) -> list[LeaseAction]:
        """The reader needs it no more."""
        lease = self._of(lease_id, reader)
        return [] if isinstance(lease, str) else self._end(lease, "its reader has released it")

    # ---- time ----

    def expire(self, now: float) -> list[LeaseAction]:
        """End what nobody has asked for in time."""
        actions: list[LeaseAction] = []
        for lease in [lease for lease in self._leases.values() if lease.is_complete and lease.deadline <= now]:
            self.num_expired += 1
            actions += self._remove(lease, f"it expired, {self._lease_s:g} s after it was last asked for")
        return actions

    def close(self) -> list[LeaseAction]:
        """End all."""
        return [action for lease in list(self._leases.values()) for action in self._remove(lease, "its rank closes")]

    def check_integrity(self) -> None:
        assert self.num_complete == sum(lease.is_complete for lease in self._leases.values()), "miscounted"
        for lease_id, lease in self._leases.items():
            assert lease.lease_id == lease_id
            assert not (lease.is_complete and lease.ended), f"lease {lease_id} should be gone"
            assert not lease.is_acquired or lease.reader is not None
            assert lease_id not in self._endings, f"lease {lease_id} is held and gone"

    # ---- inside ----

    def _of(self, lease_id: int, reader: str) -> Lease | str:
        """The lease, if `reader` may use it; else why not."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return self._endings.get(lease_id, "there is no such lease")
        if lease.ended:
            return lease.ended
        if lease.reader is not None and lease.reader != reader:
            return f"it is held for engine {lease.reader}"
        return lease

    def _end(self, lease: Lease, why: str) -> list[LeaseAction]:
        if lease.is_complete:
            return self._remove(lease, why, by_reader=True)
        lease.ended = why
        return []

    def _remove(self, lease: Lease, why: str, *, by_reader: bool = False) -> list[LeaseAction]:
        del self._leases[lease.lease_id]
        self._endings[lease.lease_id] = why
        if len(self._endings) > NUM_REMEMBERED:
            self._endings.popitem(last=False)
        actions: list[LeaseAction] = []
        if lease.is_complete:
            self.num_complete -= 1
            actions.append(SendFinished(lease.key))
        if lease.reader is not None and lease.is_acquired and not by_reader and not lease.ended:
            actions.append(GoneNotice(lease.reader, lease.lease_id, why))
        return actions
