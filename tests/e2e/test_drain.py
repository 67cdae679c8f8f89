"""Serve stops a rank while it streams: no stream is cut or even moved, and Serve puts another in its place."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.system import Served, metric

pytestmark = pytest.mark.ray

NUM_STREAMS = 4
NUM_TOKENS = 40


def moved(served: Served) -> float:
    text = httpx.get(f"{served.base_url}/metrics", timeout=10).text
    return sum(metric(text, "serried_failovers_total").values())


def stream(served: Served) -> list[str]:
    body = {
        "model": served.model,
        "prompt": "Once upon a time",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{served.base_url}/v1/completions", json=body, timeout=120) as answer:
        return [line.removeprefix("data: ") for line in answer.iter_lines() if line]


def test_a_rank_that_serve_stops_ends_its_streams_first(served: Served) -> None:
    served.wait_until_idle(timeout_s=20)
    before = {rank["boot_id"] for rank in served.ranks()}
    num_moved = moved(served)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(stream, served) for _ in range(NUM_STREAMS)]
        while served.num_running() < NUM_STREAMS:
            assert not any(future.done() for future in streams)
        served.stop_a_rank()
        said = [future.result() for future in streams]
    for events in said:
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        assert not [chunk for chunk in chunks if "error" in chunk]
        assert chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS
    assert moved(served) == num_moved
    served.wait_for_ranks(len(before), timeout_s=90)
    assert len(before - {rank["boot_id"] for rank in served.ranks()}) == 1
    served.wait_until_idle(timeout_s=20)
    served.check_integrity()
