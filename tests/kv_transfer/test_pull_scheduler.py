"""The deciding half of the pull connector, alone and together with the leases."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.connector import ExternalMatch, KvRequest, SendFinished
from kv_transfer.leases import LeaseTable
from kv_transfer.pull_orders import (
    AbandonLease,
    AdvanceLease,
    CompleteLease,
    DropTicket,
    HoldTicket,
    LoadBlocks,
    OpenLease,
    Order,
    ProlongLease,
    ReadyLease,
    RejectParams,
    VoidLease,
)
from kv_transfer.pull_scheduler import PullScheduler
from kv_transfer.ticket import Ticket, parse_params
from tests.kv_transfer.kv_peer import geometry

BLOCK_SIZE = 4
NO_BLOCKS = np.zeros((2, 0), np.int32)


def half(*, produces: bool = True, consumes: bool = True, port: int | None = 5000, **changes: Any) -> PullScheduler:
    return PullScheduler(
        engine_id="p",
        host="h",
        port=lambda: port,
        geometry=geometry(**changes),
        produces=produces,
        consumes=consumes,
    )


def request(number: int, num_tokens: int, params: dict[str, Any]) -> KvRequest:
    return KvRequest((1, number), np.arange(num_tokens, dtype=np.int32), (), params)


def outgoing(number: int = 1, num_tokens: int = 10) -> KvRequest:
    return request(number, num_tokens, {"do_remote_decode": True})


def table(*columns: int) -> np.ndarray:
    """Two groups of blocks: these, and the same plus 100."""
    return np.array([columns, [column + 100 if column else 0 for column in columns]], np.int32)


def orders(scheduler: PullScheduler) -> list[Order]:
    assert scheduler.has_pending_work()
    metadata = scheduler.build_connector_meta()
    assert metadata is not None
    assert not scheduler.has_pending_work()
    assert scheduler.build_connector_meta() is None
    return list(metadata)


def ticket(num_tokens: int = 10, blocks: np.ndarray | None = None) -> dict[str, Any]:
    """Of another rank."""
    scheduler = half()
    scheduler.on_new_request(outgoing())
    scheduler.update_state_after_alloc(outgoing(), NO_BLOCKS, 0)
    scheduler.request_computed((1, 1), num_tokens, NO_BLOCKS)
    if blocks is None:
        blocks = table(*range(1, -(-num_tokens // BLOCK_SIZE) + 1))
    keeps, params = scheduler.request_finished(outgoing(), blocks, hands_off=True)
    assert keeps
    assert params is not None
    return params


# ---- producing ----


def test_a_request_hands_off() -> None:
    scheduler = half()
    scheduler.on_new_request(outgoing())
    assert not scheduler.has_pending_work()
    assert scheduler.get_num_new_matched_tokens(outgoing(), 0) == ExternalMatch(0, False)
    scheduler.update_state_after_alloc(outgoing(), table(1, 2, 3), 0)
    scheduler.request_computed((1, 1), 8, NO_BLOCKS)
    assert orders(scheduler) == [OpenLease(1, (1, 1)), AdvanceLease(1, 8)]
    scheduler.request_computed((1, 1), 10, NO_BLOCKS)
    # A column for the tokens to come, and a window that has passed the first one.
    keeps, params = scheduler.request_finished(outgoing(), table(0, 2, 3, 4), hands_off=True)
    assert keeps
    assert params is not None
    parsed = parse_params(params)
    assert isinstance(parsed, Ticket)
    assert parsed.table().tolist() == [[0, 2, 3], [0, 102, 103]]
    assert (parsed.remote_engine_id, parsed.remote_host, parsed.remote_port) == ("p", "h", 5000)
    assert (parsed.num_tokens, parsed.remote_lease_id) == (10, 1)
    assert orders(scheduler) == [AdvanceLease(1, 10), CompleteLease(1, (1, 1), 10)]
    scheduler.check_integrity()


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("params", [{}, "ticket"])
def test_a_request_that_was_to_stay_hands_off_what_it_has(params: Any, shows: bool) -> None:
    scheduler = PullScheduler(
        engine_id="p",
        host="h",
        port=lambda: 5000,
        geometry=geometry(),
        produces=False,
        consumes=True,
        shows_blocks=shows,
    )
    arrived = request(1, 10, ticket() if params else {})
    scheduler.on_new_request(arrived)
    scheduler.update_state_after_alloc(arrived, table(1, 2, 3), 0)
    scheduler.build_connector_meta()
    ended = KvRequest((1, 1), np.arange(13, dtype=np.int32), (), arrived.params, 12)
    keeps, handed = scheduler.request_finished(ended, table(1, 2, 3, 4), hands_off=True)
    assert keeps
    parsed = parse_params(handed or {})
    assert isinstance(parsed, Ticket)
    assert (parsed.num_tokens, parsed.table()[0].tolist()) == (12, [1, 2, 3])
    opened, ready, completed = orders(scheduler)
    assert (opened, completed) == (OpenLease(1, (1, 1)), CompleteLease(1, (1, 1), 12))
    assert isinstance(ready, ReadyLease)
    assert (ready.lease_id, ready.num_tokens, ready.block_ids.shape) == (1, 12, (2, 3 if shows else 0))
    scheduler.still_wanted((1, 1))
    assert orders(scheduler) == [ProlongLease((1, 1))]
    scheduler.abandoned((1, 1))
    assert orders(scheduler) == [AbandonLease((1, 1))]
    scheduler.check_integrity()


def test_one_without_blocks_hands_nothing_off() -> None:
    scheduler = half()
    scheduler.on_new_request(request(1, 10, {}))
    assert scheduler.request_finished(request(1, 10, {}), NO_BLOCKS, hands_off=True) == (False, None)
    assert not scheduler.has_pending_work()


def test_other_ends_keep_nothing() -> None:
    scheduler = half()
    scheduler.on_new_request(outgoing())
    assert scheduler.request_finished(outgoing(), NO_BLOCKS, hands_off=False) == (False, None)
    assert not scheduler.has_pending_work()
    scheduler.on_new_request(outgoing(2))
    scheduler.update_state_after_alloc(outgoing(2), table(1), 0)
    assert scheduler.request_finished(outgoing(2), table(1), hands_off=False) == (False, None)
    assert isinstance(orders(scheduler)[-1], VoidLease)


@pytest.mark.parametrize("lack", ["port", "tokens", "blocks"])
def test_nothing_is_handed_off_that_nobody_could_fetch(lack: str) -> None:
    scheduler = half(port=None if lack == "port" else 5000)
    scheduler.on_new_request(outgoing())
    scheduler.update_state_after_alloc(outgoing(), table(1, 2, 3), 0)
    if lack != "tokens":
        scheduler.request_computed((1, 1), 10, NO_BLOCKS)
    blocks = table(1, 2) if lack == "blocks" else table(1, 2, 3)
    assert scheduler.request_finished(outgoing(), blocks, hands_off=True) == (False, None)
    assert isinstance(orders(scheduler)[-1], VoidLease)


def test_a_request_without_params_is_none_of_its_business() -> None:
    scheduler = half()
    plain = request(1, 10, {})
    scheduler.on_new_request(plain)
    scheduler.update_state_after_alloc(plain, table(1, 2, 3), 0)
    scheduler.request_computed((1, 1), 10, NO_BLOCKS)
    scheduler.request_preempted((1, 1))
    assert scheduler.request_finished(plain, table(1, 2, 3), hands_off=True) == (False, None)
    assert not scheduler.has_pending_work()


def test_preemption_gives_a_new_lease() -> None:
    scheduler = half()
    scheduler.on_new_request(outgoing())
    scheduler.update_state_after_alloc(outgoing(), table(1, 2, 3), 0)
    scheduler.request_computed((1, 1), 8, NO_BLOCKS)
    orders(scheduler)
    scheduler.request_preempted((1, 1))
    assert orders(scheduler) == [VoidLease(1, "its request was preempted")]
    scheduler.request_computed((1, 1), 9, NO_BLOCKS)  # late
    scheduler.update_state_after_alloc(outgoing(), table(4, 5, 6), 0)
    scheduler.request_computed((1, 1), 4, NO_BLOCKS)
    assert orders(scheduler) == [OpenLease(2, (1, 1)), AdvanceLease(2, 4)]
    scheduler.request_computed((1, 1), 10, NO_BLOCKS)
    _, params = scheduler.request_finished(outgoing(), table(4, 5, 6), hands_off=True)
    assert params is not None
    assert params["remote_lease_id"] == 2


# ---- partial tickets ----


def test_full_blocks_of_a_prompt_are_told_as_they_are_computed() -> None:
    scheduler = half()
    scheduler.on_new_request(outgoing())
    scheduler.update_state_after_alloc(outgoing(), table(1, 2, 3), 0)
    scheduler.request_computed((1, 1), 3, NO_BLOCKS)
    assert scheduler.partial_ticket((1, 1), 3, table(1, 2, 3)) is None
    scheduler.request_computed((1, 1), 6, NO_BLOCKS)
    told = scheduler.partial_ticket((1, 1), 6, table(1, 2, 3))
    parsed = parse_params(told or {})
    assert isinstance(parsed, Ticket)
    assert parsed.is_partial
    assert (parsed.num_tokens, parsed.remote_lease_id, parsed.table().tolist()) == (4, 1, [[1], [101]])
    scheduler.request_computed((1, 1), 7, NO_BLOCKS)
    assert scheduler.partial_ticket((1, 1), 7, table(1, 2, 3)) is None  # nothing new
    scheduler.request_computed((1, 1), 9, NO_BLOCKS)
    told = scheduler.partial_ticket((1, 1), 9, table(1, 2, 3))
    assert (told or {})["num_tokens"] == 8
    scheduler.request_computed((1, 1), 10, NO_BLOCKS)
    _, whole = scheduler.request_finished(outgoing(), table(1, 2, 3), hands_off=True)
    assert whole is not None
    assert (whole["num_tokens"], whole["remote_lease_id"], whole["is_partial"]) == (10, 1, False)


def test_after_a_preemption_partial_tickets_are_of_another_lease() -> None:
    scheduler = half()
    scheduler.on_new_request(outgoing())
    scheduler.update_state_after_alloc(outgoing(), table(1, 2, 3), 0)
    scheduler.request_computed((1, 1), 8, NO_BLOCKS)
    assert scheduler.partial_ticket((1, 1), 8, table(1, 2, 3)) is not None
    scheduler.request_preempted((1, 1))
    assert scheduler.partial_ticket((1, 1), 8, table(1, 2, 3)) is None
    scheduler.update_state_after_alloc(outgoing(), table(4, 5, 6), 0)
    scheduler.request_computed((1, 1), 4, NO_BLOCKS)
    told = scheduler.partial_ticket((1, 1), 4, table(4, 5, 6)) or {}
    assert (told["remote_lease_id"], told["remote_block_ids"]) == (2, [4, 104])


def test_who_does_not_hand_off_or_cannot_be_reached_tells_nothing() -> None:
    for scheduler, asks in ((half(), request(1, 10, {})), (half(port=None), outgoing())):
        scheduler.on_new_request(asks)
        scheduler.update_state_after_alloc(asks, table(1, 2, 3), 0)
        scheduler.request_computed((1, 1), 8, NO_BLOCKS)
        assert scheduler.partial_ticket((1, 1), 8, table(1, 2, 3)) is None


def partial(num_tokens: int = 8) -> dict[str, Any]:
    return ticket(num_tokens) | {"is_partial": True}


def test_a_partial_ticket_is_used_and_neither_held_nor_given_back() -> None:
    scheduler = half()
    ahead, unused = request(-1, 8, partial()), request(-2, 8, partial())
    scheduler.on_new_request(ahead)
    scheduler.on_new_request(unused)
    assert not scheduler.has_pending_work()
    scheduler.request_finished(unused, NO_BLOCKS, hands_off=False)
    assert not scheduler.has_pending_work()
    assert scheduler.get_num_new_matched_tokens(ahead, 4) == ExternalMatch(4, True)
    scheduler.update_state_after_alloc(ahead, table(11, 12), 4)
    held, load = orders(scheduler)
    assert isinstance(held, HoldTicket)
    assert isinstance(load, LoadBlocks)
    assert (load.remote_blocks.tolist(), load.local_blocks.tolist()) == ([2, 102], [12, 112])
    scheduler.update_state_after_alloc(ahead, table(11, 12), 0)
    scheduler.request_finished(ahead, table(11, 12), hands_off=False)
    assert not scheduler.has_pending_work()
    scheduler.check_integrity()


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_lease_is_read_by_one_load_at_a_time(ends: str) -> None:
    scheduler = half()
    first, second, whole = request(-1, 4, partial(4)), request(-2, 8, partial()), request(5, 11, ticket())
    scheduler.on_new_request(first)
    scheduler.on_new_request(second)
    assert scheduler.get_num_new_matched_tokens(first, 0) == ExternalMatch(4, True)
    scheduler.update_state_after_alloc(first, table(11), 4)
    assert scheduler.get_num_new_matched_tokens(second, 0) is None
    scheduler.on_new_request(whole)
    assert scheduler.may_load_async(whole)
    assert scheduler.get_num_new_matched_tokens(whole, 0) is None
    another = request(6, 11, ticket() | {"remote_lease_id": 77})
    scheduler.on_new_request(another)
    assert scheduler.get_num_new_matched_tokens(another, 0) == ExternalMatch(10, True)
    if ends == "well":
        scheduler.update_state_after_alloc(first, table(11), 0)
    scheduler.request_finished(first, table(11) if ends == "well" else NO_BLOCKS, hands_off=False)
    scheduler.check_integrity()
    assert scheduler.get_num_new_matched_tokens(whole, 4) == ExternalMatch(6, True)
    # Its request is here: nothing is left to be read ahead.
    assert scheduler.get_num_new_matched_tokens(second, 4) == ExternalMatch(0, False)


# ---- consuming ----


def test_what_is_not_here_is_loaded_once() -> None:
    scheduler = half()
    asks = request(5, 11, ticket())
    scheduler.on_new_request(asks)
    parsed = parse_params(asks.params)
    assert orders(scheduler) == [HoldTicket((1, 5), parsed)]  # type: ignore[arg-type]
    assert scheduler.may_load_async(asks)
    assert scheduler.get_num_new_matched_tokens(asks, 0) == ExternalMatch(10, True)
    assert scheduler.get_num_new_matched_tokens(asks, 4) == ExternalMatch(6, True)
    scheduler.update_state_after_alloc(asks, table(11, 12, 13), 6)
    (load,) = orders(scheduler)
    assert isinstance(load, LoadBlocks)
    assert load.num_local_tokens == 4
    assert load.remote_blocks.tolist() == [2, 102, 3, 103]
    assert load.local_blocks.tolist() == [12, 112, 13, 113]
    assert load.complete_at.tolist() == [8, 8, 10, 10]
    assert not scheduler.may_load_async(asks)
    assert scheduler.get_num_new_matched_tokens(asks, 0) == ExternalMatch(0, False)
    scheduler.update_state_after_alloc(asks, table(11, 12, 13), 0)
    scheduler.request_preempted((1, 5))
    scheduler.update_state_after_alloc(asks, table(21, 22, 23), 0)
    assert scheduler.request_finished(asks, table(21, 22, 23), hands_off=False) == (False, None)
    assert not scheduler.has_pending_work()


def test_null_blocks_are_left_out_on_either_side() -> None:
    scheduler = half()
    asks = request(5, 11, ticket(blocks=table(0, 2, 3)))
    scheduler.on_new_request(asks)
    orders(scheduler)
    scheduler.get_num_new_matched_tokens(asks, 0)
    scheduler.update_state_after_alloc(asks, table(11, 0, 13), 10)
    (load,) = orders(scheduler)
    assert isinstance(load, LoadBlocks)
    assert load.remote_blocks.tolist() == [3, 103]
    assert load.local_blocks.tolist() == [13, 113]


@pytest.mark.parametrize("num_local", [10, 12, 3])
def test_a_lease_that_is_not_needed_is_given_back(num_local: int) -> None:
    """The local hit covers all, or ends within a block that is this rank's own."""
    scheduler = half()
    asks = request(5, 13, ticket())
    scheduler.on_new_request(asks)
    assert scheduler.get_num_new_matched_tokens(asks, num_local) == ExternalMatch(0, False)
    scheduler.update_state_after_alloc(asks, table(11, 12, 13), 0)
    assert orders(scheduler)[-1] == DropTicket((1, 5))
    assert not scheduler.may_load_async(asks)


