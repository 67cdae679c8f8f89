"""What the repository shows its readers does run: examples and benchmarks, as they call them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.system import Served

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120


def run(*arguments: str, said: str = "") -> str:
    """Output of a Python program of this repository."""
    finished = subprocess.run(
        [sys.executable, *arguments], input=said, capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_chat(served: Served) -> None:
    output = run("examples/chat.py", served.base_url, said="Say hello.\n\n")
    greeting, answer, end = output.split("> ")
    assert greeting.startswith(f"{served.model} at {served.base_url}")
    assert answer.strip()
    assert end == ""


def test_serving_benchmark(served: Served) -> None:
    sizes = ("--input-tokens", "8", "--output-tokens", "4")
    load = ("--concurrency", "1", "--rounds", "1", "--min-requests", "2")
    figures = json.loads(run("-m", "benchmarks.serving", served.base_url, *load, *sizes).splitlines()[-1])
    names = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p50_ms", "itl_p99_ms")
    assert set(figures) == {f"serried_{name}_c1" for name in names}
    assert min(figures.values()) > 0
