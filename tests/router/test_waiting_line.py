from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.waiting_line import MAX_IDLE_TENANTS, MAX_PASSED, MAX_PASSED_OF_TENANT, Answer, Turn, Waiter, WaitingLine

ANY = (None,)


def take(line: WaitingLine[str], count: int = 1, pins: tuple[str | None, ...] = ANY) -> list[str]:
    """So many get room that does for everybody."""
    taken = serve(line, count, pins=pins)
    line.check_integrity()
    return taken


def serve(
    line: WaitingLine[str],
    count: int,
    unsuited: str | None = None,
    max_bypasses: int = 0,
    pins: tuple[str | None, ...] = ANY,
) -> list[str]:
    """Room for so many, that does not suit those whose name begins with `unsuited`."""
    taken: list[str] = []

    def offer(waiter: Waiter[str]) -> Answer:
        if len(taken) >= count:
            return Answer.NO_ROOM
        if unsuited is not None and waiter.item.startswith(unsuited):
            return Answer.UNSUITED
        taken.append(waiter.item)
        return Answer.TAKEN

    assert line.serve(pins, offer, max_bypasses) == len(taken)
    return taken


def fill(line: WaitingLine[str], tenant: str, sizes: list[int], weight: float = 1.0, priority: int = 0) -> None:
    for index, size in enumerate(sizes):
        line.push(f"{tenant}{index}", Turn(tenant, weight, size, priority))


def test_one_tenant_is_served_as_it_comes_whatever_the_sizes() -> None:
    line: WaitingLine[str] = WaitingLine()
    fill(line, "a", [500, 1, 30, 7, 900])
    assert [waiter.item for waiter in line] == take(line, 9) == ["a0", "a1", "a2", "a3", "a4"]
    assert (len(line), line.num_tokens) == (0, 0)


def test_short_requests_do_not_wait_for_another_tenants_long_ones() -> None:
    line: WaitingLine[str] = WaitingLine()
    fill(line, "long", [1000] * 100)
    assert take(line, 3) == ["long0", "long1", "long2"]
    fill(line, "s", [10] * 5)
    # It comes at the virtual time of the one that was served last, which it may as well have been before.
    assert take(line, 6) == ["s0", "s1", "s2", "s3", "s4", "long3"]


def test_idling_gains_no_credit() -> None:
    line: WaitingLine[str] = WaitingLine()
    fill(line, "a", [100] * 50)
    take(line, 40)
    fill(line, "b", [100] * 50)
    served = Counter(item[0] for item in take(line, 10))
    assert abs(served["a"] - served["b"]) <= 1


def test_weights_divide() -> None:
    line: WaitingLine[str] = WaitingLine()
    fill(line, "a", [10] * 100, weight=3.0)
    fill(line, "b", [10] * 100, weight=1.0)
    assert Counter(item[0] for item in take(line, 40)) == {"a": 30, "b": 10}


def test_moves_go_first_then_priorities() -> None:
    line: WaitingLine[str] = WaitingLine()
    fill(line, "a", [5, 5])
    fill(line, "b", [5], priority=-1)
    fill(line, "c", [5], priority=3)
    line.push("moved", Turn("c", 1.0, 1000, 9, is_move=True))
    line.push("moved too", Turn("a", 1.0, 1, is_move=True))
    line.push("moved late", Turn("a", 1.0, 1, is_move=True))
    assert [waiter.item for waiter in line] == ["moved", "moved too", "moved late", "b0", "a0", "a1", "c0"]
    assert take(line, 9) == ["moved", "moved too", "moved late", "b0", "a0", "a1", "c0"]


def test_what_is_cancelled_costs_its_tenant_nothing() -> None:
    line: WaitingLine[str] = WaitingLine()
    gone = [line.push(f"gone{index}", Turn("a", 1.0, 10_000)) for index in range(3)]
    fill(line, "a", [10, 10])
    fill(line, "b", [10, 10])
    for waiter in gone:
        line.cancel(waiter)
        line.cancel(waiter)
        line.check_integrity()
    assert take(line, 9) == ["a0", "b0", "a1", "b1"]
    line.cancel(gone[0])


def test_a_pinned_one_takes_only_its_rank_and_is_no_obstacle_elsewhere() -> None:
    line: WaitingLine[str] = WaitingLine()
    line.push("pinned", Turn("a"), "mixed/1")
    line.push("free", Turn("a"))
    assert line.must_wait(Turn("b"), (None, "mixed/1"))
    assert take(line, 9, (None, "mixed/0")) == ["free"]
    assert not line.must_wait(Turn("b"), (None, "mixed/0"))
    assert line.must_wait(Turn("b"), (None, "mixed/1"))
    assert not line.must_wait(Turn("b", is_move=True), (None, "mixed/1"))
    assert take(line, 9, (None, "mixed/1")) == ["pinned"]


