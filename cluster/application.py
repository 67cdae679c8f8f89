"""The Serve application: routers as the ingress, one deployment of ranks per pool."""

from __future__ import annotations

from pathlib import Path

from ray import serve

from cluster.config import ClusterConfig
from cluster.rank import Rank
from cluster.router_replica import RouterReplica
from router.service import RouterSettings

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
    config: ClusterConfig, *, model_dir: Path, model_name: str, max_model_len: int, secret: bytes, num_cores: int
) -> serve.Application:
    """Everything that Serve runs, as one application. Importing torch is left to the ranks."""
    pools = [
        serve.deployment(Rank)
        .options(
            name=pool_deployment(name),
            num_replicas=settings.num_ranks,
            # Ranks share the cores by their number of threads, so Serve has no CPUs to count.
            ray_actor_options={"num_cpus": 0, "num_gpus": 1 if settings.device == "cuda" else 0},
            max_ongoing_requests=MAX_ONGOING_REQUESTS,
            max_constructor_retry_count=MAX_CONSTRUCTOR_RETRIES,
            health_check_period_s=HEALTH_CHECK_PERIOD_S,
            health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=5.0,
        )
        .bind(
            config,
            name,
            str(model_dir),
            config.threads_of(name, num_cores),
            config.memory_share_of(name),
            secret,
        )
        for name, settings in config.pools.items()
    ]
    router = serve.deployment(RouterReplica).options(
        name=ROUTER_DEPLOYMENT,
        num_replicas=config.router.num_routers,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        max_constructor_retry_count=MAX_CONSTRUCTOR_RETRIES,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=5.0,
        logging_config={"enable_access_log": False},
    )
    settings = RouterSettings(
        model_name=model_name,
        model_dir=model_dir,
        max_model_len=max_model_len,
        expected_num_ranks=1,
        max_body_bytes=config.router.max_body_bytes,
        rank_silence_timeout_s=config.router.rank_silence_timeout_s,
    )
    return router.bind(settings, secret, pools)
