"""What a rank's loop needs from a scheduler: the public interface for `SchedulerConfig.scheduler_cls`.

One thread calls all of it. Up to `max_num_steps_in_flight` plans may be out at a time; their results come back in
order, one `update` or `fail` each. Messages and events may come between any two calls, in any order, late or twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from kv_transfer.connector import LoadFenced, LoadFinished, SchedulerConnector, SendFinished
from rank_scheduler.config import SchedulerConfig
from rank_scheduler.kv_events import KvEvent
from rank_scheduler.messages import Explanation, Extend, Prefetch, RankLoad, StepFrame, Submit
from rank_scheduler.performance import PerformanceModel
from rank_scheduler.plan import StepPlan, StepResult
from rank_scheduler.stats import StepStats
from rank_scheduler.stop_strings import TextDecoder
from rank_scheduler.structured_output import CompileGrammar, GrammarMatcher


class PauseState(StrEnum):
    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused_new"
    """Running requests and those that hold KV go on; nothing else is admitted."""
    PAUSED_ALL = "paused_all"
    """Nothing runs."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table."""

    sliding_window: int | None = None
    """How many positions, its own included, a position sees; None: all before it."""


def _no_decoder() -> TextDecoder:
    raise ValueError("a request has stop strings, and this scheduler was given no text decoder")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSetup:
    """What a scheduler must know of its rank; discovered when the model is loaded."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_blocks: int
    """The null block included."""
    block_size: int
    enable_prefix_caching: bool = True
    kv_groups: tuple[KvGroup, ...] = (KvGroup(),)
    is_encoder_decoder: bool = False
    async_scheduling: bool = False
    """Plan step N + 1 while step N is computed; `SchedulerConfig.async_scheduling`, resolved for this rank."""
    emit_kv_events: bool = False
    """Keep events with tokens for `take_kv_events`; steps take longer then."""
    record_prefix_changes: bool = False
    """Keep what `take_prefix_changes` returns, which costs next to nothing."""
    connector: SchedulerConnector | None = None
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """After a failed load: compute what is missing (or load again, see `max_kv_load_retries`), or end the request."""
    performance: PerformanceModel | None = None
    make_text_decoder: Callable[[], TextDecoder] = field(default=_no_decoder)


class SchedulerInterface(Protocol):
    """See the module's text. A class for `scheduler_cls` is constructed with exactly these two arguments."""

    num_ignored_messages: int
    """Duplicate, late and unknown messages and events so far."""

    def __init__(self, config: SchedulerConfig, setup: SchedulerSetup) -> None:
        """Raises ValueError, with the remedy, if the two do not fit together."""

    # Messages of a router (the owner).
    def add(self, owner: int, submit: Submit, now: float) -> None: ...
    def extend(self, owner: int, extend: Extend, now: float) -> None: ...
    def abort(self, owner: int, request_id: int, now: float) -> None: ...
    def hand_off(self, owner: int, request_id: int, now: float) -> None: ...
    def keep(self, owner: int, request_ids: list[int]) -> None: ...
    def drop_owner(self, owner: int, now: float) -> None: ...
    def prefetch(self, owner: int, prefetch: Prefetch, now: float) -> None: ...

    # Events from the rank's edge.
    def take_compile_actions(self) -> list[CompileGrammar]: ...
    def grammar_compiled(
        self,
        owner: int,
        request_id: int,
        matcher: GrammarMatcher | None,
        error: str,
        now: float,
        *,
        is_request_fault: bool = True,
    ) -> None:
        """A grammar is ready, or (`matcher` None) is not for the reason `error`, which ends this request only.

        Not `is_request_fault`: there was no room or time for it, and another attempt may do.
        """
        ...

    def load_finished(self, event: LoadFinished, now: float) -> None: ...
    def load_fenced(self, event: LoadFenced, now: float) -> None: ...
    def send_finished(self, event: SendFinished, now: float) -> None: ...

    # Operation.
    def set_pause(self, state: PauseState, now: float) -> None: ...
    def reset_prefix_cache(self) -> bool: ...

    # Steps.
    @property
    def max_num_steps_in_flight(self) -> int: ...
    def has_work(self) -> bool: ...
    def schedule(self, now: float) -> StepPlan | None: ...
    def update(self, plan: StepPlan, result: StepResult, now: float) -> dict[int, StepFrame]: ...
    def fail(self, plan: StepPlan, message: str, now: float) -> dict[int, StepFrame]: ...
    def take_frames(self) -> dict[int, StepFrame]: ...

    # Figures.
    def load(self) -> RankLoad: ...
    def explain(self, request_id: str) -> list[Explanation]: ...
    def take_stats(self) -> StepStats: ...
    def take_kv_events(self) -> list[KvEvent]: ...
    def take_prefix_changes(self) -> tuple[bytes, bytes]:
        """Hashes that a prompt would find now and those that it would not, of those that changed since the last call.

        As `prefix_chain.pack` writes them. With several `kv_groups` they are those of one full-attention group: a hit
        is at most as long as these say. What is on its way (a step that computes it, a load) may count already.
        """
        ...

    def findable_prefixes(self) -> list[bytes]:
        """All hashes that a prompt would find now, whole ones, in no order."""
        ...

    def check_integrity(self) -> None: ...
