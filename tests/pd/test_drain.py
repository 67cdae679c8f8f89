"""Ranks that leave under load: no stream is cut, and every one ends with the text of an undisturbed run.

`python -m tests.pd.test_drain --rounds 100` goes on for longer, and tells how long it took.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections import Counter

import pytest

from router.service import RouterService
from tests.pd.rig import Answer, PdSystem, in_loop, running
from tests.pd.streams import Progress, ask

pytestmark = pytest.mark.model

MIXED = ("mixed",) * 3
PD = ("prefill", "prefill", "decode", "decode")
NUM_LATER = 4


def moves(service: RouterService) -> Counter[str]:
    """What became of sequences that did not end where they began."""
    samples = [sample for metric in service.metrics.registry.collect() for sample in metric.samples]
    return Counter({s.labels["outcome"]: int(s.value) for s in samples if s.name == "serried_failovers_total"})


async def drain_one(pd: PdSystem, choose: random.Random, right: list[list[Answer]], moves_in_s: float) -> float:
    """One round: ask, have one rank leave at a random moment while more is asked; returns how long that took."""
    progress = Progress()
    streams = ask(pd, progress)
    moment, leaving = choose.randrange(0, 150), choose.choice(pd.living)
    await progress.wait_for(moment, streams)
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    drained = asyncio.create_task(leaving.drain(moves_in_s))
    later = ask(pd, count=NUM_LATER)
    assert await drained, f"{leaving.rank_id} had something left to do"
    took_s = loop.time() - began_at
    leaving.kill()
    answers = await asyncio.gather(*streams, *later)
    assert answers == [*right, *right[:NUM_LATER]], f"{leaving.rank_id} left after {moment} tokens"
    await pd.start_rank(leaving.role)
    await pd.wait_for_links(len(pd.living))
    return took_s


@pytest.mark.parametrize("roles", [MIXED, PD], ids=["mixed", "pd"])
@in_loop(300)
async def test_ranks_leave_and_no_stream_is_cut(roles: tuple[str, ...]) -> None:
    choose = random.Random(len(roles))
    async with running(*roles) as pd:
        right = await asyncio.gather(*ask(pd))
        for moves_in_s in (0.0, 60.0):
            await drain_one(pd, choose, right, moves_in_s)
        await pd.wait_until_nothing_is_held()
        assert not moves(pd.service)["moved"], "a rank left before it had ended what it had"


async def survive(roles: tuple[str, ...], num_rounds: int, seed: int) -> None:
    choose, took = random.Random(seed), []
    async with running(*roles) as pd:
        right = await asyncio.gather(*ask(pd))
        for number in range(num_rounds):
            moves_in_s = choose.choice([0.0, 0.2, 60.0])
            took.append(await drain_one(pd, choose, right, moves_in_s))
            print(f"{number + 1}: moves in {moves_in_s:g} s, empty after {took[-1]:.2f} s", flush=True)
        await pd.wait_until_nothing_is_held()
        print(f"{len(roles)} ranks, {num_rounds} drains: 0 errors, all texts equal; {dict(moves(pd.service))}")
        print(f"until empty: median {statistics.median(took):.2f} s, at most {max(took):.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pd", action="store_true", help="prefill and decode ranks instead of mixed ones")
    arguments = parser.parse_args()
    asyncio.run(survive(PD if arguments.pd else MIXED, arguments.rounds, arguments.seed))
