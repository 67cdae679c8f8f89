"""`MultiConnector`: several connectors side by side, such as the next rank's blocks, then host memory, then a store.

    kv_connector_extra_config:
      connectors:
        - {kv_connector: PullConnector}
        - {kv_connector: OffloadConnector, kv_connector_extra_config: {cpu_bytes_to_use: 4294967296}}

In this order they are preferred for loading; all of them store. See `multi_scheduler` for what that means together,
and `multi_worker` for what becomes of one that fails.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kv_transfer.config import KvRole
from kv_transfer.connector import ConnectorContext, KvConnector
from kv_transfer.connector_settings import ConnectorSettings
from kv_transfer.multi_scheduler import MultiScheduler
from kv_transfer.multi_worker import MultiWorker

NAME = "MultiConnector"


class ChildConfig(BaseModel):
    """Frozen, unknown keys refused; what is not given here is as for the whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_connector: str = Field(min_length=1)
    kv_connector_extra_config: dict[str, Any] = {}
    kv_connector_module_path: str | None = Field(default=None, min_length=1)
    kv_role: KvRole | None = None

    @field_validator("kv_connector")
    @classmethod
    def _check(cls, name: str) -> str:
        if name == NAME:
            raise ValueError(f"a {NAME} within another says nothing more: list its connectors here")
        return name


class MultiSettings(ConnectorSettings):
    connectors: tuple[ChildConfig, ...] = Field(
        min_length=1,
        description="kv_connector and kv_connector_extra_config of each, those to load from first in front",
    )
    lookup_timeout_s: float = Field(
        default=5.0, gt=0, description="Most time that a request waits for connectors that do not know yet"
    )


class MultiConnector:
    @staticmethod
    def make_scheduler_half(context: ConnectorContext) -> MultiScheduler:
        settings = MultiSettings.of(context.config)
        return MultiScheduler(
            [connector.make_scheduler_half(own) for connector, own in _children(context, settings)],
            _names(settings),
            _broken(context),
            time.monotonic,
            block_size=context.geometry.block_size,
            lookup_timeout_s=settings.lookup_timeout_s,
        )

    @staticmethod
    def make_worker_half(context: ConnectorContext) -> MultiWorker:
        settings = MultiSettings.of(context.config)
        children = [connector.make_worker_half(own) for connector, own in _children(context, settings)]
        return MultiWorker(children, _names(settings), _broken(context))


def _children(context: ConnectorContext, settings: MultiSettings) -> list[tuple[type[KvConnector], ConnectorContext]]:
    # It knows this module by name.
    from kv_transfer.registry import find_connector

    found = []
    for index, child in enumerate(settings.connectors):
        config = context.config.model_copy(update=child.model_dump(exclude={"kv_role"}))
        own = dataclasses.replace(
            context,
            config=config,
            role=child.kv_role or context.role,
            common=cast("dict[str, object]", context.common.setdefault(f"{NAME}.{index}", {})),
        )
        found.append((find_connector(config), own))
    return found


def _names(settings: MultiSettings) -> list[str]:
    return [f"{child.kv_connector} (connectors.{index})" for index, child in enumerate(settings.connectors)]


def _broken(context: ConnectorContext) -> set[int]:
    """Which children have been given up: the worker half tells, the scheduler half looks."""
    return cast("set[int]", context.common.setdefault(f"{NAME}.broken", set()))
