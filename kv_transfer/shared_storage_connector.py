"""`SharedStorageConnector`: KV blocks as files in a directory that ranks share.

Every full block becomes a file (`file_store`) when its step has computed it. A request whose prefix lies there is
admitted at once, and its blocks are read within its first step, a layer ahead of the one that computes
(`layered_loads`); what turns out to be gone or damaged is computed again.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kv_transfer.connector import ConnectorContext
from kv_transfer.connector_settings import ConnectorSettings
from kv_transfer.deadlines import Deadlines
from kv_transfer.file_store import FileStore
from kv_transfer.known_blocks import KnownBlocks
from kv_transfer.layered_loads import LayeredLoads
from kv_transfer.store_parts import check_staging, common_index, make_store_scheduler, make_store_worker
from kv_transfer.store_scheduler import StoreScheduler
from kv_transfer.store_worker import StoreWorker

NAME = "SharedStorageConnector"

# A block that is being written is worth waiting for, but not for long.
_LOOKUP_TIMEOUT_S = 1.0


class SharedStorageSettings(ConnectorSettings):
    shared_storage_path: Path = Field(description="Directory of the blocks, on a file system that the ranks share")
    max_size_bytes: int = Field(
        default=10 << 30, gt=0, description="Most bytes in the directory; beyond, the oldest files are deleted"
    )
    scan_interval_s: float = Field(default=2.0, gt=0, description="How often other ranks' files are looked for")
    load_timeout_s: float = Field(default=10.0, gt=0, description="Most time that loads may add to a step")
    max_staged_bytes: int = Field(
        default=256 << 20, gt=0, description="Memory for blocks that are not written yet; what does not fit is left out"
    )


class SharedStorageConnector:
    @staticmethod
    def make_scheduler_half(context: ConnectorContext) -> StoreScheduler:
        SharedStorageSettings.of(context.config)
        index = common_index(context, NAME, KnownBlocks)
        return make_store_scheduler(context, NAME, index, is_async=False, lookup_timeout_s=_LOOKUP_TIMEOUT_S)

    @staticmethod
    def make_worker_half(context: ConnectorContext) -> StoreWorker:
        settings = SharedStorageSettings.of(context.config)
        check_staging(settings.max_staged_bytes, context)
        index = common_index(context, NAME, KnownBlocks)
        store = FileStore(context.geometry, settings.shared_storage_path, settings.max_size_bytes, index)
        return make_store_worker(
            context,
            store,
            index,
            Deadlines("kv-files-deadlines"),
            load_timeout_s=settings.load_timeout_s,
            max_staged_bytes=settings.max_staged_bytes,
            maintenance_interval_s=settings.scan_interval_s,
            loads=LayeredLoads(context.geometry, store, index, settings.load_timeout_s),
        )
