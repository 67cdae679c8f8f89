"""One line per request, whatever becomes of it, with what happened when."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.access_log import LOGGER_NAME, write_to_file
from tests.router.fake_cluster import MODEL, Cluster, in_loop, running, until
from tests.router.test_api_keys import KEYS, bearer
from tests.router.test_faults import open_stream


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    logger = logging.getLogger(LOGGER_NAME)
    write_to_file(tmp_path / "access.log")
    yield tmp_path / "access.log"
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)


def text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


async def lines(file: Path, num_lines: int) -> list[dict[str, Any]]:
    await until(lambda: text(file).count("\n") == num_lines)
    return [json.loads(line) for line in text(file).splitlines()]


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_generation(tmp_path: Path, file: Path, stream: bool) -> None:
    async with running(tmp_path, api_keys=KEYS) as cluster:
        body = {"model": MODEL, "prompt": "hi", "n": 2, "stream": stream}
        headers = bearer("secret-1") | {"x-request-id": "mine"}
        assert (await cluster.client.post("/v1/completions?x=1", json=body, headers=headers)).status_code == 200
        [line] = await lines(file, 1)
        moments = [line.pop(name) for name in ("admitted_s", "placed_s", "first_token_s", "end_s")]
        assert moments == sorted(moments)
        assert 0 <= moments[0] < moments[-1] < 30
        assert line.pop("time").endswith("+00:00")
        assert line == {
            "request_id": "mine", "client": "127.0.0.1", "method": "POST", "path": "/v1/completions", "status": 200,
            "cause": None, "account": "tenant:blue", "tenant": "blue", "stream": stream, "num_sequences": 2,
            "num_prompt_tokens": 2, "num_cached_tokens": 3, "num_generated_tokens": 28, "ranks": ["mixed/0"],
            "num_failovers": 0,
        }  # fmt: skip


@in_loop
async def test_other_ends(tmp_path: Path, file: Path) -> None:
    async with running(tmp_path, api_keys=KEYS) as cluster:
        key, post, get, long = bearer("secret-3"), cluster.client.post, cluster.client.get, "x" * 300
        ends = [
            (get("/health"), 200, None, ""),
            (get("/v1/models"), 401, "invalid_api_key", ""),
            (get("/nowhere", headers=key), 404, "not_found", "key:three"),
            (post("/v1/completions", headers=key, content=b"{"), 400, "invalid_request", "key:three"),
            (post("/v1/completions", headers=key, json={"prompt": long}), 400, "context_length_exceeded", "key:three"),
            (post("/tokenize", headers=key, content=b"x" * 5_000_000), 413, "body_too_large", ""),
        ]  # fmt: skip
        for index, (asked, status, cause, account) in enumerate(ends):
            assert (await asked).status_code == status
            line = (await lines(file, index + 1))[-1]
            assert (line["status"], line["cause"], line["account"]) == (status, cause, account)
            assert line["end_s"] > 0


@in_loop
async def test_clients_that_leave_and_streams_that_fail(tmp_path: Path, file: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 0
        _, writer = await open_stream(cluster)
        await until(lambda: len(rank.submits) == 1)
        writer.close()
        line = (await lines(file, 1))[-1]
        assert (line["status"], line["cause"], line["first_token_s"]) == (499, "client_gone", None)
        assert line["placed_s"] > 0
        rank.allowance = 2
        asked = asyncio.create_task(stream(cluster))
        await until(lambda: rank.allowance == 0)
        rank.fail_with = "broken"
        rank.allow(1)
        await asked
        line = (await lines(file, 2))[-1]
        assert (line["status"], line["cause"], line["num_generated_tokens"]) == (200, "rank_error", 2)


async def stream(cluster: Cluster) -> None:
    assert (await cluster.complete(stream=True)).status_code == 200


@in_loop
async def test_a_replayed_answer(tmp_path: Path, file: Path) -> None:
    async with running(tmp_path) as cluster:
        for _ in range(2):
            body = {"model": MODEL, "prompt": "hi"}
            await cluster.client.post("/v1/completions", json=body, headers={"idempotency-key": "once"})
        first, second = await lines(file, 2)
        assert ("is_replayed" in first, second["is_replayed"]) == (False, True)


@in_loop
async def test_the_file_may_be_moved_away(tmp_path: Path, file: Path) -> None:
    async with running(tmp_path) as cluster:
        await cluster.client.get("/health")
        await lines(file, 1)
        os.rename(file, tmp_path / "old")
        await cluster.client.get("/health")
        await lines(file, 1)
