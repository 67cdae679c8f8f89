"""What a scheduler's decisions cost, without a model: ours against the reference's, interleaved in one process.

    SERRIED_REFERENCE_PYTHON=/path/to/python python -m benchmarks.scheduler_step --json figures.json

Scenarios, blocks of 16 tokens, prefix caching on:

- `step_<n>`, `async_step_<n>`: schedule + update of a steady decode step with n running (prompts of 512 tokens, the
  first 256 the same for all); async with one step in flight;
- `admit`: 1,024 such requests, from the front end's message until all are admitted, in one step; `admit_chunked`:
  with 8,192 tokens per step, the decode steps of those admitted earlier included;
- `lookup`: a prompt of 32,768 tokens that is wholly in the prefix cache, from message to plan;
- `churn`: a step in which 26 of 260 running requests end and 26 new ones arrive.

Every prompt is hashed as a whole each time, on both sides. Ours does this, and keeps its block pool, in C where the
extension modules were built for the Python that runs the benchmark (`/path/to/python build_extensions.py`), and says
so; without them `admit` takes about twice as long.

Each scenario runs in rounds, ours and the reference in turn, the first of a round alternating. A round's figure is
its mean time per step (the mean, so that block boundaries count at their frequency), and `<scenario>_ratio` is the
median over rounds of reference / ours: above 1 we are quicker. `cost_1024_over_64` is ours at 1,024 running over
ours at 64. The garbage collector is on, with the set-up frozen, for both.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reference_process import ReferenceMissingError, run_with_reference
from benchmarks.scheduler_rig import OurRig, Rig, RigOptions
from kv_transfer.extension import why_missing

BLOCK_SIZE = 16
PROMPT_TOKENS, SHARED_TOKENS = 512, 256
LOOKUP_TOKENS = 32_768
NUM_RUNNING = (1, 64, 256, 1024)
CHURN_PER_STEP, CHURN_LIFETIME = 26, 10
WARM_UP_STEPS = 32
_MIN_TOKEN, _MAX_TOKEN = 3, 49_000

MakeRig = Callable[[RigOptions], Rig]


@dataclass
class Clock:
    """Wall and thread CPU seconds of each measured piece of a round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    _wall: float = 0.0
    _cpu: float = 0.0

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        cpu, wall = time.thread_time(), time.perf_counter()
        result = function(*arguments)
        self._wall += time.perf_counter() - wall
        self._cpu += time.thread_time() - cpu
        return result

    def end_piece(self) -> None:
        self.wall.append(self._wall)
        self.cpu.append(self._cpu)
        self._wall = self._cpu = 0.0


Round = Callable[[Clock], None]
"""Measures one round, a clock piece per step."""


