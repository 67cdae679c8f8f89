"""The deciding half of the connectors that keep full blocks by prefix hash in a store; pure.

**Loading**: what a prompt's prefix lacks here is looked up in the store's index, which never blocks. While that does
not know, the request waits, all in all no longer than `lookup_timeout_s`; after that what is not known counts as not
there. **Storing**: the full blocks of a prompt as they get computed, and when its request ends what it has generated;
those blocks are kept until the worker half has copied them. What the index holds already is not stored again, and what
it has lost since is, also if it is a local hit here.

What it wants done goes to the worker half as the metadata of the next plan: `Order`s, in the order in which things
happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv_transfer.block_store import BlockIndex
from kv_transfer.connector import ExternalMatch, KvRequest, RequestKey
from kv_transfer.params import KvParams
from kv_transfer.transport import BlockIds

# ---- orders to the worker half ----


@dataclass(frozen=True, slots=True, eq=False)
class LoadBlocks:
    """Fill these blocks; if it is asynchronous, a `LoadFinished` is due."""

    key: RequestKey
    blocks: BlockIds
    """Shape [n]; those of a local hit are not among them."""
    hashes: tuple[bytes, ...]
    num_local_tokens: int
    """Valid whatever becomes of the load."""
    num_tokens: int
    """Valid if all of it arrives."""


@dataclass(frozen=True, slots=True)
class DropLoad:
    """The request has ended: its load, if it is still under way, may end early."""

    key: RequestKey


@dataclass(frozen=True, slots=True, eq=False)
class StoreComputed:
    """Complete when this plan's step has been computed; the request may lose the blocks in the plan after it."""

    blocks: BlockIds
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StoreKept:
    """Complete, and kept although the request has ended: a `SendFinished` is due."""

    key: RequestKey
    blocks: BlockIds
    hashes: tuple[bytes, ...]


Order = LoadBlocks | DropLoad | StoreComputed | StoreKept
StoreMetadata = tuple[Order, ...]

_NO_MATCH = ExternalMatch(0, False)
_NO_BLOCKS: BlockIds = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Request:
    num_local_tokens: int = 0
    """The local hit that was last asked about."""
    asked_at: float | None = None
    """When the index did not know for the first time."""
    table: BlockIds = field(default_factory=lambda: _NO_BLOCKS)
    """Blocks by column, as they were at its last admission."""
    hashes: tuple[bytes, ...] = ()
    num_admitted_tokens: int = 0
    """Known tokens at admission."""
    num_announced: int = 0
    """Columns that have been looked at for storing since admission."""
    may_be_loading: bool = False
    has_more_input: bool = False
    """A session that went on with its blocks: which of its tokens are computed at its end is not known here."""


