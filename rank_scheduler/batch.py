"""The running sequences as a structure of arrays, one row per slot, so that a step is a few vector operations."""

from __future__ import annotations

import numpy as np

from rank_scheduler.plan import Int32Array
from rank_scheduler.sequence import Sequence


class RunningBatch:
    """Slots of the sequences that run. Arrays are indexed by slot; `order` lists the taken slots as admitted."""

    def __init__(self, max_num_seqs: int, max_model_len: int, max_blocks_per_seq: int) -> None:
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        """Known tokens: prompt and generated."""
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        """Tokens whose KV is computed, or will be by a step that has been planned."""
        self.num_prompt = np.zeros(max_num_seqs, np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.max_total = np.zeros(max_num_seqs, np.int32)
        """Known tokens at which the sequence ends by length."""
        self.owner = np.zeros(max_num_seqs, np.int64)
        self.wire_id = np.zeros(max_num_seqs, np.int64)
        self.ignore_eos = np.zeros(max_num_seqs, np.bool_)
        self.watched = np.zeros(max_num_seqs, np.bool_)
        """Each new token needs a look at the sequence itself, which has stop tokens or stop strings."""
        # Pages of rows that never fill are never touched, so the reserved size costs no memory.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.block_table = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self._order = np.zeros(max_num_seqs, np.int32)
        self._count = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return self._count

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def order(self) -> Int32Array:
        """Taken slots in order of admission; a view, valid until the next insert or remove."""
        return self._order[: self._count]

    def insert(self, sequence: Sequence, block_ids: list[int], num_computed: int, max_total: int) -> int:
        """Give the sequence a slot (there must be a free one); returns it."""
        slot = self._free_slots.pop()
        num_tokens = len(sequence.token_ids)
        self.num_tokens[slot] = num_tokens
        self.num_computed[slot] = num_computed
        self.num_prompt[slot] = sequence.num_prompt_tokens
        self.max_total[slot] = max_total
        self.owner[slot], self.wire_id[slot] = sequence.key
        sampling = sequence.sampling
        self.ignore_eos[slot] = sampling.ignore_eos
        self.watched[slot] = bool(sampling.stop_token_ids or sampling.stop)
        self.token_ids[slot, :num_tokens] = sequence.token_ids
        self.num_blocks[slot] = len(block_ids)
        self.block_table[slot, : len(block_ids)] = block_ids
        self.sequences[slot] = sequence
        sequence.slot = slot
        self._order[self._count] = slot
        self._count += 1
        return slot

    def remove(self, slot: int) -> Sequence:
        """Take the sequence out; its known tokens go back into `sequence.token_ids`."""
        sequence = self.at(slot)
        sequence.token_ids = self.known_tokens(slot).copy()
        sequence.slot = -1
        self.sequences[slot] = None
        kept = self.order[self.order != slot]
        self._order[: len(kept)] = kept
        self._count = len(kept)
        self._free_slots.append(slot)
        return sequence

    def at(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def append_block(self, slot: int, block: int) -> None:
        self.block_table[slot, self.num_blocks[slot]] = block
        self.num_blocks[slot] += 1

    def block_ids(self, slot: int) -> list[int]:
        blocks: list[int] = self.block_table[slot, : self.num_blocks[slot]].tolist()
        return blocks

    def known_tokens(self, slot: int) -> Int32Array:
        return self.token_ids[slot, : self.num_tokens[slot]]

    def check_integrity(self) -> None:
        taken = self.order.tolist()
        assert len(set(taken)) == len(taken), "a slot is listed twice"
        assert sorted(taken + self._free_slots) == list(range(len(self.sequences))), "a slot is lost"
        for slot in range(len(self.sequences)):
            sequence = self.sequences[slot]
            assert (sequence is not None) == (slot in taken), f"slot {slot}: holder and order differ"
            assert sequence is None or sequence.slot == slot, f"slot {slot}: holder believes it is {sequence.slot}"