def make_prompts(count: int, length: int, shared: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    prefix: list[int] = np.random.default_rng(0).integers(_MIN_TOKEN, _MAX_TOKEN, shared).tolist()
    tails = rng.integers(_MIN_TOKEN, _MAX_TOKEN, (count, length - shared)).tolist()
    return [prefix + tail for tail in tails]


def step_once(rig: Rig, token: int = 7) -> None:
    step = rig.schedule()
    assert step is not None, f"{rig.name}: nothing to schedule"
    rig.update(step, rig.result(step, token))


def prepare_decode(make: MakeRig, num_running: int, num_steps: int, *, async_scheduling: bool) -> Round:
    rig = make(
        RigOptions(
            max_num_seqs=num_running,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            num_blocks=num_running * 256 + 1000,
            async_scheduling=async_scheduling,
        )
    )
    for request, prompt in enumerate(make_prompts(num_running, PROMPT_TOKENS, SHARED_TOKENS, seed=1)):
        rig.add(rig.message(request, prompt, max_tokens=7000))
    while rig.num_running() < num_running:
        step_once(rig)
    step_once(rig)
    in_flight: list[tuple[Any, Any]] = []

    def one(clock: Clock, token: int) -> None:
        step = clock.call(rig.schedule)
        in_flight.append((step, rig.result(step, token)))
        if len(in_flight) > async_scheduling:
            clock.call(rig.update, *in_flight.pop(0))
        clock.end_piece()

    for k in range(WARM_UP_STEPS):
        one(Clock(), k + 3)

    def measure(clock: Clock) -> None:
        for k in range(num_steps):
            one(clock, k + 3)

    return measure


def prepare_admission(make: MakeRig, budget: int) -> Round:
    prompts = make_prompts(1024, PROMPT_TOKENS, SHARED_TOKENS, seed=2)

    def measure(clock: Clock) -> None:
        options = RigOptions(max_num_seqs=1024, max_num_batched_tokens=budget, max_model_len=8192, num_blocks=1024 * 40)
        rig = make(options)
        messages = [rig.message(request, prompt, max_tokens=100) for request, prompt in enumerate(prompts)]
        freeze()

        def add_all() -> None:
            for message in messages:
                rig.add(message)

        clock.call(add_all)
        while True:
            step = clock.call(rig.schedule)
            if rig.num_running() == 1024:
                break
            result = rig.result(step, 7)
            clock.call(rig.update, step, result)
        clock.end_piece()

    return measure


def prepare_lookup(make: MakeRig, num_lookups: int) -> Round:
    options = RigOptions(max_num_seqs=16, max_num_batched_tokens=40_000, max_model_len=40_000, num_blocks=8000)
    rig = make(options)
    (prompt,) = make_prompts(1, LOOKUP_TOKENS, 0, seed=3)
    rig.add(rig.message(0, prompt, max_tokens=1))
    step_once(rig)
    requests = iter(range(1, sys.maxsize))

    def measure(clock: Clock) -> None:
        for _ in range(num_lookups):
            message = rig.message(next(requests), prompt, 1)
            clock.call(rig.add, message)
            step = clock.call(rig.schedule)
            clock.end_piece()
            rig.update(step, rig.result(step, 7))

    return measure


def prepare_churn(make: MakeRig, num_steps: int) -> Round:
    rig = make(
        RigOptions(
            max_num_seqs=CHURN_PER_STEP * (CHURN_LIFETIME + 1),
            max_num_batched_tokens=16_384,
            max_model_len=8192,
            num_blocks=CHURN_PER_STEP * CHURN_LIFETIME * 40,
        )
    )
    requests = iter(range(sys.maxsize))
    seeds = iter(range(10, sys.maxsize))

    def one(clock: Clock, prompts: list[list[int]]) -> None:
        messages = [rig.message(next(requests), prompt, CHURN_LIFETIME) for prompt in prompts]

        def add_all() -> None:
            for message in messages:
                rig.add(message)

        clock.call(add_all)
        step = clock.call(rig.schedule)
        result = rig.result(step, 7)
        clock.call(rig.update, step, result)
        clock.end_piece()

    def batches(count: int) -> Iterator[list[list[int]]]:
        prompts = make_prompts(count * CHURN_PER_STEP, PROMPT_TOKENS, SHARED_TOKENS, seed=next(seeds))
        return (prompts[k * CHURN_PER_STEP : (k + 1) * CHURN_PER_STEP] for k in range(count))

    for prompts in batches(WARM_UP_STEPS):
        one(Clock(), prompts)

    def measure(clock: Clock) -> None:
        for prompts in batches(num_steps):
            one(clock, prompts)

    return measure


def scenarios(decode_steps: int) -> dict[str, Callable[[MakeRig], Round]]:
    def decode(num_running: int, async_scheduling: bool) -> Callable[[MakeRig], Round]:
        num_steps = decode_steps * (4 if num_running <= 64 else 1)
        return lambda make: prepare_decode(make, num_running, num_steps, async_scheduling=async_scheduling)

    return {
        **{f"step_{n}": decode(n, False) for n in NUM_RUNNING},
        **{f"async_step_{n}": decode(n, True) for n in NUM_RUNNING},
        "admit": lambda make: prepare_admission(make, budget=1024 * PROMPT_TOKENS),
        "admit_chunked": lambda make: prepare_admission(make, budget=8192),
        "lookup": lambda make: prepare_lookup(make, num_lookups=16),
        "churn": lambda make: prepare_churn(make, num_steps=64),
    }


def freeze() -> None:
    gc.collect()
    gc.freeze()


def measure_scenario(prepare: Callable[[MakeRig], Round], makers: list[MakeRig], num_rounds: int) -> dict[str, Any]:
    """Microseconds: per side the medians over rounds of a step's mean and median, wall and CPU; and the ratios."""
    rounds = [prepare(make) for make in makers]
    clocks: list[list[Clock]] = [[], []]
    for index in range(num_rounds):
        for side in (0, 1) if index % 2 == 0 else (1, 0):
            freeze()
            clock = Clock()
            rounds[side](clock)
            clocks[side].append(clock)
    gc.unfreeze()
    figures: dict[str, Any] = {}
    for name, of_side in zip(("ours", "reference"), clocks, strict=True):
        for kind in ("wall", "cpu"):
            pieces = [getattr(clock, kind) for clock in of_side]
            figures[f"{name}_{kind}_mean_us"] = 1e6 * statistics.median(map(statistics.fmean, pieces))
            figures[f"{name}_{kind}_median_us"] = 1e6 * statistics.median(map(statistics.median, pieces))
        figures[f"{name}_round_means_us"] = [1e6 * statistics.fmean(clock.wall) for clock in of_side]
    for kind in ("wall", "cpu"):
        figures[f"ratio_{kind}"] = statistics.median(
            statistics.fmean(getattr(reference, kind)) / statistics.fmean(getattr(ours, kind))
            for ours, reference in zip(*clocks, strict=True)
        )
    return figures


def ratio_name(scenario: str) -> str:
    """`step_64` → `step_ratio_64`, `admit` → `admit_ratio`."""
    head, _, last = scenario.rpartition("_")
    return f"{head}_ratio_{last}" if last.isdigit() else f"{scenario}_ratio"


def describe_machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "num_cpus": os.cpu_count(),
        "load_average_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "missing_extensions": why_missing(),
    }


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_step", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=64, help="decode steps per round, a multiple of the block size")
    parser.add_argument("--only", nargs="*", metavar="SCENARIO", help="names as in this module's text")
    parsed = parser.parse_args(arguments)
    if parsed.rounds < 1 or parsed.steps < 1 or parsed.steps % BLOCK_SIZE:
        parser.error(f"--rounds must be at least 1 and --steps a multiple of {BLOCK_SIZE}")
    unknown = set(parsed.only or ()) - set(scenarios(parsed.steps))
    if unknown:
        parser.error(f"no scenario {sorted(unknown)}; there are {sorted(scenarios(parsed.steps))}")
    return parsed


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    if importlib.util.find_spec("vllm") is None:
        try:
            return run_with_reference("benchmarks.scheduler_step", arguments)
        except ReferenceMissingError as error:
            print(error, file=sys.stderr)
            return 2

    logging.disable(logging.WARNING)
    from benchmarks import reference_scheduler

    machine = describe_machine() | {"reference": f"vllm {reference_scheduler.VERSION}"}
    for name, reason in machine["missing_extensions"].items():
        print(f"without {name}: {reason}", file=sys.stderr)
    makers: list[MakeRig] = [OurRig, reference_scheduler.ReferenceRig]
    results: dict[str, dict[str, Any]] = {}
    print(f"{'per step':<16}{'ours µs':>12}{'reference µs':>14}{'ratio':>8}{'CPU ratio':>11}{'medians µs':>22}")
    for name, prepare in scenarios(options.steps).items():
        if options.only and name not in options.only:
            continue
        row = results[name] = measure_scenario(prepare, makers, options.rounds)
        medians = f"{row['ours_wall_median_us']:,.1f} / {row['reference_wall_median_us']:,.1f}"
        print(
            f"{name:<16}{row['ours_wall_mean_us']:>12,.1f}{row['reference_wall_mean_us']:>14,.1f}"
            f"{row['ratio_wall']:>8.1f}{row['ratio_cpu']:>11.1f}{medians:>22}",
            flush=True,
        )
    figures = {ratio_name(name): round(row["ratio_wall"], 2) for name, row in results.items()}
    if {"step_64", "step_1024"} <= results.keys():
        ours = (results["step_1024"]["ours_wall_mean_us"], results["step_64"]["ours_wall_mean_us"])
        figures["cost_1024_over_64"] = round(ours[0] / ours[1], 2)
    if options.json:
        document = figures | {"machine": machine, "rounds": options.rounds, "scenarios": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
