"""Bad input to the running system: refused in the API's error shape, naming field and limit; the server goes on."""

import re

import httpx
import pytest

pytestmark = pytest.mark.ray

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Case → route, fields, status, the error's `param`, what its message must say.
BAD = {
    "wrong type": (CHAT, {"messages": "hi"}, 400, "messages", "'hi'"),
    "wrong type of a number": (CHAT, {"messages": MESSAGES, "max_tokens": "many"}, 400, "max_tokens", "'many'"),
    "unknown field": (CHAT, {"messages": MESSAGES, "max_tokns": 5}, 400, "max_tokns", "unknown field"),
    "empty messages": (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    "a role that does not exist": (
        CHAT,
        {"messages": [{"role": "wizard", "content": "hi"}]},
        400,
        "messages[0].role",
        "'wizard'",
    ),
    "max_tokens 0": (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens", "equal to 1, got 0"),
    "max_tokens negative": (COMPLETIONS, {"prompt": "hi", "max_tokens": -3}, 400, "max_tokens", "equal to 1, got -3"),
    "temperature -1": (CHAT, {"messages": MESSAGES, "temperature": -1}, 400, "temperature", "equal to 0, got -1"),
    "top_p 0": (CHAT, {"messages": MESSAGES, "top_p": 0}, 400, "top_p", "greater than 0, got 0"),
    "prompt longer than the model": (COMPLETIONS, {"prompt": [5] * 9000}, 400, "prompt", "9000 tokens, .* 8192"),
    "prompt plus max_tokens longer": (
        COMPLETIONS,
        {"prompt": [5] * 100, "max_tokens": 8190},
        400,
        "max_tokens",
        "8190 .* 100 .* 8192 .* at most 8092",
    ),
    "text that can never fit": (COMPLETIONS, {"prompt": "a" * 2_000_000}, 400, "prompt", "2000000 characters.* 8192"),
    "unknown model": (CHAT, {"messages": MESSAGES, "model": "gpt-17"}, 404, "model", "'gpt-17'"),
    "n of 1000": (CHAT, {"messages": MESSAGES, "n": 1000}, 400, "n", "equal to 128, got 1000"),
    "128 prompts, n of 128": (
        COMPLETIONS,
        {"prompt": ["hi"] * 128, "n": 128},
        400,
        "n",
        "16384 sequences, at most 128",
    ),
    "100 stop strings": (
        CHAT,
        {"messages": MESSAGES, "stop": [str(i) for i in range(100)]},
        400,
        "stop",
        "at most 16 .* 100",
    ),
    "suffix": (COMPLETIONS, {"prompt": "hi", "suffix": "x"}, 400, "suffix", "not supported, got .x."),
    "empty prompt": (COMPLETIONS, {"prompt": []}, 400, "prompt", "not empty"),
    "token id outside the vocabulary": (COMPLETIONS, {"prompt": [1, 10**6]}, 400, "prompt", "1000000 .* 49152"),
}

RAW = {
    "not JSON": (b"hello", 400, "not valid JSON"),
    "NaN": (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', 400, "not valid JSON"),
    "invalid UTF-8": (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, "UTF-8"),
    "10 MB": (b'{"messages": [{"role": "user", "content": "' + b"a" * (10 << 20) + b'"}]}', 413, "limit is 4194304"),
    "nothing": (b"", 400, "not valid JSON"),
    "deep nesting": (b"[" * 100_000, 400, "nested too deeply"),
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
    path, body, status, param, message = BAD[case]
    answer = httpx.post(f"{served.base_url}{path}", json={"model": served.model} | body, timeout=60)
    error = assert_error(answer, status)
    assert error["param"] == param
    assert re.search(message, error["message"]), error["message"]


@pytest.mark.parametrize("case", RAW)
def test_bad_bodies(served, case):
    content, status, message = RAW[case]
    answer = httpx.post(
        f"{served.base_url}{CHAT}", content=content, headers={"content-type": "application/json"}, timeout=60
    )
    assert message in assert_error(answer, status)["message"]


def test_the_model_may_be_left_out(served):
    body = {"messages": MESSAGES, "max_tokens": 1}
    answer = httpx.post(f"{served.base_url}{CHAT}", json=body, timeout=60)
    assert (answer.status_code, answer.json()["model"]) == (200, served.model)


def test_unknown_route_and_method_have_the_error_shape(served):
    assert assert_error(httpx.get(f"{served.base_url}/v1/nothing"), 404)["code"] == "not_found"
    wrong = httpx.get(f"{served.base_url}{CHAT}")
    assert assert_error(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
