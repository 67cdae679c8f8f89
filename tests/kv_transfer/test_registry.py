"""What `kv_connector` may name."""

from __future__ import annotations

import sys
import types

import pytest

from kv_transfer.config import KVTransferConfig
from kv_transfer.pull_connector import PullConnector
from kv_transfer.registry import CONNECTORS, find_connector


class Own:
    @staticmethod
    def make_scheduler_half(context: object) -> None: ...

    @staticmethod
    def make_worker_half(context: object) -> None: ...


class HalfOfOne:
    make_worker_half = Own.make_worker_half


def find(name: str | None, module_path: str | None = None) -> object:
    if name is None:
        return find_connector(KVTransferConfig())
    return find_connector(KVTransferConfig(kv_connector=name, kv_connector_module_path=module_path))


def test_by_name_by_path_and_by_module() -> None:
    assert find("PullConnector") is PullConnector
    assert find("kv_transfer.pull_connector.PullConnector") is PullConnector
    assert find(f"{__name__}.Own") is Own
    assert find("Own", __name__) is Own


def test_a_module_is_imported_when_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("kv_of_somebody")
    module.PullConnector = Own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kv_of_somebody", module)
    assert find("PullConnector", "kv_of_somebody") is Own


@pytest.mark.parametrize(
    ("name", "module_path", "message"),
    [
        (None, None, "kv_connector is not set: name one of PullConnector, "),
        ("PulConnector", None, "kv_connector is 'PulConnector', which is not known: name one of PullConnector, "),
        ("no_such_module.Connector", None, "its module no_such_module cannot be imported"),
        ("Connector", "no_such_module", "its module no_such_module cannot be imported"),
        ("kv_transfer.pull_connector.Nothing", None, "module kv_transfer.pull_connector has no Nothing"),
        (f"{__name__}.HalfOfOne", None, "is no connector: it lacks make_scheduler_half"),
        ("sys.path", None, "it lacks make_scheduler_half and make_worker_half"),
        (".Connector", None, "is not known"),
        ("..x.Connector", None, "its module ..x cannot be imported"),
    ],
)
def test_what_is_no_connector_is_told(name: str | None, module_path: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(name, module_path)


def test_every_name_leads_to_a_connector() -> None:
    for name in CONNECTORS:
        try:
            assert find(name)
        except ValueError as error:
            pytest.skip(str(error))  # its library is not installed
