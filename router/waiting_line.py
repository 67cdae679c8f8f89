"""The order in which requests that wait for room on a rank are given it; pure.

Moves first: what a rank had before and lost, or handed off, has waited its turn. Then by priority, lower first. Then
**start-time fair queueing** over tenants (Goyal, Vin and Cheng, 1996), and within a tenant by arrival.

A tenant has a tag, the virtual time at which its next request may begin. The request whose tenant has the least tag
goes first (of equal ones who came earlier); virtual time is then that tag, and the tenant's tag grows by the request's
tokens / weight. The tag of a tenant that begins to wait is virtual time at least, so that idling gains no credit.

**Bound**: over any interval in which two tenants wait all the time, what they are given, in tokens / weight, differs by
at most the largest request of the one / its weight + the largest of the other / its weight. It holds per priority, and
for requests that any rank of the line may take. With one tenant the order is that of arrival.

What is cancelled is not charged, and its tenant's others come forward. All takes O(log tenants).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heapify, heappop, heappush, heapreplace, nlargest
from itertools import takewhile
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_Level = tuple[bool, int]

MAX_IDLE_TENANTS = 1024
"""Of those that do not wait, so many are remembered: the ones that are furthest ahead of virtual time."""
MAX_PASSED = 16
"""So many whom a rank's room does not suit it looks past at most."""
MAX_PASSED_OF_TENANT = 4
"""And so many of one tenant, whose others are likely alike; then it looks at other tenants only."""


class Answer(Enum):
    """To an offer of room."""

    TAKEN = auto()
    UNSUITED = auto()
    """Not by this one; nothing has changed."""
    LATER = auto()
    """The same, and what it waits for is nothing that others could take from it."""
    NO_ROOM = auto()
    """There is none; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What decides when somebody's turn is."""

    tenant: str = ""
    weight: float = 1.0
    num_tokens: int = 1
    """What it is charged for: tokens to compute, and an allowance for those to generate."""
    priority: int = 0
    is_move: bool = False

    @property
    def level(self) -> _Level:
        return (False, 0) if self.is_move else (True, self.priority)

    @property
    def account(self) -> str:
        """Whom it is charged to: moves are nobody's, so that they go in order of arrival."""
        return "" if self.is_move else self.tenant


@dataclass(slots=True, eq=False)
class Waiter(Generic[_Item]):
    """One who waits."""

    item: _Item
    turn: Turn
    pin: str | None
    """Only this rank will do; None: any rank of the line."""
    serial: int
    is_waiting: bool = False
    num_bypasses: int = 0
    """How often a later one was given room that this one could not use."""


@dataclass(slots=True, eq=False)
class _Tenant(Generic[_Item]):
    name: str
    tag: float
    queues: dict[str | None, OrderedDict[int, Waiter[_Item]]] = field(default_factory=dict)
    """By pin, those that are not empty; by serial."""
    listed: set[str | None] = field(default_factory=set)
    """Pins in whose heap it has its entry."""


