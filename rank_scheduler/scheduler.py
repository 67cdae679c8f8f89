"""One rank's decisions: which sequences compute how many tokens in the next step, and in which blocks.

Pure: events and `now` in, a plan or frames out. The caller alternates `schedule` and `update` (or `fail`) and
calls `add` and `abort` only in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain

import numpy as np

from rank_scheduler.batch import RunningBatch
from rank_scheduler.block_pool import BlockPool
from rank_scheduler.config import SchedulerConfig
from rank_scheduler.messages import End, FinishReason, RankLoad, StepFrame, Submit, TokenLogprobs
from rank_scheduler.plan import BoolArray, Int32Array, Int64Array, NewSequence, StepPlan, StepResult
from rank_scheduler.prefix_hash import extend_block_hashes
from rank_scheduler.sequence import Sequence, SequenceKey, SequenceState
from rank_scheduler.stop_strings import StopStringMatcher, TextDecoder


class Scheduler:
    """Owner of a rank's sequences, slots and blocks. Raises only on misuse by its own process, never on messages."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        make_text_decoder: Callable[[], TextDecoder],
    ) -> None:
        """`num_blocks` includes the null block. Raises ValueError if the pool cannot hold one longest sequence."""
        blocks_per_seq = -(-max_model_len // block_size)
        if num_blocks - 1 < blocks_per_seq:
            raise ValueError(
                f"num_blocks is {num_blocks}: {num_blocks - 1} usable blocks of {block_size} tokens hold "
                f"{(num_blocks - 1) * block_size} tokens, less than max_model_len ({max_model_len}); "
                f"raise num_blocks to at least {blocks_per_seq + 1} or lower max_model_len"
            )
        self.config = config
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos = np.array(sorted(eos_token_ids), np.int32)
        self._block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._make_text_decoder = make_text_decoder
        self._pool = BlockPool(num_blocks)
        self._batch = RunningBatch(config.max_num_seqs, max_model_len, blocks_per_seq)
        self._waiting: deque[Sequence] = deque()
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._pending_ends: list[tuple[int, End]] = []
        self._freed_slots: list[int] = []
        self._cached_in_step: set[int] = set()
        self._num_waiting_tokens = 0
        self._num_steps = 0
        self._num_generated_tokens = 0
        self._num_prompt_tokens = 0
        self._num_preemptions = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0
        self.num_ignored_messages = 0
        """Duplicate submits and aborts for requests that are gone."""

    # ---- events from outside ----

    def add(self, owner: int, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it (its `End` is in the owner's next frame) if it could never run."""
        key = (owner, submit.id)
        if key in self._sequences:
            self.num_ignored_messages += 1
            return
        refusal = self._why_impossible(submit)
        if refusal is not None:
            self._pending_ends.append((owner, End(submit.id, FinishReason.ERROR, message=refusal)))
            return
        sampling = submit.sampling
        matcher = StopStringMatcher(sampling.stop, self._make_text_decoder()) if sampling.stop else None
        token_ids = np.frombuffer(submit.token_ids, "<i4").astype(np.int32)
        sequence = Sequence(key, token_ids, sampling, matcher, now)
        self._sequences[key] = sequence
        self._waiting.append(sequence)
        self._num_waiting_tokens += len(token_ids)

    def abort(self, owner: int, request_id: int, now: float) -> None:
        """End a request whose client is gone; unknown and finished ones are ignored."""
        sequence = self._sequences.get((owner, request_id))
        if sequence is None:
            self.num_ignored_messages += 1
            return
        self._pending_ends.append((owner, self._finish(sequence, FinishReason.ABORT, now)))

    def drop_owner(self, owner: int, now: float) -> None:
        """End everything of an owner that is gone; nobody is left to be told."""
        for sequence in [s for s in self._sequences.values() if s.key[0] == owner]:
            self._finish(sequence, FinishReason.ABORT, now)
        self._pending_ends = [(to, end) for to, end in self._pending_ends if to != owner]

    # ---- a step ----

    def has_work(self) -> bool:
        """Whether `schedule` would return a plan or `take_frames` would return a frame."""
        return bool(self._sequences or self._pending_ends)

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; None if there is nothing to compute.

        Running sequences come first, in order of admission; what is left of the token budget admits waiting
        ones, unless something had to be preempted.
        """
        self._cached_in_step.clear()
        appended_slots: list[int] = []
        appended_blocks: list[int] = []
        copies: list[tuple[int, int]] = []
        entered: list[NewSequence] = []

        slots, counts = self._share_budget()
        num_preemptions = self._num_preemptions
        self._grow(slots, counts, appended_slots, appended_blocks, now)
        running = counts > 0
        slots, counts = slots[running], counts[running]
        num_running = len(slots)
        if self._num_preemptions == num_preemptions:
            budget = self.config.max_num_batched_tokens - int(counts.sum())
            new_slots, new_counts = self._admit(budget, entered, copies, now)
            slots = np.concatenate([slots, np.array(new_slots, np.int32)])
            counts = np.concatenate([counts, np.array(new_counts, np.int32)])
        if not len(slots):
            return None

        batch = self._batch
        before = batch.num_computed[slots]
        after = before + counts
        batch.num_computed[slots] = after
        if self._enable_prefix_caching:
            # Those of the admitted ones are findable since their admission.
            filled = after[:num_running] // self._block_size > before[:num_running] // self._block_size
            for slot in slots[:num_running][filled].tolist():
                self._cache_full_blocks(slot, int(batch.num_computed[slot]))
        freed_slots, self._freed_slots = self._freed_slots, []
        self._num_steps += 1
        return StepPlan(
            step=self._num_steps,
            slots=slots,
            num_tokens=counts,
            samples=after == batch.num_tokens[slots],
            freed_slots=freed_slots,
            block_copies=copies,
            new_sequences=entered,
            appended_slots=appended_slots,
            appended_blocks=appended_blocks,
        )

    def update(self, plan: StepPlan, result: StepResult, now: float) -> dict[int, StepFrame]:
        """Take in a step's result; returns the frame of each owner that has something to hear."""
        batch = self._batch
        in_prompt = batch.num_tokens[plan.slots] == batch.num_prompt[plan.slots]
        self._num_prompt_tokens += int(plan.num_tokens[in_prompt].sum())
        ends: list[tuple[int, End]] = []
        for row, message in result.failed.items():
            slot = int(plan.slots[row])
            sequence = batch.at(slot)
            # Whatever broke the logits may lie in its KV, from this step or an earlier one.
            for block in batch.block_ids(slot):
                self._pool.forget(block)
            ends.append((sequence.key[0], self._finish(sequence, FinishReason.ERROR, now, message=message)))

        rows = np.flatnonzero(result.tokens >= 0).astype(np.int64)
        slots, tokens = plan.slots[rows], result.tokens[rows]
        batch.token_ids[slots, batch.num_tokens[slots]] = tokens
        batch.num_tokens[slots] += 1
        self._num_generated_tokens += len(rows)

        owners, wire_ids = batch.owner[slots], batch.wire_id[slots]
        at_eos = np.isin(tokens, self._eos) & ~batch.ignore_eos[slots]
        at_length = batch.num_tokens[slots] >= batch.max_total[slots]
        for index in np.flatnonzero(at_eos | at_length | batch.watched[slots]).tolist():
            sequence = batch.at(int(slots[index]))
            end = self._check_stop(sequence, int(tokens[index]), bool(at_eos[index]), bool(at_length[index]), now)
            if end is not None:
                ends.append((sequence.key[0], end))
        return self._frames(owners, wire_ids, tokens, in_prompt[rows], rows, result.logprobs, ends)

    def fail(self, plan: StepPlan, message: str, now: float) -> dict[int, StepFrame]:
        """A step raised: its KV is undefined, so its sequences end and nothing of it stays in the prefix cache."""
        for block in self._cached_in_step:
            self._pool.forget(block)
        for slot in plan.slots.tolist():
            sequence = self._batch.at(slot)
            self._pending_ends.append(
                (sequence.key[0], self._finish(sequence, FinishReason.ERROR, now, message=message))
            )
        return self.take_frames()

    def take_frames(self) -> dict[int, StepFrame]:
        """Frames for ends that came about outside of a step (aborts, refusals)."""
        none = np.zeros(0, np.int64)
        return self._frames(none, none, none.astype(np.int32), none.astype(np.bool_), none, {}, [])

    # ---- figures ----

    def load(self) -> RankLoad:
        order = self._batch.order
        remaining = np.maximum(self._batch.num_prompt[order] - self._batch.num_computed[order], 0)
        return RankLoad(
            num_running=len(self._batch),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._num_waiting_tokens + int(remaining.sum()),
            num_free_blocks=self._pool.num_free_blocks,
            num_blocks=self._pool.num_usable_blocks,
            num_steps=self._num_steps,
            num_generated_tokens=self._num_generated_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_preemptions=self._num_preemptions,
            num_prefix_queries=self._num_prefix_queries,
            num_prefix_hits=self._num_prefix_hits,
        )

    def check_integrity(self) -> None:
        """Assert that no slot, block or count is lost or held twice. For use between steps."""
        batch = self._batch
        batch.check_integrity()
        slots = batch.order.tolist()
        self._pool.check_integrity(chain.from_iterable(batch.block_ids(slot) for slot in slots))
        assert self._num_waiting_tokens == sum(len(s.token_ids) for s in self._waiting), "waiting tokens miscounted"
        expected = {s.key for s in self._waiting} | {batch.at(slot).key for slot in slots}
        assert expected == set(self._sequences), "a sequence neither waits nor runs"
        assert len(self._waiting) + len(batch) == len(self._sequences), "a sequence is held twice"
        for slot in slots:
            num_computed, num_tokens = batch.num_computed[slot], batch.num_tokens[slot]
            assert 0 <= num_computed < num_tokens < batch.max_total[slot], f"slot {slot}: counts"
            assert batch.num_blocks[slot] * self._block_size >= batch.num_computed[slot], f"slot {slot} lacks blocks"

    # ---- decisions ----

    def _why_impossible(self, submit: Submit) -> str | None:
        if len(submit.token_ids) % 4:
            return f"token_ids has {len(submit.token_ids)} bytes: not a whole number of int32"
        token_ids = np.frombuffer(submit.token_ids, "<i4")
        if not len(token_ids):
            return "the prompt is empty: send at least one token"
        if len(token_ids) >= self._max_model_len:
            return (
                f"the prompt has {len(token_ids)} tokens: with one generated token that exceeds "
                f"max_model_len ({self._max_model_len}); shorten it"
            )
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            return f"the prompt has token ids outside [0, {self._vocab_size}): check the tokenizer"
        if submit.sampling.max_tokens < 1:
            return f"max_tokens is {submit.sampling.max_tokens}: ask for at least one"
        return None

    def _share_budget(self) -> tuple[Int32Array, Int32Array]:
        """Running slots in order, and the tokens each may compute within the budget (0 for those beyond it)."""
        slots = self._batch.order.copy()
        wanted = self._batch.num_tokens[slots] - self._batch.num_computed[slots]
        before = np.cumsum(wanted) - wanted
        counts = np.clip(self.config.max_num_batched_tokens - before, 0, wanted).astype(np.int32)
        return slots, counts

    def _grow(
        self, slots: Int32Array, counts: Int32Array, appended_slots: list[int], appended_blocks: list[int], now: float
    ) -> None:
        """Give a block to each decoding sequence that has outgrown its own, preempting if none is free.

        Sets the count of every preempted sequence to 0. A prompt never needs one: admission took all its blocks.
        """
        batch = self._batch
        ends = batch.num_computed[slots] + counts
        for index in np.flatnonzero((counts > 0) & (ends > batch.num_blocks[slots] * self._block_size)).tolist():
            while counts[index] and not self._pool.num_free_blocks:
                victim = self._pick_victim()
                position = int(np.flatnonzero(slots == victim)[0])
                counts[position] = 0
                while victim in appended_slots:
                    at = appended_slots.index(victim)
                    del appended_slots[at], appended_blocks[at]
                self._preempt(victim, now)
            if counts[index]:
                slot = int(slots[index])
                (block,) = self._pool.allocate(1)
                batch.append_block(slot, block)
                appended_slots.append(slot)
                appended_blocks.append(block)

    def _pick_victim(self) -> int:
        """The slot that loses least computed work, the latest of equals; only one whose blocks become free by it."""
        batch = self._batch
        candidates = [
            slot for slot in reversed(batch.order.tolist()) if self._pool.num_sole_references(batch.block_ids(slot))
        ]
        victim: int = min(candidates, key=lambda slot: int(batch.num_computed[slot]))
        return victim

    def _preempt(self, slot: int, now: float) -> None:
        """Take the slot's blocks; the sequence goes to the head of the queue and is recomputed later."""
        sequence = self._release(slot)
        sequence.move(SequenceState.PREEMPTED, now)
        self._waiting.appendleft(sequence)
        self._num_waiting_tokens += len(sequence.token_ids)
        self._num_preemptions += 1

    def _admit(
        self, budget: int, entered: list[NewSequence], copies: list[tuple[int, int]], now: float
    ) -> tuple[list[int], list[int]]:
        """Move waiting sequences into free slots while budget, slots and blocks last; returns slots and counts.

        A head that does not fit may be passed by later ones, `max_head_bypasses` times, then nothing passes it.
        """
        slots: list[int] = []
        counts: list[int] = []
        passed: list[Sequence] = []
        while self._waiting and budget > 0 and self._batch.has_free_slot:
            sequence = self._waiting.popleft()
            admission = self._try_admit(sequence, copies)
            if admission is None:
                passed.append(sequence)
                if max(passed[0].num_bypasses, len(passed) - 1) >= self.config.max_head_bypasses:
                    break
                continue
            if passed:
                passed[0].num_bypasses += 1
            self._num_waiting_tokens -= len(sequence.token_ids)
            sequence.move(SequenceState.RUNNING, now)
            sequence.num_bypasses = 0
            entered.append(admission)
            count = min(len(sequence.token_ids) - admission.num_computed_tokens, budget)
            budget -= count
            slots.append(admission.slot)
            counts.append(count)
            if self._enable_prefix_caching:
                # Already now: every layer writes a step's KV before it reads any, so the next one may share it.
                self._cache_full_blocks(admission.slot, admission.num_computed_tokens + count)
        self._waiting.extendleft(reversed(passed))
        return slots, counts

    def _try_admit(self, sequence: Sequence, copies: list[tuple[int, int]]) -> NewSequence | None:
        """Take blocks for all known tokens and a slot; None, with nothing changed, if blocks do not suffice."""
        token_ids = sequence.token_ids
        num_tokens = len(token_ids)
        hits: list[int] = []
        if self._enable_prefix_caching:
            extend_block_hashes(sequence.block_hashes, token_ids, self._block_size)
            hits = self._pool.lookup(sequence.block_hashes)
        num_computed = len(hits) * self._block_size
        copied = None
        if num_computed == num_tokens:
            # One token must be computed to have logits, and it writes into the last block: that one is copied,
            # unless this very step computes it (copies come first), then it is computed twice.
            last = hits.pop()
            copied = None if last in self._cached_in_step else last
            num_computed = num_tokens - (self._block_size if copied is None else 1)
        num_new = -(-num_tokens // self._block_size) - len(hits)
        if num_new + self._pool.num_unheld(hits) > self._pool.num_free_blocks:
            return None
        self._pool.touch(hits)
        new = self._pool.allocate(num_new)
        if copied is not None:
            # The source may just have been handed out again, even as this very destination: copies come before
            # writes, one after another, so it still holds its content.
            copies.append((copied, new[0]))
        if sequence.state is SequenceState.WAITING:
            sequence.num_cached_tokens = num_computed
            self._num_prefix_queries += num_tokens
            self._num_prefix_hits += num_computed
        max_total = min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, self._max_model_len)
        slot = self._batch.insert(sequence, hits + new, num_computed, max_total)
        return NewSequence(slot, token_ids, num_computed, np.array(hits + new, np.int32), sequence.sampling)

    def _cache_full_blocks(self, slot: int, num_computed: int) -> None:
        """Make the slot's full blocks among its first `num_computed` tokens findable."""
        sequence = self._batch.at(slot)
        num_full = num_computed // self._block_size
        extend_block_hashes(
            sequence.block_hashes, self._batch.token_ids[slot, : num_full * self._block_size], self._block_size
        )
        for index in range(num_full - 1, -1, -1):
            block = int(self._batch.block_table[slot, index])
            if self._pool.is_cached(block):
                break
            if self._pool.cache(block, sequence.block_hashes[index]):
                self._cached_in_step.add(block)

    def _check_stop(self, sequence: Sequence, token: int, at_eos: bool, at_length: bool, now: float) -> End | None:
        """End of the sequence with this token, if it is one: EOS, stop token, stop string, length, in this order."""
        if at_eos:
            return self._finish(sequence, FinishReason.STOP, now)
        if token in sequence.sampling.stop_token_ids:
            return self._finish(sequence, FinishReason.STOP, now, stop_reason=token)
        if sequence.stop_strings is not None:
            matched = sequence.stop_strings.push(token)
            if matched is not None:
                return self._finish(sequence, FinishReason.STOP, now, stop_reason=matched)
        if at_length:
            return self._finish(sequence, FinishReason.LENGTH, now)
        return None

    # ---- ends ----

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        stop_reason: str | int | None = None,
        message: str = "",
    ) -> End:
        """The one way out: frees slot and blocks or the place in the queue; returns what the owner must hear."""
        if sequence.state is SequenceState.RUNNING:
            self._release(sequence.slot)
        else:
            self._waiting.remove(sequence)
            self._num_waiting_tokens -= len(sequence.token_ids)
        sequence.move(SequenceState.FINISHED, now)
        del self._sequences[sequence.key]
        return End(sequence.key[1], reason, stop_reason, message, sequence.num_cached_tokens)

    def _release(self, slot: int) -> Sequence:
        self._pool.release(self._batch.block_ids(slot))
        self._freed_slots.append(slot)
        return self._batch.remove(slot)

    def _frames(
        self,
        owners: Int64Array,
        wire_ids: Int64Array,
        tokens: Int32Array,
        first: BoolArray,
        rows: Int64Array,
        logprobs: dict[int, TokenLogprobs],
        ends: list[tuple[int, End]],
    ) -> dict[int, StepFrame]:
        """One frame per owner out of a step's tokens and all ends, those from outside of steps included."""
        ends = self._pending_ends + ends
        self._pending_ends = []
        load = self.load()
        frames: dict[int, StepFrame] = {}
        for owner in sorted({int(owner) for owner in np.unique(owners)} | {owner for owner, _ in ends}):
            mine = owners == owner
            frames[owner] = StepFrame(
                load=load,
                ids=wire_ids[mine].tolist(),
                tokens=tokens[mine].tolist(),
                logprobs={at: logprobs[row] for at, row in enumerate(rows[mine].tolist()) if row in logprobs}
                if logprobs
                else {},
                ends=[end for to, end in ends if to == owner],
                first_token_ids=wire_ids[mine & first].tolist(),
            )
        return frames
