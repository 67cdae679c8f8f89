"""What a tenant with short prompts notices of another one that sends a hundred long ones.

    python -m benchmarks.fairness
    python -m benchmarks.fairness --url http://127.0.0.1:8000

The tenants are `long`, which sends all its prompts at once, and `short`, which sends at random moments. The figure that
counts is `p99_ratio`: the 99th percentile of the short ones' time to the first token beside the long ones / alone.

Without `--url`, time is virtual. The router's dispatcher, line and policy are the real ones, and so are the ranks'
schedulers; a step takes `STEP_S`, and `TOKEN_S` for each prompt token. Shown for several values of
`long_prefill_token_threshold`, without and with `short_prefill_tokens`; `one line` is `p99_ratio` where both are
one tenant to the router; `long_s_ratio` is what it costs the long ones: their time to the end, beside the short ones,
against the first line's.

With `--url`, the requests go to a server that runs, for a while alone and for a while beside the long ones, in turn.
Start it with `--long-prefill-token-threshold 16 --short-prefill-tokens 64`, and without, to see the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import struct
import time
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
import numpy as np

from benchmarks.pd import Prompts
from benchmarks.serving import Target, measure_request, percentile, served_model
from rank_scheduler.config import SchedulerConfig
from rank_scheduler.interface import SchedulerSetup
from rank_scheduler.messages import RankLoad, SamplingParams, Submit
from rank_scheduler.plan import StepPlan, StepResult
from rank_scheduler.scheduler import Scheduler
from router.control_messages import RankRecord
from router.dispatcher import Dispatcher
from router.errors import ApiError, Cause
from router.placement import Leg, load_contains
from router.placement_policies import load_policy
from router.placing import Placing
from router.prefix_index import NOTHING_CACHED, PromptPrefix
from router.rank_link import RankLink
from router.rank_table import RankTable
from router.room import num_step_tokens_left, room
from router.waiting_line import Turn

STEP_S, TOKEN_S = 10e-3, 5e-5
MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 16_384, 16, 16_384
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 128, 2_048
ROUTER = 1


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while anything can run, and then goes to the next timer."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        if not ready and scheduled:
            self._now = max(self._now, scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


@dataclass(slots=True)
class _Running:
    first_token: asyncio.Future[float]
    end: asyncio.Future[float]


class SimulatedLink:
    """A rank and the router's link to it: what of `RankLink` a dispatcher knows."""

    is_open = True

    def __init__(self, row: int, ranks: RankTable, dispatcher: Dispatcher, config: SchedulerConfig) -> None:
        setup = SchedulerSetup(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=32_000,
            eos_token_ids=frozenset(),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
        )
        self.row = row
        self.record = RankRecord(
            f"mixed/{row}",
            "mixed",
            f"boot-{row}",
            "h",
            1,
            1,
            "n",
            MAX_MODEL_LEN,
            config.max_num_seqs,
            NUM_BLOCKS - 1,
            BLOCK_SIZE,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            short_prefill_tokens=config.short_prefill_tokens,
        )
        self._ranks, self._dispatcher = ranks, dispatcher
        self._scheduler = Scheduler(config, setup)
        self._load = RankLoad(num_free_blocks=NUM_BLOCKS - 1, num_blocks=NUM_BLOCKS - 1)
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, _Running] = {}
        self._unseen: dict[int, tuple[int, int]] = {}
        self._held = (0, 0)
        self._is_stepping = False
        ranks.add(row, self.record)

    def hold(self, num_sequences: int, num_tokens: int) -> None:
        self._held = (self._held[0] + num_sequences, self._held[1] + num_tokens)
        self._show()

    def give_back(self, num_sequences: int, num_tokens: int) -> None:
        self.hold(-num_sequences, -num_tokens)

    def submit(self, number: int, token_ids: bytes, num_output_tokens: int) -> _Running:
        running = self._running[number] = _Running(self._loop.create_future(), self._loop.create_future())
        self._unseen[number] = (self._load.num_steps, len(token_ids) // 4)
        sampling = SamplingParams(seed=number, max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
        self._scheduler.add(ROUTER, Submit(number, token_ids, sampling), self._loop.time())
        self._show()
        if not self._is_stepping:
            self._is_stepping = True
            self._loop.call_soon(self._step)
        return running

    def _step(self) -> None:
        plan = self._scheduler.schedule(self._loop.time())
        self._is_stepping = plan is not None
        if plan is not None:
            self._loop.call_later(STEP_S + TOKEN_S * plan.total_tokens, self._end_step, plan)

    def _end_step(self, plan: StepPlan) -> None:
        now = self._loop.time()
        tokens = np.where(plan.samples, 7, -1).astype(np.int32)[:, None]
        frame = self._scheduler.update(plan, StepResult(tokens), now).get(ROUTER)
        self._load = self._scheduler.load()
        if frame is not None:
            for number in frame.first_token_ids:
                self._running[number].first_token.set_result(now)
                self._unseen.pop(number, None)
            for end in frame.ends:
                self._running.pop(end.id).end.set_result(now)
        self._unseen = {number: it for number, it in self._unseen.items() if not load_contains(it[0], self._load)}
        self._show()
        self._dispatcher.serve(cast(RankLink, self))
        self._step()

    def _show(self) -> None:
        num_sequences = len(self._unseen) + self._held[0]
        num_tokens = sum(tokens for _, tokens in self._unseen.values()) + self._held[1]
        self._ranks.update(self.row, self._load, num_sequences, num_tokens)
        num_left = num_step_tokens_left(self.record, self._load, num_sequences, num_tokens)
        self._ranks.set_room(self.row, room(self.record, self._load, num_sequences, num_tokens), num_left)


@dataclass
class Workload:
    """`num_long` prompts of one tenant at the start, and short ones of the other at random moments for `seconds`."""

    num_long: int = 100
    long_tokens: int = 8_000
    long_output: int = 16
    short_tokens: tuple[int, int] = (32, 128)
    short_output: int = 32
    short_per_s: float = 12.0
    seconds: float = 60.0
    seed: int = 1


@dataclass
class Outcome:
    short_ttft: list[float] = field(default_factory=list)
    """Of those that came while long ones were there, if there were any at all."""
    long_end: float = 0.0


async def simulate(work: Workload, num_ranks: int, config: SchedulerConfig, *, long: bool, tenants: bool) -> Outcome:
    """`tenants`: the router can tell them apart."""
    rng, outcome = random.Random(work.seed), Outcome()
    first_tokens: list[tuple[float, float]] = []
    ranks = RankTable()
    links: dict[int, SimulatedLink] = {}
    dispatcher = Dispatcher(
        ranks,
        load_policy("prefix"),
        link_of=lambda row: cast(RankLink, links[row]),
        cached=lambda prompt: NOTHING_CACHED,
        no_rank=lambda leg: ApiError(Cause.NO_RANK_AVAILABLE, f"none for {leg}"),
        falls_back=True,
        by_priority=False,
        wait_timeout_s=5.0,
        observe_wait=lambda wait_s: None,
    )
    links |= {row: SimulatedLink(row, ranks, dispatcher, config) for row in range(num_ranks)}
    dispatcher.ranks_changed()

    async def ask(number: int, tenant: str, num_tokens: int, num_output_tokens: int, at: float) -> None:
        await asyncio.sleep(at)
        token_ids = struct.pack(f"<{num_tokens}i", *(rng.randrange(1, 30_000) for _ in range(num_tokens)))
        turn = Turn(tenant if tenants else "", 1.0, num_tokens + num_output_tokens)
        link = await dispatcher.place(Placing(Leg.WHOLE, PromptPrefix(token_ids, ""), turn, f"cmpl-{number}"))
        running = cast(SimulatedLink, link).submit(number, token_ids, num_output_tokens)
        first_at = await running.first_token
        if tenant == "short":
            first_tokens.append((at, first_at - at))
        else:
            outcome.long_end = max(outcome.long_end, await running.end)

    asked = []
    if long:
        asked += [ask(number, "long", work.long_tokens, work.long_output, 0.0) for number in range(work.num_long)]
    at, number = 0.0, work.num_long
    arrivals = random.Random(work.seed + 1)
    while (at := at + arrivals.expovariate(work.short_per_s)) < work.seconds:
        asked.append(ask(number, "short", arrivals.randint(*work.short_tokens), work.short_output, at))
        number += 1
    await asyncio.gather(*asked)
    outcome.short_ttft = [ttft for at, ttft in first_tokens if at < outcome.long_end or not long]
    return outcome


def in_virtual_time(*arguments: Any, **options: Any) -> Outcome:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(simulate(*arguments, **options))


def run_virtual(arguments: argparse.Namespace) -> dict[str, float]:
    """Every figure is the median over the seeds."""
    thresholds: list[int] = arguments.thresholds
    most = Workload.short_tokens[1]
    variants = [(threshold, short) for threshold in thresholds for short in (0, most) if threshold or not short]
    figures: dict[str, float] = {}
    print("threshold  short tokens  alone p99 ms   p50 ms   p99 ms  p99_ratio  one line   long_s  long_s_ratio")
    usual_s = 0.0
    for threshold, short in variants:
        config = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=arguments.step_tokens,
            long_prefill_token_threshold=threshold,
            short_prefill_tokens=short,
            async_scheduling=False,
        )
        rows = []
        for seed in range(arguments.seeds):
            work = Workload(short_per_s=arguments.short_per_s, seed=seed)
            alone = in_virtual_time(work, arguments.ranks, config, long=False, tenants=True)
            beside = in_virtual_time(work, arguments.ranks, config, long=True, tenants=True)
            in_line = in_virtual_time(work, arguments.ranks, config, long=True, tenants=False)
            alone_s = percentile(alone.short_ttft, 99)
            p50, p99 = (percentile(beside.short_ttft, share) for share in (50, 99))
            one_line = percentile(in_line.short_ttft, 99) / alone_s
            rows.append((1e3 * alone_s, 1e3 * p50, 1e3 * p99, p99 / alone_s, one_line, beside.long_end))
        alone_ms, p50_ms, p99_ms, ratio, one_line, long_s = map(statistics.median, zip(*rows, strict=True))
        usual_s = usual_s or long_s
        print(f"{threshold:>9} {short:>13} {alone_ms:>13.1f} {p50_ms:>8.1f} {p99_ms:>8.1f}", end="")
        print(f" {ratio:>10.2f} {one_line:>9.0f} {long_s:>8.1f} {long_s / usual_s:>13.2f}")
        name = f"{threshold}_{short}" if short else str(threshold)
        figures |= {f"p99_ratio_{name}": round(ratio, 3), f"long_s_ratio_{name}": round(long_s / usual_s, 3)}
    return figures


async def measure(
    session: aiohttp.ClientSession, target: Target, arguments: argparse.Namespace, seed: int, *, long: bool
) -> list[float]:
    """Times to the first token of the short ones, in seconds. Long ones wait all the time, if there are any."""
    rng, prompts = random.Random(seed), Prompts(seed + 1_000 * long)
    ttfts: list[float] = []

    async def ask_short(num_tokens: int) -> None:
        ttfts.append((await measure_request(session, target, prompts.make(num_tokens), 8, "short")).ttft)

    waiting = [
        asyncio.create_task(measure_request(session, target, prompts.make(arguments.long_tokens), 8, "long"))
        for _ in range(100 if long else 0)
    ]
    await asyncio.sleep(2.0)
    end = time.monotonic() + arguments.seconds
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < end:
            group.create_task(ask_short(rng.randint(16, 64)))
            await asyncio.sleep(rng.expovariate(arguments.short_per_s))
    num_done = sum(task.done() for task in waiting)
    if long and num_done == len(waiting):
        raise RuntimeError("the long ones ended too early; give more --long-tokens")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return ttfts


async def run_served(arguments: argparse.Namespace) -> dict[str, float]:
    """Medians over the rounds."""
    target = Target("serried", arguments.url, await served_model(arguments.url))
    rows = []
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await measure_request(session, target, Prompts(0).make(64), 8)
        for seed in range(arguments.rounds):
            alone = await measure(session, target, arguments, seed, long=False)
            beside = await measure(session, target, arguments, seed, long=True)
            await asyncio.sleep(3.0)
            found = [1e3 * percentile(ttfts, share) for ttfts in (alone, beside) for share in (50, 99)]
            print(f"round {seed + 1}: alone p50 {found[0]:.0f} ms, p99 {found[1]:.0f} ms; ", end="")
            print(f"beside long ones p50 {found[2]:.0f} ms, p99 {found[3]:.0f} ms ({len(beside)} requests)", flush=True)
            rows.append(found[3] / found[1])
    return {"p99_ratio": round(statistics.median(rows), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--thresholds", type=int, nargs="+", default=[0, 128])
    parser.add_argument("--step-tokens", type=int, default=MAX_NUM_BATCHED_TOKENS, help="max_num_batched_tokens")
    parser.add_argument("--short-per-s", type=float, default=12.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--url", help="of a server, to measure that")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each round, alone and beside long ones")
    parser.add_argument("--long-tokens", type=int, default=600, help="of the prompts sent to the server")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(run_served(arguments)) if arguments.url else run_virtual(arguments)))


if __name__ == "__main__":
    main()
