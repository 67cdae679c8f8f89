"""How the store connectors put their parts together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kv_transfer.block_store import BlockIndex, BlockStore, check_geometry
from kv_transfer.config import KvRole
from kv_transfer.connector import ConnectorContext
from kv_transfer.deadlines import Deadlines
from kv_transfer.store_loads import AsyncLoads, StoreLoads
from kv_transfer.store_scheduler import StoreScheduler
from kv_transfer.store_worker import StoreWorker
from kv_transfer.store_writer import MAINTENANCE_INTERVAL_S, StoreWriter

Index = TypeVar("Index", bound=BlockIndex)


def common_index(context: ConnectorContext, name: str, make: Callable[[], Index]) -> Index:
    """The index that both halves of the connector `name` use; whichever is made first makes it."""
    index: Index = context.common.setdefault(name, make())  # type: ignore[assignment]
    return index


def make_store_scheduler(
    context: ConnectorContext, name: str, index: BlockIndex, *, is_async: bool, lookup_timeout_s: float
) -> StoreScheduler:
    check_geometry(context.geometry, name)
    return StoreScheduler(
        index,
        time.monotonic,
        block_size=context.geometry.block_size,
        is_async=is_async,
        loads=context.role is not KvRole.PRODUCER,
        stores=context.role is not KvRole.CONSUMER,
        lookup_timeout_s=lookup_timeout_s,
    )


def make_store_worker(
    context: ConnectorContext,
    store: BlockStore,
    index: BlockIndex,
    deadlines: Deadlines,
    *,
    load_timeout_s: float,
    max_staged_bytes: int,
    maintenance_interval_s: float = MAINTENANCE_INTERVAL_S,
    loads: StoreLoads | None = None,
) -> StoreWorker:
    """`loads` None: asynchronous ones."""
    geometry = context.geometry
    if loads is None:
        loads = AsyncLoads(geometry, store, deadlines, load_timeout_s)
    writer = StoreWriter(geometry, store, index, max_staged_bytes, maintenance_interval_s)
    return StoreWorker(geometry, store, index, loads, writer, deadlines)


def check_staging(max_staged_bytes: int, context: ConnectorContext) -> None:
    """Raises ValueError if not a single block could be stored."""
    size = context.geometry.block_size_bytes
    if max_staged_bytes < size:
        raise ValueError(
            f"kv_connector_extra_config.max_staged_bytes is {max_staged_bytes}, and a block has {size} bytes: nothing "
            f"could be stored; set it to {size} times the blocks that a step may compute"
        )
