"""What concerns all tests."""

import gc
from pathlib import Path

import pytest

_SERIAL = {"e2e": "ray", "cluster": "ray", "kv_transfer": "transfer", "pd": "transfer"}
"""Directories whose tests run one after another, beside those of other groups: they share Ray, or compare what is in
/dev/shm before and after."""
_ORDER = ("e2e", "kv_transfer", "pd", "model_runner")
"""What takes longest begins first."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: what runs in one process. A file's tests do: they share what is costly to set up."""

    def directory_of(item: pytest.Item) -> str:
        return item.path.relative_to(Path(__file__).parent).parts[0]

    for item in items:
        item.add_marker(pytest.mark.xdist_group(_SERIAL.get(directory_of(item), str(item.path))))
    places = {name: place for place, name in enumerate(_ORDER)}
    items.sort(key=lambda item: places.get(directory_of(item), len(_ORDER)))


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """What is there before a module's tests, imported modules above all, is no garbage of theirs.

    Hundreds of tests look for what they left by collecting it, and each time would walk over half a million objects.
    """
    gc.collect()
    gc.freeze()
