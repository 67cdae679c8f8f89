"""A model without weights: deterministic, without torch, and strict about its KV.

Each position's KV is a hash of its input, its position and **all KV that it sees** (per group: the window before it),
kept in a pool of blocks, and the next token is a hash of all KV that the last position sees, read back through the
block tables. So a wrong block table, prefix hit, block copy or computed count gives other tokens than
`expected_tokens`, as it would with a real model; what a real model could not notice (a null block within a window, an
encoder output that is missing) raises.

A position's input is its token, or its part of an encoder item's output, which is a hash of the item. A model with
encoder and decoder writes the encoder's output into cross-attention blocks, and all of its positions see them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.memory import KvMemory
from model_runner.batch import PersistentBatch, StepRows
from model_runner.runner import Capacity, KvHooks
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.interface import KvGroup
from rank_scheduler.messages import EncoderInput, TokenLogprobs
from rank_scheduler.plan import BoolArray, Int32Array, NewSequence, StepPlan, StepResult, UInt32Array

DEFAULT_NUM_BLOCKS = 1024
DEFAULT_VOCAB_SIZE = 32000
POOLED_SIZE = 8
"""Numbers in a pooling model's output."""

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a step takes: `base_s` + `token_s` per computed token."""

    base_s: float = 0.02
    token_s: float = 0.0005

    def step_time_s(self, plan: StepPlan) -> float:
        return self.base_s + self.token_s * plan.total_tokens


class SimulatedRunner:
    """See `ModelRunner`. Always greedy: of the sampling parameters only `min_tokens` and `num_logprobs` matter.

    Whether it is a pooling model says `SchedulerConfig.runner_type`.
    """

    def __init__(
        self,
        *,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        max_model_len: int = 4096,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        eos_token_ids: frozenset[int] = frozenset(),
        kv_groups: tuple[KvGroup, ...] = (KvGroup(),),
        is_encoder_decoder: bool = False,
        cost: CostModel | None = None,
    ) -> None:
        self._num_blocks = cache.num_blocks or DEFAULT_NUM_BLOCKS
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._kv_groups = kv_groups
        self._is_encoder_decoder = is_encoder_decoder
        self._is_pooling = scheduler.runner_type == "pooling"
        self._cost = cost or CostModel()
        self.kv_hooks: KvHooks | None = None
        self._block_size = cache.block_size
        self._max_model_len = max_model_len
        self._batch = PersistentBatch(
            scheduler.max_num_seqs,
            max_model_len,
            cache.block_size,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            num_groups=len(kv_groups),
        )
        # One pool for all groups, as blocks have one id space; so a block of the wrong group holds the wrong KV.
        self._kv = np.zeros((self._num_blocks, cache.block_size), np.uint64)
        self._encoder_outputs: dict[bytes, int] = {}

    def load(self) -> Capacity:
        return Capacity(
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            block_size_bytes=self._kv[0].nbytes,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            dtype="uint64",
            device="none",
            backend="simulated",
            kv_groups=self._kv_groups,
            is_encoder_decoder=self._is_encoder_decoder,
        )

    def step_time_s(self, plan: StepPlan) -> float:
        """Seconds of virtual time that `execute(plan)` would take."""
        return self._cost.step_time_s(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        self._apply_delta(plan)
        rows = self._batch.rows(plan)
        digests = self._compute_rows(rows)
        result = StepResult(self._batch.verify(rows, self._sample(plan, rows, digests)))
        if self._is_pooling:
            result.tokens.fill(-1)
            whole = rows.context_lens == self._batch.num_tokens[rows.slots]
            result.pooled.update({int(row): _pooled(digests[row][-1]) for row in np.flatnonzero(whole)})
        else:
            self._report(plan, rows, result)
        self._batch.advance(plan, result.tokens)
        return result

    def kv_memory(self) -> KvMemory:
        raise RuntimeError("a simulated runner's KV is no memory that could be shared")

    def close(self) -> None:
        pass

    def write_kv(self, token_ids: Sequence[int], block_ids: Int32Array, first: int, last: int) -> None:
        """Fill positions [first, last) of a sequence's blocks, shape [num_groups, columns], as a KV load would.

        `token_ids`: at least its first `last` tokens.
        """
        views = [_View(i, g.sliding_window, np.zeros(last, np.uint64)) for i, g in enumerate(self._kv_groups)]
        for position, token in enumerate(token_ids[:last]):
            _step(views, position, token, 0)
        places = np.arange(first, last)
        for row, view in zip(block_ids, views, strict=True):
            blocks = row[places // self._block_size]
            held = blocks != 0
            self._kv[blocks[held], places[held] % self._block_size] = view.kv[places[held]]

    def _apply_delta(self, plan: StepPlan) -> None:
        batch = self._batch
        batch.free(plan.freed_slots)
        for identifier in plan.freed_encoder_outputs:
            # It may be missing: the step that should have made it may have failed before.
            self._encoder_outputs.pop(identifier, None)
        for source, destination in plan.block_copies:
            self._kv[destination] = self._kv[source]
        for sequence in plan.new_sequences:
            self._check_encoder_inputs(sequence)
            self._kv[batch.install(sequence)] = 0
            self._kv[sequence.cross_block_ids] = 0
        for extension in plan.extensions:
            batch.extend(extension)
        batch.append_blocks(plan.appended_slots, plan.appended_blocks)
        self._kv[plan.appended_blocks] = 0
        if plan.connector_metadata is not None and self.kv_hooks is not None:
            self.kv_hooks.start_load_kv(plan.connector_metadata)
        for run in plan.encoder_runs:
            self._encode(run.slot, run.item)

    def _check_encoder_inputs(self, sequence: NewSequence) -> None:
        needed = 0
        if self._is_encoder_decoder:
            needed = -(-sum(item.length for item in sequence.encoder_inputs) // self._block_size)
        if len(sequence.cross_block_ids) != needed:
            raise RuntimeError(
                f"the plan installs a sequence with {len(sequence.cross_block_ids)} cross-attention blocks into slot "
                f"{sequence.slot}, and its encoder input needs {needed}"
            )

    def _encode(self, slot: int, item: EncoderInput) -> None:
        if item not in self._batch.encoder_inputs[slot]:
            raise RuntimeError(f"the plan encodes {item.identifier.hex()} for slot {slot}, which has no such input")
        output = _encoder_output(item)
        self._encoder_outputs[item.identifier] = output
        if self._is_encoder_decoder:
            index = np.arange(item.length)
            blocks = self._batch.cross_block_ids[slot][index // self._block_size]
            self._kv[blocks, index % self._block_size] = [_embedding(output, i) for i in index.tolist()]

    def _compute_rows(self, rows: StepRows) -> list[list[int]]:
        """Write all KV; returns for each row the digests after its last 1 + drafts positions."""
        digests: list[list[int]] = [[]] * len(rows.slots)
        # By start: a sequence may read blocks that another fills in this very step, always at lower positions.
        for row in np.argsort(rows.starts, kind="stable").tolist():
            slot, start, end = int(rows.slots[row]), int(rows.starts[row]), int(rows.context_lens[row])
            digests[row] = self._compute(slot, start, end, 1 + int(rows.num_drafts[row]))
        return digests

    def _compute(self, slot: int, start: int, end: int, num_digests: int) -> list[int]:
        """Write KV of positions [start, end) of a slot; returns the hashes of all KV seen from the last of them."""
        block_size = self._block_size
        cross = self._read_cross(slot) if self._is_encoder_decoder else 0
        views: list[_View] = []
        tables: list[Int32Array] = []
        for index, group in enumerate(self._kv_groups):
            column = _first_seen(start, group.sliding_window) // block_size
            table = self._batch.block_table[index, slot, column : -(-end // block_size)]
            if not table.all():
                raise RuntimeError(
                    f"slot {slot} computes positions {start} to {end - 1}, and its block table of group {index} "
                    f"(sliding_window {group.sliding_window}) has the null block at column "
                    f"{column + int((table == 0).argmax())}"
                )
            tables.append(table)
            views.append(_View(index, group.sliding_window, self._kv[table].reshape(-1), column * block_size, start))
        digests = [
            _step(views, position, value, cross) for position, value in enumerate(self._inputs(slot, start, end), start)
        ]
        for table, view in zip(tables, views, strict=True):
            places = np.arange(start, end) - view.first
            self._kv[table[places // block_size], places % block_size] = view.kv[places]
        return digests[-num_digests:]

    def _inputs(self, slot: int, start: int, end: int) -> list[int]:
        """What stands at positions [start, end): tokens, or embeddings of encoder items."""
        inputs: list[int] = self._batch.token_ids[slot, start:end].tolist()
        if self._is_encoder_decoder:
            return inputs
        for item in self._batch.encoder_inputs[slot]:
            first, last = max(start, item.offset), min(end, item.offset + item.length)
            if first >= last:
                continue
            output = self._encoder_outputs.get(item.identifier)
            if output is None:
                raise RuntimeError(
                    f"slot {slot} computes positions {first} to {last - 1} of encoder item {item.identifier.hex()}, "
                    "whose output is not there"
                )
            inputs[first - start : last - start] = [_embedding(output, i - item.offset) for i in range(first, last)]
        return inputs

    def _read_cross(self, slot: int) -> int:
        length = sum(item.length for item in self._batch.encoder_inputs[slot])
        kv = self._kv[self._batch.cross_block_ids[slot]].reshape(-1)[:length]
        if not kv.all():
            raise RuntimeError(f"slot {slot} is computed, and its cross-attention blocks were not filled")
        return _cross(kv.tolist())

    def _sample(self, plan: StepPlan, rows: StepRows, digests: list[list[int]]) -> Int32Array:
        """The token of each sampled position, or -1 where none is allowed."""
        batch = self._batch
        tokens = np.empty(len(rows.sampled_rows), np.int32)
        flat = [digest for row in np.flatnonzero(plan.samples).tolist() for digest in digests[row]]
        masks = {} if plan.masks is None else dict(zip(plan.masked.tolist(), plan.masks, strict=True))
        slots = rows.slots[rows.sampled_rows]
        may_not_end = batch.may_not_end(slots, rows.positions[rows.sampled_tokens] + 1)
        for place, digest in enumerate(flat):
            allowed = None
            if place in masks:
                allowed = _unpacked(masks[place], self._vocab_size)
            if may_not_end[place]:
                allowed = np.ones(self._vocab_size, np.bool_) if allowed is None else allowed
                allowed[list(batch.ending_token_ids[slots[place]])] = False
            tokens[place] = _pick(digest, self._vocab_size, allowed)
        return tokens

    def _report(self, plan: StepPlan, rows: StepRows, result: StepResult) -> None:
        """Failures and logprobs."""
        for row in np.flatnonzero(plan.samples & (result.tokens[:, 0] < 0)).tolist():
            result.failed[row] = "its grammar and min_tokens allow no token: relax the grammar, or lower min_tokens"
        num_logprobs = self._batch.num_logprobs[rows.slots]
        for row in np.flatnonzero((num_logprobs >= 0) & (result.tokens[:, 0] >= 0)).tolist():
            tops = [(token,) if num_logprobs[row] else () for token in result.tokens[row].tolist() if token >= 0]
            result.logprobs[row] = [TokenLogprobs(0.0, top, (0.0,) * len(top)) for top in tops]


def expected_tokens(
    prompt: Sequence[int],
    num_tokens: int,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    *,
    kv_groups: Sequence[KvGroup] = (KvGroup(),),
    encoder_inputs: Iterable[EncoderInput] = (),
    cross_inputs: Iterable[EncoderInput] = (),
    allowed: Callable[[list[int]], BoolArray | None] | None = None,
) -> list[int]:
    """What a `SimulatedRunner` generates after `prompt` if every step reads the right KV.

    `cross_inputs`: the encoder inputs of a model with encoder and decoder; `encoder_inputs`: of another model.
    `allowed` tells which tokens may follow those generated so far, shape [vocab_size]; None: all.
    """
    views = [_View(i, g.sliding_window, np.zeros(len(prompt) + num_tokens, np.uint64)) for i, g in enumerate(kv_groups)]
    cross = _cross([_embedding(_encoder_output(item), i) for item in cross_inputs for i in range(item.length)])
    generated: list[int] = []
    digest = 0
    for position, value in enumerate(_with_embeddings(prompt, encoder_inputs)):
        digest = _step(views, position, value, cross)
    while True:
        generated.append(_pick(digest, vocab_size, None if allowed is None else allowed(generated)))
        if len(generated) == num_tokens:
            return generated
        digest = _step(views, len(prompt) + len(generated) - 1, generated[-1], cross)


def expected_pooled(
    prompt: Sequence[int],
    *,
    kv_groups: Sequence[KvGroup] = (KvGroup(),),
    encoder_inputs: Iterable[EncoderInput] = (),
) -> bytes:
    """What a `SimulatedRunner` of a pooling model makes of `prompt`."""
    views = [_View(i, g.sliding_window, np.zeros(len(prompt), np.uint64)) for i, g in enumerate(kv_groups)]
    digest = 0
    for position, value in enumerate(_with_embeddings(prompt, encoder_inputs)):
        digest = _step(views, position, value, 0)
    return _pooled(digest)


class _View:
    """One group's KV from position `first` on, and the sum of what a position sees.

    Weighted by position, so that blocks in another order give another sum.
    """

    __slots__ = ("_seen_from", "_window", "first", "index", "kv", "total")

    def __init__(
        self, index: int, window: int | None, kv: npt.NDArray[np.uint64], first: int = 0, start: int = 0
    ) -> None:
        """`kv` holds what is computed, up to `start`, and has room for what will be."""
        self.index, self.kv, self.first = index, kv, first
        self._window = window
        self._seen_from = _first_seen(start, window)
        weights = 2 * np.arange(self._seen_from, start, dtype=np.uint64) + np.uint64(1)
        self.total = int((kv[self._seen_from - first : start - first] * weights).sum(dtype=np.uint64))

    def slide(self, position: int) -> None:
        """Forget what `position` does not see."""
        while self._seen_from < _first_seen(position, self._window):
            self._add(self._seen_from, -int(self.kv[self._seen_from - self.first]))
            self._seen_from += 1

    def write(self, position: int, value: int) -> None:
        self.kv[position - self.first] = value
        self._add(position, value)

    def _add(self, position: int, value: int) -> None:
        self.total = (self.total + value * (2 * position + 1)) & _MASK


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _step(views: list[_View], position: int, value: int, cross: int) -> int:
    """Compute a position with this input; returns the hash of all that is seen from it, its own KV included."""
    for view in views:
        view.slide(position)
    mixed = _digest(views, cross) ^ _mix((position << 32) ^ value)
    for view in views:
        view.write(position, _mix(mixed + view.index & _MASK))
    return _digest(views, cross)


def _digest(views: list[_View], cross: int) -> int:
    digest = cross
    for view in views:
        digest = _mix(digest ^ view.total)
    return digest


def _pick(digest: int, vocab_size: int, allowed: BoolArray | None) -> int:
    """The first allowed token from the hash on, around the end of the vocabulary; -1: none is allowed."""
    token = digest % vocab_size
    if allowed is None:
        return token
    ids = np.flatnonzero(allowed)
    return int(ids[np.searchsorted(ids, token) % len(ids)]) if len(ids) else -1


def _unpacked(mask: UInt32Array, vocab_size: int) -> BoolArray:
    return np.unpackbits(mask.astype("<u4").view(np.uint8), count=vocab_size, bitorder="little").astype(np.bool_)


def _encoder_output(item: EncoderInput) -> int:
    digest = hashlib.blake2b(item.data, digest_size=8, key=hashlib.sha256(item.identifier).digest()).digest()
    return int.from_bytes(digest, "little")


def _embedding(output: int, index: int) -> int:
    """Of the encoder's output, at `index` of the item; never 0."""
    return _mix(output ^ _mix(index + 1)) | 1


def _with_embeddings(prompt: Sequence[int], items: Iterable[EncoderInput]) -> list[int]:
    values = list(prompt)
    for item in items:
        output = _encoder_output(item)
        values[item.offset : item.offset + item.length] = [_embedding(output, i) for i in range(item.length)]
    return values


def _cross(kv: Sequence[int]) -> int:
    """What all positions see of the encoder's; 0 without any."""
    return _mix(sum(value * (2 * index + 1) for index, value in enumerate(kv)) & _MASK)


def _pooled(digest: int) -> bytes:
    numbers = [_mix(digest ^ _mix(index + 1)) for index in range(POOLED_SIZE)]
    return (np.array(numbers, np.float64) / 2.0**64).astype("<f4").tobytes()


def _mix(x: int) -> int:
    """SplitMix64's finalizer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
