"""Both schedulers over the same random workloads, step by step; needs a Python that has the reference (vLLM).

    SERRIED_REFERENCE_PYTHON=/path/to/python python -m tests.rank_scheduler.reference_worker --count 5000

A workload follows from its kind and seed. `test_differential` says what is compared and what is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import random
import sys
import traceback
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reference_process import ReferenceMissingError, run_with_reference
from benchmarks.scheduler_rig import EOS, OWNER, OurRig, RigOptions
from rank_scheduler.plan import StepResult

BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
FIRST_TAG = 40_000
"""A prompt's last token is this plus its request's number: so every prompt is unique, and a plan tells whose it is."""
MAX_STEPS = 4_000


@dataclass(frozen=True)
class Arrival:
    request: int
    prompt: list[int]
    max_tokens: int
    priority: int
    ignore_eos: bool


@dataclass
class Workload:
    kind: str
    seed: int
    options: RigOptions
    arrivals: dict[int, list[Arrival]] = field(default_factory=dict)
    """By step."""
    aborts: dict[int, list[int]] = field(default_factory=dict)
    eos_period: int = 50
    """On average one in so many generated tokens is end-of-sequence."""

    def token(self, request: int, position: int) -> int:
        """What the model says for this position of this request's text."""
        mixed = (request * 2_654_435_761 + position * 40_503 + self.seed * 69_069) % 2**32
        mixed = (mixed ^ (mixed >> 15)) * 2_246_822_519 % 2**32
        mixed ^= mixed >> 13
        return EOS if mixed % self.eos_period == 0 else 100 + mixed % 30_000


@dataclass
class Seen:
    """A step as a scheduler decided it; requests by number."""

    tokens: dict[int, int] = field(default_factory=dict)
    admitted: list[tuple[int, int]] = field(default_factory=list)
    """With the tokens that they have computed already."""
    preempted: list[int] = field(default_factory=list)


