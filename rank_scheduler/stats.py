"""What a scheduler's steps brought: in all, and since they were last asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace


@dataclass(slots=True)
class StepStats:
    """Sums over a scheduler's life, or (`since`) over an interval of it, as `Scheduler.take_stats` hands them out."""

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
    num_prefetched_tokens: int = 0
    """Tokens whose KV was loaded before the request that needs it had come; loads of requests do not count them."""
    num_dropped_prefetches: int = 0
    """Those that brought nothing: no room, nothing new to load, or a failure."""
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

    def copy(self) -> StepStats:
        return replace(self, accepted_per_position=self.accepted_per_position.copy())

    def since(self, earlier: StepStats) -> StepStats:
        """What came after `earlier`, an older copy."""
        interval = self.copy()
        for each in fields(self):
            if each.name not in ("accepted_per_position", "utilisation"):
                setattr(interval, each.name, getattr(self, each.name) - getattr(earlier, each.name))
        before = earlier.accepted_per_position
        interval.accepted_per_position = [
            count - (before[place] if place < len(before) else 0)
            for place, count in enumerate(self.accepted_per_position if interval.num_drafts else [])
        ]
        if not interval.num_steps:
            interval.utilisation = 0.0
        return interval
