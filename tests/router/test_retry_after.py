"""Refusals as clients see them: cheap, and with a time that is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from router.caller import ANYBODY, Caller
from router.retry_alias import with_retry_alias
from tests.router.fake_cluster import HOST, MODEL, Cluster, in_loop, running, until

SECRET = b"a cluster's secret"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def hold(cluster: Cluster, number: int = 1) -> list[asyncio.Task[Any]]:
    """Requests that stay in the queue until their rank is allowed to go on."""
    (rank,) = cluster.ranks
    rank.allowance = 0
    tasks = [asyncio.create_task(cluster.client.post("/v1/chat/completions", json=CHAT)) for _ in range(number)]
    await until(lambda: len(rank.submits) == number)
    return tasks


@in_loop
async def test_a_refusal_says_when_to_come_and_by_which_token(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_reqs=1) as cluster:
        (held,) = await hold(cluster)
        refused = await cluster.client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        wait_ms = int(refused.headers["retry-after-ms"])
        assert int(refused.headers["retry-after"]) == -(-wait_ms // 1000)
        token = refused.headers["x-serried-retry-token"]
        early = await cluster.client.post("/v1/chat/completions", json=CHAT, headers={"x-serried-retry-token": token})
        assert (early.status_code, early.headers["x-serried-retry-token"]) == (503, token)
        assert int(early.headers["retry-after-ms"]) < wait_ms
        cluster.ranks[0].allow(float("inf"))
        assert (await held).status_code == 200
        on_time = await cluster.client.post("/v1/chat/completions", json=CHAT, headers={"x-serried-retry-token": token})
        assert on_time.status_code == 200


@in_loop
async def test_what_is_refused_for_its_number_is_not_even_parsed(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_reqs=1) as cluster:
        (held,) = await hold(cluster)
        refused = await cluster.client.post("/v1/completions", content=b"no JSON")
        assert refused.json()["error"]["code"] == "max_num_queued_reqs"
        cluster.ranks[0].allow(float("inf"))
        assert (await held).status_code == 200
        # There is a place again: it is given back by what turns out to be nonsense, or is for another model.
        assert (await cluster.client.post("/v1/completions", content=b"no JSON")).status_code == 400
        other = await cluster.client.post("/v1/completions", json={"model": "other", "prompt": "hi"})
        assert other.status_code == 404
        assert cluster.service.control.num_holdings == 0
        several = {"model": MODEL, "prompt": ["a", "b"]}
        assert (await cluster.client.post("/v1/completions", json=several)).status_code == 503
        assert (await cluster.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        cluster.service.check_integrity()


@in_loop
async def test_an_openai_client_that_is_refused_has_its_place_at_the_time_it_was_told(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_reqs=1) as cluster:
        (held,) = await hold(cluster)
        client = AsyncOpenAI(base_url=f"http://{HOST}:{cluster.port}/v1", api_key="none", max_retries=1)
        async with client:
            asked = asyncio.create_task(client.chat.completions.create(**CHAT))  # type: ignore[call-overload]
            await until(lambda: cluster.ledger.counts().num_refused_requests == 1)
            cluster.ranks[0].allow(float("inf"))
            assert (await held).status_code == 200
            assert (await asked).choices[0].message.content
        assert cluster.ledger.counts().num_refused_requests == 1


def alias_of(body: bytes = b"body", caller: Caller = ANYBODY, secret: bytes = SECRET) -> str | None:
    return with_retry_alias(caller, [], body, secret).retry_alias


def test_an_alias_is_of_who_asks_and_what_and_of_the_cluster() -> None:
    aliases = [
        alias_of(),
        alias_of(b"other"),
        alias_of(caller=Caller(tenant="t")),
        alias_of(caller=Caller(account="t")),
        alias_of(caller=Caller(tenant="tbody"), body=b""),
        alias_of(secret=b"another"),
    ]
    assert len(set(aliases)) == len(aliases)
    assert alias_of() == aliases[0]


@pytest.mark.parametrize(
    ("count", "is_retry"), [(b"0", False), (b"1", True), (b"2", True), (b"-1", False), (b"x", False)]
)
def test_a_client_s_own_retry_is_known_by_its_alias(count: bytes, is_retry: bool) -> None:
    headers = [(b"x-stainless-retry-count", count)]
    caller = with_retry_alias(ANYBODY, headers, b"body", SECRET)
    assert caller.retry_token == (alias_of() if is_retry else None)
    assert with_retry_alias(Caller(retry_token="given"), headers, b"body", SECRET).retry_token == "given"
