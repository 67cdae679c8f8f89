"""What a scheduler's steps brought since they were last asked for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepStats:
    """Sums over the steps of one interval; `Scheduler.take_stats` hands it out and starts a new one."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    """Tokens looked up in the prefix cache by requests on their first admission, and hits of those."""
    num_prefix_hits: int = 0
    num_preempted_prefix_queries: int = 0
    """The same for requests that came back after a preemption."""
    num_preempted_prefix_hits: int = 0
    num_external_hits: int = 0
    """Tokens that a connector loaded."""
    num_failed_loads: int = 0
    num_drafts: int = 0
    """Rows that had drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """How often the draft at each place was right."""
    estimated_flops: float = 0.0
    estimated_bytes: float = 0.0
    busy_s: float = 0.0
    """From `schedule` to `update`, summed."""
    utilisation: float = 0.0
    """Of the latest step: share of the machine's calibrated limit, the nearer one."""
