"""Who is let in, whose requests they are, and that a refusal comes before anything else of the request is looked at."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError

from router import api_keys
from router.api_keys import ApiKey, ApiKeys
from router.errors import ApiError, Cause
from tests.router.fake_cluster import HOST, MODEL, in_loop, running, until
from tests.router.test_bad_input import check_error


def key(name: str, secret: str, tenant: str = "") -> ApiKey:
    return ApiKey(name=name, sha256=hashlib.sha256(secret.encode()).hexdigest(), tenant=tenant)


KEYS = (key("one", "secret-1", "blue"), key("two", "secret-2", "blue"), key("three", "secret-3"))


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.parametrize(
    ("header", "name"),
    [(b"Bearer secret-1", "one"), (b"bearer secret-2", "two"), (b"BEARER  secret-3 ", "three")],
)
def test_a_known_key(header: bytes, name: str) -> None:
    found = ApiKeys(KEYS).check("/v1/models", header)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "is missing; send `Authorization: Bearer KEY`"),
        (b"", "another scheme"),
        (b"Basic secret-1", "another scheme"),
        (b"Bearer", "not known"),
        (b"Bearer secret-4", "not known"),
        (b"Bearer secret-1 secret-1", "not known"),
        (b"Bearer \xff\x00", "not known"),
        (b"Bearer " + KEYS[0].sha256.encode(), "not known"),
    ],
)
def test_what_is_no_known_key(header: bytes | None, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        ApiKeys(KEYS).check("/v1/models", header)
    assert caught.value.cause is Cause.INVALID_API_KEY
    assert "secret" not in caught.value.message


def test_accounts_are_those_of_tenants() -> None:
    assert [each.account for each in KEYS] == ["tenant:blue", "tenant:blue", "key:three"]
    assert key("blue", "x").account != key("y", "y", "blue").account


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: str, other: str) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    assert hmac.compare_digest is compare
    ApiKeys(KEYS).check("/v1/models", b"Bearer secret-1")
    assert compared == [each.sha256 for each in KEYS]


@in_loop
async def test_all_routes_but_those_for_looking_after_it_ask_for_one(tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=KEYS) as cluster:
        client = cluster.client
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
        for method, path in (
            ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"),
            ("POST", "/detokenize"), ("GET", "/v1/models"), ("GET", f"/v1/models/{MODEL}"),
            ("GET", "/v1/requests/cmpl-1/explain"), ("GET", "/openapi.json"), ("GET", "/nowhere"),
            ("GET", "/health/"), ("GET", "//health"), ("GET", "/metrics/x"),
        ):  # fmt: skip
            response = await client.request(method, path, content=b"no JSON")
            error = check_error(response, 401, "invalid_api_key", "Bearer KEY")
            assert error["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        response = await client.get("/v1/models", headers=[("authorization", "Bearer secret-1")] * 2)
        check_error(response, 400, "invalid_request", "authorization", "give it once")
        assert (await client.get("/v1/models", headers=bearer("secret-3"))).status_code == 200
        assert (await client.get("/nowhere", headers=bearer("secret-3"))).status_code == 404
        assert (await client.get("/v1/models", headers={"x-api-key": "secret-1"})).status_code == 200
        check_error(await client.get("/v1/models", headers={"x-api-key": "wrong"}), 401, "invalid_api_key")


@in_loop
async def test_the_openai_client(tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=KEYS) as cluster:
        base_url = f"http://{HOST}:{cluster.port}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="secret-2", max_retries=0) as client:
            answer = await client.completions.create(model=MODEL, prompt="hi")
            assert answer.choices[0].text == "Hello, world!"
        async with AsyncOpenAI(base_url=base_url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(AuthenticationError):
                await client.completions.create(model=MODEL, prompt="hi")


@in_loop
async def test_the_key_says_who_the_tenant_is(tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=KEYS) as cluster:
        cluster.ranks[0].allowance = 0
        callers = {}

        async def send(secret: str) -> httpx.Response:
            body = {"model": MODEL, "prompt": "hi", "user": "green", "metadata": {"secret": secret}}
            return await cluster.client.post("/v1/completions", headers=bearer(secret), json=body)

        sending = [asyncio.create_task(send(secret)) for secret in ("secret-1", "secret-3")]
        await until(lambda: len(cluster.service._flows) == 2)
        for flow in cluster.service._flows:
            callers[flow.caller.account] = flow.caller.tenant
        assert callers == {"tenant:blue": "blue", "key:three": "green"}
        cluster.ranks[0].allow(float("inf"))
        assert [(await each).status_code for each in sending] == [200, 200]


@in_loop
async def test_a_refusal_does_not_wait_for_the_body(tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=KEYS) as cluster:
        reader, writer = await asyncio.open_connection(HOST, cluster.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 401 " in head
        assert json.loads(await reader.read())["error"]["code"] == "invalid_api_key"
        writer.close()
        assert cluster.counted("serried_refused") == {"invalid_api_key": 1}
