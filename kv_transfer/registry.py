"""Connectors by name: what `kv_connector` may say."""

from __future__ import annotations

import importlib
from typing import cast

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector import KvConnector

CONNECTORS = {
    "PullConnector": "kv_transfer.pull_connector",
    "SharedStorageConnector": "kv_transfer.shared_storage_connector",
    "OffloadConnector": "kv_transfer.offload_connector",
    "RedisConnector": "kv_transfer.redis_connector",
    "MultiConnector": "kv_transfer.multi_connector",
}
"""The module of each; imported when it is used, so that what others need need not be installed."""

_REMEDY = f"name one of {', '.join(CONNECTORS)}, or a class by its dotted path"


def find_connector(config: KVTransferConfig) -> type[KvConnector]:
    """The class that `kv_connector` names. Raises ValueError, which says what is known."""
    name, module_path = config.kv_connector, config.kv_connector_module_path
    if name is None:
        raise ValueError(f"kv_connector is not set: {_REMEDY}")
    if module_path is not None:
        class_name = name
    elif name in CONNECTORS:
        module_path, class_name = CONNECTORS[name], name
    else:
        module_path, _, class_name = name.rpartition(".")
        if not module_path:
            raise ValueError(f"kv_connector is {name!r}, which is not known: {_REMEDY}")
    told = f"kv_connector is {name!r}"
    try:
        module = importlib.import_module(module_path)
    except Exception as error:  # whatever a module of somebody else's does
        raise ValueError(f"{told}, and its module {module_path} cannot be imported ({error}): {_REMEDY}") from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ValueError(f"{told}, and module {module_path} has no {class_name}: {_REMEDY}")
    missing = [
        method for method in ("make_scheduler_half", "make_worker_half") if not callable(getattr(found, method, None))
    ]
    if missing:
        raise ValueError(f"{told}, which is no connector: it lacks {' and '.join(missing)}")
    return cast(type[KvConnector], found)
