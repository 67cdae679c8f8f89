"""A model given as a directory, one rank, and Serve's own proxy instead of HAProxy: a start of its own."""

import json
from collections.abc import Iterator

import httpx
import pytest

from model_runner.embedded import embedded_model_dir
from tests.e2e.system import Served, ServeProcess

pytestmark = [pytest.mark.ray, pytest.mark.model]

MODEL_NAME = "other"


@pytest.fixture(scope="module")
def served_path() -> Iterator[Served]:
    path = str(embedded_model_dir(print))
    with ServeProcess(path, "--num-ranks", "1", "--model-name", MODEL_NAME, "--ha-proxy", "off") as process:
        run = process.wait_until_ready()
        assert run["ha_proxy"] is False
        system = Served(run)
        try:
            yield system
        finally:
            system.close()


def chat(served: Served, **more: object) -> dict[str, object]:
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": "What is the capital of France?"}], **more}


def test_it_has_the_name_that_was_given_and_answers(served_path: Served) -> None:
    models = httpx.get(f"{served_path.base_url}/v1/models", timeout=10).json()["data"]
    assert [model["id"] for model in models] == [MODEL_NAME]
    body = chat(served_path, max_tokens=16, temperature=0)
    answer = httpx.post(f"{served_path.base_url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def test_it_streams_and_notices_a_client_that_leaves(served_path: Served) -> None:
    url = f"{served_path.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=chat(served_path, max_tokens=16, temperature=0, stream=True)) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    pieces = [choice["delta"].get("content") or "" for event in events for choice in json.loads(event)["choices"]]
    assert "Paris" in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 4, "it came in one piece"

    endless = chat(served_path, max_tokens=4000, stream=True, ignore_eos=True)
    with httpx.stream("POST", url, json=endless, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert served_path.num_running() == 1
    # The whole answer would take minutes.
    served_path.wait_until_idle(timeout_s=20)
    served_path.check_integrity()
