"""What a rank's scheduler owns, and the moves that several of its passes make.

Every sequence is in exactly one place, which follows from its state: in a slot of the batch (RUNNING, or
WAITING_FOR_INPUT with its KV), in `waiting` or `load_candidates` or `loaded` (WAITING, PREEMPTED), or in `deferred`,
where an event must come first (a grammar, a KV load, the next input, tokens still in flight).

Blocks are held by a slot of the batch, by a sequence (`blocks`, `cross_blocks`), by `quarantine` (an ended request's
load may still write), by `sending` (a connector's peer may still read), by `prefetching` (a load without a request)
or by `deferred_frees` (a step in flight may still write, where a connector reads and writes blocks beside the steps).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.connector import KvRequest, RequestKey
from kv_transfer.params import KvParams
from rank_scheduler.batch import RunningBatch
from rank_scheduler.block_pool import NULL_BLOCK
from rank_scheduler.config import SchedulerConfig
from rank_scheduler.encoder_cache import EncoderCache
from rank_scheduler.interface import KvGroup, PauseState, SchedulerSetup
from rank_scheduler.kv_cache_manager import KvCacheManager
from rank_scheduler.messages import End, FinishReason
from rank_scheduler.performance import StepCost
from rank_scheduler.plan import BoolArray, Extension, Int32Array, Int64Array
from rank_scheduler.prefix_hash import extend_block_hashes
from rank_scheduler.sequence import NEW, Obstacle, RequestEvent, Sequence, SequenceKey, SequenceState
from rank_scheduler.stats import StepStats
from rank_scheduler.waiting_queue import WaitingQueue

NUM_REMEMBERED = 1_000
"""Ended sequences that can still be explained."""


@dataclass(slots=True)
class Flight:
    """A plan that is out: what its result must be matched with."""

    step: int
    slots: Int32Array
    epochs: Int64Array
    num_tokens: Int32Array
    samples: BoolArray
    num_drafts: Int32Array | None
    planned_at: float
    num_prompt_tokens: Int32Array
    """Of each row's tokens, those of a prompt; below 0 where it is long past."""
    cost: StepCost | None = None
    encoder_items: list[bytes] = field(default_factory=list)
    tickets: dict[int, KvParams] = field(default_factory=dict)
    """By row: what its owner hears if this step is computed."""
    cached: list[int] = field(default_factory=list)
    """Blocks that became findable on the promise of this step."""
    steady_version: int = -1
    """The batch's version, if this is a step of `SteadyBatch`."""


@dataclass(slots=True)
class HeldBlocks:
    """Blocks without a sequence, until an event lets them go."""

    table: Int32Array
    cross_blocks: list[int]