def test_pins_gain_a_tenant_nothing() -> None:
    line: WaitingLine[str] = WaitingLine()
    for index in range(20):
        line.push(f"a{index}", Turn("a", 1.0, 10), "mixed/1")
    fill(line, "b", [10] * 20)
    assert Counter(item[0] for item in take(line, 10, (None, "mixed/1"))) == {"a": 5, "b": 5}


def test_one_that_does_not_fit_is_passed_so_often_and_no_more() -> None:
    line: WaitingLine[str] = WaitingLine()
    fill(line, "big", [1000])
    fill(line, "s", [1] * 9)
    assert serve(line, 2, "big", 3) == ["s0", "s1"]
    assert next(iter(line)).item == "big0"
    assert serve(line, 99, "big", 3) == ["s2"]
    assert serve(line, 99, "big", 3) == []
    line.check_integrity()
    assert take(line, 9) == ["big0", "s3", "s4", "s5", "s6", "s7", "s8"]


def test_a_look_past_those_that_do_not_fit_is_bounded() -> None:
    line: WaitingLine[str] = WaitingLine()
    fill(line, "a", [10] * 1000)
    offered = []

    def offer(waiter: Waiter[str]) -> Answer:
        offered.append(waiter.item)
        return Answer.UNSUITED

    assert line.serve(ANY, offer, 100) == 0
    assert len(offered) == MAX_PASSED_OF_TENANT
    assert take(line, 2000) == [f"a{index}" for index in range(1000)]


def test_one_for_whom_it_is_too_early_is_passed_without_bound() -> None:
    line: WaitingLine[str] = WaitingLine()
    fill(line, "long", [1000])
    fill(line, "s", [1] * 50)
    answers = {"l": Answer.LATER, "s": Answer.TAKEN}
    assert line.serve(ANY, lambda waiter: answers[waiter.item[0]], 3) == 50
    assert [waiter.num_bypasses for waiter in line] == [0]
    line.check_integrity()


def test_a_look_past_many_tenants_is_bounded_too() -> None:
    line: WaitingLine[str] = WaitingLine()
    for tenant in range(100):
        fill(line, f"t{tenant}-", [10, 10])
    assert serve(line, 9, "t", 100) == []
    line.check_integrity()
    assert len(line) == 200
    assert take(line, 2) == ["t0-0", "t1-0"]
    assert line.serve(ANY, lambda waiter: Answer.UNSUITED, 100) == 0
    assert MAX_PASSED > MAX_PASSED_OF_TENANT


def test_one_tenant_whose_requests_fit_nowhere_does_not_hide_others() -> None:
    line: WaitingLine[str] = WaitingLine()
    fill(line, "long", [1000] * 100)
    fill(line, "s", [1, 1])
    assert serve(line, 1, "long", 100) == ["s0"]
    assert serve(line, 9, "long", 100) == ["s1"]
    line.check_integrity()
    fill(line, "s", [1])
    assert len(line) == 101
    assert take(line, 101)[-2:] == ["long98", "long99"]


def test_all_can_be_taken_out_to_line_up_elsewhere() -> None:
    line: WaitingLine[str] = WaitingLine()
    fill(line, "a", [5, 5])
    fill(line, "b", [5], priority=-1)
    line.push("m", Turn(is_move=True), "mixed/0")
    waiters = line.take_all()
    assert [waiter.item for waiter in waiters] == ["a0", "a1", "b0", "m"]
    assert not any(waiter.is_waiting for waiter in waiters)
    line.check_integrity()
    assert (len(line), line.num_tokens) == (0, 0)


