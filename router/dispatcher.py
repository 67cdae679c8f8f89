"""Gives room on ranks to those who want it: at once where nobody waits for it, else when their turn has come.

A rank has room while its slots last and its prompt tokens to compute fill less than two steps: so it never starves
between two frames, and has no deep queue of its own. All else waits here, where it can still go anywhere, in two lines:
one for prefill ranks, one for the others. Who begins where others than the ranks made for it take its part, waits in
their line.

Freed room is known from a rank's frames (`serve`). Mutable state: the lines, and `_are_apart`, which says who waits in
which. Whoever is given room by `serve` has it held on the link until its task goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from router.control_messages import PoolRole
from router.errors import ApiError
from router.named_rank import named_rank
from router.placement import Leg, Wanted
from router.placement_policies import PlacementPolicy
from router.placing import Place, Placing
from router.prefix_index import CachedPrefix, PromptPrefix
from router.rank_link import RankLink
from router.rank_table import Candidates, RankTable
from router.waiting_line import Answer, Waiter, WaitingLine

MAX_BYPASSES_PER_RANK = 8
"""So often, times the ranks that it may go to, later ones may pass one for which KV room lacks; as on a rank."""

ASK_AGAIN_S = 0.05


class Dispatcher:
    """Use from one event loop."""

    def __init__(
        self,
        ranks: RankTable,
        policy: PlacementPolicy,
        *,
        link_of: Callable[[int], RankLink | None],
        cached: Callable[[PromptPrefix], CachedPrefix],
        no_rank: Callable[[Leg], ApiError],
        falls_back: bool,
        by_priority: bool,
        wait_timeout_s: float,
        observe_wait: Callable[[float], None],
    ) -> None:
        """`link_of`: the open one of a row. `no_rank`: what is raised after `wait_timeout_s` without any rank.

        `by_priority`: ranks put sequences aside for more urgent ones.
        """
        self._ranks = ranks
        self._policy = policy
        self._link_of = link_of
        self._cached = cached
        self._no_rank = no_rank
        self._falls_back = falls_back
        self._by_priority = by_priority
        self._wait_timeout_s = wait_timeout_s
        self._observe_wait = observe_wait
        self._loop = asyncio.get_running_loop()
        self._prefill_line: WaitingLine[Placing] = WaitingLine()
        self._other_line: WaitingLine[Placing] = WaitingLine()
        self._are_apart = self._find_apart()
        self._asks_again: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._prefill_line) + len(self._other_line)

    @property
    def num_waiting_tokens(self) -> int:
        """Of all that wait, as they will be charged."""
        return self._prefill_line.num_tokens + self._other_line.num_tokens

    def peek(self, placing: Placing, *, needs_room: bool) -> RankLink | None:
        """Where it would go now if nobody waited."""
        rows = self._open(placing) if needs_room else self._suitable(placing)
        return self._choose(placing, rows, needs_room=needs_room, may_wait=False)

    async def place(self, placing: Placing) -> RankLink:
        """The rank for it, to be submitted to before anything else happens. Raises `no_rank` after a while without."""
        link = self.try_now(placing)
        if link is None:
            link = await self._wait(placing)
        self._observe_wait(self._loop.time() - placing.since)
        return link

    def try_now(self, placing: Placing) -> RankLink | None:
        """The rank for it, to be submitted to at once; None if it has to wait."""
        placing.since = self._loop.time()
        line, rows = self._line(placing), self._open(placing)
        if line and rows.size:
            pins = (None,) if placing.rank_id is None else (None, placing.rank_id)
            if line.must_wait(placing.turn, pins):
                return None
            is_free = [not line.must_wait(placing.turn, (self._ranks.records[row].rank_id,)) for row in rows.tolist()]
            rows = rows[is_free]
        link = self._choose(placing, rows)
        if link is None and self._by_priority and not line.must_wait(placing.turn, (None,)):
            yielding = [row for row in self._suitable(placing).tolist() if self._yields(row, placing)]
            link = self._choose(placing, np.array(yielding, np.intp), needs_room=False)
        return link

    def serve(self, link: RankLink) -> None:
        """Give this rank's room to those who wait for it; costs nothing where there is no room, or nobody."""
        line = self._prefill_line if link.record.role is PoolRole.PREFILL else self._other_line
        if line and link.is_open and (self._by_priority or self._ranks.has_room(link.row, Leg.DECODE)):
            line.serve((None, link.record.rank_id), partial(self._offer, link), self._max_bypasses)

    def ranks_changed(self) -> None:
        """One has come, or gone: who waits may have to go elsewhere, or to give up."""
        prefill_waits_apart, others_wait_apart = self._are_apart
        self._are_apart = self._find_apart()
        if self._are_apart != (prefill_waits_apart, others_wait_apart):
            waiters = self._prefill_line.take_all() + self._other_line.take_all()
            for waiter in sorted(waiters, key=lambda waiter: waiter.item.since):
                try:
                    self._push(waiter.item)
                except ApiError as error:
                    self._give_up(waiter.item, error)
        for waiter in [*self._prefill_line, *self._other_line]:
            self._watch(waiter.item)
        self._serve_all()

    def find(self, request_id: str) -> list[Place]:
        """Where prompts of a request wait; takes a look at all that do."""
        places = []
        for line in (self._prefill_line, self._other_line):
            num_tokens = 0
            for num_before, waiter in enumerate(line):
                if waiter.item.request_id == request_id:
                    num_suitable, num_open = self._suitable(waiter.item).size, self._open(waiter.item).size
                    places.append(Place(waiter.item, num_before, num_tokens, num_suitable, num_open))
                num_tokens += waiter.turn.num_tokens
        return places

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books agree."""
        for line in (self._prefill_line, self._other_line):
            line.check_integrity()

    # ---- ranks ----

    def _suitable(self, placing: Placing) -> NDArray[np.intp]:
        """Rows of ranks that may take it, with room or without. Raises ApiError if the one that it names is gone."""
        if placing.rank_id is not None:
            return np.array([named_rank(self._ranks, placing.rank_id)])
        return self._ranks.suitable(placing.leg, falls_back=self._falls_back)

    def _open(self, placing: Placing) -> NDArray[np.intp]:
        """Rows of those that have room for somebody, if not for this one."""
        if placing.rank_id is not None:
            rows = self._suitable(placing)
            return rows if self._ranks.has_room(int(rows[0]), placing.leg) else rows[:0]
        return self._ranks.candidates(placing.leg, falls_back=self._falls_back).rows

    def _choose(
        self, placing: Placing, rows: NDArray[np.intp], *, needs_room: bool = True, may_wait: bool = True
    ) -> RankLink | None:
        """The best of these; None if it fits into none of them, or had better wait for another."""
        wanted = Wanted(
            placing.leg,
            placing.num_tokens,
            self._cached(placing.prompt),
            session_id=placing.session_id,
            may_wait=needs_room and may_wait,
            waited_s=self._loop.time() - placing.since,
        )
        if needs_room:
            rows = rows[self._fits(wanted, rows)]
        preferred = placing.preferred
        if preferred is not None and preferred.is_open and preferred.row in rows:
            return preferred
        if not rows.size:
            return None
        if placing.rank_id is not None:
            return self._link_of(int(rows[0]))
        index = self._policy.choose(wanted, Candidates(self._ranks, rows, self._suitable(placing)))
        if index is None:
            self._ask_again()
            return None
        return self._link_of(int(rows[index]))

    def _fits(self, wanted: Wanted, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of these, that have room, have enough for what they lack of the prompt: of KV, and of the next step.

        All choices of a prompt share that, and go together: one that has a slot for the first takes them all.
        """
        ranks = self._ranks
        most = ranks.num_free_tokens[rows]
        if wanted.leg is not Leg.DECODE:
            # Those that take any prompt have some of a step left as well, if not enough for this one.
            most = np.where(ranks.takes_any_prompt[rows], most, np.minimum(most, ranks.num_step_tokens_left[rows]))
        fits: NDArray[np.bool_] = most >= wanted.num_tokens
        for index in np.flatnonzero(~fits).tolist():
            row = int(rows[index])
            fits[index] = ranks.is_idle(row) or most[index] >= wanted.num_uncached_tokens(row)
        return fits

    def _yields(self, row: int, placing: Placing) -> bool:
        """Whether a rank without room would make some, by putting aside what is less urgent."""
        link = self._link_of(row)
        return link is not None and self._ranks.is_member(row) and link.yields_to(placing.turn.priority)

    # ---- lines ----

    async def _wait(self, placing: Placing) -> RankLink:
        placed: asyncio.Future[RankLink] = self._loop.create_future()
        placing.placed = placed
        self._push(placing)
        self._watch(placing)
        if (rows := self._open(placing)).size and (link := self._link_of(int(rows[0]))) is not None:
            # Whoever is first does not fit there; it may be passed.
            self.serve(link)
        is_used = False
        try:
            link = await placed
            is_used = True
        finally:
            self._leave(placing)
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                link = placed.result()
                link.give_back(placing.num_sequences, placing.num_held_tokens)
                if not is_used:
                    self._loop.call_soon(self.serve, link)
        return link

    def _push(self, placing: Placing) -> None:
        placing.line = self._line(placing)
        placing.waiter = placing.line.push(placing, placing.turn, placing.rank_id)

    def _leave(self, placing: Placing) -> None:
        if placing.line is not None and placing.waiter is not None:
            placing.line.cancel(placing.waiter)
        if placing.expiry is not None:
            placing.expiry.cancel()

    def _offer(self, link: RankLink, waiter: Waiter[Placing]) -> Answer:
        """While this rank has room: hold some for the waiter, there or elsewhere, and wake its task to submit."""
        placing = waiter.item
        yields = self._by_priority and self._yields(link.row, placing)
        if not link.is_open or not (yields or self._ranks.has_room(link.row, placing.leg)):
            return Answer.NO_ROOM
        if placing.placed is None or placing.placed.done():
            return Answer.UNSUITED  # it is about to leave
        may_wait = waiter.num_bypasses < self._max_bypasses
        found = self._choose(placing, self._open(placing), may_wait=may_wait)
        if found is None and yields:
            found = link
        if found is None:
            # A long prompt that is begun when the one before has been computed loses nothing to short ones meanwhile.
            is_early = placing.leg is not Leg.DECODE and not self._ranks.takes_any_prompt[self._open(placing)].any()
            return Answer.LATER if is_early else Answer.UNSUITED
        num_uncached = placing.num_tokens - self._cached(placing.prompt).num_tokens(found.row)
        placing.num_held_tokens = placing.num_sequences * max(1, num_uncached)
        found.hold(placing.num_sequences, placing.num_held_tokens)
        placing.placed.set_result(found)
        return Answer.TAKEN

    def _watch(self, placing: Placing) -> None:
        """Let it wait for so long only while there is no rank that it could wait for."""
        try:
            is_hopeful = self._suitable(placing).size > 0
        except ApiError as error:
            self._give_up(placing, error)
            return
        if is_hopeful and placing.expiry is not None:
            placing.expiry.cancel()
            placing.expiry = None
        elif not is_hopeful and placing.expiry is None:
            placing.expiry = self._loop.call_later(self._wait_timeout_s, self._expire, placing)

    def _expire(self, placing: Placing) -> None:
        self._give_up(placing, self._no_rank(placing.leg))

    def _give_up(self, placing: Placing, error: ApiError) -> None:
        self._leave(placing)
        if placing.placed is not None and not placing.placed.done():
            placing.placed.set_exception(error)

    def _ask_again(self) -> None:
        """Somebody waits for a rank that suits it better; how long that is worth it, nobody else tells."""
        if self._asks_again is None:
            self._asks_again = self._loop.call_later(ASK_AGAIN_S, self._serve_all)

    def _serve_all(self) -> None:
        self._asks_again = None
        for row in list(self._ranks.records):
            if (link := self._link_of(row)) is not None:
                self.serve(link)

    @property
    def _max_bypasses(self) -> int:
        return MAX_BYPASSES_PER_RANK * len(self._ranks.records)

    def _line(self, placing: Placing) -> WaitingLine[Placing]:
        prefill_waits_apart, others_wait_apart = self._are_apart
        if placing.rank_id is not None:
            role = self._ranks.records[named_rank(self._ranks, placing.rank_id)].role
            return self._prefill_line if role is PoolRole.PREFILL else self._other_line
        if placing.leg is Leg.PREFILL:
            return self._prefill_line if prefill_waits_apart else self._other_line
        return self._other_line if others_wait_apart else self._prefill_line

    def _find_apart(self) -> tuple[bool, bool]:
        """Whether the prefill parts of requests wait in the line for prefill ranks, and the rest in the other."""
        if not self._falls_back:
            return True, True
        has_prefill = self._ranks.suitable(Leg.PREFILL, falls_back=False).size > 0
        has_others = self._ranks.suitable(Leg.WHOLE, falls_back=False).size > 0
        return has_prefill or not has_others, has_others or not has_prefill
