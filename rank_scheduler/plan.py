"""The contract between a rank's scheduler and its model runner: a step's plan, and its result.

A plan is a **delta**: the runner keeps a persistent batch of `max_num_seqs` slots (known tokens, computed count,
block table, sampling parameters per slot), and the plan says only what changed. The runner appends each sampled
token to its slot itself, so a steady decode step carries three small arrays and nothing else.

Order within `execute`: free slots, copy blocks (one after another, as listed), install new sequences, append
blocks, then compute. After it, a slot's computed count has grown by its `num_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rank_scheduler.messages import SamplingParams, TokenLogprobs

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters a slot, for the first time or again after preemption."""

    slot: int
    token_ids: Int32Array
    """All known tokens (prompt, and after a preemption what was generated), shape [n]."""
    num_computed_tokens: int
    """How many of them have KV in `block_ids` already (prefix hits), < n."""
    block_ids: Int32Array
    """Blocks that cover at least the known tokens, shape [>= ceil(n / block_size)]."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Rows are scheduled slots; `slots`, `num_tokens`, `samples` have shape [rows]."""

    step: int
    slots: Int32Array
    num_tokens: Int32Array
    """Tokens to compute per row, from the slot's computed count on; >= 1."""
    samples: BoolArray
    """Whether the row's last computed position yields a token (false for all but the last chunk of a prompt)."""
    freed_slots: list[int] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) block ids."""
    new_sequences: list[NewSequence] = field(default_factory=list)
    appended_slots: list[int] = field(default_factory=list)
    """Slot of each block in `appended_blocks`; blocks of one slot are in order."""
    appended_blocks: list[int] = field(default_factory=list)

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought."""

    tokens: Int32Array
    """Sampled token per row, shape [rows]; -1 where the row did not sample or failed."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Row → logprobs, for rows that sampled and whose request asked."""
    failed: dict[int, str] = field(default_factory=dict)
    """Row → why no token could be taken from it (for example: logits are not finite). Ends that request only."""
