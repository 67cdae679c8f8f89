"""The running sequences as a structure of arrays, one row per slot, so that a step is a few vector operations."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain

import numpy as np

from rank_scheduler.plan import Int32Array
from rank_scheduler.sequence import Sequence

OwnerRows = np.ndarray[tuple[int], np.dtype[np.intp]] | slice

_NO_EPOCH = -1
_NUM_TOUCHED_TOKENS = 2048
_NUM_PADDED_TOKENS = 16


class RunningBatch:
    """Slots of the sequences that run, idle sessions included. Arrays are indexed by slot.

    The ledger of a slot, every number >= 0: `num_tokens` are known, of them (and of drafts) `num_computed` have KV
    or get it by a step that has been planned; `num_in_flight` of those are in steps not yet processed, which will
    bring `num_placeholders` more tokens (drafts that may prove right counted as if they did).
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int, max_drafts: int
    ) -> None:
        max_columns = -(-max_model_len // block_size)
        self._block_size = block_size
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        self.num_in_flight = np.zeros(max_num_seqs, np.int32)
        self.num_placeholders = np.zeros(max_num_seqs, np.int32)
        self.num_prompt = np.zeros(max_num_seqs, np.int32)
        self.num_columns = np.zeros(max_num_seqs, np.int32)
        """Columns of the block table in use."""
        self.max_total = np.zeros(max_num_seqs, np.int32)
        """Known tokens at which the sequence (of a session: its turn) ends by length."""
        self.priority = np.zeros(max_num_seqs, np.int32)
        self.owner = np.zeros(max_num_seqs, np.int64)
        self.wire_id = np.zeros(max_num_seqs, np.int64)
        self.epoch = np.full(max_num_seqs, _NO_EPOCH, np.int64)
        """Names one stay of one sequence in a slot: results of steps planned for an earlier stay are not for it."""
        self.ignore_eos = np.zeros(max_num_seqs, np.bool_)
        self.watched = np.zeros(max_num_seqs, np.bool_)
        """Each new token needs a look at the sequence itself (stop tokens, stop strings, grammar, repetition)."""
        self.is_chunk = np.zeros(max_num_seqs, np.bool_)
        """The latest step left known tokens uncomputed; kept only where prompts have a cadence."""
        self.is_idle = np.zeros(max_num_seqs, np.bool_)
        """A session between two turns."""
        self.has_grammar = np.zeros(max_num_seqs, np.bool_)
        self.has_encoder_inputs = np.zeros(max_num_seqs, np.bool_)
        self.num_cached_columns = np.zeros(max_num_seqs, np.int32)
        """Leading columns that the prefix cache has been told of."""
        self.num_drafts = np.zeros(max_num_seqs, np.int32)
        self.drafts = np.zeros((max_num_seqs, max_drafts), np.int32)
        # Pages of long rows that never fill are never touched, so the reserved size costs no memory. The first pages
        # are touched now: else each slot's first sequence would pay for that, within a step.
        # Rows that lay a power of two apart would compete for the same few lines of the processor's caches when each
        # gets its next token, so they are one line longer.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + _NUM_PADDED_TOKENS), np.int32)
        self.token_ids[:, :_NUM_TOUCHED_TOKENS] = 0
        self.block_table = np.zeros((num_groups, max_num_seqs, max_columns), np.int32)
        self.block_table[:, :, : _NUM_TOUCHED_TOKENS // block_size] = 0
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self.version = 0
        """Changes whenever a sequence enters, leaves, ends its turn or is extended."""
        self.num_idle = 0
        self.num_watched = 0
        self.num_with_grammar = 0
        self.num_with_encoder_inputs = 0
        self._order = np.zeros(max_num_seqs, np.int32)
        self._count = 0
        self._num_ordered = 0
        """Entries of `_order`; those of sequences that have left go when it is read or written."""
        self._next_epoch = 0
        # A heap: low slots first, so that the taken ones lie together.
        self._free_slots = list(range(max_num_seqs))
        self._inserted: list[tuple[int | bool, ...]] = []

    def __len__(self) -> int:
        return self._count

    @property
    def order(self) -> Int32Array:
        """Taken slots in order of admission; a view, valid until the next insert or remove."""
        self._drop_removed()
        return self._order[: self._num_ordered]

    def insert(self, sequence: Sequence, table: Int32Array, num_computed: int, max_total: int) -> int:
        """Give the sequence a slot (there must be a free one); returns it. `table`: [num_groups, columns].

        What stands in arrays of one number per slot is written by `settle`, for many sequences at once.
        """
        if not self._inserted:
            # A slot that is taken again must not stand in the order twice.
            self._drop_removed()
        slot = heappop(self._free_slots)
        self.version += 1
        num_tokens, columns = len(sequence.token_ids), table.shape[1]
        self.token_ids[slot, :num_tokens] = sequence.token_ids
        self.block_table[:, slot, :columns] = table
        self.sequences[slot] = sequence
        sequence.slot = slot
        sampling, has_encoder_inputs = sequence.sampling, bool(sequence.encoder_inputs)
        self.num_watched += sequence.is_watched
        self.num_with_grammar += sequence.has_grammar
        self.num_with_encoder_inputs += has_encoder_inputs
        owner, wire_id = sequence.key
        self._inserted.append(
            (
                slot,
                num_tokens,
                num_computed,
                columns,
                max_total,
                sequence.num_prompt_tokens,
                sequence.priority,
                owner,
                wire_id,
                sampling.ignore_eos and not sequence.has_grammar,
                sequence.is_watched,
                sequence.has_grammar,
                has_encoder_inputs,
            )
        )
        self._count += 1
        return slot

    def settle(self) -> None:
        """Write what `insert` has left; before anybody reads the arrays."""
        if not self._inserted:
            return
        inserted, self._inserted = self._inserted, []
        num_figures = len(inserted) * len(inserted[0])
        figures = np.fromiter(chain.from_iterable(inserted), np.int64, num_figures).reshape(len(inserted), -1).T
        slots = figures[0]
        self._order[self._num_ordered : self._num_ordered + len(inserted)] = slots
        self._num_ordered += len(inserted)
        self.num_tokens[slots] = figures[1]
        self.num_computed[slots] = figures[2]
        self.num_columns[slots] = figures[3]
        self.max_total[slots] = figures[4]
        self.num_prompt[slots] = figures[5]
        self.priority[slots] = figures[6]
        self.owner[slots] = figures[7]
        self.wire_id[slots] = figures[8]
        self.ignore_eos[slots] = figures[9]
        self.watched[slots] = figures[10]
        self.has_grammar[slots] = figures[11]
        self.has_encoder_inputs[slots] = figures[12]
        for zeroed in (
            self.num_in_flight,
            self.num_placeholders,
            self.num_drafts,
            self.num_cached_columns,
            self.is_chunk,
        ):
            zeroed[slots] = 0
        self.epoch[slots] = np.arange(self._next_epoch, self._next_epoch + len(inserted))
        self._next_epoch += len(inserted)

    def remove(self, slot: int, *, keeps_tokens: bool = True) -> Sequence:
        """Take the sequence out; unless nobody wants them, its known tokens go back into `sequence.token_ids`."""
        sequence = self.at(slot)
        sequence.num_generated = int(self.num_tokens[slot]) - sequence.num_prompt_tokens
        if keeps_tokens:
            sequence.token_ids = self.known_tokens(slot).copy()
        sequence.slot = -1
        if self.num_idle:
            self.set_idle(slot, False)
        self.version += 1
        self.num_watched -= sequence.is_watched
        self.num_with_grammar -= sequence.has_grammar
        self.num_with_encoder_inputs -= bool(sequence.encoder_inputs)
        self.epoch[slot] = _NO_EPOCH
        self.sequences[slot] = None
        self._count -= 1
        heappush(self._free_slots, slot)
        return sequence

    def at(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def set_idle(self, slot: int, is_idle: bool) -> None:
        self.num_idle += int(is_idle) - int(self.is_idle[slot])
        self.is_idle[slot] = is_idle
        self.version += 1

    def end_turn(self, slot: int) -> None:
        """The session waits for its next input; what steps in flight still bring is not for it."""
        self.set_idle(slot, True)
        self._new_epoch(slot)
        self.num_in_flight[slot] = self.num_placeholders[slot] = self.num_drafts[slot] = 0
        self.num_computed[slot] = self.num_tokens[slot] - 1

    def extend(self, slot: int, first: int, token_ids: Int32Array, max_total: int) -> None:
        """Replace the known tokens from index `first` on, as the prompt of the session's next turn."""
        end = first + len(token_ids)
        self.set_idle(slot, False)
        self.token_ids[slot, first:end] = token_ids
        self.num_tokens[slot] = self.num_prompt[slot] = end
        self.num_cached_columns[slot] = min(self.num_cached_columns[slot], first // self._block_size)
        self.num_drafts[slot] = 0
        self.max_total[slot] = max_total

    def append_columns(self, slots: Int32Array, columns: Int32Array) -> None:
        """Append to each slot, which may occur more than once, a column of blocks; shapes [k] and [k, num_groups]."""
        for slot, column in zip(slots.tolist(), columns, strict=True):
            self.block_table[:, slot, self.num_columns[slot]] = column
            self.num_columns[slot] += 1

    def append_column(self, slots: Int32Array, columns: Int32Array) -> None:
        """`append_columns` where every slot occurs once."""
        at = self.num_columns[slots]
        if len(self.block_table) == 1:
            self.block_table[0, slots, at] = columns[:, 0]
        else:
            self.block_table[:, slots, at] = columns.T
        self.num_columns[slots] = at + 1

    def table(self, slot: int) -> Int32Array:
        """The slot's blocks, shape [num_groups, columns]; a view."""
        return self.block_table[:, slot, : self.num_columns[slot]]

    def known_tokens(self, slot: int) -> Int32Array:
        """A view."""
        return self.token_ids[slot, : self.num_tokens[slot]]

    def by_owner(self, slots: Int32Array) -> list[tuple[int, OwnerRows]]:
        """The owners of these slots, at least one, and which of the slots are whose: an index into `slots`."""
        owners = self.owner[slots]
        if (owners == owners[0]).all():
            return [(int(owners[0]), slice(None))]
        return [(int(owner), np.flatnonzero(owners == owner)) for owner in np.unique(owners)]

    def _drop_removed(self) -> None:
        if self._num_ordered + len(self._inserted) != self._count:
            order = self._order[: self._num_ordered]
            kept = order[self.epoch[order] != _NO_EPOCH]
            self._order[: len(kept)] = kept
            self._num_ordered = len(kept)

    def _new_epoch(self, slot: int) -> None:
        self.epoch[slot] = self._next_epoch
        self._next_epoch += 1

    def check_integrity(self) -> None:
        assert not self._inserted, "sequences were inserted and not settled"
        taken = self.order.tolist()
        assert len(set(taken)) == len(taken), "a slot is listed twice"
        assert sorted(taken + self._free_slots) == list(range(len(self.sequences))), "a slot is lost"
        for slot in range(len(self.sequences)):
            sequence = self.sequences[slot]
            assert (sequence is not None) == (slot in taken), f"slot {slot}: holder and order differ"
            assert sequence is None or sequence.slot == slot, f"slot {slot}: holder believes it is {sequence.slot}"
            assert sequence is not None or not self.is_idle[slot], f"slot {slot}: empty and idle"
        order = self.order
        for figures in (self.num_in_flight, self.num_placeholders, self.num_computed, self.num_drafts):
            assert (figures[order] >= 0).all(), "a count of the ledger is negative"
        assert self.num_idle == int(self.is_idle.sum()), "idle sessions miscounted"
        assert self.num_watched == int(self.watched[order].sum()), "watched sequences miscounted"
        assert self.num_with_grammar == int(self.has_grammar[order].sum()), "grammars miscounted"
        assert self.num_with_encoder_inputs == int(self.has_encoder_inputs[order].sum()), "encoder inputs miscounted"
