"""A scheduler together with just as much of an engine as it takes to drive it, and ours in one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rank_scheduler.config import SchedulerConfig
from rank_scheduler.interface import SchedulerSetup
from rank_scheduler.messages import SamplingParams, Submit
from rank_scheduler.plan import StepPlan, StepResult
from rank_scheduler.scheduler import Scheduler

VOCAB_SIZE = 49_152
EOS = 2
OWNER = 1


@dataclass(frozen=True, kw_only=True)
class RigOptions:
    """What both schedulers are constructed from."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int = 16
    async_scheduling: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the scheduler's config, named alike on both sides."""


class Rig(Protocol):
    """What is measured is `add`, `schedule` and `update`; the rest is the engine around it."""

    name: str

    def message(
        self, request: int, prompt: list[int], max_tokens: int, priority: int = 0, ignore_eos: bool = True
    ) -> Any:
        """A request as it arrives from the engine's front end, which has made it: not measured."""

    def add(self, message: Any) -> None: ...

    def abort(self, request: int) -> None: ...

    def schedule(self) -> Any:
        """The next step, or None if there is nothing to compute."""

    def result(self, step: Any, token: int) -> Any:
        """What a model runner would answer if every sampled token were this one. Asked before the next `schedule`."""

    def update(self, step: Any, result: Any) -> Any: ...

    def num_running(self) -> int: ...


class OurRig:
    name = "serried"

    def __init__(self, options: RigOptions) -> None:
        fields = dict(options.config)
        fields |= {
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "async_scheduling": options.async_scheduling,
        }
        self.scheduler = Scheduler(
            SchedulerConfig(**fields),
            SchedulerSetup(
                max_model_len=options.max_model_len,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=frozenset({EOS}),
                num_blocks=options.num_blocks,
                block_size=options.block_size,
                async_scheduling=options.async_scheduling,
            ),
        )

    def message(
        self, request: int, prompt: list[int], max_tokens: int, priority: int = 0, ignore_eos: bool = True
    ) -> Submit:
        sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
        return Submit(request, np.array(prompt, "<i4").tobytes(), sampling, priority=priority)

    def add(self, message: Submit) -> None:
        self.scheduler.add(OWNER, message, time.monotonic())

    def abort(self, request: int) -> None:
        self.scheduler.abort(OWNER, request, time.monotonic())

    def schedule(self) -> StepPlan | None:
        return self.scheduler.schedule(time.monotonic())

    def result(self, step: StepPlan, token: int) -> StepResult:
        return StepResult(np.where(step.samples, token, -1).astype(np.int32)[:, None])

    def update(self, step: StepPlan, result: StepResult) -> Any:
        return self.scheduler.update(step, result, time.monotonic())

    def num_running(self) -> int:
        return self.scheduler.load().num_running