class RankState:
    """Mutable state of one scheduler; touched by its one thread only."""

    def __init__(self, config: SchedulerConfig, setup: SchedulerSetup) -> None:
        self.config = config
        self.setup = setup
        groups = setup.kv_groups
        if config.disable_hybrid_kv_cache_manager:
            groups = tuple(KvGroup() for _ in groups)
        self.no_blocks = np.zeros((len(setup.kv_groups), 0), np.int32)
        self.kv = KvCacheManager(
            setup.num_blocks,
            setup.block_size,
            groups,
            emit_events=setup.emit_kv_events,
            records_changes=setup.record_prefix_changes,
        )
        self.batch = RunningBatch(
            config.max_num_seqs,
            setup.max_model_len,
            setup.block_size,
            self.kv.num_groups,
            config.num_speculative_tokens,
        )
        self.caches = setup.enable_prefix_caching and not setup.is_encoder_decoder
        """Not for an encoder-decoder model, whose prompt is computed with its encoder's output."""
        self.encoder = EncoderCache(config.encoder_cache_capacity) if config.is_multimodal_model else None
        by_priority = config.policy == "priority"
        self.waiting = WaitingQueue(by_priority=by_priority)
        self.load_candidates = WaitingQueue(by_priority=by_priority)
        self.loaded: deque[Sequence] = deque()
        """Loads that are done, in order of completion; the sequences hold their blocks."""
        self.deferred: dict[SequenceKey, Sequence] = {}
        self.num_loading = 0
        self.sequences: dict[SequenceKey, Sequence] = {}
        self.flights: deque[Flight] = deque()
        self.draining: dict[int, Sequence] = {}
        """Epoch of a preempted stay → its sequence, while steps in flight will still bring it tokens."""
        self.quarantine: dict[RequestKey, HeldBlocks] = {}
        self.sending: dict[RequestKey, HeldBlocks] = {}
        self.prefetching: dict[RequestKey, Sequence] = {}
        """Loads without a request, see `prefetches`; in no other place."""
        self.deferred_frees: deque[tuple[int, HeldBlocks]] = deque()
        """(step after whose result they are free, blocks), oldest first."""
        self.pause = PauseState.UNPAUSED
        self.ends: list[tuple[int, End]] = []
        self.turn_ends: list[tuple[int, End]] = []
        self.freed_slots: list[int] = []
        self.extensions: dict[int, Extension] = {}
        """By slot: not in any plan yet."""
        self.cached_in_step: set[int] = set()
        self.stats = StepStats()
        self.ended: OrderedDict[SequenceKey, Sequence] = OrderedDict()
        self.num_arrivals = 0
        self.num_steps = 0
        self.may_have_prefills = False
        """Some running sequence may have prompt tokens left to compute."""
        self.pass_number = 0
        self.pass_obstacle = NEW
        """Why the latest waiting pass came to its end."""
        self.load_obstacle = NEW
        """Why the latest pass started no more KV loads."""

    # ---- figures ----

    @property
    def num_active(self) -> int:
        return len(self.batch)

    @property
    def num_loads(self) -> int:
        """KV loads in progress, and done but not yet running."""
        return self.num_loading + len(self.loaded)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that must stay free when a request is admitted now."""
        if not self.config.watermark or len(self.batch) == self.batch.num_idle:
            return 0
        return int(self.config.watermark * self.setup.num_blocks)

    def num_lost(self, slot: int) -> int:
        """What counts, the less the sooner, when a victim is chosen among equals: computed work, or nothing."""
        return 0 if self.config.preemption_policy == "last" else int(self.batch.num_computed[slot])

    # ---- moves ----

    def enqueue(self, sequence: Sequence) -> None:
        """Put a WAITING or PREEMPTED sequence where it will be admitted from, or where it must wait for more."""
        self.remember_obstacle(sequence, NEW)
        if sequence.num_draining:
            self.deferred[sequence.key] = sequence
        elif sequence.blocks is not None:
            self.loaded.append(sequence)
        elif self._may_load_async(sequence):
            self.load_candidates.push(sequence)
        else:
            self.waiting.push(sequence)

    def may_load(self, sequence: Sequence) -> bool:
        """Whether the connector may still load something for it."""
        return (
            sequence.kv_request is not None
            # Its prompt is computed with its encoder's output, and reads that in blocks which no load fills.
            and not self.setup.is_encoder_decoder
            and sequence.reads_prefix_cache
            and not sequence.is_preempted
            and sequence.key not in self.quarantine
            and sequence.num_load_failures <= self.config.max_kv_load_retries
        )

    def preempt(self, slot: int, now: float, cause: str, *, is_wrong: bool = False) -> None:
        """Take slot and blocks; the sequence is recomputed later, and loses no token that is on its way.

        `is_wrong`: its KV is, and so is what steps in flight bring; none of it is kept.
        """
        batch = self.batch
        epoch, num_placeholders = int(batch.epoch[slot]), int(batch.num_placeholders[slot])
        is_idle = bool(batch.is_idle[slot])
        sequence = self._leave_slot(slot, caches=not is_wrong)
        if sequence.kv_request is not None:
            assert self.setup.connector is not None
            self.setup.connector.request_preempted(sequence.key)
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        sequence.note(RequestEvent.PREEMPTED, now, cause)
        if is_idle:
            self.deferred[sequence.key] = sequence
            return
        sequence.is_preempted = True
        sequence.move(SequenceState.PREEMPTED)
        if num_placeholders and not is_wrong:
            sequence.num_draining = num_placeholders
            self.draining[epoch] = sequence
        self.enqueue(sequence)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        stop_reason: str | int | None = None,
        message: str = "",
        is_request_fault: bool = False,
        pooled: bytes = b"",
    ) -> None:
        """The one way out: whatever the sequence holds is given back, and its owner will hear of it."""
        if sequence.slot >= 0:
            # Nobody knows what a step that failed has written.
            self._leave_slot(sequence.slot, reason, caches=reason is not FinishReason.ERROR)
        else:
            sequence.num_generated = len(sequence.token_ids) - sequence.num_prompt_tokens
            self._leave_queue(sequence, reason)
        sequence.move(SequenceState.FINISHED)
        sequence.finish_reason = reason
        sequence.note(RequestEvent.FINISHED, now, f"{reason}: {message}" if message else str(reason))
        del self.sequences[sequence.key]
        self.ends.append(
            (
                sequence.key[0],
                End(
                    sequence.key[1],
                    reason,
                    stop_reason,
                    message,
                    is_request_fault,
                    sequence.num_cached_tokens,
                    pooled,
                    sequence.handed_params,
                ),
            )
        )
        sequence.strip()
        if sequence.request_id:
            # The number of arrival is unique, a key is not: owners may use a number again once it has ended.
            self.ended[(sequence.key[0], sequence.order)] = sequence
            if len(self.ended) > NUM_REMEMBERED:
                self.ended.popitem(last=False)

    def fail(self, sequence: Sequence, message: str, now: float, *, is_request_fault: bool = False) -> None:
        self.finish(sequence, FinishReason.ERROR, now, message=message, is_request_fault=is_request_fault)

    def release_passed_fences(self) -> None:
        """Free what no step in flight can write any more."""
        while self.deferred_frees and (not self.flights or self.deferred_frees[0][0] < self.flights[0].step):
            self.free(self.deferred_frees.popleft()[1])

    def release_held(self, holders: dict[RequestKey, HeldBlocks], key: RequestKey) -> bool:
        """Of `quarantine` or `sending`: the event that was waited for has come; False if nothing waits for it."""
        held = holders.pop(key, None)
        if held is not None:
            self._free_behind_flights(held)
        return held is not None

    def free(self, held: HeldBlocks) -> None:
        self.kv.release(held.table)
        if held.cross_blocks:
            self.kv.pool.release(held.cross_blocks)

    def drop_blocks(self, sequence: Sequence) -> None:
        """A waiting sequence starts over without the blocks that it holds."""
        assert sequence.blocks is not None
        self.free(HeldBlocks(sequence.blocks, sequence.cross_blocks))
        sequence.blocks, sequence.cross_blocks, sequence.num_computed = None, [], 0

    def quarantine_blocks(self, sequence: Sequence) -> None:
        """A waiting sequence goes on without the blocks that it holds, which a load may still write into."""
        assert sequence.blocks is not None
        self.quarantine[sequence.key] = HeldBlocks(sequence.blocks, sequence.cross_blocks)
        sequence.blocks, sequence.cross_blocks, sequence.num_computed = None, [], 0

    def discard_invalid(self, invalid: frozenset[int], now: float) -> None:
        """A synchronous load has not filled these blocks: whatever was computed on them is wrong, and done again.

        What lies before them is right, stays in the prefix cache, and is found there by the next attempt.
        """
        batch = self.batch
        # Whoever has left since the step was planned holds no slot, but what it has left is findable as well.
        for held in [*(held for _, held in self.deferred_frees), *self.sending.values()]:
            self._forget_from_lost(held.table, invalid)
        for sequence in list(self.draining.values()):
            # A token that is on its way may be wrong as well. It is computed again after the preemption.
            self.forget_draining(sequence)
            del self.deferred[sequence.key]
            self.enqueue(sequence)
        for slot in batch.order.tolist():
            column = self._forget_from_lost(batch.table(slot), invalid)
            if column is None:
                continue
            sequence = batch.at(slot)
            cause = f"KV of its column {column} could not be loaded"
            self.stats.num_failed_loads += 1
            sequence.num_load_failures += 1
            sequence.note(RequestEvent.LOAD_FAILED, now, cause)
            if self.setup.kv_load_failure_policy == "fail":
                self.fail(sequence, f"its KV could not be loaded ({cause}); send the request again", now)
            else:
                self.preempt(slot, now, cause, is_wrong=True)

    def cache_full_columns(self, slot: int, num_computed: int) -> None:
        """Make the slot's full columns among its first `num_computed` known tokens findable."""
        sequence, block_size = self.batch.at(slot), self.setup.block_size
        num_full = num_computed // block_size
        first = int(self.batch.num_cached_columns[slot])
        if num_full <= first:
            return
        token_ids = self.batch.token_ids[slot, : num_full * block_size]
        extend_block_hashes(sequence.block_hashes, token_ids, block_size, sequence.extra_keys)
        self.cached_in_step.update(
            self.kv.cache(self.batch.table(slot), sequence.block_hashes, first, num_full, token_ids)
        )
        self.batch.num_cached_columns[slot] = num_full

    def remember_obstacle(self, sequence: Sequence, obstacle: Obstacle) -> None:
        sequence.obstacle = obstacle
        sequence.pass_number = self.pass_number

    def held_blocks(self) -> Iterator[int]:
        """Every reference to a block, for the integrity check."""
        for slot in self.batch.order.tolist():
            yield from self.batch.table(slot).ravel().tolist()
            yield from self.batch.at(slot).cross_blocks
        for sequence in (*self.sequences.values(), *self.prefetching.values()):
            if sequence.blocks is not None:
                yield from sequence.blocks.ravel().tolist()
                yield from sequence.cross_blocks
        fenced = [held for _, held in self.deferred_frees]
        for held in [*self.quarantine.values(), *self.sending.values(), *fenced]:
            yield from held.table.ravel().tolist()
            yield from held.cross_blocks

    def check_integrity(self) -> None:
        """Assert that no sequence, slot, block or count is lost or held twice."""
        self.batch.check_integrity()
        self.kv.pool.check_integrity(self.held_blocks())
        places = [
            *(self.batch.at(slot).key for slot in self.batch.order.tolist()),
            *(sequence.key for sequence in self.waiting),
            *(sequence.key for sequence in self.load_candidates),
            *(sequence.key for sequence in self.loaded),
            *self.deferred,
        ]
        assert len(places) == len(set(places)), "a sequence is in two places"
        assert set(places) == set(self.sequences), "a sequence is in no place"
        for queue in (self.waiting, self.load_candidates):
            assert queue.num_tokens == sum(len(sequence.token_ids) for sequence in queue), "waiting tokens miscounted"
        loading = [s for s in self.deferred.values() if s.state is SequenceState.WAITING_FOR_KV_LOAD]
        assert self.num_loading == len(loading), "loads miscounted"
        assert all(sequence.num_draining >= 0 for sequence in self.sequences.values()), "drained too much"
        if self.setup.async_scheduling:
            in_flight = np.zeros(len(self.batch.sequences), np.int64)
            for flight in self.flights:
                live = self.batch.epoch[flight.slots] == flight.epochs
                in_flight[flight.slots[live]] += flight.num_tokens[live]
            taken = self.batch.epoch >= 0
            assert (in_flight == self.batch.num_in_flight * taken).all(), "tokens in flight miscounted"
        batch = self.batch
        for slot in batch.order.tolist():
            computed, known = int(batch.num_computed[slot]), int(batch.num_tokens[slot])
            num_coming = int(batch.num_placeholders[slot])
            if not self.setup.async_scheduling and self.flights:
                num_coming = self.config.num_speculative_tokens
            assert computed <= known + num_coming, f"slot {slot}: more computed than known"
            assert batch.num_columns[slot] * self.setup.block_size >= computed, f"slot {slot} lacks blocks"
            assert known <= self.setup.max_model_len, f"slot {slot}: too long"
        if self.encoder is not None:
            self.encoder.check_integrity()

    # ---- inside ----

    def _may_load_async(self, sequence: Sequence) -> bool:
        connector, request = self.setup.connector, sequence.kv_request
        if connector is None or request is None or not self.may_load(sequence):
            return False
        return connector.may_load_async(request)

    def _forget_from_lost(self, table: Int32Array, invalid: frozenset[int]) -> int | None:
        """Nobody is to find the first lost block and what lies behind it; returns its column, None: there is none."""
        columns = np.flatnonzero(np.isin(table, list(invalid - {NULL_BLOCK})).any(axis=0))
        if not len(columns):
            return None
        for block in table[:, columns[0] :].ravel().tolist():
            self.kv.pool.forget(block)
        return int(columns[0])

    def _leave_slot(self, slot: int, reason: FinishReason | None = None, *, caches: bool = True) -> Sequence:
        """`reason`: why it ends; None: it goes on later."""
        batch = self.batch
        num_computed = 0
        if self.setup.async_scheduling or not self.flights:
            num_computed = int(min(batch.num_computed[slot] - batch.num_in_flight[slot], batch.num_tokens[slot]))
        if caches and self.caches and num_computed // self.setup.block_size > batch.num_cached_columns[slot]:
            # What is full by now, and was not left to a step in flight.
            self.cache_full_columns(slot, num_computed)
        has_connector = self.setup.connector is not None
        # With a connector they may be held longer than the slot.
        table = batch.table(slot).copy() if has_connector else batch.table(slot)
        if self.extensions:
            self.extensions.pop(slot, None)
        sequence = batch.remove(slot, keeps_tokens=reason is None or has_connector)
        self.freed_slots.append(slot)
        if self.encoder is not None:
            self.encoder.release_all(sequence.key)
        self._let_go(sequence, table, reason, num_computed)
        return sequence

    def _leave_queue(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence without a slot ends."""
        blocks = sequence.blocks
        if sequence.key in self.deferred:
            del self.deferred[sequence.key]
            self.forget_draining(sequence)
            if sequence.state is SequenceState.WAITING_FOR_KV_LOAD:
                self.num_loading -= 1
                # The load may still write.
                self.quarantine_blocks(sequence)
                blocks = None
        elif blocks is not None:
            self.loaded.remove(sequence)
        elif self.waiting.position(sequence) >= 0:
            self.waiting.remove(sequence)
        else:
            self.load_candidates.remove(sequence)
        num_computed = 0 if blocks is None else sequence.num_computed
        self._let_go(sequence, self.no_blocks if blocks is None else blocks, reason, num_computed)

    def _let_go(self, sequence: Sequence, table: Int32Array, reason: FinishReason | None, num_computed: int) -> None:
        """Give up a sequence's blocks: now, after the steps in flight, or when the connector's peers have read them.

        `num_computed`: tokens with KV there that no step in flight is to write.
        """
        held = HeldBlocks(table, sequence.cross_blocks)
        sequence.blocks, sequence.cross_blocks, sequence.num_computed = None, [], 0
        connector = self.setup.connector
        if connector is None:
            self.free(held)
            return
        if reason is not None and sequence.kv_request is not None:
            request = KvRequest(
                sequence.key,
                sequence.token_ids,
                tuple(sequence.block_hashes),
                sequence.kv_request.params,
                num_computed,
            )
            keeps, sequence.handed_params = connector.request_finished(
                request, table, hands_off=reason is FinishReason.HANDOFF
            )
            if keeps and table.size:
                self.sending[sequence.key] = held
                return
        self._free_behind_flights(held)

    def _free_behind_flights(self, held: HeldBlocks) -> None:
        """A step in flight may still write: what a load fills beside the steps must not be overwritten by it."""
        if self.flights:
            self.deferred_frees.append((self.flights[-1].step, held))
        else:
            self.free(held)

    def forget_draining(self, sequence: Sequence) -> None:
        """Whatever steps in flight still bring is not for it any more."""
        if sequence.num_draining:
            sequence.num_draining = 0
            self.draining = {epoch: other for epoch, other in self.draining.items() if other is not sequence}