@dataclass
class Heard:
    """What a step's result brought."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)


@dataclass
class Difference:
    kind: str
    seed: int
    step: int
    what: str
    ours: Any
    reference: Any
    options: str
    preceding: list[str]


class OurSide:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        # What the reference does not have is set to what it does.
        config = {"max_head_bypasses": 0, "preemption_policy": "last", **workload.options.config}
        self.rig = OurRig(
            RigOptions(
                max_num_seqs=workload.options.max_num_seqs,
                max_num_batched_tokens=workload.options.max_num_batched_tokens,
                max_model_len=workload.options.max_model_len,
                num_blocks=workload.options.num_blocks,
                async_scheduling=workload.options.async_scheduling,
                config=config,
            )
        )
        self.request_of: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.over: set[int] = set()

    def add(self, arrival: Arrival) -> None:
        self.rig.add(
            self.rig.message(arrival.request, arrival.prompt, arrival.max_tokens, arrival.priority, arrival.ignore_eos)
        )

    def abort(self, request: int) -> None:
        self.rig.abort(request)
        self.over.add(request)

    def schedule(self) -> tuple[Seen, Any]:
        plan = self.rig.schedule()
        seen = Seen()
        if plan is None:
            return seen, None
        for slot in plan.freed_slots:
            request = self.request_of.pop(slot)
            if request not in self.over:
                seen.preempted.append(request)
        for new in plan.new_sequences:
            request = int(new.token_ids[new.num_prompt_tokens - 1]) - FIRST_TAG
            self.request_of[new.slot], self.computed[new.slot] = request, new.num_computed_tokens
            seen.admitted.append((request, new.num_computed_tokens))
        tokens = np.full((len(plan.slots), 1), -1, np.int32)
        rows = zip(plan.slots.tolist(), plan.num_tokens.tolist(), plan.samples.tolist(), strict=True)
        for row, (slot, count, samples) in enumerate(rows):
            request = self.request_of[slot]
            seen.tokens[request] = count
            self.computed[slot] += count
            if samples:
                tokens[row] = self.workload.token(request, self.computed[slot])
        return seen, (plan, StepResult(tokens))

    def update(self, flight: Any) -> Heard:
        heard = Heard()
        if flight is None:
            return heard
        frame = self.rig.update(*flight).get(OWNER)
        if frame is not None:
            for request, token in zip(frame.ids, frame.tokens, strict=True):
                heard.tokens.setdefault(request, []).append(token)
            for end in frame.ends:
                self.over.add(end.id)
                if end.reason != "abort":
                    heard.finished[end.id] = f"{end.reason}{': ' if end.message else ''}{end.message}"
        return heard

    def check(self) -> None:
        self.rig.scheduler.check_integrity()


class ReferenceSide:
    """Its prefill cadence on a single engine is newer than this release: the rule is here, outside of it."""

    def __init__(self, workload: Workload) -> None:
        from benchmarks.reference_scheduler import ReferenceRig

        self.workload = workload
        self.rig = ReferenceRig(workload.options)
        self.interval: int = workload.options.config.get("prefill_schedule_interval", 1)
        self.num_executed = 0
        self.last_prefill = -self.interval
        self.order: dict[str, int] = {}

    def add(self, arrival: Arrival) -> None:
        self.order[str(arrival.request)] = len(self.order)
        self.rig.add(
            self.rig.message(arrival.request, arrival.prompt, arrival.max_tokens, arrival.priority, arrival.ignore_eos)
        )

    def abort(self, request: int) -> None:
        self.rig.abort(request)

    def schedule(self) -> tuple[Seen, Any]:
        scheduler = self.rig.scheduler
        chunked = {request.request_id for request in scheduler.running if request.is_prefill_chunk}
        step = scheduler.schedule(self.num_executed - self.last_prefill < self.interval)
        # Its lists of new and resumed requests come one after the other; the order of admission is that of the counts.
        entered = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        seen = Seen(
            tokens={int(name): count for name, count in step.num_scheduled_tokens.items()},
            admitted=[(int(name), entered[name]) for name in step.num_scheduled_tokens if name in entered],
            preempted=[int(name) for name in step.preempted_req_ids or ()],
        )
        if not step.num_scheduled_tokens:
            return seen, None
        if not chunked.isdisjoint(step.num_scheduled_tokens) or any(
            len(new.prefill_token_ids) - new.num_computed_tokens > 1 for new in step.scheduled_new_reqs
        ):
            self.last_prefill = self.num_executed
        self.num_executed += 1
        from benchmarks.reference_scheduler import make_output

        tokens = {}
        for name in step.num_scheduled_tokens:
            request = scheduler.requests[name]
            samples = not request.is_prefill_chunk
            tokens[name] = [self.workload.token(int(name), request.num_computed_tokens)] if samples else []
        return seen, (step, make_output(tokens))

    def update(self, flight: Any) -> Heard:
        heard = Heard()
        if flight is None:
            return heard
        for outputs in self.rig.update(*flight).values():
            for output in outputs.outputs:
                request = int(output.request_id)
                if output.new_token_ids:
                    heard.tokens.setdefault(request, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    heard.finished[request] = output.finish_reason.name.lower()
        return heard


def make_workload(kind: str, seed: int) -> Workload:
    rng = random.Random(f"{kind} {seed}")
    config: dict[str, Any] = {}
    num_requests = rng.randint(4, 40)
    max_num_seqs = rng.choice([1, 2, 4, 8, 16])
    budget = rng.choice([max_num_seqs, 16, 33, 64, 128, 512])
    num_blocks = num_requests * MAX_MODEL_LEN // BLOCK_SIZE + 2
    max_prompt = rng.choice([20, 100, 300])
    is_scarce = kind in ("tight", "thrash")
    if is_scarce:
        # The reference only checks that a prompt's later chunks would fit, ours takes their blocks: so either all
        # prompts come in one piece, or nobody looks at later chunks.
        if kind == "tight":
            config["enable_chunked_prefill"] = False
            budget = MAX_MODEL_LEN
        else:
            config["scheduler_reserve_full_isl"] = False
        num_blocks = rng.randint(MAX_MODEL_LEN // BLOCK_SIZE + 2, 2 * MAX_MODEL_LEN // BLOCK_SIZE)
        num_requests = rng.randint(10, 40)
        max_num_seqs = rng.choice([8, 16, 32])
        max_prompt = rng.choice([50, 150])
        config["watermark"] = rng.choice([0.0, 0.0, 0.05, 0.2])
    elif kind == "priority":
        # A slot for each, and prompts in one piece: for want of a slot ours preempts, and a running prompt's next
        # chunk does not go before a waiting request of higher priority.
        config["policy"] = "priority"
        max_num_seqs = num_requests
        config["enable_chunked_prefill"] = False
        budget = MAX_MODEL_LEN
    elif kind == "cadence":
        config["prefill_schedule_interval"] = rng.randint(2, 8)
    if kind in ("plenty", "priority", "cadence"):
        config["watermark"] = rng.choice([0.0, 0.01])
        if kind != "priority" and rng.random() < 0.4:
            config["long_prefill_token_threshold"] = rng.choice([1, 7, 16, 40])
            config["long_prefill_token_threshold_adaptive"] = rng.random() < 0.5
        elif rng.random() < 0.3:
            config["enable_chunked_prefill"] = False
            budget = MAX_MODEL_LEN
        if rng.random() < 0.3:
            config["max_num_scheduled_tokens"] = rng.choice([8, 24, 48, MAX_MODEL_LEN])
            if not config.get("enable_chunked_prefill", True):
                config["max_num_scheduled_tokens"] = MAX_MODEL_LEN
        config["scheduler_reserve_full_isl"] = rng.random() < 0.7
    budget = max(budget, max_num_seqs)
    if "max_num_scheduled_tokens" in config:
        config["max_num_scheduled_tokens"] = min(config["max_num_scheduled_tokens"], budget)
    if kind != "priority" and rng.random() < 0.4:
        config["max_num_active_seqs"] = rng.randint(1, max_num_seqs)
    workload = Workload(
        kind,
        seed,
        RigOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            async_scheduling=rng.random() < 0.5,
            config=config,
        ),
        eos_period=rng.choice([100, 1000] if is_scarce else [7, 40, 1000]),
    )
    prefixes = [[rng.randrange(100, 30_000) for _ in range(200)] for _ in range(3)]
    spread = rng.choice([1, 10, 60])
    for request in range(num_requests):
        length = rng.randint(1, max_prompt)
        num_shared = rng.choice([0, rng.randint(0, length - 1)])
        prompt = rng.choice(prefixes)[:num_shared]
        prompt = prompt + [rng.randrange(100, 30_000) for _ in range(length - 1 - len(prompt))] + [FIRST_TAG + request]
        max_tokens = rng.choice([1, 2, rng.randint(1, 40), rng.randint(1, 150)])
        if is_scarce:
            max_tokens += rng.randint(0, 100)
        arrival = Arrival(request, prompt, max_tokens, rng.randint(-2, 2), rng.random() < 0.5)
        step = rng.randrange(spread)
        workload.arrivals.setdefault(step, []).append(arrival)
        if rng.random() < 0.1:
            workload.aborts.setdefault(step + rng.randint(0, 60), []).append(request)
    return workload


KINDS = ("plenty", "tight", "thrash", "priority", "cadence")


def compare(workload: Workload, counts: Counter[str]) -> Difference | None:
    """Drive both in lockstep until all is done; the first difference, or None. Counts what happened."""
    ours, reference = OurSide(workload), ReferenceSide(workload)
    try:
        return _drive(workload, ours, reference, counts)
    except Exception:
        return Difference(workload.kind, workload.seed, -1, traceback.format_exc(), "", "", repr(workload.options), [])


def _drive(workload: Workload, ours: OurSide, reference: ReferenceSide, counts: Counter[str]) -> Difference | None:
    in_flight: deque[tuple[Any, Any]] = deque()
    arrived: set[int] = set()
    over: set[int] = set()
    preceding: deque[str] = deque(maxlen=4)
    num_requests = sum(map(len, workload.arrivals.values()))

    def difference(step: int, what: str, of_ours: Any, of_reference: Any) -> Difference:
        return Difference(
            workload.kind, workload.seed, step, what, of_ours, of_reference, repr(workload.options), list(preceding)
        )

    for step in range(MAX_STEPS):
        for request in workload.aborts.get(step, []):
            if request in arrived and request not in over:
                ours.abort(request)
                reference.abort(request)
                over.add(request)
                counts["aborted"] += 1
        for arrival in workload.arrivals.get(step, []):
            ours.add(arrival)
            reference.add(arrival)
            arrived.add(arrival.request)
        (our_seen, our_flight), (reference_seen, reference_flight) = ours.schedule(), reference.schedule()
        preceding.append(f"step {step}: ours {our_seen}; reference {reference_seen}")
        for what, mine, other in (
            ("preempted", sorted(our_seen.preempted), sorted(reference_seen.preempted)),
            ("admitted", our_seen.admitted, reference_seen.admitted),
            ("tokens", _in_order(our_seen.tokens), _in_order(reference_seen.tokens)),
        ):
            if mine != other:
                return difference(step, what, mine, other)
        counts["steps"] += 1
        counts["preempted"] += len(our_seen.preempted)
        counts["admitted"] += len(our_seen.admitted)
        if our_flight or reference_flight:
            in_flight.append((our_flight, reference_flight))
        depth = 1 if workload.options.async_scheduling else 0
        if in_flight and (len(in_flight) > depth or not our_seen.tokens):
            our_flight, reference_flight = in_flight.popleft()
            our_heard, reference_heard = ours.update(our_flight), reference.update(reference_flight)
            for what in ("tokens", "finished"):
                mine, other = getattr(our_heard, what), getattr(reference_heard, what)
                if mine != other:
                    return difference(step, f"delivered {what}", mine, other)
            over |= our_heard.finished.keys()
            counts["finished"] += len(our_heard.finished)
        if not in_flight:
            ours.check()
        if len(over) == num_requests and not in_flight:
            return None
    return difference(MAX_STEPS, "unfinished", sorted(arrived - over), sorted(arrived - over))


def _in_order(tokens: dict[int, int]) -> list[tuple[int, int]]:
    """Order matters where rows compete for tokens; where all decode, ours go by slot."""
    rows = list(tokens.items())
    return rows if any(count > 1 for _, count in rows) else sorted(rows)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rank_scheduler.reference_worker")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=50, help="seeds per kind")
    parser.add_argument("--json", type=Path, help="where to write the outcome")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        try:
            return run_with_reference("tests.rank_scheduler.reference_worker", arguments)
        except ReferenceMissingError as error:
            print(error, file=sys.stderr)
            return 2
    logging.disable(logging.WARNING)
    outcome: dict[str, dict[str, Any]] = {}
    for kind in options.kinds:
        counts: Counter[str] = Counter()
        differences = []
        for seed in range(options.first, options.first + options.count):
            found = compare(make_workload(kind, seed), counts)
            if found is not None:
                differences.append(vars(found))
        outcome[kind] = {"counts": counts, "differences": differences}
        print(f"{kind}: {len(differences)} of {options.count} differ; {dict(counts)}", flush=True)
        for found in differences[:3]:
            print(json.dumps(found, indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(outcome))
    return int(any(result["differences"] for result in outcome.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
