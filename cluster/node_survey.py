"""Looks at every node of a Ray cluster, from a task there, before any rank is started.

The task comes from the package that is installed on the node; that it is, in this version, is the first thing to know.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.environment import num_cores
from cluster.node_plan import Node
from cluster.start_errors import StartError, last_line

TIMEOUT_S = 60.0
HA_PROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"
THROUGHPUT_VARIABLE = "RAY_SERVE_THROUGHPUT_OPTIMIZED"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a process sees that Ray has started on the node."""

    version: str
    num_cores: int
    available_bytes: int
    serve_switches: frozenset[str]
    """Of the two variables above, those that are set: Serve's processes on this node have them as well."""


def package_version() -> str:
    """Of the serried that this process runs."""
    return importlib.metadata.version("serried")


def look() -> NodeFacts:
    """The task."""
    from model_runner.memory import available_memory_bytes

    return NodeFacts(
        version=package_version(),
        num_cores=num_cores(),
        available_bytes=available_memory_bytes(),
        serve_switches=frozenset(
            name for name in (HA_PROXY_VARIABLE, THROUGHPUT_VARIABLE) if os.environ.get(name) == "1"
        ),
    )


def survey() -> dict[str, NodeFacts]:
    """By node id, of all nodes that are alive. Raises StartError, with the node's name, where serried cannot run."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(look)
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    calls = {
        node_id: task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote()
        for node_id in alive
    }
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=TIMEOUT_S)
    facts: dict[str, NodeFacts] = {}
    for node_id, call in calls.items():
        name = node_name(alive[node_id])
        try:
            facts[node_id] = ray.get(call, timeout=0)
        except ray.exceptions.GetTimeoutError:
            raise StartError(f"node {name} has not run a task within {TIMEOUT_S:.0f} s; see `ray status`") from None
        except Exception as error:
            raise StartError(
                f"on node {name} serried cannot be run ({last_line(error)}); install serried {package_version()} "
                "there, into the environment that Ray was started from"
            ) from error
        if facts[node_id].version != package_version():
            raise StartError(
                f"on node {name} serried {facts[node_id].version} is installed, and here {package_version()}; install "
                "the same version everywhere"
            )
    return facts


def free_nodes(facts: Mapping[str, NodeFacts]) -> list[Node]:
    """Every node that is alive, with what Ray has to give there now; one without facts has no cores and no memory."""
    import ray
    from ray._private.state import available_resources_per_node

    # Ray has no public call for what is free on each node.
    free: dict[str, dict[str, float]] = available_resources_per_node()
    return [
        _node(node, free.get(node["NodeID"], {}), facts.get(node["NodeID"])) for node in ray.nodes() if node["Alive"]
    ]


def node_here() -> Node:
    """The node of this process, which Ray has started, with all that Ray has to give there: for one that came later."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    [node] = [node for node in ray.nodes() if node["NodeID"] == node_id]
    return _node(node, node["Resources"], look())


def _node(node: dict[str, Any], resources: Mapping[str, float], facts: NodeFacts | None) -> Node:
    return Node(
        node_id=node["NodeID"],
        address=node["NodeManagerAddress"],
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
        num_cores=facts.num_cores if facts else 0,
        available_bytes=facts.available_bytes if facts else 0,
    )


def node_name(node: dict[str, Any]) -> str:
    """For people."""
    address, host = node["NodeManagerAddress"], node["NodeManagerHostname"]
    return f"{address} ({host})"
