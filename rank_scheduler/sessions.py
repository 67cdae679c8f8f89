"""Streaming sessions: requests that are extended while they live.

Between two turns a session waits for its input in its slot, with its KV. The next input takes the place of the turn's
last token, whose KV was never computed, and is the prompt of a turn of its own.
"""

from __future__ import annotations

import numpy as np

from rank_scheduler.messages import End, Extend, FinishReason
from rank_scheduler.plan import Extension
from rank_scheduler.rank_state import RankState
from rank_scheduler.refusals import why_no_tokens, why_too_long
from rank_scheduler.sequence import RequestEvent, Sequence, SequenceState
from rank_scheduler.stop_strings import StopStringMatcher

MAX_NUM_WAITING_INPUTS = 64
"""Of one session, while a turn goes on."""


class Sessions:
    """Works on a rank's state; keeps nothing of its own."""

    def __init__(self, state: RankState) -> None:
        self._state = state

    def take(self, sequence: Sequence, extend: Extend, now: float) -> None:
        """New input: goes on at once if the session waits for it, after the turns before otherwise."""
        if len(sequence.extensions) == MAX_NUM_WAITING_INPUTS:
            message = (
                f"{MAX_NUM_WAITING_INPUTS} inputs of the session wait for its turn to end, and one more came: send the "
                "next input when a turn has ended"
            )
            self._state.fail(sequence, message, now, is_request_fault=True)
            return
        sequence.extensions.append(extend)
        if sequence.state is SequenceState.WAITING_FOR_INPUT:
            self._next_turn(sequence, FinishReason.STOP, now)

    def end_turn(
        self, sequence: Sequence, reason: FinishReason, now: float, *, stop_reason: str | int | None = None
    ) -> None:
        """The sequence's latest token ends it, or, of a session, its turn."""
        state = self._state
        if not sequence.is_session:
            state.finish(sequence, reason, now, stop_reason=stop_reason)
            return
        sequence.note(RequestEvent.TURN_ENDED, now, str(reason))
        if not sequence.extensions or sequence.extensions[0].token_ids:
            end = End(sequence.key[1], reason, stop_reason, num_cached_tokens=sequence.num_cached_tokens)
            state.turn_ends.append((sequence.key[0], end))
        sequence.move(SequenceState.WAITING_FOR_INPUT)
        slot = sequence.slot
        state.forget_draining(sequence)
        if slot >= 0:
            state.batch.end_turn(slot)
        elif sequence.key not in state.deferred:
            state.waiting.remove(sequence)
            state.deferred[sequence.key] = sequence
        self._next_turn(sequence, reason, now)

    def _next_turn(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Go on with the next input that has come, if any; `reason` ended the turn before."""
        if not sequence.extensions:
            return
        state, setup = self._state, self._state.setup
        extend = sequence.extensions.pop(0)
        if extend.is_last and not extend.token_ids:
            state.finish(sequence, reason, now)
            return
        slot = sequence.slot
        known = state.batch.known_tokens(slot) if slot >= 0 else sequence.token_ids
        # A turn ends with a token that was never an input: the next input takes its place.
        num_kept = len(known) - 1
        refusal = why_no_tokens(extend.token_ids, setup) or why_too_long(
            num_kept + len(extend.token_ids) // 4, state.config, setup
        )
        if refusal is None and extend.max_tokens < 1:
            refusal = f"max_tokens is {extend.max_tokens}: ask for at least one"
        if refusal is not None:
            state.fail(sequence, refusal, now, is_request_fault=True)
            return
        token_ids = np.frombuffer(extend.token_ids, "<i4").astype(np.int32)
        total = num_kept + len(token_ids)
        sequence.is_session = not extend.is_last
        sequence.max_tokens = extend.max_tokens
        sequence.num_prompt_tokens = total
        sequence.ngram = None
        if sequence.sampling.stop:
            # The text of the turn before, up to the token that is replaced, is no part of this one's.
            sequence.stop_strings = StopStringMatcher(sequence.sampling.stop, setup.make_text_decoder())
        del sequence.block_hashes[num_kept // setup.block_size :]
        sequence.note(RequestEvent.EXTENDED, now, f"{len(token_ids)} tokens")
        if slot >= 0:
            sequence.move(SequenceState.RUNNING)
            max_total = min(total + extend.max_tokens, setup.max_model_len)
            state.batch.extend(slot, num_kept, token_ids, max_total)
            state.may_have_prefills = True
            state.extensions[slot] = Extension(slot, num_kept, token_ids)
        else:
            del state.deferred[sequence.key]
            sequence.token_ids = np.concatenate((known[:num_kept], token_ids))
            sequence.is_preempted = False
            sequence.move(SequenceState.WAITING)
            state.enqueue(sequence)
