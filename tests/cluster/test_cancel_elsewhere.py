"""`DELETE /v1/requests/{id}` finds a request in whichever router it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cluster.several_routers import running
from tests.router.fake_cluster import in_loop, until
from tests.router.test_bad_input import check_error


@in_loop
async def test_any_router_cancels_a_request_of_any_other(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as cluster:
        first, second, third = cluster.routers
        cluster.rank.allowance = 0
        asked = asyncio.create_task(first.complete({"x-request-id": "mine"}, n=2))
        await until(lambda: len(cluster.rank.submits) == 2)
        response = await third.client.delete("/v1/requests/cmpl-mine")
        assert (response.status_code, response.json()) == (200, {"id": "cmpl-mine", "cancelled": True})
        check_error(await asked, 499, "cancelled", "cmpl-mine")
        await until(lambda: sorted(cluster.rank.aborts) == [1, 2])
        await until(first.is_idle)
        check_error(await second.client.delete("/v1/requests/cmpl-mine"), 404, "not_found", "2 others")
        assert cluster.control._inquiries.num_open == 0


@in_loop
async def test_one_that_dies_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as cluster:
        first, second = cluster.routers
        assert second.service._control is not None

        def die(_: object) -> bool:
            assert second.service._control is not None
            assert second.service._control._connection is not None
            second.service._control._connection.abort("as if killed")
            return False

        second.service._control._on_inquired = die
        check_error(await first.client.delete("/v1/requests/cmpl-mine"), 404, "not_found", "1 others")
        await until(lambda: second.service.control.is_connected)


@in_loop
async def test_one_that_is_silent_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as cluster:
        first, second = cluster.routers
        send = second.service.control._send
        second.service.control._send = lambda message: True  # type: ignore[method-assign]
        check_error(await first.client.delete("/v1/requests/cmpl-mine"), 503, "admission_unavailable", "1 s")
        second.service.control._send = send  # type: ignore[method-assign]
