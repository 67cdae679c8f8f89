"""What of the cluster's configuration concerns the routers."""

from __future__ import annotations

from pathlib import Path

from cluster.config import ClusterConfig
from router.api_keys import ApiKey
from router.service import RouterSettings


def router_settings(config: ClusterConfig, *, model_dir: Path, model_name: str, max_model_len: int) -> RouterSettings:
    """What each router is told before it starts."""
    return RouterSettings(
        model_name=model_name,
        model_dir=model_dir,
        max_model_len=max_model_len,
        max_body_bytes=config.router.max_body_bytes,
        policy=config.scheduler.policy,
        stream_interval=config.scheduler.stream_interval,
        remote_prefill_min_tokens=config.router.remote_prefill_min_tokens if config.is_disaggregated else None,
        placement=config.router.placement,
        pd_fallback=config.router.pd_fallback,
        max_failovers=config.router.max_failovers,
        api_keys=tuple(
            ApiKey(name=name, sha256=key.sha256, tenant=key.tenant) for name, key in config.router.api_keys.items()
        ),
        idempotency_ttl_s=config.router.idempotency_ttl_s,
        default_deadline_s=config.router.default_deadline_s,
        tenant_weights={name: tenant.weight for name, tenant in config.router.tenants.items()},
        rank_silence_timeout_s=config.router.rank_silence_timeout_s,
    )
