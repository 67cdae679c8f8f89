"""What placement by prefixes brings: traces of real services, replayed over simulated ranks by each policy.

    python -m benchmarks.placement --traces FOLDER        (default: the folder that SERRIED_TRACES names)

A trace is a file `*_trace.jsonl` of the Mooncake release: per request its arrival, its lengths, and an id for each 512
tokens of its prompt, equal where all up to there is equal. Lengths are scaled down by 32, so that these are a block;
the pace of arrivals is set so that the ranks would be busy for `--load` of the time if nothing were cached.

Time is virtual. The ranks' schedulers, KV caches and frames, the prefix index, the table of ranks, what room a rank has
and the policies are the real ones; a step takes as long as a simple model of it says. Requests wait in order of arrival
while no rank has room. One rank is `--slow` times slower than its peers, if that is not 1.

With `--model`, requests that share prefixes are served by 2 and by 4 real ranks of the embedded model as well, in real
time (`benchmarks.placement_model`); `--model-only` leaves the traces out.

Figures by trace (or `model`), policy and number of ranks: `cached_share` of prompt tokens, `ttft_mean_ms` and
`ttft_p99_ms`, the latter two as ratios to those of `prefix` as well.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import os
import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.serving import percentile
from cluster.prefix_feed import PrefixFeed
from rank_scheduler.config import SchedulerConfig
from rank_scheduler.interface import SchedulerSetup
from rank_scheduler.messages import PrefixSnapshot, RankLoad, SamplingParams, StepFrame, Submit
from rank_scheduler.plan import StepPlan, StepResult
from rank_scheduler.scheduler import Scheduler
from router.control_messages import RankRecord
from router.placement import Leg, Wanted, load_contains
from router.placement_policies import POLICIES, load_policy
from router.prefix_index import PrefixIndex, PromptPrefix
from router.rank_table import Candidates, RankTable
from router.room import room

BLOCK_SIZE = 16
SCALE = 512 // BLOCK_SIZE
MAX_MODEL_LEN = 8_192
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 512
ROUTER = 1
VOCAB_SIZE, EOS = 49_152, 2

STEP_S, TOKEN_S, SEQUENCE_S = 4e-3, 1e-4 * 8, 1e-4
"""A step's time, and what each prompt token and each sequence adds to it: a token here stands for 32."""


@dataclass(slots=True)
class Request:
    """One of a trace, scaled."""

    arrival: float
    token_ids: bytes
    num_output_tokens: int
    prefix: PromptPrefix = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = PromptPrefix(self.token_ids, "")


