"""What ranks ask Ray for on a cluster that runs, and what they may use of a node."""

import pytest

from cluster.config import ClusterConfig, load_config
from cluster.node_plan import Demand, Node, Share, demands, missing, shares

GIB = 1 << 30


def node(name: str, cpus: float, gpus: float = 0, cores: int | None = None) -> Node:
    return Node(name, name, cpus, gpus, int(cpus) if cores is None else cores, 64 * GIB)


def config(address: str | None = "auto", **pools: dict[str, object]) -> ClusterConfig:
    return load_config(None, {"pools": pools, "ray.address": address})


@pytest.mark.parametrize(
    ("num_ranks", "cpus", "asked"),
    [(2, [1, 1], 1), (2, [8, 8], 8), (3, [8, 8], 4), (4, [8, 8], 4), (2, [8, 2], 4), (5, [1, 1], 1), (1, [], 1)],
)
def test_a_rank_asks_for_as_many_cpus_as_leave_room_for_all(num_ranks: int, cpus: list[int], asked: int) -> None:
    nodes = [node(str(index), each) for index, each in enumerate(cpus)]
    assert demands(config(a={"num_ranks": num_ranks}), nodes) == {"a": Demand(asked, 0)}


def test_threads_that_are_given_are_what_is_asked_for() -> None:
    found = demands(config(a={"num_ranks": 2, "threads_per_rank": 3}, b={"num_ranks": 2}), [node("n", 8), node("m", 8)])
    assert found == {"a": Demand(3, 0), "b": Demand(5, 0)}


def test_a_rank_on_a_gpu_asks_for_that_alone() -> None:
    pools = {"a": {"device": "cuda", "threads_per_rank": 3}, "b": {"num_ranks": 1}}
    assert demands(config(**pools), [node("n", 8, gpus=2)]) == {"a": Demand(0, 1), "b": Demand(8, 0)}


def test_gpus_that_are_lacking_take_no_cpus_from_the_others() -> None:
    pools = {"a": {"device": "cuda"}, "b": {"num_ranks": 1}}
    assert demands(config(**pools), [node("n", 8)])["b"] == Demand(8, 0)


def test_on_a_ray_of_our_own_ranks_share_the_machine() -> None:
    own = config(None, a={"num_ranks": 2}, b={"num_ranks": 1, "device": "cuda"})
    asked = demands(own, [node("n", 6)])
    assert asked == {"a": Demand(0, 0), "b": Demand(0, 1)}
    assert shares(own, asked, node("n", 6)) == {"a": Share(2, 32 * GIB), "b": Share(2, None)}


def test_what_is_lacking_is_told_with_pool_and_kind() -> None:
    asked = {"big": Demand(4, 0), "gpu": Demand(0, 1)}
    nodes = [node("n", 6, gpus=1), node("m", 3)]
    assert missing(asked, {"big": 1, "gpu": 1}, nodes) == []
    assert [str(each) for each in missing(asked, {"big": 3, "gpu": 2}, nodes)] == [
        "pool gpu: 1 rank lacks 1 GPU on one node",
        "pool big: 2 ranks lack 4 CPUs on one node",
    ]
    assert [str(each) for each in missing(asked, {"big": 1}, [])] == ["pool big: 1 rank lacks 4 CPUs on one node"]


def test_small_ranks_take_what_large_ones_leave() -> None:
    asked = {"a": Demand(1, 0), "b": Demand(4, 0)}
    assert missing(asked, {"a": 3, "b": 1}, [node("n", 5), node("m", 2)]) == []


def test_each_node_is_shared_among_those_that_fit_there() -> None:
    settings = config(a={"num_ranks": 4})
    asked = {"a": Demand(4, 0)}
    assert shares(settings, asked, node("n", 8, cores=16)) == {"a": Share(8, 32 * GIB)}
    assert shares(settings, asked, node("m", 4)) == {"a": Share(4, 64 * GIB)}
    # More would fit than there are.
    assert shares(settings, asked, node("l", 64)) == {"a": Share(16, 16 * GIB)}
    # Ray may have put another's work there since.
    assert shares(settings, asked, node("k", 1)) == {"a": Share(1, 64 * GIB)}


def test_gpus_share_the_cores_of_their_node_and_no_memory() -> None:
    settings = config(a={"num_ranks": 8, "device": "cuda"}, b={"num_ranks": 1, "threads_per_rank": 2})
    found = shares(settings, demands(settings, [node("n", 32, gpus=4)]), node("n", 32, gpus=4))
    assert found == {"a": Share(8, None), "b": Share(2, 64 * GIB)}