class StoreScheduler:
    """The scheduler half of one rank."""

    def __init__(
        self,
        index: BlockIndex,
        now: Callable[[], float],
        *,
        block_size: int,
        is_async: bool,
        loads: bool,
        stores: bool,
        lookup_timeout_s: float,
    ) -> None:
        """`is_async`: loads take place while the request waits, not within its first step."""
        self._index = index
        self._now = now
        self._block_size = block_size
        self._is_async = is_async
        self._loads = loads
        self._stores = stores
        self._lookup_timeout_s = lookup_timeout_s
        self._requests: dict[RequestKey, _Request] = {}
        self._orders: list[Order] = []

    def on_new_request(self, request: KvRequest) -> None:
        self._requests[request.key] = _Request()

    def may_load_async(self, request: KvRequest) -> bool:
        # Its hashes may not be known yet.
        is_long_enough = len(request.token_ids) >= self._block_size
        return self._is_async and self._loads and is_long_enough and self._index.may_hold()

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> ExternalMatch | None:
        known = self._requests[request.key]
        known.num_local_tokens = num_computed_tokens
        column, rest = divmod(num_computed_tokens, self._block_size)
        # A hit that ends within a block ends in one that this rank will write itself.
        if not self._loads or rest or column >= len(request.block_hashes):
            return _NO_MATCH
        found = self._index.num_leading(request.key, request.block_hashes[column:])
        if found is None:
            now = self._now()
            if known.asked_at is None:
                known.asked_at = now
            if now - known.asked_at < self._lookup_timeout_s:
                return None
            return _NO_MATCH
        return ExternalMatch(found * self._block_size, self._is_async) if found else _NO_MATCH

    def update_state_after_alloc(
        self, request: KvRequest, block_ids: npt.NDArray[np.int32], num_external_tokens: int
    ) -> None:
        known = self._requests[request.key]
        known.table, known.hashes = block_ids[0], request.block_hashes
        known.num_admitted_tokens = len(request.token_ids)
        known.num_announced, known.has_more_input = 0, False
        known.may_be_loading = num_external_tokens > 0 and self._is_async
        if num_external_tokens > 0:
            num_tokens = known.num_local_tokens + num_external_tokens
            columns = slice(known.num_local_tokens // self._block_size, -(-num_tokens // self._block_size))
            blocks, hashes = known.table[columns], known.hashes[columns]
            self._orders.append(LoadBlocks(request.key, blocks, hashes, known.num_local_tokens, num_tokens))
            # Should it come back, what was found out is to be found out anew.
            self._index.forget(request.key)

    def request_computed(self, key: RequestKey, num_tokens: int, block_ids: npt.NDArray[np.int32]) -> None:
        known = self._requests[key]
        known.has_more_input |= num_tokens > known.num_admitted_tokens
        if not self._stores:
            return
        last = min(num_tokens // self._block_size, len(known.table), len(known.hashes))
        missing = self._missing(known.num_announced, last, known.table, known.hashes)
        known.num_announced = max(known.num_announced, last)
        if missing:
            self._orders.append(StoreComputed(known.table[missing], tuple(known.hashes[c] for c in missing)))

    def partial_ticket(self, key: RequestKey, num_tokens: int, block_ids: npt.NDArray[np.int32]) -> KvParams | None:
        """Nothing to tell: what is stored is found by its hash."""
        return None

    def request_preempted(self, key: RequestKey) -> None:
        """Its next admission tells which blocks it has then."""

    def build_connector_meta(self) -> StoreMetadata | None:
        orders, self._orders = tuple(self._orders), []
        return orders or None

    def request_finished(
        self, request: KvRequest, block_ids: npt.NDArray[np.int32], *, hands_off: bool
    ) -> tuple[bool, KvParams | None]:
        known = self._requests.pop(request.key)
        self._index.forget(request.key)
        if known.may_be_loading:
            self._orders.append(DropLoad(request.key))
        num_tokens, num_columns = len(request.token_ids), block_ids.shape[1]
        # A token that was sampled since admission tells that all before it had been computed, and no step had failed.
        has_sampled = num_tokens > known.num_admitted_tokens and not known.has_more_input
        if not self._stores or not num_columns or not has_sampled:
            return False, None
        last = min((num_tokens - 1) // self._block_size, num_columns, len(request.block_hashes))
        # Also what was announced before, if it was not taken.
        missing = self._missing(0, last, block_ids[0], request.block_hashes)
        if not missing:
            return False, None
        hashes = tuple(request.block_hashes[column] for column in missing)
        self._orders.append(StoreKept(request.key, block_ids[0][missing], hashes))
        return True, None

    def still_wanted(self, key: RequestKey) -> None:
        """What is stored waits for nobody."""

    def abandoned(self, key: RequestKey) -> None:
        """What is stored is for everybody."""

    def has_pending_work(self) -> bool:
        return bool(self._orders)

    def check_integrity(self) -> None:
        for key, known in self._requests.items():
            assert known.num_announced <= len(known.table), f"{key}: columns announced that it does not have"

    def _missing(self, first: int, last: int, table: BlockIds, hashes: tuple[bytes, ...]) -> list[int]:
        """Columns that the store lacks; none that have the null block."""
        return [c for c in range(first, last) if table[c] and not self._index.holds(hashes[c])]
