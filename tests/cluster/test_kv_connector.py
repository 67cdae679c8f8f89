"""Which connector a rank gets, and what of the configuration is refused when it starts."""

from typing import ClassVar

import pytest

from cluster.kv_connector import make_connector
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector import ConnectorContext
from kv_transfer.geometry import Geometry
from kv_transfer.pull_connector import PullConnector
from kv_transfer.pull_scheduler import PullScheduler
from model_runner.runner import Capacity
from router.control_messages import PoolRole

GEOMETRY = Geometry("model", "float32", 2, 1, 8, 16, 1, 2 * 2 * 16 * 8 * 4)


def capacity(geometry: Geometry | None = GEOMETRY, device: str = "cpu") -> Capacity:
    return Capacity(
        8,
        16,
        4096,
        64,
        100,
        frozenset(),
        "float32",
        device,
        "torch",
        geometry=geometry,
        is_kv_mirrored=device == "cuda",
    )


def made(geometry: Geometry | None = GEOMETRY, role: PoolRole = PoolRole.MIXED, device: str = "cpu", **config: object):
    return make_connector(KVTransferConfig(**config), role, "e", "127.0.0.1", b"secret", capacity(geometry, device))


def test_without_a_name_there_is_none() -> None:
    assert made() is None


def test_both_halves_know_the_same_rank() -> None:
    connector = made(kv_connector="PullConnector", role=PoolRole.DECODE)
    assert connector is not None
    assert isinstance(connector.scheduler, PullScheduler)


class Remembering(PullConnector):
    """Keeps what it is made of."""

    contexts: ClassVar[list[ConnectorContext]] = []

    @staticmethod
    def make_scheduler_half(context: ConnectorContext) -> PullScheduler:
        Remembering.contexts.append(context)
        return PullConnector.make_scheduler_half(context)


@pytest.mark.parametrize("buffer_device", [None, "cpu"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_pool_on_a_gpu_has_one_too_and_it_knows_of_the_mirror(device: str, buffer_device: str | None) -> None:
    config = {"kv_connector": "Remembering", "kv_connector_module_path": __name__, "kv_buffer_device": buffer_device}
    assert made(device=device, **config) is not None
    assert Remembering.contexts.pop().pool_is_mirrored == (device == "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_transfers_out_of_a_gpu_s_memory_are_refused_with_the_reason(device: str) -> None:
    with pytest.raises(ValueError, match=r"kv_buffer_device is 'cuda'.*\(GPUDirect\).*mirror.*set it to 'cpu'"):
        made(kv_connector="PullConnector", kv_buffer_device="cuda", device=device)


@pytest.mark.parametrize(
    ("config", "geometry", "named"),
    [
        ({"kv_connector": "PullConector"}, GEOMETRY, "PullConnector"),
        ({"kv_connector": "PullConnector"}, None, "'torch' does not say what its KV blocks hold"),
        ({"kv_connector": "PullConnector", "kv_connector_extra_config": {"lease": 3}}, GEOMETRY, "lease"),
    ],
)
def test_what_cannot_work_is_refused(config: dict[str, object], geometry: Geometry | None, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        made(geometry, **config)