class _FairQueue(Generic[_Item]):
    """Those of one level."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._virtual_time = 0.0
        self._tenants: dict[str, _Tenant[_Item]] = {}
        self._heaps: dict[str | None, list[tuple[float, int, _Tenant[_Item]]]] = {}
        """By pin: tenants by tag, or by one that they had before."""
        self._hidden: dict[str, dict[str | None, OrderedDict[int, Waiter[_Item]]]] = {}
        self._tidy_at = 2 * MAX_IDLE_TENANTS

    def push(self, waiter: Waiter[_Item], *, at_front: bool = False) -> None:
        """`at_front`: it was offered room that did not do for it."""
        name, pin = waiter.turn.account, waiter.pin
        tenant = self._tenants.get(name)
        if tenant is None:
            self._tidy()
            tenant = self._tenants[name] = _Tenant(name, self._virtual_time)
        elif not tenant.queues and not at_front:
            tenant.tag = max(tenant.tag, self._virtual_time)
        queue = tenant.queues.setdefault(pin, OrderedDict())
        queue[waiter.serial] = waiter
        if at_front:
            queue.move_to_end(waiter.serial, last=False)
        self.num_waiting += 1
        self._list(tenant, pin, waiter.serial)

    def remove(self, waiter: Waiter[_Item]) -> None:
        tenant = self._tenants[waiter.turn.account]
        queue = tenant.queues[waiter.pin]
        del queue[waiter.serial]
        self.num_waiting -= 1
        if not queue:
            del tenant.queues[waiter.pin]

    def charge(self, waiter: Waiter[_Item]) -> None:
        """It has been given its room, and removed."""
        tenant, turn = self._tenants[waiter.turn.account], waiter.turn
        self._virtual_time = max(self._virtual_time, tenant.tag)
        tenant.tag += turn.num_tokens / turn.weight

    def first(self, pins: Sequence[str | None]) -> Waiter[_Item] | None:
        """The next one with one of these pins."""
        least: tuple[float, int] | None = None
        found: Waiter[_Item] | None = None
        for pin in pins:
            waiter = self._first(pin)
            if waiter is not None:
                key = (self._tenants[waiter.turn.account].tag, waiter.serial)
                if least is None or key < least:
                    least, found = key, waiter
        return found

    def has(self, pin: str | None) -> bool:
        return self._first(pin) is not None

    def hide(self, name: str) -> None:
        """Look at none of this account's until `show`; it is not tidied up meanwhile."""
        tenant = self._tenants[name]
        self._hidden[name], tenant.queues = tenant.queues, {}

    def show(self) -> None:
        """All that were hidden."""
        for name, queues in self._hidden.items():
            tenant = self._tenants[name]
            tenant.queues = queues
            for pin, queue in queues.items():
                self._list(tenant, pin, next(iter(queue)))
        self._hidden = {}

    def __iter__(self) -> Iterator[Waiter[_Item]]:
        """In the order in which they would be served if nobody came; takes O(n log n)."""
        tags: list[tuple[float, int, Waiter[_Item]]] = []
        for tenant in self._tenants.values():
            tag = tenant.tag
            waiters = [waiter for queue in tenant.queues.values() for waiter in queue.values()]
            for waiter in sorted(waiters, key=lambda waiter: waiter.serial):
                tags.append((tag, waiter.serial, waiter))
                tag += waiter.turn.num_tokens / waiter.turn.weight
        return (waiter for _, _, waiter in sorted(tags))

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books agree."""
        waiting = 0
        for tenant in self._tenants.values():
            assert tenant.queues.keys() <= tenant.listed, f"tenant {tenant.name!r} is in no heap"
            assert all(tenant.queues.values()), f"tenant {tenant.name!r} keeps an empty queue"
            waiting += sum(map(len, tenant.queues.values()))
        assert waiting == self.num_waiting, f"{waiting} wait, {self.num_waiting} are counted"
        assert sum(map(len, self._heaps.values())) == sum(len(tenant.listed) for tenant in self._tenants.values())

    def _list(self, tenant: _Tenant[_Item], pin: str | None, serial: int) -> None:
        if pin not in tenant.listed:
            tenant.listed.add(pin)
            heappush(self._heaps.setdefault(pin, []), (tenant.tag, serial, tenant))

    def _first(self, pin: str | None) -> Waiter[_Item] | None:
        heap = self._heaps.get(pin)
        while heap:
            tag, serial, tenant = heap[0]
            queue = tenant.queues.get(pin)
            if queue is None:
                heappop(heap)
                tenant.listed.discard(pin)
                continue
            waiter = next(iter(queue.values()))
            if (tag, serial) == (tenant.tag, waiter.serial):
                return waiter
            heapreplace(heap, (tenant.tag, waiter.serial, tenant))
        return None

    def _tidy(self) -> None:
        """Forget tenants that do not wait, once there may be many: first those that are least ahead of the others."""
        if len(self._tenants) < self._tidy_at:
            return
        idle = [tenant for tenant in self._tenants.values() if not tenant.queues and tenant.tag > self._virtual_time]
        kept = [tenant for tenant in self._tenants.values() if tenant.queues]
        kept += nlargest(MAX_IDLE_TENANTS, idle, key=lambda tenant: tenant.tag)
        self._tenants = {tenant.name: tenant for tenant in kept}
        self._heaps = {}
        for tenant in kept:
            tenant.listed = set(tenant.queues)
            for pin, queue in tenant.queues.items():
                self._heaps.setdefault(pin, []).append((tenant.tag, next(iter(queue)), tenant))
        for heap in self._heaps.values():
            heapify(heap)
        self._tidy_at = 2 * max(MAX_IDLE_TENANTS, len(kept))


class WaitingLine(Generic[_Item]):
    """Those who wait for ranks that all may take them, save for pins.

    Mutable state: `_queues` by level, those that are not empty, and `_levels`, which says their order.
    """

    def __init__(self) -> None:
        self._queues: dict[_Level, _FairQueue[_Item]] = {}
        self._levels: list[_Level] = []
        self._next_serial = 0
        self.num_tokens = 0
        """What all that wait will be charged."""

    def __len__(self) -> int:
        return sum(queue.num_waiting for queue in self._queues.values())

    def __iter__(self) -> Iterator[Waiter[_Item]]:
        """In the order in which they would be served if nobody came; takes O(n log n)."""
        for level in self._levels:
            yield from self._queues[level]

    def push(self, item: _Item, turn: Turn, pin: str | None = None) -> Waiter[_Item]:
        waiter = Waiter(item, turn, pin, self._next_serial)
        self._next_serial += 1
        self._insert(waiter)
        return waiter

    def cancel(self, waiter: Waiter[_Item]) -> None:
        """It does not wait any more. Ignored if it has not been waiting."""
        if waiter.is_waiting:
            self._remove(waiter)
            self._drop_empty(waiter.turn.level)

    def must_wait(self, turn: Turn, pins: Sequence[str | None]) -> bool:
        """Whether somebody with one of these pins waits already who goes before one that comes now."""
        before = takewhile(lambda level: level <= turn.level, self._levels)
        return any(self._queues[level].has(pin) for level in before for pin in pins)

    def serve(self, pins: Sequence[str | None], offer: Callable[[Waiter[_Item]], Answer], max_bypasses: int) -> int:
        """Offer a rank's room to those with one of these pins, in order, until there is none; how many took of it.

        One whom it does not suit may be passed `max_bypasses` times by later ones; then nobody does. One for whom it is
        only too early may be passed without bound.
        """
        passed: list[Waiter[_Item]] = []
        harmed: Waiter[_Item] | None = None
        num_passed: Counter[tuple[_Level, str]] = Counter()
        levels: set[_Level] = set()
        num_taken = 0
        while (waiter := self._first(pins)) is not None:
            level = waiter.turn.level
            levels.add(level)
            self._remove(waiter)
            answer = offer(waiter)
            if answer is Answer.TAKEN:
                self._queues[level].charge(waiter)
                num_taken += 1
                if harmed is not None:
                    harmed.num_bypasses += 1
            else:
                passed.append(waiter)
                if harmed is None and answer is Answer.UNSUITED:
                    harmed = waiter
                account = (level, waiter.turn.account)
                num_passed[account] += 1
                if num_passed[account] == MAX_PASSED_OF_TENANT:
                    self._queues[level].hide(waiter.turn.account)
            if answer is Answer.NO_ROOM or len(passed) > MAX_PASSED:
                break
            if harmed is not None and harmed.num_bypasses >= max_bypasses:
                break
        for level in levels:
            self._queues[level].show()
        for waiter in reversed(passed):
            self._insert(waiter, at_front=True)
        for level in levels:
            self._drop_empty(level)
        return num_taken

    def take_all(self) -> list[Waiter[_Item]]:
        """By arrival; nobody waits here any more."""
        waiters = sorted(self, key=lambda waiter: waiter.serial)
        self._queues, self._levels, self.num_tokens = {}, [], 0
        for waiter in waiters:
            waiter.is_waiting = False
        return waiters

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books agree."""
        assert self._levels == sorted(self._queues), "levels and queues differ"
        for queue in self._queues.values():
            assert queue.num_waiting > 0, "an empty level is kept"
            queue.check_integrity()
        waiters = list(self)
        assert all(waiter.is_waiting for waiter in waiters), "one that does not wait is in line"
        assert sum(waiter.turn.num_tokens for waiter in waiters) == self.num_tokens, "tokens in line are miscounted"

    def _first(self, pins: Sequence[str | None]) -> Waiter[_Item] | None:
        for level in self._levels:
            waiter = self._queues[level].first(pins)
            if waiter is not None:
                return waiter
        return None

    def _insert(self, waiter: Waiter[_Item], *, at_front: bool = False) -> None:
        level = waiter.turn.level
        queue = self._queues.get(level)
        if queue is None:
            queue = self._queues[level] = _FairQueue()
            insort(self._levels, level)
        queue.push(waiter, at_front=at_front)
        waiter.is_waiting = True
        self.num_tokens += waiter.turn.num_tokens

    def _remove(self, waiter: Waiter[_Item]) -> None:
        self._queues[waiter.turn.level].remove(waiter)
        waiter.is_waiting = False
        self.num_tokens -= waiter.turn.num_tokens

    def _drop_empty(self, level: _Level) -> None:
        """With the last one that waits go all accounts: what comes finds nobody to be fair to."""
        if not self._queues[level].num_waiting:
            del self._queues[level]
            self._levels.remove(level)
