"""A rank without its threads and sockets: the real scheduler and a real runner, stepped by the test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from model_runner.runner import ModelRunner
from rank_scheduler.config import SchedulerConfig
from rank_scheduler.messages import End, SamplingParams, StepFrame, Submit
from rank_scheduler.plan import StepPlan
from rank_scheduler.scheduler import Scheduler
from rank_scheduler.stop_strings import TextDecoder


class NoText:
    def step(self, token_ids: list[int]) -> str:
        raise AssertionError("no request of this test has stop strings")


class Engine:
    """Submits requests and collects what their owner would hear. Time is the number of steps."""

    def __init__(
        self,
        runner: ModelRunner,
        config: SchedulerConfig,
        *,
        enable_prefix_caching: bool = True,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        make_text_decoder: Callable[[], TextDecoder] = NoText,
    ) -> None:
        """`num_blocks` and `max_model_len` may lower what the runner has, to force preemption."""
        capacity = runner.load()
        self.runner = runner
        self.scheduler = Scheduler(
            config,
            max_model_len=max_model_len or capacity.max_model_len,
            vocab_size=capacity.vocab_size,
            eos_token_ids=capacity.eos_token_ids,
            num_blocks=num_blocks or capacity.num_blocks,
            block_size=capacity.block_size,
            enable_prefix_caching=enable_prefix_caching,
            make_text_decoder=make_text_decoder,
        )
        self.now = 0.0
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, End] = {}
        self.plans: list[StepPlan] = []

    def submit(
        self, request_id: int, prompt: list[int], max_tokens: int = 8, owner: int = 0, **sampling: object
    ) -> None:
        params = {"seed": request_id, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | sampling
        message = Submit(request_id, np.array(prompt, "<i4").tobytes(), SamplingParams(**params))
        self.scheduler.add(owner, message, self.now)

    def step(self) -> StepPlan | None:
        """One turn of the rank's loop, with every invariant checked after it."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        if plan is None:
            frames = self.scheduler.take_frames()
        else:
            assert plan.total_tokens <= self.scheduler.config.max_num_batched_tokens
            self.plans.append(plan)
            frames = self.scheduler.update(plan, self.runner.execute(plan), self.now)
        self.take(frames)
        self.scheduler.check_integrity()
        return plan

    def take(self, frames: dict[int, StepFrame]) -> None:
        for frame in frames.values():
            for request_id, token in zip(frame.ids, frame.tokens, strict=True):
                assert request_id not in self.ends, f"token for {request_id} after its end"
                self.tokens[request_id].append(token)
            for end in frame.ends:
                assert end.id not in self.ends, f"{end.id} ended twice"
                self.ends[end.id] = end

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"not drained after {max_steps} steps: {self.scheduler.load()}")
