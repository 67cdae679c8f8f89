"""One connection to one rank: submits, aborts, questions, and the frames that come back.

Ownership: from `submit` on the link owes the choice exactly one `finish` or `lose`, whatever happens to the
connection; `abort` takes that duty back. Ids are the link's, never used twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from kv_transfer.connection import MAX_SEND_BUFFER_BYTES, Connection
from rank_scheduler.messages import (
    Abort,
    Explain,
    Explained,
    HandOff,
    Keep,
    KvTransferLoad,
    Leaving,
    LeavingHeard,
    Prefetch,
    PrefixEvents,
    PrefixSnapshot,
    RankLoad,
    RankToRouter,
    StepFrame,
    Submit,
    WatchPrefixes,
)
from router.choice import Choice
from router.control_messages import RankRecord
from router.errors import ApiError, Cause
from router.explanation import RankAnswer
from router.peer import UNDECODABLE, PeerFault
from router.placement import load_contains
from router.prefix_index import PrefixIndex
from router.rank_table import RankTable
from router.room import Room, num_step_tokens_left, room

logger = logging.getLogger(__name__)


# A rank that is this far behind with reading gets no more for now: half of what would cut its connection.
MAX_UNSENT_BYTES = MAX_SEND_BUFFER_BYTES // 2
# So often a rank hears that what it has handed off is wanted still: much less than it keeps that for.
KEEP_INTERVAL_S = 0.5
# A rank that leaves keeps what nobody else can take; so often it is looked whether somebody can by now.
MOVE_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Unseen:
    """A submitted sequence that the rank's figures do not contain yet."""

    num_steps: int
    num_tokens: int


