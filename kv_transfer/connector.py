"""KV connectors: what a rank's scheduler asks about KV that lies elsewhere, and what moves it.

A connector has two halves. The **scheduler half** is pure: called from the scheduler, between steps, it decides and
remembers. The **worker half** moves data, at the edge. What the first wants moved goes to the second as the metadata
of a step's plan, and comes back as events, at any time, also long after its request has ended. Names and call order
follow the field's reference.

A connector must end every load that it was asked for with one `LoadFinished` (no second one: the request may be
loading again by then), and every request whose blocks it asked to keep with a `SendFinished`, each within a deadline
of its own, whatever its peers do: also if they die, and also if the request has ended meanwhile or its owner is gone.
The scheduler has no timer for them. Until then the request waits, and the blocks, which somebody may still write or
read, are nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.config import KvRole, KVTransferConfig
from kv_transfer.geometry import Geometry
from kv_transfer.memory import KvMemory
from kv_transfer.params import LOAD_SECONDS_BOUNDS, KvParams

RequestKey = tuple[int, int]
"""A request on this rank: its owner's number, and the number that its owner gave it."""


@dataclass(frozen=True, slots=True)
class KvRequest:
    """A request as a connector sees it."""

    key: RequestKey
    token_ids: npt.NDArray[np.int32]
    """Known tokens, shape [n]."""
    block_hashes: tuple[bytes, ...]
    """Of the full blocks among them; empty without prefix caching."""
    params: KvParams
    """Empty if its router sent none."""
    num_computed_tokens: int = 0
    """When it has ended: so many of its tokens have their KV in its blocks, once the steps in flight are done."""


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """Tokens beyond the local prefix hit that a connector could supply."""

    num_tokens: int
    is_async: bool
    """True: blocks are taken and filled while the request waits. False: they are filled within its first step."""


@dataclass(frozen=True, slots=True)
class LoadFinished:
    """Event: an asynchronous load has ended."""

    key: RequestKey
    num_valid_tokens: int | None = None
    """How many leading tokens of the request have right KV in its blocks; None: all that were to be loaded."""
    cause: str = ""
    """Why it failed, if it did."""
    is_fenced: bool = True
    """Nothing writes into its blocks any more. Else a `LoadFenced` follows, and until then they are quarantined."""


@dataclass(frozen=True, slots=True)
class LoadFenced:
    """Event: nothing writes any more into the blocks of a load that had ended without a fence."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class SendFinished:
    """Event: nobody reads the blocks of this ended request any more (or its lease has expired)."""

    key: RequestKey


ConnectorEvent = LoadFinished | LoadFenced | SendFinished


class SchedulerConnector(Protocol):
    """The scheduler half: owned and called by one scheduler."""

    def on_new_request(self, request: KvRequest) -> None:
        """A request has been queued; called once, before anything else about it."""
        ...

    def may_load_async(self, request: KvRequest) -> bool:
        """Whether the request may wait for an asynchronous load. No side effects.

        Asked whenever it is queued for an attempt: when it is added, after a load that failed, and for a session's
        next turn.
        """
        ...

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> ExternalMatch | None:
        """What could be supplied beyond a local hit of `num_computed_tokens`; None: not known yet, ask again.

        No side effects; may be called again for each attempt to admit.
        """
        ...

    def update_state_after_alloc(
        self, request: KvRequest, block_ids: npt.NDArray[np.int32], num_external_tokens: int
    ) -> None:
        """The request has blocks, shape [num_groups, columns]; load `num_external_tokens` into them (0: nothing).

        The tokens to load follow the local hit that `get_num_new_matched_tokens` was last asked with. An asynchronous
        load ends with a `LoadFinished`; another is done within the request's first step. Called for every request
        that is admitted, again for one that is admitted after an asynchronous load (with 0) or after a preemption,
        then with its new blocks.
        """
        ...

    def request_computed(self, key: RequestKey, num_tokens: int, block_ids: npt.NDArray[np.int32]) -> None:
        """The step that is being planned brings the request's computed tokens to `num_tokens`.

        Called while its prompt is computed, and what another rank has generated if it hands off; its blocks are
        complete up to there once that step has been executed.
        `block_ids` are all it holds, shape [num_groups, columns]: the scheduler's own table, to be copied if kept.
        """
        ...

    def partial_ticket(self, key: RequestKey, num_tokens: int, block_ids: npt.NDArray[np.int32]) -> KvParams | None:
        """What its owner may hear of a request that will hand off, and whose prompt is not computed to its end yet.

        `num_tokens` and `block_ids` as in the `request_computed` just before. None: nothing new. The owner hears
        it once that step has been computed, if the request still has these blocks then; it may lose them at any time.
        """
        ...

    def request_preempted(self, key: RequestKey) -> None:
        """The request has lost its blocks, and waits to be admitted anew."""
        ...

    def build_connector_meta(self) -> object | None:
        """For the worker half, what has come up since the last call; ends up in the step's plan."""
        ...

    def request_finished(
        self, request: KvRequest, block_ids: npt.NDArray[np.int32], *, hands_off: bool
    ) -> tuple[bool, KvParams | None]:
        """The request has ended. Called once for every request.

        Returns (keep its blocks until `SendFinished`, what its owner hears in its `End`). `hands_off`: another rank
        goes on, since it was to compute its prompt only, and has done so, or since this rank leaves. `block_ids` has
        no columns if it held no blocks when it ended, or if a load may still write into them: then nothing is kept,
        whatever the answer, and that load's `LoadFinished` is still due.
        """
        ...

    def still_wanted(self, key: RequestKey) -> None:
        """Somebody will fetch what is kept of this request, which has ended, once a rank has room for it."""
        ...

    def abandoned(self, key: RequestKey) -> None:
        """The request has ended, and nobody will fetch what is kept of it; its `SendFinished` is due all the same."""
        ...

    def has_pending_work(self) -> bool:
        """Whether `build_connector_meta` would return something."""
        ...


