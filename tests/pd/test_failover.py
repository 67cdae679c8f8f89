"""Ranks that are killed or stopped at random moments: every stream ends with the text of an undisturbed run.

`python -m tests.pd.test_failover --rounds 50` goes on for longer, and tells how long streams paused.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.pd.rig import Answer, PdSystem, in_loop, running
from tests.pd.streams import Progress, ask

pytestmark = pytest.mark.model

SILENCE_S = 2.0
MIXED = ("mixed",) * 3
PD = ("prefill", "prefill", "decode", "decode")
# What a stopped rank hands off when it goes on is nobody's, until its lease expires.
KV_TRANSFER = {"kv_connector_extra_config": {"lease_s": 3.0}}


@dataclass
class Round:
    """What one round cost, in seconds."""

    number: signal.Signals
    role: str
    detection: float
    """From the signal until the router has lost the rank."""
    recomputes: list[float] = field(default_factory=list)
    """From there to the next token, of each stream that had something there."""
    pauses: list[float] = field(default_factory=list)
    """Between two tokens, of those of them that had had one."""


async def disturb(
    pd: PdSystem, choose: random.Random, right: Sequence[Sequence[Answer]], number: signal.Signals
) -> Round:
    """Ask, signal one rank at a random moment, and compare."""
    progress, loop = Progress(), asyncio.get_running_loop()
    streams = ask(pd, progress)
    moment, victim = choose.randrange(0, 150), choose.choice(pd.living)
    await progress.wait_for(moment, streams)
    (link,) = (link for link in pd.service.pool.links if link.record.rank_id == victim.rank_id)
    lost_at: asyncio.Future[float] = loop.create_future()
    link.closed.add_done_callback(lambda _: lost_at.set_result(loop.time()))
    began_at = loop.time()
    victim.signal(number)
    try:
        found = await asyncio.gather(*streams)
        detected_at = await lost_at
    finally:
        if number is signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
        else:
            victim.kill()
    assert found == right, f"{number.name} of {victim.rank_id} after {moment} tokens"
    done = Round(number, victim.role, detected_at - began_at)
    for stream, answers in enumerate(found):
        if any(answer.num_failovers for answer in answers):
            last, following = progress.around(stream, detected_at)
            if following is not None:
                done.recomputes.append(following - detected_at)
                done.pauses += [] if last is None else [following - last]
    if number is signal.SIGKILL:
        await pd.start_rank(victim.role)
    await pd.wait_for_links(len(pd.living))
    return done


@pytest.mark.parametrize("roles", [MIXED, PD], ids=["mixed", "pd"])
@in_loop(300)
async def test_streams_survive_their_ranks(roles: tuple[str, ...]) -> None:
    choose = random.Random(len(roles))
    async with running(*roles, kv_transfer=KV_TRANSFER, rank_silence_timeout_s=SILENCE_S) as pd:
        right = await asyncio.gather(*ask(pd))
        for number in (signal.SIGKILL, signal.SIGSTOP):
            await disturb(pd, choose, right, number)
        await pd.wait_until_nothing_is_held()


async def survive(roles: tuple[str, ...], num_rounds: int, seed: int) -> None:
    choose, rounds = random.Random(seed), []
    settings: dict[str, Any] = {"kv_transfer": KV_TRANSFER, "rank_silence_timeout_s": SILENCE_S}
    async with running(*roles, **settings) as pd:
        right = await asyncio.gather(*ask(pd))
        for index in range(num_rounds):
            # Every second one, so that both are as many.
            number = (signal.SIGKILL, signal.SIGSTOP)[index % 2]
            done = await disturb(pd, choose, right, number)
            rounds.append(done)
            print(
                f"{index + 1}: {number.name} of a {done.role} rank, noticed after {done.detection:.3f} s, "
                f"{len(done.recomputes)} streams moved, the longest pause {max(done.pauses, default=0.0):.2f} s",
                flush=True,
            )
        await pd.wait_until_nothing_is_held()
    print(f"{num_rounds} rounds on {dict(Counter(roles))}: 0 errors, all texts equal")
    print_table(rounds)


def print_table(rounds: Sequence[Round]) -> None:
    row = "{:10}{:>8}{:>9}  {:>16}{:>16}{:>16}"
    print(row.format("seconds", "rounds", "streams", "detection", "recompute", "pause"))
    for number in (signal.SIGKILL, signal.SIGSTOP):
        these = [done for done in rounds if done.number is number]
        recomputes = [recompute for done in these for recompute in done.recomputes]
        figures = (
            [done.detection for done in these],
            recomputes,
            [pause for done in these for pause in done.pauses],
        )
        print(row.format(number.name, len(these), len(recomputes), *map(median_and_p99, figures)))
    print(f"median / p99; a stopped rank is noticed by its silence, here after {SILENCE_S:g} s")


def median_and_p99(found: Iterable[float]) -> str:
    values = sorted(found)
    return f"{statistics.median(values):.3f} / {values[int(0.99 * len(values))]:.3f}" if values else "-"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pd", action="store_true", help="prefill and decode ranks instead of mixed ones")
    arguments = parser.parse_args()
    asyncio.run(survive(PD if arguments.pd else MIXED, arguments.rounds, arguments.seed))
