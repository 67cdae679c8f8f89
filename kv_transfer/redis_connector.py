"""`RedisConnector`: KV blocks in a Redis server, for all ranks that reach it.

Every full block is written, with a time to live, when its step has computed it (`redis_store`). A request is looked up
while it waits (`lookup_board`), and what is there is read while it waits. A server that is down, slow, full, or answers
nonsense costs the computation that it would have saved, and each request no more than `lookup_timeout_s` and
`load_timeout_s`. Needs the package `redis` (pip install 'serried[redis]').
"""

from __future__ import annotations

import time

from pydantic import Field

from kv_transfer.connector import ConnectorContext
from kv_transfer.connector_settings import ConnectorSettings
from kv_transfer.deadlines import Deadlines
from kv_transfer.lookup_board import LookupBoard
from kv_transfer.store_parts import check_staging, common_index, make_store_scheduler, make_store_worker
from kv_transfer.store_scheduler import StoreScheduler
from kv_transfer.store_worker import StoreWorker

NAME = "RedisConnector"


class RedisSettings(ConnectorSettings):
    url: str = Field(
        default="redis://127.0.0.1:6379/0", min_length=1, description="redis://, rediss:// or unix://, with credentials"
    )
    key_prefix: str = Field(default="serried", min_length=1, description="What all keys begin with")
    ttl_s: float = Field(default=3600.0, gt=0, description="How long a block is kept after it was written")
    timeout_s: float = Field(
        default=2.0, gt=0, description="To connect, and for each batch of blocks (about 4 MiB) or of look-ups"
    )
    lookup_timeout_s: float = Field(default=0.5, gt=0, description="Most time that a request waits for its look-up")
    load_timeout_s: float = Field(default=10.0, gt=0, description="Most time that a request waits for its blocks")
    max_staged_bytes: int = Field(
        default=256 << 20, gt=0, description="Memory for blocks that are not written yet; what does not fit is left out"
    )


class RedisConnector:
    @staticmethod
    def make_scheduler_half(context: ConnectorContext) -> StoreScheduler:
        settings = RedisSettings.of(context.config)
        return make_store_scheduler(
            context,
            NAME,
            common_index(context, NAME, lambda: _make_board(settings)),
            is_async=True,
            lookup_timeout_s=settings.lookup_timeout_s,
        )

    @staticmethod
    def make_worker_half(context: ConnectorContext) -> StoreWorker:
        try:
            from kv_transfer.redis_store import RedisStore
        except ImportError as error:
            raise ValueError(
                f"kv_connector is {NAME!r}, and the package redis cannot be imported ({error}): "
                "pip install 'serried[redis]'"
            ) from error
        settings = RedisSettings.of(context.config)
        check_staging(settings.max_staged_bytes, context)
        index = common_index(context, NAME, lambda: _make_board(settings))
        deadlines = Deadlines("kv-redis-deadlines")
        store = RedisStore(
            context.geometry,
            index,
            deadlines,
            url=settings.url,
            key_prefix=settings.key_prefix,
            ttl_s=settings.ttl_s,
            timeout_s=settings.timeout_s,
        )
        return make_store_worker(
            context,
            store,
            index,
            deadlines,
            load_timeout_s=settings.load_timeout_s,
            max_staged_bytes=settings.max_staged_bytes,
        )


def _make_board(settings: RedisSettings) -> LookupBoard:
    # What is used still is written again when half of its time is over.
    return LookupBoard(settings.ttl_s / 2, time.monotonic)
