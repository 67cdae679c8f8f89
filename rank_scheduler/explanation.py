"""Why a request is not running, in figures and in words; and what became of it so far."""

from __future__ import annotations

import string

from rank_scheduler.interface import PauseState
from rank_scheduler.messages import Explanation
from rank_scheduler.rank_state import RankState
from rank_scheduler.sequence import Obstacle, Sequence, SequenceState, WaitReason

_WORDS = {
    WaitReason.NEW: "no step has been planned since it was queued",
    WaitReason.SLOTS: "all slots are taken: {num_active} of {limit}",
    WaitReason.BLOCKS: (
        "it needs {num_needed} KV blocks; {num_free} are free, and {num_kept_free} of them are kept (watermark, "
        "promises to running prompts)"
    ),
    WaitReason.BUDGET: "the step's tokens were used up ({left} left)",
    WaitReason.PREEMPTION: (
        "{num_preempted_in_step} of the running sequences had to give up their blocks in this step, which admits nobody"
    ),
    WaitReason.CADENCE: "while others decode, prompts are computed in one step of {prefill_schedule_interval}",
    WaitReason.ENCODER: "the encoder budget ({budget_left} left in the step) or cache ({cache_held} held) is used up",
    WaitReason.BEHIND: "it waits its turn: {position} in the queue come before it",
    WaitReason.DRAINING: "it was preempted, and {num_draining} tokens of steps in flight are still to come",
    WaitReason.GRAMMAR: "its grammar is being compiled",
    WaitReason.LOAD_CAP: "{num_loads} KV loads are in progress or done and waiting, {num_started} started in this step",
    WaitReason.LOADING: "its KV is being loaded ({num_external_tokens} tokens)",
    WaitReason.CONNECTOR: "the KV connector does not know yet what it can load",
    WaitReason.INPUT: "the session waits for its next input",
    WaitReason.PAUSED: "the rank is paused ({num_paused} requests wait)",
}


def explain(sequence: Sequence, state: RankState) -> Explanation:
    """`sequence` may have ended; its record is kept for a while."""
    batch = state.batch
    num_computed, num_known = sequence.num_computed, len(sequence.token_ids)
    num_generated = sequence.num_generated if sequence.finish_reason else num_known - sequence.num_prompt_tokens
    if sequence.slot >= 0:
        num_computed = int(batch.num_computed[sequence.slot] - batch.num_in_flight[sequence.slot])
        num_generated = int(batch.num_tokens[sequence.slot]) - sequence.num_prompt_tokens
    obstacle = why_waiting(sequence, state)
    return Explanation(
        state=str(sequence.state if sequence.finish_reason is None else f"finished ({sequence.finish_reason})"),
        timeline=sequence.timeline(),
        reason=str(obstacle.reason) if obstacle else "",
        message=_message(obstacle) if obstacle else "",
        figures=obstacle.figures if obstacle else {},
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=num_computed,
        num_generated_tokens=max(0, num_generated),
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        position=_position(sequence, state),
    )


def why_waiting(sequence: Sequence, state: RankState) -> Obstacle | None:
    """What keeps a living sequence from running; None if it runs, or has ended."""
    if sequence.state in (SequenceState.RUNNING, SequenceState.FINISHED):
        return None
    if sequence.state is SequenceState.WAITING_FOR_GRAMMAR:
        return Obstacle(WaitReason.GRAMMAR)
    if sequence.state is SequenceState.WAITING_FOR_KV_LOAD:
        return Obstacle(WaitReason.LOADING, {"num_external_tokens": sequence.num_external_tokens})
    if sequence.state is SequenceState.WAITING_FOR_INPUT:
        return Obstacle(WaitReason.INPUT)
    if sequence.num_draining:
        return Obstacle(WaitReason.DRAINING, {"num_draining": sequence.num_draining})
    paused = state.pause is PauseState.PAUSED_ALL or (state.pause is PauseState.PAUSED_NEW and sequence.blocks is None)
    if paused:
        return Obstacle(WaitReason.PAUSED, {"num_paused": len(state.waiting) + len(state.load_candidates)})
    if sequence.pass_number == state.pass_number:
        return sequence.obstacle
    # Not looked at in the latest pass: what ended that pass before its turn is the reason.
    ended_by = state.load_obstacle if state.load_candidates.position(sequence) >= 0 else state.pass_obstacle
    position = _position(sequence, state)
    if position > 0:
        cause = {f"ahead_{name}": figure for name, figure in ended_by.figures.items()}
        return Obstacle(WaitReason.BEHIND, {"position": position} | cause)
    return ended_by


def _position(sequence: Sequence, state: RankState) -> int:
    if sequence.state not in (SequenceState.WAITING, SequenceState.PREEMPTED) or sequence.num_draining:
        return -1
    if sequence.blocks is not None:
        return state.loaded.index(sequence) if sequence in state.loaded else -1
    at = state.waiting.position(sequence)
    return at + len(state.loaded) if at >= 0 else state.load_candidates.position(sequence)


def _message(obstacle: Obstacle) -> str:
    figures = obstacle.figures
    return _WORDS[obstacle.reason].format_map({**figures}) if _has_all(obstacle) else str(obstacle.reason)


def _has_all(obstacle: Obstacle) -> bool:
    names = {name for _, name, _, _ in string.Formatter().parse(_WORDS[obstacle.reason]) if name}
    return names <= obstacle.figures.keys()
