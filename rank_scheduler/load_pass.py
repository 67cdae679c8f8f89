"""KV loads: which start in a step, and what becomes of those that have ended."""

from __future__ import annotations

from kv_transfer.connector import LoadFinished
from rank_scheduler.needs import Needs
from rank_scheduler.rank_state import RankState
from rank_scheduler.sequence import Obstacle, RequestEvent, Sequence, SequenceState, WaitReason


class LoadPass:
    """Works on a rank's state."""

    def __init__(self, state: RankState, needs: Needs) -> None:
        self._state = state
        self._needs = needs
        self._block_size = state.setup.block_size
        self.must_ask_again = False
        """A connector did not know yet: another step may go further, though nothing else has happened."""
        self.starved: Sequence | None = None
        """The first candidate, if it lacks blocks: those that are admitted meanwhile pass it."""

    def start(self, now: float) -> int:
        """Start asynchronous loads, under both caps; they cost no tokens, and no slot where the cap is set.

        Returns how many.
        """
        state = self._state
        self.must_ask_again, self.starved = False, None
        num_started = 0
        for sequence in list(state.load_candidates):
            obstacle = self._load_cap(num_started)
            if obstacle is None:
                obstacle = self._start_load(sequence, now)
                num_started += sequence.state is SequenceState.WAITING_FOR_KV_LOAD
            if obstacle is not None:
                state.remember_obstacle(sequence, obstacle)
                if obstacle.reason is not WaitReason.CONNECTOR:
                    state.load_obstacle = obstacle
                    if obstacle.reason is WaitReason.BLOCKS:
                        self.starved = sequence
                    break
        return num_started

    def _load_cap(self, num_started: int) -> Obstacle | None:
        state, config = self._state, self._state.config
        figures = {"num_loads": state.num_loads, "num_started": num_started}
        per_step, in_flight = config.max_async_kv_loads_per_step, config.max_num_inflight_kv_loads
        if per_step is not None and num_started >= per_step:
            return Obstacle(WaitReason.LOAD_CAP, figures | {"max_async_kv_loads_per_step": per_step})
        if in_flight is not None and state.num_loads >= in_flight:
            return Obstacle(WaitReason.LOAD_CAP, figures | {"max_num_inflight_kv_loads": in_flight})
        if in_flight is None and state.num_active + state.num_loads >= config.active_seqs_limit:
            return Obstacle(
                WaitReason.SLOTS, figures | {"num_active": state.num_active, "limit": config.active_seqs_limit}
            )
        return None

    def _start_load(self, sequence: Sequence, now: float) -> Obstacle | None:
        """Take blocks for the whole prompt and have the connector fill them; None: started, or nothing to load."""
        state, connector = self._state, self._state.setup.connector
        assert connector is not None
        hit = self._needs.probe_settled(sequence)
        request = self._needs.kv_request(sequence)
        num_local = min(hit.num_columns * self._block_size, len(sequence.token_ids))
        match = connector.get_num_new_matched_tokens(request, num_local)
        if match is None:
            self.must_ask_again = True
            return Obstacle(WaitReason.CONNECTOR)
        if not match.is_async or match.num_tokens <= 0:
            state.load_candidates.remove(sequence)
            state.waiting.push(sequence)
            return None
        num_columns = state.kv.num_columns(len(sequence.token_ids))
        num_needed = state.kv.num_needed(hit, num_columns)
        reserved = self._needs.num_promised_blocks() + state.watermark_blocks
        if num_needed + reserved > state.kv.pool.num_free_blocks:
            return self._needs.lacks_blocks(num_needed, reserved)
        state.load_candidates.remove(sequence)
        sequence.blocks = state.kv.take(hit, num_columns)
        sequence.num_computed = num_local
        sequence.num_external_tokens = match.num_tokens
        sequence.num_bypasses = 0
        sequence.move(SequenceState.WAITING_FOR_KV_LOAD)
        sequence.note(RequestEvent.LOAD_STARTED, now, f"{match.num_tokens} tokens")
        state.deferred[sequence.key] = sequence
        state.num_loading += 1
        connector.update_state_after_alloc(request, sequence.blocks, match.num_tokens)
        return None

    def take(self, sequence: Sequence, event: LoadFinished, now: float) -> None:
        """A load has ended: what of it is valid is kept, the rest is loaded again, computed here, or fails the request.

        The sequence is WAITING_FOR_KV_LOAD.
        """
        state = self._state
        num_tokens = len(sequence.token_ids)
        num_expected = min(sequence.num_computed + sequence.num_external_tokens, num_tokens)
        num_valid = num_expected if event.num_valid_tokens is None else min(event.num_valid_tokens, num_expected)
        has_failed = num_valid < num_expected or bool(event.cause) or not event.is_fenced
        if has_failed:
            cause = event.cause or f"{num_valid} of {num_expected} tokens are valid"
            sequence.num_load_failures += 1
            state.stats.num_failed_loads += 1
            sequence.note(RequestEvent.LOAD_FAILED, now, cause)
            if state.setup.kv_load_failure_policy == "fail":
                state.fail(sequence, f"its KV could not be loaded ({cause}); send the request again", now)
                # As if its load were still to end.
                if event.is_fenced:
                    state.release_held(state.quarantine, sequence.key)
                return
        else:
            sequence.note(RequestEvent.LOAD_FINISHED, now)
        del state.deferred[sequence.key]
        state.num_loading -= 1
        sequence.move(SequenceState.WAITING)
        # What was found here was never part of the load.
        num_valid = max(num_valid, sequence.num_computed)
        if not event.is_fenced:
            # All of them: a block that is the request's alone may be written at any time.
            state.quarantine_blocks(sequence)
            num_valid = 0
        if has_failed and num_valid == 0:
            sequence.num_external_tokens = 0
            if sequence.blocks is not None:
                state.drop_blocks(sequence)
        else:
            assert sequence.blocks is not None
            sequence.num_external_tokens = num_valid - sequence.num_computed
            sequence.num_computed = min(num_valid, num_tokens - 1)
            if state.caches:
                num_full = num_valid // self._block_size
                state.kv.cache(sequence.blocks, sequence.block_hashes, 0, num_full, sequence.token_ids)
        state.enqueue(sequence)
