import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["cluster", "router", "rank_scheduler", "model_runner", "kv_transfer"])
def test_packages_are_this_repository_s(package: str) -> None:
    """Their names are short; an installed distribution may have the same one."""
    file = importlib.import_module(package).__file__
    assert file is not None
    assert Path(file).parent == ROOT / package
