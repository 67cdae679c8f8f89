"""Build hook: compiles the extension modules when a wheel is made or the project is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Build backends are not run with the project on their path.
sys.path.insert(0, str(Path(__file__).parent))

from build_extensions import build_all


class ExtensionsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Only with an extension in it is a wheel bound to a platform and a Python."""
        built = build_all()
        build_data["artifacts"] += [f"/{path.as_posix()}" for path in built]
        if built:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