@pytest.mark.parametrize("stage", ["queued", "loading"])
def test_a_request_that_ends_gives_its_lease_back(stage: str) -> None:
    scheduler = half()
    asks = request(5, 11, ticket())
    scheduler.on_new_request(asks)
    if stage == "loading":
        scheduler.get_num_new_matched_tokens(asks, 0)
        scheduler.update_state_after_alloc(asks, table(11, 12, 13), 10)
    assert scheduler.request_finished(asks, NO_BLOCKS, hands_off=False) == (False, None)
    assert orders(scheduler)[-1] == DropTicket((1, 5))


def test_other_geometries_are_left_to_the_worker_half() -> None:
    """It hears from the holder what differs, and says so."""
    scheduler = half(block_size=8)
    asks = request(5, 11, ticket())
    scheduler.on_new_request(asks)
    scheduler.get_num_new_matched_tokens(asks, 0)
    scheduler.update_state_after_alloc(asks, table(11, 12), 10)
    load = orders(scheduler)[-1]
    assert isinstance(load, LoadBlocks)
    assert not len(load.remote_blocks)
    assert load.misfit == "the ticket is for another geometry than this rank's"


@pytest.mark.parametrize(
    "changes",
    [{"num_groups": 3, "remote_block_ids": list(range(1, 10))}, {"block_size": 2, "remote_block_ids": [1] * 10}],
)
def test_a_ticket_that_contradicts_its_geometry_fails_its_load(changes: dict[str, Any]) -> None:
    scheduler = half()
    asks = request(5, 11, ticket() | changes)
    scheduler.on_new_request(asks)
    scheduler.get_num_new_matched_tokens(asks, 0)
    scheduler.update_state_after_alloc(asks, table(11, 12, 13), 10)
    load = orders(scheduler)[-1]
    assert isinstance(load, LoadBlocks)
    assert not len(load.remote_blocks)
    assert "and 3 of 2 of 4 are to be filled" in load.misfit


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"do_remote_prefill": True}, {}, "missing required field"),
        ({"x": 1}, {}, "unknown field"),
        ({"do_remote_decode": True}, {"produces": False}, "kv_consumer"),
        (ticket(), {"consumes": False}, "kv_producer"),
        (ticket(num_tokens=12), {}, "num_tokens is 12, and the request has 11"),
    ],
)
def test_params_that_say_nothing_usable_are_told_and_nothing_is_loaded(
    params: dict[str, Any], options: dict[str, bool], message: str
) -> None:
    scheduler = half(**options)
    asks = request(5, 11, params)
    scheduler.on_new_request(asks)
    (order,) = orders(scheduler)
    assert isinstance(order, RejectParams)
    assert message in order.message
    assert not scheduler.may_load_async(asks)
    assert scheduler.get_num_new_matched_tokens(asks, 0) == ExternalMatch(0, False)
    scheduler.update_state_after_alloc(asks, table(11, 12, 13), 0)
    assert scheduler.request_finished(asks, table(11, 12, 13), hands_off=True) == (False, None)
    assert not scheduler.has_pending_work()


