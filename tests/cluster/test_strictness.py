"""The judge of the strictness runs, and a short run of real links around a real endpoint that is restarted."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cluster import control
from cluster.control import ControlEndpoint
from rank_scheduler.config import SchedulerConfig
from tests.cluster.burst_load import BurstLoad
from tests.cluster.holdings import GRACE_S, Event, Record, judge, read

HOST = "127.0.0.1"
SECRET = b"s" * 32
LIMIT = 12


def request(key: int, asked: float, answered: float, returning: float | None = None, number: int = 1) -> list[Record]:
    """Admitted until `returning`; None: refused."""
    answer = Event.REFUSED if returning is None else Event.ADMITTED
    records = [Record(asked, Event.ASKED, key, number), Record(answered, answer, key, number)]
    return records if returning is None else [*records, Record(returning, Event.RETURNING, key, number)]


def test_the_judge_sees_an_overshoot_over_routers() -> None:
    first, second = request(1, 0.0, 1.0, 3.0), request(1, 0.0, 2.0, 4.0, number=2)
    assert judge([(first, None), (second, None)], 2).overshoot == 1
    assert judge([(first, None), (second, None)], 3).overshoot == 0
    # One that was given back before, or died before, is not held together with it.
    assert judge([(request(1, 0.0, 1.0, 2.0), None), (second, None)], 2).overshoot == 0
    assert judge([(first, 1.5), (second, None)], 2).overshoot == 0


def test_the_judge_sees_a_refusal_in_spite_of_room() -> None:
    held, refused = request(1, 0.0, 1.0, 3.0), request(2, 4.0, 4.1)
    # That the place was given back is known by what its router was refused later; then there is room.
    assert judge([(held + refused, None)], 1).num_refused_in_spite_of_room == 0
    again = request(3, 5.0, 5.1)
    assert judge([(held + refused + again, None)], 1).num_refused_in_spite_of_room == 1
    assert judge([(held + refused, None), (again, None)], 1).num_refused_in_spite_of_room == 1
    assert judge([(held, None), (refused + again, None)], 1).num_refused_in_spite_of_room == 0
    # While it is held, or asked for, there is none.
    for asked_at in (0.5, 2.0, 2.9):
        assert judge([(held + request(2, asked_at, asked_at + 0.1), None)], 1).num_refused_in_spite_of_room == 0
        assert judge([(held + request(2, asked_at, asked_at + 0.1), None)], 2).num_refused_in_spite_of_room == 1
    # A dead router's are free after a grace.
    for late, unjust in ((GRACE_S - 1, 0), (GRACE_S + 1, 1)):
        refused = request(1, 2.0 + late, 2.1 + late)
        assert judge([(held, 2.0), (refused, None)], 1).num_refused_in_spite_of_room == unjust


def test_what_a_killed_router_wrote_last_may_be_cut(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"half")
    assert read(tmp_path / "journal") == []


def test_bursts_over_four_routers_and_two_ledgers(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(bursts(tmp_path), 60))


async def bursts(tmp_path: Path, num_routers: int = 4) -> None:
    scheduler = SchedulerConfig(max_num_queued_reqs=LIMIT)
    endpoint = ControlEndpoint(scheduler, SECRET, tick_interval_s=0.1)
    port = await endpoint.start(HOST)

    async def address() -> tuple[str, int]:
        return HOST, port

    names = [f"router-{index}" for index in range(num_routers)]
    loads = [BurstLoad(address, SECRET, name, tmp_path / name, 2 * LIMIT // num_routers) for name in names]
    for load in loads:
        load.start()
    runs = [asyncio.create_task(load.run()) for load in loads]

    async def until_attempted(number: int) -> None:
        while sum(load.num_attempts for load in loads) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    await until_attempted(400)
    await endpoint.stop()
    endpoint = ControlEndpoint(scheduler, SECRET, tick_interval_s=0.1, num_routers=num_routers, is_restarted=True)
    port = await endpoint.start(HOST)
    await until_attempted(800)
    for load in loads:
        load.stop()
    await asyncio.gather(*runs)
    async with asyncio.timeout(control.RECOVERY_S):
        while endpoint.ledger.counts().num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    endpoint.check_integrity()
    for load in loads:
        await load.close()
    await endpoint.stop()
    verdict = judge([(read(tmp_path / name), None) for name in names], LIMIT)
    assert (verdict.overshoot, verdict.num_refused_in_spite_of_room) == (0, 0), verdict
    assert verdict.most_held == LIMIT
    assert verdict.num_refused > 50
