"""The extension modules in C that do what is done per block, where they were built (`build_extensions.py`).

Each is the twin of a Python module, which does the same, slower, where the extension is missing.
"""

from __future__ import annotations

import hashlib
import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

OFF_VARIABLE = "SERRIED_NO_EXTENSIONS"
"""Environment variable: set to 1, extensions are left alone."""
NAMES = ("kv_transfer._block_moves", "rank_scheduler._block_pool", "rank_scheduler._prefix_hash")


class ExtensionMissingError(Exception):
    """An extension cannot be used; the text says why."""


def load(name: str) -> ModuleType:
    """The extension module of this full name. Raises ExtensionMissingError, also if it is not of its present source."""
    if os.environ.get(OFF_VARIABLE, "0") not in ("", "0"):
        raise ExtensionMissingError(f"{OFF_VARIABLE} is set")
    try:
        module = import_module(name)
    except ImportError as error:
        raise ExtensionMissingError(f"{error}: install again with a C compiler and Python's headers") from error
    assert module.__file__ is not None
    path = Path(module.__file__)
    source = path.with_name(f"{path.name.partition('.')[0]}.c")
    try:
        source_hash = hashlib.sha256(source.read_bytes()).hexdigest()
    except OSError as error:
        text = f"{path.name} cannot be compared with its source ({error}): install again"
        raise ExtensionMissingError(text) from error
    if source_hash != module.SOURCE_HASH:
        raise ExtensionMissingError(f"{path.name} was not built from the present {source.name}: install again")
    return module


def why_missing() -> dict[str, str]:
    """Which extensions are not used, and why; empty if all are."""
    missing = {}
    for name in NAMES:
        try:
            load(name)
        except ExtensionMissingError as error:
            missing[name] = str(error)
    return missing
