"""The Serve application: routers as the ingress, one deployment of ranks per pool."""

from __future__ import annotations

from pathlib import Path

from ray import serve

from cluster.config import ClusterConfig
from cluster.rank import Rank
from cluster.router_replica import RouterReplica
from cluster.router_settings import router_settings

APPLICATION_NAME = "serried"
ROUTER_DEPLOYMENT = "router"
# Serve counts requests only to hold them back; admission is the ledger's business.
MAX_ONGOING_REQUESTS = 1_000_000
HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 30.0
# Attempts to start a replica before the deployment has failed. Reasons that cannot go away are reported at once.
MAX_CONSTRUCTOR_RETRIES = 3


def pool_deployment(pool: str) -> str:
    """Name of the Serve deployment that holds the ranks of `pool`."""
    return f"ranks-{pool}"


def build(
    config: ClusterConfig,
    *,
    model_dir: Path,
    model_name: str,
    max_model_len: int,
    secret: bytes,
    num_cores: int,
    available_bytes: int,
) -> serve.Application:
    """Everything that Serve runs, as one application. Importing torch is left to the ranks.

    `available_bytes` is the node's free memory before any rank has started, so that each rank's part of it is the
    same for the first and for every one that replaces it.
    """
    pools = [
        _deployment(
            Rank, pool_deployment(name), settings.num_ranks, num_gpus=1 if settings.device == "cuda" else 0
        ).bind(
            config,
            name,
            str(model_dir),
            config.threads_of(name, num_cores),
            config.memory_budget_of(name, available_bytes),
            secret,
        )
        for name, settings in config.pools.items()
    ]
    settings = router_settings(config, model_dir=model_dir, model_name=model_name, max_model_len=max_model_len)
    return _deployment(RouterReplica, ROUTER_DEPLOYMENT, config.router.num_routers).bind(settings, secret, pools)


def _deployment(replica: type, name: str, num_replicas: int, *, num_gpus: int = 0) -> serve.Deployment:
    return serve.deployment(replica).options(
        name=name,
        num_replicas=num_replicas,
        # Ranks share the cores by their number of threads, so Serve has no CPUs to count.
        ray_actor_options={"num_cpus": 0, "num_gpus": num_gpus},
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        max_constructor_retry_count=MAX_CONSTRUCTOR_RETRIES,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=5.0,
        logging_config={"enable_access_log": False},
    )
