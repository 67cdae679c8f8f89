"""Room for those that wait: what running sequences of lower priority, and idle sessions, must give up for them."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice

from rank_scheduler.block_pool import NULL_BLOCK
from rank_scheduler.interface import PauseState
from rank_scheduler.needs import Needs
from rank_scheduler.rank_state import RankState
from rank_scheduler.sequence import Sequence, WaitReason

# Room would not help those that wait for this.
_NOT_FOR_ROOM = frozenset({WaitReason.CONNECTOR, WaitReason.ENCODER})


class RoomMaker:
    """Works on a rank's state."""

    def __init__(self, state: RankState, needs: Needs) -> None:
        self._state = state
        self._needs = needs
        self.must_drain = False
        """Only the blocks of running ones would do, and they are usable only after the steps in flight."""

    def begin(self) -> None:
        self.must_drain = False

    def make_for_priority(self, budget: int, now: float) -> int | None:
        """Preempt running sequences for waiting ones of strictly higher priority that could not be admitted.

        Worst first, only if that makes room now, no more than needed, and no more than `budget` tokens can serve.
        Returns the priority of the first in line.
        """
        state, batch = self._state, self._state.batch
        if not state.waiting or state.pause is not PauseState.UNPAUSED:
            return None
        slots_free = state.config.active_seqs_limit - state.num_active - len(state.loaded)
        # Running sequences grow before anybody is admitted.
        num_kept = state.watermark_blocks + self._needs.num_promised_blocks()
        left = budget - (len(batch) - batch.num_idle)
        for sequence in list(islice(state.waiting, state.config.active_seqs_limit)):
            if sequence.obstacle.reason in _NOT_FOR_ROOM:
                continue
            victims = self._lower_priority(sequence.priority)
            num_tokens = self._needs.num_tokens_to_compute(sequence)
            if not victims or left <= 0 or (num_tokens > left and not state.config.enable_chunked_prefill):
                break
            slots_free -= 1
            chosen = self._choose(sequence, victims, slots_free, num_kept)
            if chosen is None:
                break
            for slot in chosen:
                num_kept -= self._needs.num_lacking(slot)
                left += not batch.is_idle[slot]
                state.preempt(slot, now, f"priority {sequence.priority} waits for a slot or blocks")
            # It will take all that is left if its prompt is long enough, the tokens of its victims included.
            left -= min(num_tokens, left)
            num_kept += self._needs.num_blocks_to_admit(sequence)
            slots_free += len(chosen)
        return state.waiting.first.priority

    def _choose(self, sequence: Sequence, victims: list[int], slots_free: int, num_kept: int) -> list[int] | None:
        """The first of `victims` that suffice to admit the sequence; None: all of them do not.

        `slots_free` may be -1, the sequence's own being counted; `num_kept` blocks are for others.
        """
        state = self._state
        pool = state.kv.pool
        given_up: Counter[int] = Counter()
        chosen: list[int] = []
        for slot in [*victims, None]:
            # What only the victims hold becomes free, and is no hit that comes for nothing any more.
            num_freed = sum(pool.num_references(block) == count for block, count in given_up.items())
            num_needed = num_kept + self._needs.num_blocks_to_admit(sequence, given_up)
            lacks_blocks = num_needed > pool.num_free_blocks
            if slots_free + len(chosen) >= 0 and pool.num_free_blocks + num_freed >= num_needed:
                # With a connector, blocks are usable only after the steps in flight.
                self.must_drain = bool(chosen and lacks_blocks and state.setup.connector is not None and state.flights)
                return None if self.must_drain else chosen
            if slot is None:
                break
            chosen.append(slot)
            num_kept -= self._needs.num_lacking(slot)
            given_up.update(block for block in state.batch.table(slot).ravel().tolist() if block != NULL_BLOCK)
        return None

    def take_from_idle(self, now: float) -> None:
        """Where nobody runs, and so nobody will make room, sessions between two turns give way to the first in line."""
        state, batch = self._state, self._state.batch
        if not batch.num_idle or batch.num_idle < len(batch) or state.num_loading or state.flights:
            return
        first = next(chain(state.loaded, state.waiting), None)
        load = next(iter(state.load_candidates), None)
        firsts = [sequence for sequence in (first, load) if sequence is not None]
        while len(batch) and any(map(self._lacks_room, firsts)):
            slot = min(batch.order.tolist(), key=lambda slot: int(batch.num_computed[slot]))
            state.preempt(slot, now, "it waits for input, and another request for its slot or blocks")

    def _lacks_room(self, sequence: Sequence) -> bool:
        """Whether a sequence, were it the first in line, could not be admitted now for want of a slot or of blocks."""
        state = self._state
        if state.num_active >= state.config.active_seqs_limit:
            return True
        if sequence.blocks is not None:
            return False
        return self._needs.num_blocks_to_admit(sequence) + state.watermark_blocks > state.kv.pool.num_free_blocks

    def _lower_priority(self, priority: int) -> list[int]:
        """Slots of strictly lower priority, worst first; of equals idle ones, then who loses least, or came last."""
        batch = self._state.batch
        order = batch.order
        slots = order[batch.priority[order] > priority][::-1].tolist()
        return sorted(
            slots,
            key=lambda slot: (
                -int(batch.priority[slot]),
                not batch.is_idle[slot],
                self._state.num_lost(slot),
            ),
        )