@dataclass(slots=True)
class ConnectorStats:
    """Sums since the start."""

    num_loads: int = 0
    """Loads that ended well."""
    num_loaded_bytes: int = 0
    load_failures: dict[str, int] = field(default_factory=dict)
    """By reason (`kv_transfer.transport.FailureReason`, of stores `kv_transfer.block_store.StoreReason`)."""
    load_seconds: list[int] = field(default_factory=lambda: [0] * (len(LOAD_SECONDS_BOUNDS) + 1))
    """Loads by duration, from start to end: how many were within each bound, and beyond the last."""
    load_seconds_sum: float = 0.0
    num_leases: int = 0
    """Requests whose blocks are kept now for others to read."""
    num_expired_leases: int = 0
    num_quarantined_blocks: int = 0
    lanes: dict[str, int] = field(default_factory=dict)
    """Loads by transport."""
    num_rejected_params: int = 0
    """Requests whose `params` could not be acted upon, and which were served without."""
    num_stored_blocks: int = 0
    """Blocks that were written into a store."""
    num_stored_bytes: int = 0
    num_evicted_blocks: int = 0
    """Blocks that a store has given up for others."""
    store_failures: dict[str, int] = field(default_factory=dict)
    """Blocks that were not stored, or were found unusable, by reason (`kv_transfer.block_store.StoreReason`)."""


class WorkerConnector(Protocol):
    """The worker half. All but `start`, `stats` and `close` are called by the thread that executes steps."""

    def start(self, memory: KvMemory, post: Callable[[ConnectorEvent], None]) -> None:
        """Called once, first. `post` may be called from any thread. Raises OSError or ValueError, with the remedy."""
        ...

    def handle_preemptions(self, metadata: object) -> None:
        """See to it that nobody relies on blocks which their requests have lost, and return.

        Called once for each plan that has metadata, before anything of the plan is done: neither it nor a load that
        begins with it has written into those blocks yet. `start_load_kv` follows, with the same metadata.
        """
        ...

    def start_load_kv(self, metadata: object) -> None:
        """Begin what the scheduler half asked for, and return.

        Called once for each plan that has metadata, in order, before the plan is executed; also for plans that will
        not be, since what they ask for is remembered as asked for.
        """
        ...

    def wait_for_layer_load(self, layer: int) -> None:
        """Called within a step before `layer` reads its KV: returns when synchronous loads have filled it."""
        ...

    def save_kv_layer(self, layer: int) -> None:
        """Called within a step when `layer` has written the step's KV."""
        ...

    def finish_step(self, metadata: object | None, *, was_computed: bool) -> frozenset[int]:
        """After each step: its blocks are complete as planned, if it `was_computed`.

        Returns blocks that a synchronous load of this step should have filled, and has not.
        """
        ...

    def stats(self) -> ConnectorStats: ...

    def close(self, timeout_s: float) -> None:
        """End everything. Idempotent. Nothing is read or written after it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorContext:
    """What a connector must know of its rank."""

    config: KVTransferConfig
    role: KvRole
    engine_id: str
    """This process, among all ranks that ever were (also the boot id)."""
    host: str
    """Address that peers reach it by."""
    secret: bytes
    """The cluster's."""
    geometry: Geometry
    pool_is_mirrored: bool = False
    """The runner computes elsewhere: what is read in the pool's `KvMemory` must be brought there first."""
    ports: dict[str, int] = field(default_factory=dict)
    """Filled by worker halves within `start`, by connector: what they listen on. Scheduler halves look it up."""
    common: dict[str, object] = field(default_factory=dict)
    """What the two halves of a connector have in common, such as an index that may be asked from any thread."""


class KvConnector(Protocol):
    """What `kv_connector` names: a class with the two halves' constructors."""

    @staticmethod
    def make_scheduler_half(context: ConnectorContext) -> SchedulerConnector:
        """Raises ValueError, naming the key, for settings that it does not understand."""
        ...

    @staticmethod
    def make_worker_half(context: ConnectorContext) -> WorkerConnector: ...
