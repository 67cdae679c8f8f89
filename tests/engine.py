"""A rank without its threads and sockets: the real scheduler and a real runner, stepped by the test."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest

from model_runner.runner import ModelRunner
from rank_scheduler.config import SchedulerConfig
from rank_scheduler.interface import SchedulerSetup
from rank_scheduler.messages import End, Explanation, SamplingParams, StepFrame, Submit, TokenLogprobs
from rank_scheduler.plan import StepPlan, StepResult
from rank_scheduler.scheduler import Scheduler


class Engine:
    """Submits requests and collects what their owner would hear. Time is the number of steps.

    With `async_scheduling`, the plan of step N + 1 is made before step N is executed, as late as its result allows.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: SchedulerConfig,
        *,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        **setup: Any,
    ) -> None:
        """`num_blocks` and `max_model_len` may lower what the runner has, to force preemption; `setup` goes on."""
        capacity = runner.load()
        self.runner = runner
        self.scheduler = Scheduler(
            config,
            SchedulerSetup(
                max_model_len=max_model_len or capacity.max_model_len,
                vocab_size=capacity.vocab_size,
                eos_token_ids=capacity.eos_token_ids,
                num_blocks=num_blocks or capacity.num_blocks,
                block_size=capacity.block_size,
                **setup,
            ),
        )
        self.now = 0.0
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, End] = {}
        self.prompt_logprobs: dict[int, dict[int, TokenLogprobs]] = defaultdict(dict)
        """Of each request, by the token's index in the prompt."""
        self.turn_ends: dict[int, list[End]] = defaultdict(list)
        self.computed: list[tuple[int, int]] = []
        """What was told of prompts that were computed in part, in order."""
        self.plans: list[StepPlan] = []
        self.in_flight: deque[StepPlan] = deque()

    def submit(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int = 8,
        owner: int = 0,
        fields: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> None:
        """`fields` are those of `Submit`, `sampling` those of `SamplingParams`."""
        params: dict[str, Any] = {"seed": request_id, "max_tokens": max_tokens, "temperature": 0.0}
        params |= {"ignore_eos": True, **sampling}
        options: dict[str, Any] = {"request_id": f"r{request_id}"} | (fields or {})
        message = Submit(request_id, np.array(prompt, "<i4").tobytes(), SamplingParams(**params), **options)
        self.scheduler.add(owner, message, self.now)

    def step(self) -> StepPlan | None:
        """One turn of the rank's loop, with every invariant checked after it; returns the plan that it made."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            assert plan.total_tokens <= self.scheduler.config.num_scheduled_tokens_limit
            self.plans.append(plan)
            self.in_flight.append(plan)
        self.take(self.scheduler.take_frames())
        self.scheduler.check_integrity()
        if self.in_flight and (plan is None or len(self.in_flight) == self.scheduler.max_num_steps_in_flight):
            self.finish_step()
        return plan

    def finish_step(self) -> None:
        """Execute the oldest plan and take in its result."""
        plan = self.in_flight.popleft()
        self.take(self.scheduler.update(plan, self.execute(plan), self.now))
        self.scheduler.check_integrity()

    def execute(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(plan)

    def take(self, frames: dict[int, StepFrame]) -> None:
        for frame in frames.values():
            for request_id, token in zip(frame.ids, frame.tokens, strict=True):
                assert request_id not in self.ends, f"token for {request_id} after its end"
                self.tokens[request_id].append(token)
            for request_id, part in frame.prompt_logprobs.items():
                assert request_id not in self.ends, f"prompt logprobs for {request_id} after its end"
                for index, logprobs in enumerate(part.tokens, part.first):
                    known = self.prompt_logprobs[request_id].setdefault(index, logprobs)
                    assert known.logprob == pytest.approx(logprobs.logprob, abs=1e-4), f"other values for {request_id}"
            self.computed += frame.computed.items()
            for end in frame.turn_ends:
                self.turn_ends[end.id].append(end)
            for end in frame.ends:
                assert end.id not in self.ends, f"{end.id} ended twice"
                self.ends[end.id] = end

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.in_flight and not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"not drained after {max_steps} steps: {self.scheduler.load()}")

    def explain(self, request_id: int) -> Explanation:
        """Of the only sequence of a request."""
        (explanation,) = self.scheduler.explain(f"r{request_id}")
        return explanation
