"""What a waiting sequence would need, and what is promised to those that run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from kv_transfer.connector import KvRequest
from rank_scheduler.kv_cache_manager import PrefixHit
from rank_scheduler.prefix_hash import extend_block_hashes
from rank_scheduler.rank_state import RankState
from rank_scheduler.sequence import Obstacle, Sequence, WaitReason

_NOTHING: Mapping[int, int] = MappingProxyType({})


class Needs:
    """Looks at a rank's state and changes nothing but that hashes are known from then on."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._caches = state.caches
        self._block_size = state.setup.block_size

    def probe(self, sequence: Sequence) -> PrefixHit:
        """Cached prefix of a waiting sequence. No side effects but that its hashes are known from now on."""
        if not self._caches:
            return PrefixHit(0, [[] for _ in range(self._state.kv.num_groups)])
        extend_block_hashes(sequence.block_hashes, sequence.token_ids, self._block_size, sequence.extra_keys)
        if not sequence.reads_prefix_cache:
            return PrefixHit(0, [[] for _ in range(self._state.kv.num_groups)])
        hashes = sequence.block_hashes
        if self._state.kv.has_windows:
            # The last token, computed anew after a full hit, would see columns that the hit has left out.
            hashes = hashes[: (len(sequence.token_ids) - 1) // self._block_size]
        return self._state.kv.probe(hashes)

    def probe_settled(self, sequence: Sequence) -> PrefixHit:
        """`probe`, without blocks that a step only promises: who takes no part in it must not rely on it."""
        promised = set(self._state.cached_in_step)
        for flight in self._state.flights:
            promised.update(flight.cached)
        hit = self.probe(sequence)
        while promised:
            columns = [column for row in hit.blocks for column, block in enumerate(row) if block in promised]
            if not columns:
                break
            # Once more, as in a window group a shorter prefix needs other columns.
            hit = self._state.kv.probe(sequence.block_hashes[: min(columns)])
        return hit

    def kv_request(self, sequence: Sequence) -> KvRequest:
        """What a connector is asked about, with the hashes that `probe` has made known."""
        request = sequence.kv_request
        assert request is not None
        if request.token_ids is not sequence.token_ids or len(request.block_hashes) != len(sequence.block_hashes):
            request = KvRequest(request.key, sequence.token_ids, tuple(sequence.block_hashes), request.params)
            sequence.kv_request = request
        return request

    def num_cross_blocks(self, sequence: Sequence) -> int:
        """Blocks for the encoder's positions of an encoder-decoder model."""
        if not self._state.setup.is_encoder_decoder:
            return 0
        return sum(self._state.kv.num_columns(item.length) for item in sequence.encoder_inputs)

    def num_tokens_to_compute(self, sequence: Sequence) -> int:
        """At least one, also of a prompt that is cached as a whole."""
        num_tokens = len(sequence.token_ids)
        return max(1, num_tokens - self.probe(sequence).num_columns * self._block_size)

    def num_blocks_to_admit(self, sequence: Sequence, given_up: Mapping[int, int] = _NOTHING) -> int:
        """How many free blocks its admission takes, after `given_up` (block → references) have been let go."""
        state = self._state
        num_tokens = len(sequence.token_ids)
        hit = self.probe(sequence)
        if hit.num_columns * self._block_size == num_tokens:
            # Its last block is copied, or computed again.
            hit.drop_last()
        num_needed = state.kv.num_needed(hit, state.kv.num_columns(num_tokens)) + self.num_cross_blocks(sequence)
        if given_up:
            pool = state.kv.pool
            num_needed += sum(
                0 < pool.num_references(block) == given_up.get(block, 0) for row in hit.blocks for block in row
            )
        return num_needed

    def num_promised_blocks(self) -> int:
        """What running sequences will still need for the tokens that are known: a load must not take it.

        An idle session needs nothing: its last token makes way for the next input.
        """
        batch = self._state.batch
        order = batch.order[~batch.is_idle[batch.order]]
        lacking = -(-batch.num_tokens[order] // self._block_size) - batch.num_columns[order]
        return int(np.maximum(lacking, 0).sum()) * self._state.kv.num_groups

    def num_lacking(self, slot: int) -> int:
        """The slot's part of `num_promised_blocks`."""
        kv, batch = self._state.kv, self._state.batch
        if batch.is_idle[slot]:
            return 0
        return max(0, kv.num_columns(int(batch.num_tokens[slot])) - int(batch.num_columns[slot])) * kv.num_groups

    def lacks_blocks(self, num_needed: int, num_kept_free: int) -> Obstacle:
        return Obstacle(
            WaitReason.BLOCKS,
            {
                "num_needed": num_needed,
                "num_free": self._state.kv.pool.num_free_blocks,
                "num_kept_free": num_kept_free,
            },
        )
