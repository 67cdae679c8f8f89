"""What concerns all tests."""

import gc

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_SERIAL = {"e2e": "ray", "cluster": "ray", "kv_transfer": "transfer", "pd": "transfer"}
"""Directories whose tests run one after another, beside those of other groups: they share Ray, or compare what is in
/dev/shm before and after."""
_ORDER = ("e2e", "kv_transfer", "pd", "model_runner")
"""What takes longest begins first."""


class _Groups(LoadScopeScheduling):
    """What runs in one process, where there are several: a group, else a file, whose tests share what is costly."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _SERIAL.get(file.split("/")[1], file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Groups:
    return _Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(_ORDER)}
    items.sort(key=lambda item: places.get(item.nodeid.split("/")[1], len(_ORDER)))


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """What is there before a module's tests, imported modules above all, is no garbage of theirs.

    Hundreds of tests look for what they left by collecting it, and each time would walk over half a million objects.
    """
    gc.collect()
    gc.freeze()