# ---- together with the leases ----

NUM_COLUMNS = 3
NUM_TOKENS = NUM_COLUMNS * BLOCK_SIZE
LEASE_S = 10.0


WEIGHTS = {
    "admit": 2, "compute": 1, "step": 6, "failed step": 1, "preempt": 4, "hand off": 2, "end": 1, "hear": 1, "wait": 1,
    "read": 4, "copy": 1, "beat": 1, "confirm": 5, "release": 1, "read ahead": 3, "copy ahead": 1, "confirm ahead": 4,
}  # fmt: skip
ACTIONS = [action for action, weight in WEIGHTS.items() for _ in range(weight)]


class PrefillRank(RuleBasedStateMachine):
    """A prefill rank whose blocks are reused at once, and readers that copy block by block, at any time.

    The orders reach the lease table through a queue, as late as can be; only that void leases cannot be confirmed is
    known when the step begins (`PullWorker.handle_preemptions`). Whatever a reader has been confirmed must be right.
    """

    @initialize()
    def start(self) -> None:
        self.scheduler = half()
        self.leases = LeaseTable(LEASE_S)
        self.now = 0.0
        self.free = list(range(1, 40))
        self.content: dict[int, object] = {}
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.kept: dict[int, list[int]] = {}
        self.lease_of: dict[int, int] = {}
        self.refused: set[int] = set()
        self.queue: collections.deque[Callable[[], None]] = collections.deque()
        self.writes: list[tuple[int, object]] = []
        self.num_requests = self.num_readers = self.num_kept = self.num_sent = 0
        self.readers: list[list[Any]] = []
        self.tickets: dict[int, Ticket] = {}
        """The latest partial one of each request, from the plan of its step on."""
        self.ahead: list[tuple[int, Ticket, dict[int, object]]] = []
        self.num_read_ahead = 0

    # One rule, since hypothesis leaves rules out at random, and what matters here takes most of them.

    @rule(action=st.sampled_from(ACTIONS), which=st.integers(0, 99), some=st.booleans())
    def act_once(self, action: str, which: int, some: bool) -> None:
        """`which` of those that could; `some`: the less usual way."""
        candidates: list[Any] = []
        match action:
            case "admit" if len(self.free) >= NUM_COLUMNS:
                self.admit(1 if some else NUM_COLUMNS)
            case "step" | "failed step":
                self.step(was_computed=action == "step", is_heard=some)
            case "hear" if self.queue:
                self.queue.popleft()()
            case "wait":
                self.wait(11.0 if some else 1.0)
            case "compute" | "preempt" | "hand off" | "end":
                candidates = sorted(self.blocks)
            case "read":
                candidates = sorted(self.lease_of)
            case "copy" | "beat" | "confirm" | "release":
                candidates = self.readers
            case "read ahead":
                candidates = sorted(self.tickets)
            case "copy ahead" | "confirm ahead":
                candidates = self.ahead
        if not candidates:
            return
        one = candidates[-1 - which % len(candidates)]
        match action:
            case "compute":
                self.compute(one, 1 if some else NUM_COLUMNS)
            case "preempt":
                self.preempt(one)
            case "hand off" | "end":
                self.finish(one, action == "hand off")
            case "read":
                self.read(one)
            case "copy":
                self.copy(one)
            case "beat":
                self.leases.heartbeat(one[2], one[0], self.now)
            case "confirm":
                self.confirm(one)
            case "release":
                self.release(one)
            case "read ahead":
                self.ahead.append((one, self.tickets[one], {}))
            case "copy ahead":
                self.copy_ahead(one)
            case "confirm ahead":
                self.confirm_ahead(one)

    # the request's side

    def take(self, number: int) -> None:
        self.blocks[number] = [self.free.pop(0) for _ in range(NUM_COLUMNS)]
        self.computed[number] = 0
        self.scheduler.update_state_after_alloc(
            outgoing(number, NUM_TOKENS), np.array([self.blocks[number]], np.int32), 0
        )

    def give_up(self, blocks: list[int]) -> None:
        """They are first in line, and written by the very next step."""
        self.free[:0] = blocks
        self.writes += [(block, "another's") for block in blocks]

    def admit(self, num_columns: int) -> None:
        self.num_requests += 1
        self.scheduler.on_new_request(outgoing(self.num_requests, NUM_TOKENS))
        self.take(self.num_requests)
        if num_columns:
            self.compute(self.num_requests, num_columns)

    def compute(self, number: int, num_columns: int) -> None:
        first = self.computed[number]
        self.computed[number] = last = min(first + num_columns, NUM_COLUMNS)
        self.scheduler.request_computed((1, number), last * BLOCK_SIZE, np.array([self.blocks[number]], np.int32))
        self.writes += [(self.blocks[number][column], (number, column)) for column in range(first, last)]
        if last > first:
            told = self.scheduler.partial_ticket(
                (1, number), last * BLOCK_SIZE, np.array([self.blocks[number]], np.int32)
            )
            parsed = parse_params(told or {})
            if isinstance(parsed, Ticket):
                self.tickets[number] = parsed

    def preempt(self, number: int) -> None:
        self.scheduler.request_preempted((1, number))
        self.give_up(self.blocks.pop(number))
        self.take(number)

    def finish(self, number: int, hands_off: bool) -> None:
        blocks = self.blocks.pop(number)
        hands_off &= self.computed[number] == NUM_COLUMNS
        keeps, _ = self.scheduler.request_finished(
            outgoing(number, NUM_TOKENS), np.array([blocks], np.int32), hands_off=hands_off
        )
        assert keeps == hands_off
        if keeps:
            self.kept[number] = blocks
            self.num_kept += 1
        else:
            self.give_up(blocks)

    def step(self, was_computed: bool, is_heard: bool) -> None:
        """A plan: void leases are refused, then its blocks are written, and at the end some are complete."""
        metadata = self.scheduler.build_connector_meta() or ()
        self.refused |= {order.lease_id for order in metadata if isinstance(order, VoidLease)}
        self.queue.append(lambda: self.obey(metadata))
        for block, content in self.writes:
            self.content[block] = content if was_computed else "half written"
        self.writes = []
        self.queue.append(lambda: self.advance(metadata, was_computed))
        while is_heard and self.queue:
            self.queue.popleft()()

    def obey(self, metadata: tuple[Order, ...]) -> None:
        for order in metadata:
            match order:
                case OpenLease(lease_id, key):
                    self.leases.open(lease_id, key)
                    self.lease_of[key[1]] = lease_id
                case VoidLease(lease_id, why):
                    self.act(self.leases.void(lease_id, why))
                    self.refused.discard(lease_id)
                case CompleteLease(lease_id, key, num_tokens):
                    self.act(self.leases.complete(lease_id, key, num_tokens, self.now))

    def advance(self, metadata: tuple[Order, ...], was_computed: bool) -> None:
        for order in metadata:
            if isinstance(order, AdvanceLease):
                if was_computed:
                    self.act(self.leases.advance(order.lease_id, order.num_tokens))
                else:
                    self.act(self.leases.void(order.lease_id, "not computed"))

    def act(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, SendFinished):
                self.num_sent += 1
                self.give_up(self.kept.pop(action.key[1]))

    def wait(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        self.act(self.leases.expire(self.now))

    # the readers' side: [name, request, lease, blocks, copies]

    def read(self, number: int) -> None:
        """Somebody begins to read the latest lease of a request that the table has heard of."""
        blocks = self.blocks.get(number) or self.kept.get(number) or []
        self.num_readers += 1
        name, lease_id = f"reader {self.num_readers}", self.lease_of[number]
        if not isinstance(self.leases.acquire(lease_id, name), str):
            self.readers.append([name, number, lease_id, list(blocks), {}])

    def copy(self, reader: list[Any]) -> None:
        """It may not have heard yet that the lease is gone."""
        name, _, lease_id, blocks, copies = reader
        ready = self.leases.acquire(lease_id, name)
        if blocks and not isinstance(ready, str):
            for column in range(len(copies), ready // BLOCK_SIZE):
                copies[column] = self.content.get(blocks[column])

    def confirm(self, reader: list[Any]) -> None:
        """At once, or some time after it has copied the last block."""
        name, number, lease_id, blocks, copies = reader
        self.copy(reader)
        if len(copies) < NUM_COLUMNS or lease_id in self.refused:
            return
        self.readers.remove(reader)
        denial, actions = self.leases.confirm(lease_id, name, NUM_TOKENS)
        if not denial:
            assert blocks
            assert copies == {column: (number, column) for column in range(NUM_COLUMNS)}
        self.act(actions)

    def copy_ahead(self, reader: tuple[int, Ticket, dict[int, object]]) -> None:
        _, ticket, copies = reader
        ready = self.leases.num_ready(ticket.remote_lease_id)
        if not isinstance(ready, str):
            for column in range(len(copies), min(ready, ticket.num_tokens) // BLOCK_SIZE):
                copies[column] = self.content.get(ticket.remote_block_ids[column])

    def confirm_ahead(self, reader: tuple[int, Ticket, dict[int, object]]) -> None:
        number, ticket, copies = reader
        self.copy_ahead(reader)
        if len(copies) < ticket.num_columns or ticket.remote_lease_id in self.refused:
            return
        self.ahead.remove(reader)
        if not self.leases.confirm_ahead(ticket.remote_lease_id, ticket.num_tokens):
            self.num_read_ahead += 1
            assert copies == {column: (number, column) for column in range(ticket.num_columns)}

    def release(self, reader: list[Any]) -> None:
        self.readers.remove(reader)
        self.act(self.leases.release(reader[2], reader[0]))

    @invariant()
    def nothing_is_lost(self) -> None:
        self.leases.check_integrity()
        self.scheduler.check_integrity()
        held = [block for blocks in [*self.blocks.values(), *self.kept.values()] for block in blocks]
        assert sorted(held + self.free) == list(range(1, 40))
        assert self.num_kept == self.num_sent + len(self.kept)

    def teardown(self) -> None:
        self.step(was_computed=True, is_heard=True)
        self.wait(1e6)
        assert not self.kept
        assert self.num_kept == self.num_sent
        self.act(self.leases.close())
        assert not len(self.leases)


TestPrefillRank = PrefillRank.TestCase
TestPrefillRank.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("first_seed", range(0, 1000, 250))
def test_random_days(first_seed: int) -> None:
    """The same machine without hypothesis, which takes a hundred times as long for a day: what is rare needs many."""
    num_read_ahead = 0
    for seed in range(first_seed, first_seed + 250):
        rng, rank = random.Random(seed), PrefillRank()
        rank.start()
        try:
            for _ in range(60):
                rank.act_once(rng.choice(ACTIONS), rng.randrange(100), rng.random() < 0.5)
                rank.nothing_is_lost()
            rank.teardown()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_read_ahead += rank.num_read_ahead
    assert num_read_ahead > 25
