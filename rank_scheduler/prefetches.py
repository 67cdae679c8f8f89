"""Prefetches: KV that is loaded before the request that needs it has come, while another rank computes the rest.

A prefetch is a load without a request: a sequence that is never admitted, under a key that no request has. It takes
blocks for its full columns, a connector fills them, and then they are let go, findable by their hashes, so that the
request finds them as it finds any prefix. Nobody waits for it and nobody hears of it. Whatever keeps it from that ends
it: no room, nothing to load, a failure.

**It stands behind every request**: those that could load are looked at first, its blocks come out of what neither
running nor waiting requests need and never make more than a share of the pool, and its load counts towards the caps of
loads only for other prefetches.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kv_transfer.connector import KvRequest, LoadFinished
from rank_scheduler.messages import Prefetch, SamplingParams, Submit
from rank_scheduler.needs import Needs
from rank_scheduler.plan import Int32Array
from rank_scheduler.prefix_hash import ExtraKeys
from rank_scheduler.rank_state import HeldBlocks, RankState
from rank_scheduler.sequence import Sequence

MAX_NUM_QUEUED = 64
"""The oldest one makes way."""
SHARE_OF_POOL = 4
"""Prefetches hold one n-th of the pool at most, and leave one n-th free."""


class Prefetches:
    """Works on a rank's state; what is being loaded is in the state's `prefetching`, what is not yet is here."""

    def __init__(self, state: RankState, needs: Needs) -> None:
        self._state = state
        self._needs = needs
        self._block_size = state.setup.block_size
        # Blocks that slide out of a window are given up, and full columns are what a prefetch leaves behind.
        self._is_possible = state.setup.connector is not None and state.caches and not state.kv.has_windows
        self._queue: deque[Sequence] = deque()
        self._num_taken = 0
        self.must_ask_again = False
        """A connector did not know yet: another step may go further, though nothing else has happened."""

    def __len__(self) -> int:
        """Those that wait to be started."""
        return len(self._queue)

    def add(self, owner: int, prefetch: Prefetch, now: float) -> bool:
        """Queue it; False if it is of no use to this rank."""
        state, connector = self._state, self._state.setup.connector
        num_tokens, rest = divmod(len(prefetch.token_ids), 4)
        num_tokens -= num_tokens % self._block_size
        if not self._is_possible or connector is None or rest or not 0 < num_tokens <= state.setup.max_model_len:
            return False
        self._num_taken += 1
        # Requests count from 0 on.
        key = (owner, -self._num_taken)
        token_ids: Int32Array = np.frombuffer(prefetch.token_ids, "<i4", num_tokens)
        extra = ExtraKeys(prefetch.cache_salt, ()) if prefetch.cache_salt else None
        submit = Submit(0, prefetch.token_ids, SamplingParams(0, 1), request_id=prefetch.request_id)
        sequence = Sequence(key, submit, token_ids, None, extra, -1, now)
        sequence.kv_request = KvRequest(key, token_ids, (), prefetch.kv_transfer_params)
        connector.on_new_request(sequence.kv_request)
        self._queue.append(sequence)
        if len(self._queue) > MAX_NUM_QUEUED:
            self._drop(self._queue.popleft())
        return True

    def clear(self) -> None:
        """Nothing new is to be started."""
        self.must_ask_again = False
        while self._queue:
            self._drop(self._queue.popleft())

    def start(self, num_started: int) -> None:
        """Start or end those that wait, after `num_started` loads of requests in this step.

        One of which a connector does not know yet what it could load stays in the queue.
        """
        self.must_ask_again = False
        for _ in range(len(self._queue)):
            sequence = self._queue.popleft()
            if not self._is_allowed(num_started):
                self._drop(sequence)
                continue
            started = self._start(sequence)
            if started is None:
                self.must_ask_again = True
                self._queue.append(sequence)
            elif started:
                num_started += 1
            else:
                self._drop(sequence)

    def take(self, event: LoadFinished) -> None:
        """The load of one that is in `prefetching` has ended."""
        state, connector = self._state, self._state.setup.connector
        assert connector is not None
        sequence = state.prefetching.pop(event.key)
        table = sequence.blocks
        assert table is not None
        num_tokens = len(sequence.token_ids)
        num_valid = num_tokens if event.num_valid_tokens is None else event.num_valid_tokens
        if event.cause or not event.is_fenced or num_valid < num_tokens:
            if event.is_fenced:
                state.free(HeldBlocks(table, []))
            else:
                state.quarantine[event.key] = HeldBlocks(table, [])
            self._drop(sequence)
            return
        state.kv.cache(table, sequence.block_hashes, 0, table.shape[1], sequence.token_ids)
        state.stats.num_prefetched_tokens += sequence.num_external_tokens
        request = self._needs.kv_request(sequence)
        connector.update_state_after_alloc(request, table, 0)
        keeps, _ = connector.request_finished(request, table, hands_off=False)
        if keeps:
            state.sending[event.key] = HeldBlocks(table, [])
        else:
            state.free(HeldBlocks(table, []))

    # ---- inside ----

    def _is_allowed(self, num_started: int) -> bool:
        state, config = self._state, self._state.config
        per_step, in_flight = config.max_async_kv_loads_per_step, config.max_num_inflight_kv_loads
        num_loads = state.num_loads + len(state.prefetching)
        if per_step is not None and num_started >= per_step:
            return False
        if in_flight is not None:
            return num_loads < in_flight
        return state.num_active + num_loads < config.active_seqs_limit

    def _start(self, sequence: Sequence) -> bool | None:
        """Take blocks and have the connector fill them; False: that is not to be, None: it cannot say yet."""
        state, connector = self._state, self._state.setup.connector
        assert connector is not None
        num_tokens = len(sequence.token_ids)
        hit = self._needs.probe_settled(sequence)
        num_local = hit.num_columns * self._block_size
        if num_local == num_tokens:
            return False
        request = self._needs.kv_request(sequence)
        match = connector.get_num_new_matched_tokens(request, num_local)
        if match is None:
            return None
        # What a prefetch is not told to load in whole blocks, it leaves to the request.
        if not match.is_async or num_local + match.num_tokens != num_tokens:
            return False
        num_columns = state.kv.num_columns(num_tokens)
        if not self._has_room(state.kv.num_needed(hit, num_columns)):
            return False
        sequence.blocks = state.kv.take(hit, num_columns)
        sequence.num_external_tokens = match.num_tokens
        state.prefetching[sequence.key] = sequence
        connector.update_state_after_alloc(request, sequence.blocks, match.num_tokens)
        return True

    def _has_room(self, num_needed: int) -> bool:
        """Whether so many blocks are to spare."""
        state = self._state
        share = state.kv.pool.num_usable_blocks // SHARE_OF_POOL
        num_held = sum(held.blocks.size for held in state.prefetching.values() if held.blocks is not None)
        if num_held + num_needed > share:
            return False
        queues = (state.waiting, state.load_candidates)
        num_columns = sum(state.kv.num_columns(queue.num_tokens) + len(queue) for queue in queues)
        for sequence in (*state.loaded, *state.deferred.values()):
            num_columns += state.kv.num_columns(len(sequence.token_ids)) if sequence.blocks is None else 0
        num_kept = num_columns * state.kv.num_groups + self._needs.num_promised_blocks() + state.watermark_blocks
        return num_needed + num_kept + share <= state.kv.pool.num_free_blocks

    def _drop(self, sequence: Sequence) -> None:
        """It brings nothing. Its blocks, if it had any, are no concern of it any more."""
        state, connector = self._state, self._state.setup.connector
        assert connector is not None
        state.stats.num_dropped_prefetches += 1
        connector.request_finished(self._needs.kv_request(sequence), state.no_blocks, hands_off=False)
        sequence.strip()
