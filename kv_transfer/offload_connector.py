"""`OffloadConnector`: KV blocks that leave a rank's pool stay findable in its host's memory.

Every full block is copied into a tier of `cpu_bytes_to_use` bytes when its step has computed it, so that the pool may
give it away at any time without asking; where the tier is full, the blocks that were used longest ago go. A request
whose prefix lies there waits while a thread copies it back.
"""

from __future__ import annotations

from pydantic import Field

from kv_transfer.connector import ConnectorContext
from kv_transfer.connector_settings import ConnectorSettings
from kv_transfer.deadlines import Deadlines
from kv_transfer.host_tier import HostTier
from kv_transfer.known_blocks import KnownBlocks
from kv_transfer.store_parts import common_index, make_store_scheduler, make_store_worker
from kv_transfer.store_scheduler import StoreScheduler
from kv_transfer.store_worker import StoreWorker

NAME = "OffloadConnector"

# Of a copy within memory; and its index always knows.
_LOAD_TIMEOUT_S = 30.0
_LOOKUP_TIMEOUT_S = 0.0


class OffloadSettings(ConnectorSettings):
    cpu_bytes_to_use: int = Field(
        default=1 << 30,
        gt=0,
        description="Host memory for blocks, in bytes, besides the rank's pool; taken as it fills",
    )


class OffloadConnector:
    @staticmethod
    def make_scheduler_half(context: ConnectorContext) -> StoreScheduler:
        OffloadSettings.of(context.config)
        index = common_index(context, NAME, KnownBlocks)
        return make_store_scheduler(context, NAME, index, is_async=True, lookup_timeout_s=_LOOKUP_TIMEOUT_S)

    @staticmethod
    def make_worker_half(context: ConnectorContext) -> StoreWorker:
        settings = OffloadSettings.of(context.config)
        index = common_index(context, NAME, KnownBlocks)
        tier = HostTier(context.geometry, settings.cpu_bytes_to_use, index)
        return make_store_worker(
            context, tier, index, Deadlines("kv-offload-deadlines"), load_timeout_s=_LOAD_TIMEOUT_S, max_staged_bytes=0
        )
