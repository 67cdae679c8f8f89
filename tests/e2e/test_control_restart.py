"""The control actor is killed while the system serves: streams go on, and what it knew is told to it again."""

import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.system import Served, wait_for

pytestmark = pytest.mark.ray

# Several times as long as the control actor needs to come back.
NUM_TOKENS = 120


def events(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line:
            yield line.removeprefix("data: ")


def is_served(served: Served) -> bool:
    body = {"model": served.model, "prompt": "Once", "max_tokens": 1}
    return httpx.post(f"{served.base_url}/v1/completions", json=body, timeout=30).status_code == 200


def series(served: Served) -> list[str]:
    """Names and labels of all series in /metrics."""
    lines = httpx.get(f"{served.base_url}/metrics", timeout=10).text.splitlines()
    return [line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")]


def test_a_killed_control_actor_cuts_no_stream_and_requests_are_served_again(served: Served) -> None:
    served.wait_until_idle(timeout_s=20)
    before = {rank["rank_id"]: rank["boot_id"] for rank in served.ranks()}
    series_before = series(served)
    killed_pid = served.control_pid()
    body = {
        "model": served.model,
        "prompt": "Once upon a time",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{served.base_url}/v1/completions", json=body, timeout=120) as response:
        stream = events(response)
        said = [next(stream)]
        os.kill(killed_pid, signal.SIGKILL)
        wait_for(lambda: is_served(served), 20, lambda: "a new request served after the control actor's death")
        said += stream

    assert said.pop() == "[DONE]"
    chunks = [json.loads(event) for event in said]
    assert not [chunk for chunk in chunks if "error" in chunk]
    assert chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == ["length"]

    served.wait_for_ranks(len(before), timeout_s=30)
    assert served.control_pid() != killed_pid
    assert {rank["rank_id"]: rank["boot_id"] for rank in served.ranks()} == before
    after = series(served)
    assert len(after) == len(set(after))
    assert {name for name in series_before if "rank=" in name} == {name for name in after if "rank=" in name}
    served.wait_until_idle(timeout_s=20)
    served.check_integrity()
