"""A rank's KV connector, from the cluster's configuration and what its runner holds."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.config import KvRole, KVTransferConfig
from kv_transfer.connector import ConnectorContext, SchedulerConnector, WorkerConnector
from kv_transfer.registry import find_connector
from model_runner.runner import Capacity
from router.control_messages import PoolRole

_KV_ROLES = {
    PoolRole.PREFILL: KvRole.PRODUCER,
    PoolRole.DECODE: KvRole.CONSUMER,
    PoolRole.MIXED: KvRole.BOTH,
}


@dataclass(frozen=True, slots=True)
class ConnectorHalves:
    scheduler: SchedulerConnector
    worker: WorkerConnector


def make_connector(
    config: KVTransferConfig, role: PoolRole, engine_id: str, host: str, secret: bytes, capacity: Capacity
) -> ConnectorHalves | None:
    """Both halves of the configured connector; None if there is none.

    Raises ValueError, with the remedy, for an unknown connector or settings that it refuses.
    """
    if config.kv_connector is None:
        return None
    if capacity.geometry is None:
        raise ValueError(
            f"kv_transfer.kv_connector is {config.kv_connector!r}, and the backend {capacity.backend!r} does not say "
            "what its KV blocks hold; leave kv_connector out"
        )
    if config.kv_buffer_device not in (None, "cpu"):
        raise ValueError(
            f"kv_transfer.kv_buffer_device is {config.kv_buffer_device!r}, and no transport or store here reads or "
            "writes a device's memory (GPUDirect): KV of a pool on a GPU goes through a mirror in host memory; set it "
            "to 'cpu', or leave it out"
        )
    context = ConnectorContext(
        config=config,
        role=config.kv_role or _KV_ROLES[role],
        engine_id=engine_id,
        host=config.kv_ip or host,
        secret=secret,
        geometry=capacity.geometry,
        pool_is_mirrored=capacity.is_kv_mirrored,
    )
    connector = find_connector(config)
    return ConnectorHalves(connector.make_scheduler_half(context), connector.make_worker_half(context))
