"""A child process that has both schedulers: ours and the reference's, vLLM's V1 scheduler.

The reference is too large to depend on. Its Python is the current one if `vllm` can be imported, else the one that
the environment variable SERRIED_REFERENCE_PYTHON names; ours is put on that one's path and needs from it only
numpy, msgspec and pydantic.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

PYTHON_VARIABLE = "SERRIED_REFERENCE_PYTHON"
_ROOT = Path(__file__).resolve().parent.parent


class ReferenceMissingError(RuntimeError):
    """No Python here can import the reference; the text says what to do."""


def find_reference_python() -> str:
    """Path of a Python that has the reference. Raises ReferenceMissingError."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        raise ReferenceMissingError(
            f"vllm cannot be imported, and {PYTHON_VARIABLE} is not set: install vllm, or set the variable to the path "
            "of a Python that has it"
        )
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([python, "-c", probe], check=False).returncode == 0
    except OSError as error:
        raise ReferenceMissingError(f"{PYTHON_VARIABLE} is {python!r}, which does not start: {error}") from error
    if not found:
        raise ReferenceMissingError(f"{PYTHON_VARIABLE} is {python!r}, which has no vllm: name a Python that has it")
    return python


def run_with_reference(module: str, arguments: list[str], timeout: float | None = None) -> int:
    """Run a module of this repository in a process that has both; returns its exit code.

    Its output goes where ours goes. Raises ReferenceMissingError, and subprocess.TimeoutExpired after `timeout`
    seconds, the process being gone by then.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    command = [find_reference_python(), "-m", module, *arguments]
    return subprocess.run(command, env=environment, cwd=_ROOT, timeout=timeout, check=False).returncode
