"""The Serve application: routers as the ingress, one deployment of ranks per pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray import serve

from cluster.config import ClusterConfig
from cluster.node_plan import Demand, Node, demands
from cluster.rank import Rank
from cluster.router_replica import RouterReplica

ROUTER_DEPLOYMENT = "router"
# Serve counts requests only to hold them back; admission is the ledger's business.
MAX_ONGOING_REQUESTS = 1_000_000
HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 30.0
# For a router to end, and for a rank to end once it has nothing left to do.
STOP_TIMEOUT_S = 5.0
# Attempts to start a replica before the deployment has failed. Reasons that cannot go away are reported at once.
MAX_CONSTRUCTOR_RETRIES = 3


def pool_deployment(pool: str) -> str:
    """Name of the Serve deployment that holds the ranks of `pool`."""
    return f"ranks-{pool}"


def build(
    config: ClusterConfig,
    *,
    model_path: str | None,
    model_name: str,
    max_model_len: int,
    secret: bytes,
    nodes: Sequence[Node],
    environment: Mapping[str, str],
) -> serve.Application:
    """Everything that Serve runs, as one application. Importing torch is left to the ranks.

    `model_path`: as every node finds the model; None: the embedded one. `nodes`: as they are before any rank has
    started, so that each rank's part of one is the same for the first and for every one that replaces it.
    `environment`: for the replicas, besides what they have from their node.
    """
    asked = demands(config, nodes)
    by_id = {node.node_id: node for node in nodes}
    pools = [
        _deployment(
            Rank, pool_deployment(name), settings.num_ranks, asked[name], environment, settings.drain_limit_s
        ).bind(config, name, model_path, asked, by_id, secret)
        for name, settings in config.pools.items()
    ]
    # A router is idle most of the time: asking for a whole CPU would take one from a rank.
    return _deployment(RouterReplica, ROUTER_DEPLOYMENT, config.router.num_routers, Demand(0, 0), environment).bind(
        config, model_path, model_name, max_model_len, secret, pools
    )


def _deployment(
    replica: type,
    name: str,
    num_replicas: int,
    asked: Demand,
    environment: Mapping[str, str],
    drain_limit_s: float = 0.0,
) -> serve.Deployment:
    return serve.deployment(replica).options(
        name=name,
        num_replicas=num_replicas,
        ray_actor_options={
            "num_cpus": asked.num_cpus,
            "num_gpus": asked.num_gpus,
            **({"runtime_env": {"env_vars": dict(environment)}} if environment else {}),
        },
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        max_constructor_retry_count=MAX_CONSTRUCTOR_RETRIES,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_limit_s + STOP_TIMEOUT_S,
        logging_config={"enable_access_log": False},
    )
