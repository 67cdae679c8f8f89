"""An idempotency key that reaches another router than the first time: its request does not run a second time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cluster.several_routers import running
from tests.router.fake_cluster import in_loop, until
from tests.router.test_bad_input import check_error

KEY = {"idempotency-key": "once"}


@in_loop
async def test_the_owner_answers_and_others_say_where(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as cluster:
        first, second, third = cluster.routers
        cluster.rank.allowance = 0
        asked = asyncio.create_task(first.complete(KEY))
        await until(lambda: len(cluster.rank.submits) == 1)
        response = await second.complete(KEY)
        check_error(response, 409, "in_progress", "another router")
        assert response.headers["retry-after"] == "1"
        cluster.rank.allow(float("inf"))
        assert (await asked).status_code == 200
        check_error(await third.complete(KEY), 409, "in_progress")
        assert (await first.complete(KEY)).headers["idempotent-replayed"] == "true"
        assert len(cluster.rank.submits) == 1
        assert (await third.complete({"idempotency-key": "another"})).status_code == 200


@in_loop
async def test_of_two_that_begin_at_once_one_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as cluster:
        for attempt in range(20):
            key = {"idempotency-key": str(attempt)}
            num_submits = len(cluster.rank.submits)
            answers = await asyncio.gather(*(router.complete(key) for router in cluster.routers))
            assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
            assert len(cluster.rank.submits) == num_submits + 1