class RankLink:
    """Use from the event loop that owns `connection`. While it is open, `prefixes` has what the rank's cache has, and
    `ranks` its figures, in the same row.

    `on_idle` is called when the last live sequence has ended, `on_frame` after each of the rank's frames, which may
    show that there is room now (there is one per second at least), `on_leave` when it has said that it leaves.
    """

    def __init__(
        self,
        record: RankRecord,
        connection: Connection,
        *,
        prefixes: PrefixIndex,
        ranks: RankTable,
        silence_timeout_s: float,
        on_idle: Callable[[RankLink], None],
        on_frame: Callable[[RankLink], None],
        on_leave: Callable[[], None],
        count: Callable[[PeerFault], None],
    ) -> None:
        self.record = record
        self.kv_transfer: KvTransferLoad | None = None
        """Figures of the rank's KV connector, if it has one, as last heard."""
        self.load = RankLoad(num_free_blocks=record.num_blocks, num_blocks=record.num_blocks)
        self._connection = connection
        self._prefixes = prefixes
        self._ranks = ranks
        self._silence_timeout_s = silence_timeout_s
        self._on_idle = on_idle
        self._on_frame_taken = on_frame
        self._on_leave = on_leave
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[RankToRouter] = msgspec.msgpack.Decoder(RankToRouter)
        self._next_id = 1
        self._next_query = 1
        self._live: dict[int, Choice] = {}
        self._priority_of: dict[int, int] = {}
        """Of those that are live."""
        self._num_of_priority: Counter[int] = Counter()
        self._queries: dict[int, asyncio.Future[Explained | None]] = {}
        self._unseen: dict[int, _Unseen] = {}
        self._num_unseen_tokens = 0
        self._num_held_sequences = 0
        self._num_held_tokens = 0
        self._promised: dict[int, Callable[[], None]] = {}
        """What gives back the room that is held elsewhere, of those that are to be handed off."""
        self._kept: set[int] = set()
        self._keeps: asyncio.TimerHandle | None = None
        """While something is kept."""
        self._moves: asyncio.TimerHandle | None = None
        """Of a rank that leaves: when others are to go on with what runs there."""
        self._last_frame_at = self._loop.time()
        self._watch = self._loop.call_later(silence_timeout_s, self._check_silence)
        self.row = prefixes.add(record.boot_id, record.block_size)
        ranks.add(self.row, record)
        connection.closed.add_done_callback(self._on_closed)
        connection.start(self._on_frame)
        self._connection.send(self._encoder.encode(WatchPrefixes()))

    @property
    def closed(self) -> asyncio.Future[str]:
        """Resolves with the reason when the connection has ended."""
        return self._connection.closed

    @property
    def is_open(self) -> bool:
        return not self._connection.closed.done()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def is_leaving(self) -> bool:
        """The rank wants no new work: nothing more is to be submitted."""
        return self._moves is not None

    @property
    def room(self) -> Room:
        """What may be submitted now."""
        if self._connection.num_unsent_bytes >= MAX_UNSENT_BYTES:
            return Room.NONE
        return room(self.record, self.load, self._num_new_sequences, self._num_new_tokens)

    def yields_to(self, priority: int) -> bool:
        """Whether the rank would put aside what runs there for one of this priority, and none waits for that yet."""
        least_urgent = max(self._num_of_priority, default=priority)
        return least_urgent > priority and self.load.num_waiting + self._num_new_sequences == 0

    def hold(self, num_sequences: int, num_tokens: int) -> None:
        """Room for them is not for others, until whoever was promised it gives it back."""
        self._num_held_sequences += num_sequences
        self._num_held_tokens += num_tokens
        self._show()

    def give_back(self, num_sequences: int, num_tokens: int) -> None:
        """What was held, to submit to it at once, or because nobody will."""
        self.hold(-num_sequences, -num_tokens)

    def submit(self, prepared: Submit, choice: Choice, num_new_tokens: int) -> int:
        """Send what is prepared, under an id of the link's own, to the rank; returns the id to abort it by.

        `num_new_tokens`: how many of its tokens the rank has to compute, as far as is known here.
        """
        request_id = self._next_id
        self._next_id += 1
        self._live[request_id] = choice
        self._priority_of[request_id] = prepared.priority
        self._num_of_priority[prepared.priority] += 1
        self._unseen[request_id] = _Unseen(self.load.num_steps, num_new_tokens)
        self._num_unseen_tokens += num_new_tokens
        if not self._connection.send(self._encoder.encode(msgspec.structs.replace(prepared, id=request_id))):
            self._forget(request_id)
            choice.lose(self._lost("closed"))
        self._show()
        return request_id

    def prefetch(self, prefetch: Prefetch) -> None:
        """Tell the rank of a request to come; nothing follows."""
        self._connection.send(self._encoder.encode(prefetch))

    def abort(self, request_id: int) -> None:
        """The request is of no interest any more; its choice hears nothing further. Ignored if it has ended."""
        if self._forget(request_id) is not None:
            self._connection.send(self._encoder.encode(Abort(request_id)))
            self._show()
            self._tell_if_idle()

    def hand_off(self, request_id: int, to: RankLink, num_tokens: int) -> None:
        """Another rank is to go on: unless the request ends by itself, its choice hears of a hand-off.

        Room for so many tokens is held there until its choice hears how it ended here, or it is aborted.
        """
        to.hold(1, num_tokens)
        self._promised[request_id] = partial(to.give_back, 1, num_tokens)
        self._connection.send(self._encoder.encode(HandOff(request_id)))

    def keep(self, request_id: int) -> None:
        """The KV of this one, which was handed off, is to be kept, until `let_go` or `abandon`."""
        self._kept.add(request_id)
        if self._keeps is None and self.is_open:
            self._keeps = self._loop.call_later(KEEP_INTERVAL_S, self._keep)

    def let_go(self, request_id: int) -> None:
        """Somebody fetches it now, and says himself that he does."""
        self._kept.discard(request_id)

    def abandon(self, request_id: int) -> None:
        """Nobody will fetch the KV of this one, which was handed off."""
        self._kept.discard(request_id)
        self._connection.send(self._encoder.encode(Abort(request_id)))

    async def explain(self, request_id: str, timeout_s: float) -> RankAnswer:
        """What the rank knows of a request, by its public id; nothing if it does not say so in time, or is lost.

        A rank answers between two steps.
        """
        query = self._next_query
        self._next_query += 1
        answer: asyncio.Future[Explained | None] = self._loop.create_future()
        explained: Explained | None = None
        # A rank that is behind with reading would not answer in time, and must not be sent more.
        is_behind = self._connection.num_unsent_bytes >= MAX_UNSENT_BYTES
        if not is_behind and self._connection.send(self._encoder.encode(Explain(query, request_id))):
            self._queries[query] = answer
            try:
                async with asyncio.timeout(timeout_s):
                    explained = await answer
            except TimeoutError:
                logger.info("rank %s did not explain %s in %g s", self.record.rank_id, request_id, timeout_s)
            finally:
                self._queries.pop(query, None)
        return RankAnswer(self.record.rank_id, explained, self._loop.time())

    def close(self, reason: str) -> None:
        self._connection.close(reason)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the figures agree with each other."""
        assert self._priority_of.keys() == self._live.keys()
        assert self._num_of_priority == Counter(self._priority_of.values())
        assert self._promised.keys() <= self._live.keys(), "room is held for one that has ended here"
        assert self._unseen.keys() <= self._live.keys(), "an ended sequence is still counted as unseen"
        assert self._num_unseen_tokens == sum(unseen.num_tokens for unseen in self._unseen.values())
        assert min(self._num_held_sequences, self._num_held_tokens) >= 0, "more was given back than held"

    def _on_frame(self, payload: bytes) -> None:
        try:
            frame = self._decoder.decode(payload)
        except UNDECODABLE as error:
            self._cut_malformed(f"what is no frame: {error}")
            return
        if isinstance(frame, Explained):
            self._last_frame_at = self._loop.time()
            self._on_explained(frame)
        elif isinstance(frame, PrefixSnapshot):
            self._last_frame_at = self._loop.time()
            self._on_prefixes(frame)
        elif isinstance(frame, Leaving):
            self._last_frame_at = self._loop.time()
            self._leave(frame.moves_in_s)
        elif len(frame.ids) == len(frame.tokens):
            self._last_frame_at = self._loop.time()
            self._on_step(frame)
        else:
            self._cut_malformed(f"{len(frame.tokens)} tokens for {len(frame.ids)} ids")

    def _on_explained(self, explained: Explained) -> None:
        answer = self._queries.pop(explained.query, None)
        if answer is None or answer.done():
            self._count(PeerFault.STALE)
        else:
            answer.set_result(explained)

    def _on_step(self, frame: StepFrame) -> None:
        self.load = frame.load
        if frame.kv_transfer is not None:
            self.kv_transfer = frame.kv_transfer
            self._ranks.update_transfers(self.row, frame.kv_transfer)
        live = self._live
        for request_id in frame.first_token_ids:
            if (choice := live.get(request_id)) is not None:
                choice.prefill_done()
                self._saw(request_id)
        for request_id, num_tokens in frame.computed.items():
            if (choice := live.get(request_id)) is not None:
                choice.computed(num_tokens)
        logprobs = frame.logprobs
        for index, request_id in enumerate(frame.ids):
            choice = live.get(request_id)
            if choice is None:
                self._count(PeerFault.STALE)
                continue
            choice.add_token(frame.tokens[index], logprobs.get(index) if logprobs else None)
        for request_id, prompt_logprobs in frame.prompt_logprobs.items():
            if (choice := live.get(request_id)) is not None:
                choice.take_prompt_logprobs(prompt_logprobs)
        for request_id, ticket in frame.tickets.items():
            if (choice := live.get(request_id)) is not None:
                choice.take_ticket(ticket)
        for end in frame.ends:
            choice = self._forget(end.id)
            if choice is None:
                self._count(PeerFault.STALE)
                continue
            choice.finish(end, self.record.rank_id)
        if self._unseen:
            for request_id in [i for i, unseen in self._unseen.items() if load_contains(unseen.num_steps, frame.load)]:
                self._saw(request_id)
        if frame.prefixes is not None:
            self._on_prefixes(frame.prefixes)
        self._show()
        self._on_frame_taken(self)
        if frame.ends:
            self._tell_if_idle()

    def _on_prefixes(self, message: PrefixEvents | PrefixSnapshot) -> None:
        try:
            if isinstance(message, PrefixSnapshot):
                self._prefixes.take_snapshot(self.record.boot_id, message)
            elif not self._prefixes.take_events(self.record.boot_id, message):
                self._count(PeerFault.GAP)
                self._connection.send(self._encoder.encode(WatchPrefixes()))
        except ValueError as error:
            self._cut_malformed(f"what are no prefixes: {error}")

    def _leave(self, moves_in_s: float) -> None:
        if self._moves is None:
            logger.info("rank %s leaves, with %d sequences", self.record.rank_id, len(self._live))
        else:
            self._moves.cancel()
        self._ranks.set_member(self.row, False)
        self._connection.send(self._encoder.encode(LeavingHeard()))
        self._moves = self._loop.call_later(moves_in_s, self._move_live)
        self._on_leave()

    def _move_live(self) -> None:
        for choice in list(self._live.values()):
            choice.leave()
        self._moves = self._loop.call_later(MOVE_INTERVAL_S, self._move_live)

    def _keep(self) -> None:
        self._keeps = None
        if self._kept and self._connection.send(self._encoder.encode(Keep(sorted(self._kept)))):
            self._keeps = self._loop.call_later(KEEP_INTERVAL_S, self._keep)

    def _cut_malformed(self, what: str) -> None:
        self._count(PeerFault.MALFORMED)
        self._connection.abort(f"rank {self.record.rank_id} sent {what}")

    def _show(self) -> None:
        """What `ranks` is to say of this one, after a change of it."""
        if self.is_open:
            self._ranks.update(self.row, self.load, self._num_new_sequences, self._num_new_tokens)
            num_left = num_step_tokens_left(self.record, self.load, self._num_new_sequences, self._num_new_tokens)
            self._ranks.set_room(self.row, self.room, num_left)

    @property
    def _num_new_sequences(self) -> int:
        """Those that the rank's figures do not contain."""
        return len(self._unseen) + self._num_held_sequences

    @property
    def _num_new_tokens(self) -> int:
        return self._num_unseen_tokens + self._num_held_tokens

    def _saw(self, request_id: int) -> None:
        unseen = self._unseen.pop(request_id, None)
        if unseen is not None:
            self._num_unseen_tokens -= unseen.num_tokens

    def _forget(self, request_id: int) -> Choice | None:
        self._saw(request_id)
        if (give_back := self._promised.pop(request_id, None)) is not None:
            give_back()
        priority = self._priority_of.pop(request_id, None)
        if priority is not None:
            self._num_of_priority[priority] -= 1
            if not self._num_of_priority[priority]:
                del self._num_of_priority[priority]
        return self._live.pop(request_id, None)

    def _tell_if_idle(self) -> None:
        if not self._live:
            self._on_idle(self)

    def _check_silence(self) -> None:
        remaining_s = self._last_frame_at + self._silence_timeout_s - self._loop.time()
        if remaining_s <= 0:
            self._count(PeerFault.SILENT)
            self._connection.abort(f"nothing heard for {self._silence_timeout_s:g} s")
        else:
            self._watch = self._loop.call_later(remaining_s, self._check_silence)

    def _on_closed(self, closed: asyncio.Future[str]) -> None:
        self._watch.cancel()
        for timer in (self._moves, self._keeps):
            if timer is not None:
                timer.cancel()
        self._prefixes.forget(self.record.boot_id)
        self._ranks.forget(self.row)
        live, self._live = self._live, {}
        for give_back in self._promised.values():
            give_back()
        self._promised.clear()
        self._priority_of.clear()
        self._num_of_priority.clear()
        for answer in self._queries.values():
            if not answer.done():
                answer.set_result(None)
        self._unseen.clear()
        self._num_unseen_tokens = 0
        if live:
            logger.warning("rank %s lost with %d sequences: %s", self.record.rank_id, len(live), closed.result())
        for choice in live.values():
            choice.lose(self._lost(closed.result()))
        self._on_idle(self)

    def _lost(self, reason: str) -> ApiError:
        return ApiError(Cause.RANK_LOST, f"the connection to rank {self.record.rank_id} was lost ({reason})")
