"""Ranks that are killed or stopped at random moments: every stream ends with the text of an undisturbed run.

`python -m tests.pd.test_failover --rounds 50` goes on for longer, and tells how long streams paused.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics

import pytest

from tests.pd.rig import Answer, PdSystem, in_loop, make_prompts, running

pytestmark = pytest.mark.model

SILENCE_S = 2.0
NUM_TOKENS = 24
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
KINDS = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 30, "logprobs": 2},
    {"n": 2, "temperature": 0.8},
    {"stop": [" the", "a."], "min_tokens": 3},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}, "max_tokens": 40},
    {"priority": 0, "ignore_eos": True},
    {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
]
PROMPTS = make_prompts(16, seed=31, shortest=10, longest=40)


def ask(pd: PdSystem, on_token=lambda: None):
    """16 streams of all kinds; one task each."""
    return [
        asyncio.create_task(
            pd.answer(
                prompt,
                on_token=on_token,
                **{"seed": index, "max_tokens": NUM_TOKENS, **KINDS[index % len(KINDS)]},
            )
        )
        for index, prompt in enumerate(PROMPTS)
    ]


class Pauses:
    """The longest time without any token, of all streams together."""

    def __init__(self) -> None:
        self._last = asyncio.get_running_loop().time()
        self.longest = 0.0
        self.num_tokens = 0
        self.came = asyncio.Event()

    def token(self) -> None:
        now = asyncio.get_running_loop().time()
        self.longest, self._last = max(self.longest, now - self._last), now
        self.num_tokens += 1
        self.came.set()


async def disturb(pd: PdSystem, choose: random.Random, right: list[list[Answer]], number: signal.Signals) -> float:
    """One round: ask, signal one rank at a random moment, compare; returns the longest pause."""
    pauses = Pauses()
    streams = ask(pd, pauses.token)
    moment, victim = choose.randrange(0, 200), choose.choice(pd.living)
    while pauses.num_tokens < moment and not all(stream.done() for stream in streams):
        pauses.came.clear()
        await asyncio.wait([asyncio.ensure_future(pauses.came.wait()), *streams], return_when="FIRST_COMPLETED")
    victim.signal(number)
    try:
        found = await asyncio.gather(*streams)
    finally:
        if number is signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
        else:
            victim.kill()
    assert found == right, f"{number.name} of {victim.rank_id} after {moment} tokens"
    if number is signal.SIGKILL:
        await pd.wait_for_links(len(pd.living))
        await pd.start_rank(victim.role)
    await pd.wait_for_links(len(pd.living))
    return pauses.longest


@pytest.mark.parametrize("roles", [("mixed",) * 3, ("prefill", "prefill", "decode", "decode")], ids=["mixed", "pd"])
@in_loop(300)
async def test_streams_survive_their_ranks(roles):
    choose = random.Random(len(roles))
    # What a stopped rank hands off when it goes on is nobody's, until its lease expires.
    kv_transfer = {"kv_connector_extra_config": {"lease_s": 3.0}}
    async with running(*roles, kv_transfer=kv_transfer, rank_silence_timeout_s=SILENCE_S) as pd:
        right = await asyncio.gather(*ask(pd))
        for number in (signal.SIGKILL, signal.SIGSTOP):
            await disturb(pd, choose, right, number)
        await pd.wait_until_nothing_is_held()


async def survive(num_rounds: int, seed: int) -> None:
    choose, pauses = random.Random(seed), []
    async with running("mixed", "mixed", "mixed", rank_silence_timeout_s=SILENCE_S) as pd:
        right = await asyncio.gather(*ask(pd))
        for number in range(num_rounds):
            kind = choose.choice([signal.SIGKILL, signal.SIGSTOP])
            pauses.append((kind, await disturb(pd, choose, right, kind)))
            print(f"{number + 1}: {kind.name}, longest pause {pauses[-1][1]:.2f} s", flush=True)
        await pd.wait_until_nothing_is_held()
    for kind in (signal.SIGKILL, signal.SIGSTOP):
        found = [pause for each, pause in pauses if each is kind]
        if found:
            print(
                f"{kind.name}: {len(found)} times, pauses {statistics.median(found):.2f} s, {max(found):.2f} s at most"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    asyncio.run(survive(arguments.rounds, arguments.seed))
