"""The contract between a rank's scheduler and its model runner: a step's plan, and its result.

A plan is a **delta**: the runner keeps a persistent batch of `max_num_seqs` slots (known tokens, computed count,
block tables, sampling parameters per slot), and the plan says only what changed. The runner appends each sampled
token to its slot itself, so a steady decode step carries three small arrays and nothing else, and the plan of step
N + 1 may be made before step N has been executed.

Plans are executed in order, one at a time. Order within `execute`: free slots, forget encoder outputs, copy blocks
(one after another, as listed), install new sequences, extend sessions, append blocks, hand `connector_metadata` to
the KV connector's worker half, encode, then compute. After it, a slot's computed count has grown by its
`num_tokens`, less its drafts that were wrong.

Drafts: a row with d drafts computes its known tokens that are not computed yet and then the drafts, and yields
between 1 and d + 1 tokens: those that its own sampling picks, up to and including the first that differs from the
draft at its place.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from rank_scheduler.messages import EncoderInput, PromptLogprobs, SamplingParams, TokenLogprobs

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
UInt32Array = npt.NDArray[np.uint32]

NO_TOKENS: Int32Array = np.zeros(0, np.int32)
NO_BLOCKS: Int32Array = np.zeros((0, 1), np.int32)


class NewSequence(msgspec.Struct, frozen=True, eq=False):
    """A sequence that enters a slot, for the first time or again after preemption."""

    slot: int
    token_ids: Int32Array
    """All known tokens (prompt, and after a preemption what was generated), shape [n]."""
    num_computed_tokens: int
    """How many of them have KV in `block_ids` already (prefix hits, loads), < n."""
    block_ids: Int32Array
    """Shape [num_groups, columns]: per layer group the blocks of the sequence's positions, `block_size` per column.

    The null block stands where a sliding-window group needs no block any more.
    """
    num_prompt_tokens: int
    sampling: SamplingParams
    cross_block_ids: Int32Array = NO_TOKENS
    """Encoder-decoder models: blocks of the encoder's positions, shape [m]; static while the sequence runs."""
    encoder_inputs: tuple[EncoderInput, ...] = ()


class Extension(msgspec.Struct, frozen=True, eq=False):
    """More input for a streaming session that kept its slot."""

    slot: int
    first: int
    """Known tokens from this index on are replaced."""
    token_ids: Int32Array


class EncoderRun(msgspec.Struct, frozen=True):
    """Compute an encoder item and keep its output under its identifier until a plan forgets it."""

    slot: int
    """A sequence that needs it."""
    item: EncoderInput


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """What one step computes. Rows are scheduled slots; `slots`, `num_tokens`, `samples` have shape [rows].

    There may be no rows, when only the delta or the connector has something to do.
    """

    step: int
    slots: Int32Array
    num_tokens: Int32Array
    """Tokens to compute per row, from the slot's computed count on, drafts included; >= 1."""
    samples: BoolArray
    """Whether the row yields tokens (false for all but the last chunk of a prompt)."""
    num_drafts: Int32Array | None = None
    """Drafts per row, shape [rows]; None: no row has any."""
    draft_tokens: Int32Array = NO_TOKENS
    """Drafts of all rows, one after another."""
    masked: Int32Array = NO_TOKENS
    """Which sampled positions have a mask, shape [m]. A row that samples has 1 + d of them; they count through."""
    masks: UInt32Array | None = None
    """Allowed tokens, shape [m, ceil(vocab_size / 32)], lowest bit first."""
    freed_slots: list[int] = []
    freed_encoder_outputs: list[bytes] = []
    """Identifiers."""
    block_copies: list[tuple[int, int]] = []
    """(source, destination) block ids."""
    new_sequences: list[NewSequence] = []
    extensions: list[Extension] = []
    appended_slots: Int32Array = NO_TOKENS
    """Slot of each row of `appended_blocks`, shape [k]; a slot's rows are in order."""
    appended_blocks: Int32Array = NO_BLOCKS
    """One column of the slot's block tables, shape [k, num_groups]."""
    encoder_runs: list[EncoderRun] = []
    connector_metadata: object | None = None
    """Handed over once, also if the step fails: a load that nobody started would never end."""

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


class StepResult(msgspec.Struct, frozen=True, eq=False):
    """What a step brought."""

    tokens: Int32Array
    """Sampled tokens per row, shape [rows, 1 + most drafts of a row], filled from the left, -1 where there is none."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """Row → logprobs of its tokens, for rows that sampled and whose request asked."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """Row → those of the prompt's tokens behind the positions that it computed, for rows whose request asked."""
    failed: dict[int, str] = {}
    """Row → why no token could be taken from it (for example: logits are not finite). Ends that request only."""
    pooled: dict[int, bytes] = {}
    """Row → the pooling model's output, little-endian float32, for rows whose last position was computed."""
    invalid_blocks: frozenset[int] = frozenset()
    """Blocks that a synchronous KV load should have filled, and has not: what was computed on them is wrong."""