def test_tenants_that_come_once_are_forgotten() -> None:
    line: WaitingLine[str] = WaitingLine()
    line.push("stays", Turn("z"), "mixed/9")
    for index in range(4 * MAX_IDLE_TENANTS):
        waiter = line.push("x", Turn(f"t{index}", 1.0, 10))
        if index % 2:
            line.cancel(waiter)
        else:
            serve(line, 1)
    line.check_integrity()
    (queue,) = line._queues.values()
    assert len(queue._tenants) <= 2 * MAX_IDLE_TENANTS + 2
    assert sum(map(len, queue._heaps.values())) <= 2 * MAX_IDLE_TENANTS + 2


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_service_of_tenants_that_both_wait_differs_by_at_most_one_request_of_each(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    names = "abcd"[: data.draw(st.integers(2, 4))]
    weights = {name: data.draw(st.sampled_from([0.5, 1.0, 2.0, 5.0])) for name in names}
    largest = {name: data.draw(st.sampled_from([1, 10, 300])) for name in names}
    line: WaitingLine[str] = WaitingLine()
    waiting: dict[str, list[Waiter[str]]] = defaultdict(list)
    given_to: Counter[str] = Counter()
    history: list[tuple[dict[str, float], frozenset[str]]] = []
    for _ in range(data.draw(st.integers(1, 60))):
        for name in rng.choices(names, k=rng.choice([0, 0, 1, 3])):
            turn = Turn(name, weights[name], rng.randint(1, largest[name]))
            waiting[name].append(line.push(name, turn))
        for name in names:
            if waiting[name] and rng.random() < 0.05:
                line.cancel(waiting[name].pop(rng.randrange(len(waiting[name]))))
        # Who waits now, and still does when this service is over, waits all the time between.
        before = {name for name in names if waiting[name]}
        for _ in range(rng.choice([0, 1, 1, 4])):
            first = next(iter(line), None)
            if take(line) and first is not None:
                waiting[first.item].remove(first)
                given_to[first.item] += first.turn.num_tokens
            stays = frozenset(name for name in before if waiting[name])
            history.append(({name: given_to[name] / weights[name] for name in names}, stays))
    for one, other in itertools.combinations(names, 2):
        bound = largest[one] / weights[one] + largest[other] / weights[other] + 1e-6
        differences: list[float] = []
        for served, stays in history:
            if one in stays and other in stays:
                differences.append(served[one] - served[other])
                assert max(differences) - min(differences) <= bound
            else:
                differences = []


class Line(RuleBasedStateMachine):
    """Against a list: nobody is lost, or served twice, or out of order within tenant, level and pin."""

    def __init__(self) -> None:
        super().__init__()
        self.line: WaitingLine[int] = WaitingLine()
        self.waiting: dict[int, Waiter[int]] = {}
        self.count = 0

    @rule(
        tenant=st.sampled_from("abc"),
        weight=st.sampled_from([0.25, 1.0, 4.0]),
        size=st.integers(1, 50),
        priority=st.integers(-1, 1),
        is_move=st.booleans(),
        pin=st.sampled_from([None, None, "x", "y"]),
    )
    def push(self, tenant: str, weight: float, size: int, priority: int, is_move: bool, pin: str | None) -> None:
        turn = Turn(tenant, weight, size, priority, is_move)
        self.waiting[self.count] = self.line.push(self.count, turn, pin)
        self.count += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.line.cancel(self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting)))))

    @rule(pin=st.sampled_from("xyz"), count=st.integers(1, 4), odd=st.booleans(), limit=st.integers(0, 3))
    def serve(self, pin: str, count: int, odd: bool, limit: int) -> None:
        """`odd`: the room does only for those with an odd number."""
        pins, taken = (None, pin), list[Waiter[int]]()
        expected = [waiter for waiter in self.line if waiter.pin in pins]

        def offer(waiter: Waiter[int]) -> Answer:
            assert waiter.pin in pins
            if len(taken) >= count:
                return Answer.NO_ROOM
            if odd and waiter.item % 2 == 0:
                return Answer.UNSUITED
            taken.append(waiter)
            return Answer.TAKEN

        assert self.line.serve(pins, offer, limit) == len(taken)
        if not odd:
            assert [waiter.item for waiter in taken] == [waiter.item for waiter in expected[:count]]
        for waiter in taken:
            del self.waiting[waiter.item]
            assert all(
                later.item > waiter.item
                for later in self.waiting.values()
                if (later.turn.account, later.turn.level, later.pin)
                == (waiter.turn.account, waiter.turn.level, waiter.pin)
                and not odd
            )

    @rule()
    def line_up_again(self) -> None:
        for waiter in self.line.take_all():
            self.waiting[waiter.item] = self.line.push(waiter.item, waiter.turn, waiter.pin)

    @invariant()
    def agrees(self) -> None:
        self.line.check_integrity()
        assert {waiter.item for waiter in self.line} == self.waiting.keys()
        assert all(waiter.is_waiting for waiter in self.waiting.values())


TestLine = Line.TestCase
TestLine.settings = settings(deadline=None, max_examples=30, stateful_step_count=30)


@pytest.mark.parametrize("num_tenants", [1, 1000])
def test_time_does_not_go_with_how_many_wait(num_tenants: int) -> None:
    """By what is touched, not by a clock."""
    line: WaitingLine[str] = WaitingLine()
    rng = random.Random(3)
    for index in range(4_000):
        line.push(f"{index}", Turn(f"t{index % num_tenants}", 1.0, rng.randint(1, 100)))
    (queue,) = line._queues.values()
    touched = 0
    original = queue._first

    def first(pin: str | None) -> Waiter[str] | None:
        nonlocal touched
        touched += 1
        return original(pin)

    queue._first = first  # type: ignore[method-assign]
    assert len(serve(line, 2_000)) == 2_000
    assert touched == 2_001
