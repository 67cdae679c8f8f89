"""How well `Retry-After` is kept, and what that costs: the real ledger and leases under a virtual clock.

Clients come at a multiple of what the cluster gets done, and obey: whoever is refused comes back when it was told, with
its token. Each patiently, at most `ATTEMPTS` times. Printed as JSON, medians over seeds:

- `retry_error_median`: a promise says when there will be room for all that were refused before and for this one. The
  error is measured against when so many places had come free, whoever got them, relative to the promised time.
- `on_time_admitted`: the share of retries on time that were admitted within 0.5 s, without another refusal.
- `goodput_2x`, `goodput_5x`: requests done against those done with a queue without limit.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from router.amounts import NOTHING, Amounts, Limits
from router.control_messages import Ask, ControlToRouter, Granted, Refused, Tighten
from router.lease import Lease
from router.ledger import Ledger

NUM_ROUTERS = 4
NUM_SERVERS = 64
LIMIT = 128
MEAN_SERVICE_S = 2.0
LATENCY_S = 0.001
REPORT_DELAY_S = 0.05
ATTEMPTS = 6
AT_ONCE_S = 0.5
WARM_UP_S = 20.0


@dataclass
class Request:
    """Of a client that obeys."""

    service_s: float
    attempts: int = 0
    token: str = ""
    due_at: float | None = None
    """When it was told to come."""


@dataclass
class Promise:
    refused_at: float
    promised_s: float
    num_departures: int
    """Before it was given."""
    position: int
    """How many places have to come free until it is its turn: those promised before, unclaimed, and its own."""


@dataclass
class Router:
    name: str
    lease: Lease = field(default_factory=lambda: Lease(1e9))
    asked: dict[int, tuple[Request, Amounts]] = field(default_factory=dict)
    drained: Amounts = NOTHING
    is_report_planned: bool = False


class Overload:
    """One run at `load` times the capacity; with `limit` None nobody is refused."""

    def __init__(self, seed: int, load: float, limit: int | None, sigma: float) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.load = load
        self.sigma = sigma
        self.ledger = Ledger(limit, None)
        self.routers = [Router(f"router-{index}") for index in range(NUM_ROUTERS)]
        for router in self.routers:
            self.ledger.resume(router.name, NOTHING, 0.0)
            router.lease.bounded_by(Limits(limit, None))
            router.lease.heard(0.0)
        self.by_name = {router.name: router for router in self.routers}
        self.num_done = 0
        self.departures: list[float] = []
        self.promises: list[Promise] = []
        self.waits: list[float] = []
        """Of retries on time, until they were admitted."""
        self.num_retries_refused = 0
        self.unclaimed: set[str] = set()
        self._queue: deque[Callable[[], None]] = deque()
        self._num_busy = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._keys = itertools.count(1)
        self._wake_serial = 0
        self.later(self._gap_s(), self._arrive)
        self.later(1.0, self._tick)

    def run(self, until: float) -> None:
        while self._events[0][0] < until:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def _gap_s(self) -> float:
        return self.random.expovariate(self.load * NUM_SERVERS / MEAN_SERVICE_S)

    # ---- clients ----

    def _arrive(self) -> None:
        self.later(self._gap_s(), self._arrive)
        service_s = self.random.lognormvariate(math.log(MEAN_SERVICE_S) - self.sigma**2 / 2, self.sigma)
        self._attempt(Request(service_s))

    def _attempt(self, request: Request) -> None:
        router, key, amounts = self.random.choice(self.routers), next(self._keys), Amounts(1, 0)
        request.attempts += 1
        self.unclaimed.discard(request.token)
        if router.lease.take(key, amounts, self.now):
            self._admitted(router, key, request)
            return
        router.asked[key] = (request, amounts)
        ask = Ask(key, amounts, request.token)
        self.later(LATENCY_S, lambda: self._answer(self.ledger.ask(router.name, ask, self.now)))

    def _refused(self, request: Request, refused: Refused) -> None:
        if request.due_at is not None:
            self.num_retries_refused += self.now > WARM_UP_S
        request.token = refused.token
        request.due_at = self.now + refused.retry_after_s if refused.token else None
        if refused.token:
            self.unclaimed.add(refused.token)
            if self.now > WARM_UP_S:
                position = len(self.unclaimed)
                self.promises.append(Promise(self.now, refused.retry_after_s, len(self.departures), position))
        if request.attempts < ATTEMPTS:
            self.later(refused.retry_after_s + LATENCY_S, lambda: self._attempt(request))
        else:
            self.unclaimed.discard(request.token)

    # ---- routers and the ledger ----

    def _answer(self, messages: list[tuple[str, ControlToRouter]]) -> None:
        for name, message in messages:
            router = self.by_name[name]
            self.later(LATENCY_S, lambda r=router, m=message: self._at_router(r, m))  # type: ignore[misc]
        self._wake_serial += 1
        if (at := self.ledger.wakes_at) is not None:
            serial = self._wake_serial

            def wake() -> None:
                if serial == self._wake_serial:
                    self._answer(self.ledger.wake(self.now))

            self.later(max(0.0, at - self.now), wake)

    def _at_router(self, router: Router, message: ControlToRouter) -> None:
        match message:
            case Granted(key, lent, kept):
                request, amounts = router.asked.pop(key)
                router.lease.granted(key, amounts, lent, kept)
                self._admitted(router, key, request)
                self._give_back(router, router.lease.surplus())
            case Refused(key):
                request, _ = router.asked.pop(key)
                self._refused(request, message)
            case Tighten(serial):
                self._give_back(router, router.lease.tighten())
                self.later(LATENCY_S, lambda: self._answer(self.ledger.tightened(router.name, serial, self.now)))

    def _give_back(self, router: Router, surplus: Amounts) -> None:
        if surplus != NOTHING:
            self.later(LATENCY_S, lambda: self._answer(self.ledger.returned(router.name, surplus, self.now)))

    def _tick(self) -> None:
        self.later(1.0, self._tick)
        self._answer(self.ledger.tick(self.now)[1])

    # ---- the work ----

    def _admitted(self, router: Router, key: int, request: Request) -> None:
        if request.due_at is not None and self.now > WARM_UP_S:
            self.waits.append(self.now - request.due_at)

        def begin() -> None:
            self._num_busy += 1
            self.later(request.service_s, lambda: self._done(router, key))

        if self._num_busy < NUM_SERVERS:
            begin()
        else:
            self._queue.append(begin)

    def _done(self, router: Router, key: int) -> None:
        self._num_busy -= 1
        if self._queue:
            self._queue.popleft()()
        self.num_done += self.now > WARM_UP_S
        self.departures.append(self.now)
        router.drained = router.drained.plus(router.lease.put_back(key))
        self._give_back(router, router.lease.surplus())
        if not router.is_report_planned:
            router.is_report_planned = True
            self.later(REPORT_DELAY_S, lambda: self._report(router))

    def _report(self, router: Router) -> None:
        router.is_report_planned = False
        drained, router.drained = router.drained, NOTHING
        self.ledger.reported(router.name, router.lease.taken, drained, self.now)

    # ---- figures ----

    def errors(self) -> list[float]:
        """Of the promises whose places had come free before the end."""
        found = []
        for promise in self.promises:
            index = promise.num_departures + promise.position - 1
            if index < len(self.departures):
                real_s = self.departures[index] - promise.refused_at
                found.append(abs(promise.promised_s - real_s) / promise.promised_s)
        return found

    def on_time_admitted(self) -> float:
        num_at_once = bisect_left(sorted(self.waits), AT_ONCE_S)
        return num_at_once / max(1, len(self.waits) + self.num_retries_refused)


def goodput(seed: int, load: float, sigma: float, duration_s: float) -> tuple[float, Overload]:
    limited = Overload(seed, load, LIMIT, sigma)
    limited.run(WARM_UP_S + duration_s)
    best = Overload(seed, load, None, sigma)
    best.run(WARM_UP_S + duration_s)
    return limited.num_done / best.num_done, limited


def figures(seeds: int = 3, duration_s: float = 120.0) -> dict[str, float]:
    twice = [goodput(seed, 2.0, sigma, duration_s) for seed in range(seeds) for sigma in (0.5, 1.0)]
    five = [goodput(seed, 5.0, sigma, duration_s) for seed in range(seeds) for sigma in (0.5, 1.0)]
    runs = [run for _, run in twice]
    return {
        "retry_error_median": statistics.median(statistics.median(run.errors()) for run in runs),
        "on_time_admitted": statistics.median(run.on_time_admitted() for run in runs),
        "goodput_2x": min(ratio for ratio, _ in twice),
        "goodput_5x": min(ratio for ratio, _ in five),
        "num_promises": sum(len(run.promises) for run in runs),
        "promised_s_median": statistics.median(p.promised_s for run in runs for p in run.promises),
        "wait_median_s": statistics.median(statistics.median(run.waits) for run in runs),
        "wait_p95_s": statistics.median(sorted(run.waits)[int(0.95 * len(run.waits))] for run in runs),
        "num_retries_refused": sum(run.num_retries_refused for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=120.0, help="simulated seconds of each run")
    arguments = parser.parse_args()
    print(json.dumps(figures(arguments.seeds, arguments.duration), indent=2))


if __name__ == "__main__":
    main()