def read_trace(path: Path, num_requests: int) -> list[Request]:
    """The first ones; each block's tokens follow from its id, those of the part behind the last whole one are new."""
    requests = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(itertools.islice(lines, num_requests)):
            entry = json.loads(line)
            num_tokens = min(max(1, entry["input_length"] // SCALE), MAX_MODEL_LEN - 512)
            num_blocks = num_tokens // BLOCK_SIZE
            tokens: list[int] = []
            for block in entry["hash_ids"][:num_blocks]:
                tokens += (100 + block // 30_000, 100 + block % 30_000) * (BLOCK_SIZE // 2)
            tokens += [100 + number % 30_000] * (num_tokens - len(tokens))
            num_output = min(max(1, entry["output_length"] // SCALE), 500)
            requests.append(Request(entry["timestamp"] / 1e3, struct.pack(f"<{len(tokens)}i", *tokens), num_output))
    return requests


@dataclass(slots=True)
class _Rank:
    name: str
    row: int
    record: RankRecord
    slowness: float
    scheduler: Scheduler
    load: RankLoad
    """As its last frame said."""
    feed: PrefixFeed = field(default_factory=PrefixFeed)
    plan: StepPlan | None = None
    unseen: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Request → the step at which it was submitted, and what it brought."""


class Replay:
    """One trace, by one policy."""

    def __init__(self, policy: str, num_ranks: int, num_blocks: int, slow: float) -> None:
        self._policy = load_policy(policy)
        self._index, self._table = PrefixIndex(), RankTable()
        self._ranks = [self._make_rank(row, num_blocks, slow if row == 0 else 1.0) for row in range(num_ranks)]
        self._line: deque[int] = deque()
        self._events: list[tuple[float, int, int]] = []
        """(time, tie-breaker, rank whose step ends, or -1 for the next arrival)"""
        self._serial = itertools.count()
        self._requests: list[Request] = []
        self._first_token_at: dict[int, float] = {}

    def _make_rank(self, row: int, num_blocks: int, slowness: float) -> _Rank:
        config = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, async_scheduling=False
        )
        setup = SchedulerSetup(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            record_prefix_changes=True,
        )
        name = f"boot-{row}"
        record = RankRecord(
            f"mixed/{row}", "mixed", name, "h", 1, 1, "n", MAX_MODEL_LEN, MAX_NUM_SEQS, num_blocks - 1, BLOCK_SIZE,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        )  # fmt: skip
        self._table.add(self._index.add(name, BLOCK_SIZE), record)
        rank = _Rank(name, row, record, slowness, Scheduler(config, setup), RankLoad(num_free_blocks=num_blocks - 1))
        rank.feed.watch(ROUTER, [])
        self._index.take_snapshot(name, PrefixSnapshot(0))
        return rank

    def run(self, requests: list[Request]) -> dict[str, float]:
        """All of them, to their ends."""
        self._requests = requests
        for number, request in enumerate(requests):
            heapq.heappush(self._events, (request.arrival, next(self._serial), ~number))
        while self._events:
            now, _, what = heapq.heappop(self._events)
            if what < 0:
                self._line.append(~what)
            else:
                self._end_step(self._ranks[what], now)
            self._serve(now)
        assert not self._line, f"{len(self._line)} requests were never placed"
        stats = [rank.scheduler.load() for rank in self._ranks]
        ttft = [self._first_token_at[number] - request.arrival for number, request in enumerate(requests)]
        num_prompt = sum(request.prefix.num_tokens for request in requests)
        return {
            "cached_share": 1 - sum(load.num_prompt_tokens for load in stats) / num_prompt,
            "ttft_mean_ms": 1e3 * sum(ttft) / len(ttft),
            "ttft_p99_ms": 1e3 * percentile(ttft, 99),
            "first_rank_share": stats[0].num_prompt_tokens / sum(load.num_prompt_tokens for load in stats),
        }

    def _serve(self, now: float) -> None:
        """Place those who wait, in order, while a rank has room for the next."""
        while self._line:
            number = self._line[0]
            request = self._requests[number]
            candidates = self._table.candidates(Leg.WHOLE, falls_back=False)
            wanted = Wanted(Leg.WHOLE, request.prefix.num_tokens, self._index.find(request.prefix))
            rows = [
                row
                for row in candidates.rows.tolist()
                if self._table.is_idle(row) or self._table.num_free_tokens[row] >= wanted.num_uncached_tokens(row)
            ]
            if not rows:
                return
            index = self._policy.choose(wanted, Candidates(self._table, np.array(rows, np.intp)))
            if index is None:
                return
            self._line.popleft()
            self._submit(self._ranks[rows[index]], number, wanted.num_uncached_tokens(rows[index]), now)

    def _submit(self, rank: _Rank, number: int, num_uncached: int, now: float) -> None:
        request = self._requests[number]
        sampling = SamplingParams(seed=number, max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True)
        rank.unseen[number] = (rank.load.num_steps, num_uncached)
        rank.scheduler.add(ROUTER, Submit(number, request.token_ids, sampling), now)
        self._show(rank)
        self._start_step(rank, now)

    def _start_step(self, rank: _Rank, now: float) -> None:
        if rank.plan is not None or (plan := rank.scheduler.schedule(now)) is None:
            return
        rank.plan = plan
        num_sequences = len(plan.samples)
        took_s = STEP_S + TOKEN_S * (plan.total_tokens - num_sequences) + SEQUENCE_S * num_sequences
        took_s *= rank.slowness
        heapq.heappush(self._events, (now + took_s, next(self._serial), rank.row))

    def _end_step(self, rank: _Rank, now: float) -> None:
        plan, rank.plan = rank.plan, None
        assert plan is not None
        result = StepResult(np.where(plan.samples, 7, -1).astype(np.int32)[:, None])
        frames = rank.scheduler.update(plan, result, now)
        changes = rank.scheduler.take_prefix_changes()
        rank.load = load = rank.scheduler.load()
        frame = rank.feed.add_to(frames, changes, load).get(ROUTER, StepFrame(load))
        if frame.prefixes is not None:
            assert self._index.take_events(rank.name, frame.prefixes), "a simulated frame was lost"
        for number in frame.first_token_ids:
            self._first_token_at.setdefault(number, now)
            rank.unseen.pop(number, None)
        for end in frame.ends:
            rank.unseen.pop(end.id, None)
        rank.unseen = {number: it for number, it in rank.unseen.items() if not load_contains(it[0], frame.load)}
        self._show(rank)
        self._start_step(rank, now)

    def _show(self, rank: _Rank) -> None:
        num_tokens = sum(tokens for _, tokens in rank.unseen.values())
        self._table.update(rank.row, rank.load, len(rank.unseen), num_tokens)
        self._table.set_room(rank.row, room(rank.record, rank.load, len(rank.unseen), num_tokens))


def paced(requests: list[Request], num_ranks: int, load: float) -> list[Request]:
    """The same, arriving at such a pace that they would keep the ranks busy for that share of the time, uncached."""
    work_s = sum(STEP_S + TOKEN_S * request.prefix.num_tokens for request in requests) / num_ranks
    stretch = work_s / load / max(requests[-1].arrival - requests[0].arrival, 1e-9)
    return [Request(request.arrival * stretch, request.token_ids, request.num_output_tokens) for request in requests]


def ideal_share(requests: list[Request]) -> float:
    """Of the prompt tokens, in one cache without end that everybody uses."""
    seen: set[int] = set()
    num_cached = 0
    for request in requests:
        hashes = request.prefix.hashes(BLOCK_SIZE)
        num_cached += BLOCK_SIZE * sum(1 for _ in itertools.takewhile(seen.__contains__, hashes))
        seen.update(hashes)
    return num_cached / sum(request.prefix.num_tokens for request in requests)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__.split("\n", 1)[0])
    folder = os.environ.get("SERRIED_TRACES")
    parser.add_argument("--traces", type=Path, default=folder, help="folder with *_trace.jsonl (SERRIED_TRACES)")
    parser.add_argument("--requests", type=int, default=3_000, help="of each trace")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--blocks-per-rank", type=int, default=4_096)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--model-only", action="store_true")
    parser.add_argument("--model-ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3, help="on the model, of each policy in turn")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    figures = {} if arguments.model_only else replay_traces(arguments, parser)
    if arguments.model or arguments.model_only:
        from benchmarks.placement_model import measure_model

        for num_ranks in arguments.model_ranks:
            found = asyncio.run(measure_model(num_ranks, arguments.rounds, arguments.seed))
            figures |= tell("model", num_ranks, found)
    print(json.dumps(figures))


def tell(name: str, num_ranks: int, found: dict[str, dict[str, float]]) -> dict[str, float]:
    """A line for each policy; the figures."""
    figures: dict[str, float] = {}
    for policy, of_it in found.items():
        values = "  ".join(f"{key} {value:9.3f}" for key, value in of_it.items())
        print(f"{name:>14} {num_ranks:>3} ranks {policy:>12}  {values}", flush=True)
        figures |= {f"{name}_{policy}_{key}_{num_ranks}": round(value, 4) for key, value in of_it.items()}
        for key in ("ttft_mean", "ttft_p99"):
            ratio = of_it[f"{key}_ms"] / found["prefix"][f"{key}_ms"]
            figures[f"{name}_{policy}_{key}_ratio_{num_ranks}"] = round(ratio, 3)
    return figures


def replay_traces(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, float]:
    """The figures of all traces; ends the program if there are none."""
    traces = sorted(Path(arguments.traces).glob("*_trace.jsonl")) if arguments.traces else []
    if not traces:
        parser.error(f"--traces {arguments.traces}: no *_trace.jsonl there; give the folder with Mooncake's traces")
    figures: dict[str, float] = {}
    for path in traces:
        name = path.name.removesuffix("_trace.jsonl")
        requests = read_trace(path, arguments.requests)
        ideal = ideal_share(requests)
        figures[f"{name}_ideal_cached_share"] = round(ideal, 4)
        print(f"{name}: {len(requests)} requests; one endless cache would have {ideal:.3f} of their tokens")
        for num_ranks in arguments.ranks:
            found = {}
            for policy in POLICIES:
                replay = Replay(policy, num_ranks, arguments.blocks_per_rank, arguments.slow)
                found[policy] = replay.run(paced(requests, num_ranks, arguments.load))
            figures |= tell(name, num_ranks, found)
    return figures


if __name__ == "__main__":
    main()
