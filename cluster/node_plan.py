"""What each rank asks Ray for, and what it may use of the node it gets; pure.

On a Ray of our own the ranks share one machine, and Ray counts nothing. On a cluster that others use too, ranks ask for
what they take, so that Ray places each where there is room: a GPU, or CPUs. How many threads a rank then runs, and how
much memory it may take, follows from the cores and the memory of its own node, and from how many ranks fit there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import ClusterConfig, PoolConfig


@dataclass(frozen=True, slots=True)
class Node:
    node_id: str
    address: str
    """Where the others reach it."""
    num_cpus: float
    """CPUs and GPUs that Ray has to give there, now."""
    num_gpus: float
    num_cores: int
    """Cores and memory that a process there may use."""
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What one rank asks Ray for."""

    num_cpus: int
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank may use of its node."""

    num_threads: int
    memory_budget_bytes: int | None
    """None: what is free on its device."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Ranks of a pool for which there is no room."""

    pool: str
    num_ranks: int
    demand: Demand

    def __str__(self) -> str:
        kind, count = ("GPU", self.demand.num_gpus) if self.demand.num_gpus else ("CPU", self.demand.num_cpus)
        ranks, lack = ("rank", "lacks") if self.num_ranks == 1 else ("ranks", "lack")
        return f"pool {self.pool}: {self.num_ranks} {ranks} {lack} {count} {kind}{'s' if count > 1 else ''} on one node"


def demands(config: ClusterConfig, nodes: Sequence[Node]) -> dict[str, Demand]:
    """What a rank of each pool asks for. A rank on the CPU without a number of threads asks for as many CPUs as still
    leave room for all of them: the whole cluster is used, and one that is too small is asked for one each."""
    if config.ray.is_own:
        return {pool: Demand(0, _gpus(settings)) for pool, settings in config.pools.items()}
    counts = {pool: settings.num_ranks for pool, settings in config.pools.items() if not _gpus(settings)}
    for cpus in range(int(max((node.num_cpus for node in nodes), default=1)), 1, -1):
        found = _demands_with(config, cpus)
        if not missing(found, counts, nodes):
            return found
    return _demands_with(config, 1)


def missing(demands: Mapping[str, Demand], counts: Mapping[str, int], nodes: Sequence[Node]) -> list[Missing]:
    """Which of `counts` ranks of each pool would find no room on `nodes`, one a pool."""
    cpus = {node.node_id: node.num_cpus for node in nodes}
    gpus = {node.node_id: node.num_gpus for node in nodes}
    found = []
    # Large ones first: what is left over between them is of use to the small ones.
    for pool, demand in sorted(demands.items(), key=lambda item: (-item[1].num_gpus, -item[1].num_cpus, item[0])):
        left = counts.get(pool, 0)
        for node_id in cpus:
            while left and cpus[node_id] >= demand.num_cpus and gpus[node_id] >= demand.num_gpus:
                cpus[node_id] -= demand.num_cpus
                gpus[node_id] -= demand.num_gpus
                left -= 1
        if left:
            found.append(Missing(pool, left, demand))
    return found


def shares(config: ClusterConfig, demands: Mapping[str, Demand], node: Node) -> dict[str, Share]:
    """What a rank of each pool may use on `node`."""
    if config.ray.is_own:
        return {
            pool: Share(config.threads_of(pool, node.num_cores), config.memory_budget_of(pool, node.available_bytes))
            for pool in config.pools
        }
    return {pool: _share(config, demands, pool, node) for pool in config.pools}


def _share(config: ClusterConfig, demands: Mapping[str, Demand], pool: str, node: Node) -> Share:
    alike = {name: each for name, each in config.pools.items() if each.device == config.pools[pool].device}
    smallest = min((demands[name] for name in alike), key=lambda demand: (demand.num_gpus, demand.num_cpus))
    room = node.num_gpus // smallest.num_gpus if smallest.num_gpus else node.num_cpus // max(1, smallest.num_cpus)
    neighbours = max(1, min(int(room), sum(each.num_ranks for each in alike.values())))
    return Share(
        config.pools[pool].threads_per_rank or max(1, node.num_cores // neighbours),
        None if config.pools[pool].device == "cuda" else node.available_bytes // neighbours,
    )


def _demands_with(config: ClusterConfig, cpus: int) -> dict[str, Demand]:
    return {
        pool: Demand(0 if _gpus(settings) else settings.threads_per_rank or cpus, _gpus(settings))
        for pool, settings in config.pools.items()
    }


def _gpus(settings: PoolConfig) -> int:
    return 1 if settings.device == "cuda" else 0
