"""Bad input to the running system: refused in the API's error shape, naming field and limit; the server goes on."""

import json

import httpx
import pytest

pytestmark = pytest.mark.ray

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

BAD = {
    "wrong type": (CHAT, {"messages": "hi"}, 400, "messages"),
    "wrong type of a number": (CHAT, {"messages": MESSAGES, "max_tokens": "many"}, 400, "max_tokens"),
    "unknown field": (CHAT, {"messages": MESSAGES, "max_tokns": 5}, 400, "max_tokns"),
    "empty messages": (CHAT, {"messages": []}, 400, "messages"),
    "a role that does not exist": (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, 400, "role"),
    "max_tokens 0": (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
    "max_tokens negative": (COMPLETIONS, {"prompt": "hi", "max_tokens": -3}, 400, "max_tokens"),
    "temperature -1": (CHAT, {"messages": MESSAGES, "temperature": -1}, 400, "temperature"),
    "top_p 0": (CHAT, {"messages": MESSAGES, "top_p": 0}, 400, "top_p"),
    "prompt longer than the model": (COMPLETIONS, {"prompt": [5] * 9000}, 400, "8192"),
    "prompt plus max_tokens longer": (COMPLETIONS, {"prompt": [5] * 100, "max_tokens": 8190}, 400, "max_tokens"),
    "unknown model": (CHAT, {"messages": MESSAGES, "model": "gpt-17"}, 404, "gpt-17"),
    "n of 1000": (CHAT, {"messages": MESSAGES, "n": 1000}, 400, "n"),
    "100 stop strings": (CHAT, {"messages": MESSAGES, "stop": [str(i) for i in range(100)]}, 400, "stop"),
    "echo": (COMPLETIONS, {"prompt": "hi", "echo": True}, 400, "echo"),
    "empty prompt": (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    "token id outside the vocabulary": (COMPLETIONS, {"prompt": [1, 10**6]}, 400, "prompt"),
}

RAW = {
    "not JSON": (b"hello", 400),
    "NaN": (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', 400),
    "invalid UTF-8": (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
    "10 MB": (b'{"messages": [{"role": "user", "content": "' + b"a" * (10 << 20) + b'"}]}', 413),
    "nothing": (b"", 400),
    "deep nesting": (b"[" * 100_000, 400),
}


def assert_error(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture(autouse=True)
def _goes_on(served):
    yield
    body = {"model": served.model, "prompt": "Hello", "max_tokens": 1}
    assert httpx.post(f"{served.base_url}{COMPLETIONS}", json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("case", BAD)
def test_bad_fields(served, case):
    path, body, status, named = BAD[case]
    answer = httpx.post(f"{served.base_url}{path}", json={"model": served.model} | body, timeout=60)
    error = assert_error(answer, status)
    assert named in json.dumps(error)


@pytest.mark.parametrize("case", RAW)
def test_bad_bodies(served, case):
    content, status = RAW[case]
    answer = httpx.post(
        f"{served.base_url}{CHAT}", content=content, headers={"content-type": "application/json"}, timeout=60
    )
    assert_error(answer, status)


def test_unknown_route_and_method_have_the_error_shape(served):
    assert_error(httpx.get(f"{served.base_url}/v1/nothing"), 404)
    assert_error(httpx.get(f"{served.base_url}{CHAT}"), 405)
