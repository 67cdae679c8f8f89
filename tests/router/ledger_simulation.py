"""A ledger and its routers in one thread: messages that take their time, routers and ledgers that die, all from a seed.

Checked whenever anything happens: what all requests hold is within the limits, whoever believes what; nobody is refused
while there is room, be it idle in a router; what is lent and what is held add up. Who is refused comes back on time, or
early, or late, or with a token that nobody gave, or not at all. Without faults: everybody who waits has an answer in
time, and who is on time is refused only after it has waited.

`python -m tests.router.ledger_simulation --attempts 1000000` runs for long.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from router.amounts import NOTHING, Amounts, Limits
from router.control_messages import (
    Ask,
    Bounds,
    ControlToRouter,
    Granted,
    Refused,
    Report,
    Resume,
    Return,
    RouterToControl,
    Tighten,
    Tightened,
)
from router.lease import Lease
from router.ledger import CLAIM_PATIENCE_S, Ledger

VALID_S, GRACE_S, RECOVERY_S = 5.0, 10.0, 6.0
HEARTBEAT_S = 1.0


@dataclass
class Asked:
    ask: Ask
    at: float
    is_on_time: bool
    is_patient: bool


@dataclass
class Router:
    name: str
    lease: Lease = field(default_factory=lambda: Lease(VALID_S))
    is_connected: bool = False
    connection: int = 0
    """Messages of earlier ones are lost."""
    asked: dict[int, Asked] = field(default_factory=dict)
    drained: Amounts = NOTHING


@dataclass
class Figures:
    num_attempts: int = 0
    num_admitted: int = 0
    num_admitted_without_asking: int = 0
    num_refused: int = 0
    num_given_up: int = 0
    num_on_time: int = 0
    num_on_time_admitted: int = 0
    most: Amounts = NOTHING


class Simulation:
    def __init__(
        self, seed: int, *, num_routers: int, limits: Limits, with_faults: bool, arrivals_per_s: float = 200.0
    ) -> None:
        self.random = random.Random(seed)
        self.limits = limits
        self.num_routers = num_routers
        self.arrivals_per_s = arrivals_per_s
        """At each router."""
        self.now = 0.0
        self.figures = Figures()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._keys = itertools.count(1)
        self._names = itertools.count(1)
        self._epoch = 0
        self._num_checks = 0
        self._wake_serial = 0
        self._last: dict[tuple[str, int, bool], float] = {}
        self._dead: list[tuple[float, Amounts]] = []
        """What routers that died had, until its loan is dropped."""
        self.with_faults = with_faults
        self.ledger: Ledger | None = Ledger(*limits, now=0.0, holder_grace_s=GRACE_S)
        self.routers: dict[str, Router] = {}
        for _ in range(num_routers):
            self.start_router()
        self.later(HEARTBEAT_S, self.heartbeat)
        if with_faults:
            self.later(self.random.expovariate(1 / 5), self.fault)

    # ---- time ----

    def later(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def run(self, num_attempts: int) -> None:
        while self.figures.num_attempts < num_attempts:
            self.step()

    def drain(self) -> None:
        """No more arrivals: everything ends, and nothing is left lent but what may be idle."""
        self.figures.num_attempts = 10**12
        until = self.now + 60.0
        while self._events and self.now < until:
            self.step()

    def step(self) -> None:
        self.now, _, event = heapq.heappop(self._events)
        event()
        self.check()

    def check(self) -> None:
        taken = NOTHING
        for router in self.routers.values():
            taken = taken.plus(self.limits.bounded(router.lease.taken))
        for limit, used in zip(self.limits, taken, strict=True):
            assert limit is None or used <= limit, f"{taken} of {self.limits} at {self.now:.4f}"
        self.figures.most = Amounts(*map(max, self.figures.most, taken))
        self._num_checks += 1
        if self._num_checks % 16 == 0:
            for router in self.routers.values():
                router.lease.check_integrity()
            if self.ledger is not None:
                self.ledger.check_integrity()

    # ---- the network ----

    def send(self, router: Router, message: RouterToControl) -> None:
        if router.is_connected:
            self._travel(router, lambda: self.at_ledger(router, message), to_ledger=True)

    def answer(self, messages: list[tuple[str, ControlToRouter]]) -> None:
        for name, message in messages:
            if isinstance(message, Refused) and self.ledger is not None:
                self.check_refusal(message)
            router = self.routers.get(name)
            if router is not None and router.is_connected:
                self._travel(router, lambda r=router, m=message: self.at_router(r, m), to_ledger=False)  # type: ignore[misc]
        self.wake_in_time()

    def _travel(self, router: Router, deliver: Callable[[], None], *, to_ledger: bool) -> None:
        connection, epoch = router.connection, self._epoch
        way = (router.name, connection, to_ledger)
        at = max(self.now + self.random.expovariate(1 / 0.002), self._last.get(way, 0.0))
        self._last[way] = at

        def arrive() -> None:
            is_same = router.is_connected and router.connection == connection and self._epoch == epoch
            if is_same and self.routers.get(router.name) is router:
                deliver()

        heapq.heappush(self._events, (at, next(self._order), arrive))

    def wake_in_time(self) -> None:
        """One wake is planned at a time; what is planned later replaces it."""
        self._wake_serial += 1
        if self.ledger is not None and (at := self.ledger.wakes_at) is not None:
            ledger, serial = self.ledger, self._wake_serial

            def wake() -> None:
                if self.ledger is ledger and self._wake_serial == serial:
                    self.answer(ledger.wake(self.now))

            heapq.heappush(self._events, (max(at, self.now), next(self._order), wake))

    def check_refusal(self, refused: Refused) -> None:
        """Whoever is connected keeps nothing idle (unless it asks for more than there could ever be)."""
        self.figures.num_refused += 1
        if refused.requested > refused.limit:
            return
        assert refused.current + refused.requested > refused.limit
        for router in self.routers.values():
            if router.is_connected and router.lease.idle != NOTHING:
                assert self.now < self.hung_until, f"refused while {router.name} keeps {router.lease.idle} idle"

    hung_until = 0.0

    # ---- the ledger's side ----

    def at_ledger(self, router: Router, message: RouterToControl) -> None:
        ledger, name = self.ledger, router.name
        assert ledger is not None
        match message:
            case Resume(lent):
                self.answer(ledger.resume(name, lent, self.now))
            case Ask():
                self.answer(ledger.ask(name, message, self.now))
            case Return(amounts):
                self.answer(ledger.returned(name, amounts, self.now))
            case Tightened(serial):
                self.answer(ledger.tightened(name, serial, self.now))
            case Report(taken, drained):
                ledger.reported(name, taken, drained, self.now)

    def heartbeat(self) -> None:
        self.later(HEARTBEAT_S, self.heartbeat)
        if self.ledger is not None:
            _, messages = self.ledger.tick(self.now)
            self.answer(messages)
            for router in self.routers.values():
                if router.is_connected:
                    self._travel(router, lambda r=router: r.lease.heard(self.now), to_ledger=False)  # type: ignore[misc]

    # ---- a router's side ----

    def start_router(self) -> None:
        router = Router(f"router-{next(self._names)}")
        self.routers[router.name] = router
        self.connect(router)
        self.later(self.random.expovariate(self.arrivals_per_s), lambda: self.arrive(router))

    def connect(self, router: Router) -> None:
        if self.routers.get(router.name) is not router or router.is_connected:
            return
        if self.ledger is None:
            self.later(0.1, lambda: self.connect(router))
            return
        router.is_connected, router.connection = True, router.connection + 1
        router.lease.lost(self.now)
        self.send(router, Resume(router.lease.lent))
        for asked in router.asked.values():
            self.send(router, asked.ask)
        self._travel(router, lambda: self.at_router(router, Bounds(self.limits)), to_ledger=False)

    def arrive(self, router: Router) -> None:
        if self.routers.get(router.name) is not router or self.figures.num_attempts >= 10**12:
            return
        self.later(self.random.expovariate(self.arrivals_per_s), lambda: self.arrive(router))
        self.figures.num_attempts += 1
        amounts = Amounts(self.random.choice([1, 1, 1, 2, 4]), self.random.choice([1, 10, 100, 300]))
        self.attempt(router, amounts, token="", alias=self.random.choice(["", f"alias {self.figures.num_attempts}"]))

    def attempt(self, router: Router, amounts: Amounts, token: str, alias: str, is_on_time: bool = False) -> None:
        """Take what is idle, or ask for it."""
        key = next(self._keys)
        if router.lease.take(key, amounts, self.now):
            self.figures.num_admitted_without_asking += 1
            self.admitted(router, key)
            return
        is_patient = self.random.random() < 0.95
        self.figures.num_on_time += is_on_time
        router.asked[key] = Asked(Ask(key, amounts, token, alias), self.now, is_on_time, is_patient)
        self.send(router, router.asked[key].ask)

        def give_up() -> None:
            if router.asked.pop(key, None) is not None:
                assert self.with_faults or not is_patient, "no answer"
                self.figures.num_given_up += 1

        self.later(2.0 if is_patient else self.random.random() * 0.01, give_up)

    def come_back(self, amounts: Amounts, alias: str, refused: Refused) -> None:
        """At any router, with or without the token, in time or not."""
        delay_s, token, is_on_time = refused.retry_after_s, refused.token, False
        match self.random.choice(["on time", "on time", "on time", "early", "late", "forged", "never"]):
            case "on time":
                delay_s += self.random.random() * 0.2
                is_on_time = bool(token)
            case "early":
                delay_s *= self.random.random()
            case "late":
                delay_s += self.random.random() * 5
            case "forged":
                token = self.random.choice(["0" * 32, "?", token[:-1]])
            case "never":
                return
        if not is_on_time and alias and self.random.random() < 0.5:
            token = alias

        def again() -> None:
            if self.figures.num_attempts < 10**12 and self.routers:
                router = self.random.choice(list(self.routers.values()))
                self.attempt(router, amounts, token, alias, is_on_time)

        self.later(delay_s, again)

    def at_router(self, router: Router, message: ControlToRouter) -> None:
        router.lease.heard(self.now)
        match message:
            case Bounds(limits):
                router.lease.bounded_by(limits)
            case Granted(key, lent, kept):
                asked = router.asked.pop(key, None)
                wanted = NOTHING if asked is None else asked.ask.amounts
                router.lease.granted(None if asked is None else key, wanted, lent, kept)
                if asked is not None:
                    self.figures.num_on_time_admitted += asked.is_on_time
                    self.admitted(router, key)
                self.give_back(router)
            case Refused(key):
                asked = router.asked.pop(key, None)
                if asked is not None:
                    has_waited = self.now - asked.at >= CLAIM_PATIENCE_S
                    assert self.with_faults or has_waited or not asked.is_on_time, "on time, and refused at once"
                    self.come_back(asked.ask.amounts, asked.ask.alias, message)
            case Tighten(serial):
                surplus = router.lease.tighten()
                if surplus != NOTHING:
                    self.send(router, Return(surplus))
                self.send(router, Tightened(serial))

    def admitted(self, router: Router, key: int) -> None:
        self.figures.num_admitted += 1
        done_in = self.random.expovariate(1 / 0.1)
        self.later(done_in, lambda: self.put_back(router, key, 10**6))
        self.later(done_in + self.random.expovariate(1 / 0.3), lambda: self.put_back(router, key, None))

    def put_back(self, router: Router, key: int, num_tokens: int | None) -> None:
        router.drained = router.drained.plus(router.lease.put_back(key, num_tokens))
        self.give_back(router)
        self.send(router, Report(router.lease.taken, router.drained))
        router.drained = NOTHING

    def give_back(self, router: Router) -> None:
        surplus = router.lease.surplus()
        if surplus != NOTHING:
            self.send(router, Return(surplus))

    # ---- faults ----

    def fault(self) -> None:
        self.later(self.random.expovariate(1 / 5), self.fault)
        routers = list(self.routers.values())
        match self.random.choice(["cut", "cut", "kill", "ledger"]):
            case "cut":
                self.cut(self.random.choice(routers), back_in=self.random.choice([0.0, 0.5, 3.0, 7.0]))
            case "kill":
                router = self.random.choice(routers)
                self.cut(router, back_in=None)
                del self.routers[router.name]
                self.start_router()
            case "ledger":
                if self.ledger is not None:
                    for router in routers:
                        router.is_connected = False
                        self.later(self.random.random() * 4, lambda r=router: self.connect(r))  # type: ignore[misc]
                    self.ledger = None
                    self._epoch += 1
                    self.later(self.random.random() * 3, self.new_ledger)

    def new_ledger(self) -> None:
        self.ledger = Ledger(
            *self.limits,
            now=self.now,
            holder_grace_s=GRACE_S,
            recovery_s=RECOVERY_S,
            num_routers=self.random.choice([0, self.num_routers]),
        )

    def cut(self, router: Router, back_in: float | None) -> None:
        if not router.is_connected:
            return
        router.is_connected = False
        epoch = self._epoch

        def noticed() -> None:
            if self._epoch == epoch and self.ledger is not None and not router.is_connected:
                self.answer(self.ledger.router_lost(router.name, self.now))

        self.later(self.random.random() * 0.01, noticed)
        if back_in is not None:
            self.later(0.02 + back_in, lambda: self.connect(router))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=40)
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        choose = random.Random(seed)
        limits = Limits(choice_of(choose, [None, 0, 1, 5, 40, 400]), choice_of(choose, [None, 300, 2000, 50_000]))
        num_routers = choose.choice([1, 2, 4, 8])
        # About 1.7 sequences, each for 0.4 s; waiting prompts of 100 tokens, for 0.1 s.
        places = min(
            ((limit or 0) / each for limit, each in zip(limits, (0.7, 10.0), strict=True) if limit), default=50
        )
        arrivals_per_s = max(1.0, places * choose.choice([0.3, 0.8, 1.5, 4.0]) / num_routers)
        simulation = Simulation(
            seed,
            num_routers=num_routers,
            limits=limits,
            with_faults=choose.random() < 0.7,
            arrivals_per_s=arrivals_per_s,
        )
        simulation.run(arguments.attempts // arguments.seeds)
        print(f"{seed}: {num_routers} routers, {limits}, {simulation.figures}", flush=True)


def choice_of(choose: random.Random, values: list[int | None]) -> int | None:
    return choose.choice(values)


if __name__ == "__main__":
    main()
