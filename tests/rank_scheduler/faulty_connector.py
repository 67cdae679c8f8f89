"""A KV connector with everything that goes wrong with real ones, each time by a draw from the seed.

Time is the number of turns of its driver. Every load and every send that it was asked for ends by a deadline, as the
contract of connectors demands; until then anything may happen.
"""

from __future__ import annotations

import heapq
import random
from enum import Enum, auto

import numpy as np

from kv_transfer.connector import ConnectorEvent, KvRequest, LoadFenced, LoadFinished, RequestKey, SendFinished
from kv_transfer.params import KvParams
from tests.rank_scheduler.simulated_connector import SimulatedConnector

DEADLINE = 40
"""Turns after which what never came is given up."""
GARBAGE = 12345


class Fate(Enum):
    WELL = auto()
    SLOW = auto()
    FAILS = auto()
    """With a part of its tokens valid, or none."""
    UNFENCED = auto()
    """Fails while the peer may still write, and does: garbage, until the fence comes."""
    SILENT = auto()
    """Nothing until the deadline."""
    SILENT_UNFENCED = auto()


class FaultyConnector(SimulatedConnector):
    """`drops` synchronous loads lose blocks, now and then."""

    def __init__(self, rng: random.Random, *, drops: bool) -> None:
        super().__init__()
        self._rng = rng
        self.drops = drops
        self.now = 0
        self._due: list[tuple[int, int, ConnectorEvent, tuple[KvRequest, np.ndarray, int, int] | None]] = []
        """When, a running number, what, and the load that it ends."""
        self._count = 0
        self.num_starts = 0
        """Asynchronous loads that were asked for since this was last set to 0."""
        self.lost_blocks: set[int] = set()
        """Of synchronous loads since this was last cleared."""
        self.troubled: set[RequestKey] = set()
        """Requests with a load that did not end well."""
        self.fates: set[Fate] = set()
        self._unfenced: dict[RequestKey, list[np.ndarray]] = {}
        self.current: dict[RequestKey, int] = {}
        """Loads in progress; which of its loads, if a request has several."""

    def update_state_after_alloc(self, request: KvRequest, block_ids: np.ndarray, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        if num_external_tokens and request.params.get("is_async"):
            self.num_starts += 1
            assert request.key not in self.current, f"two loads of {request.key} at once"
            self._count += 1
            self.current[request.key] = self._count

    def request_finished(
        self, request: KvRequest, block_ids: np.ndarray, *, hands_off: bool
    ) -> tuple[bool, KvParams | None]:
        keeps, params = super().request_finished(request, block_ids, hands_off=hands_off)
        if keeps and block_ids.shape[1]:
            self._later(self._rng.choice([1, 5, DEADLINE]), SendFinished(request.key))
        return keeps, params

    def start_load_kv(self, metadata: list[tuple[KvRequest, np.ndarray, int, int]]) -> None:
        for load in metadata:
            if load[0].params.get("is_async"):
                self._begin(load)
                continue
            self._fill(load, load[3], self.runner)
            if self.drops and self._rng.random() < 0.3:
                self._lose(load)

    @property
    def num_due(self) -> int:
        return len(self._due)

    def tick(self) -> list[ConnectorEvent]:
        """A turn has passed; what the scheduler hears."""
        self.now += 1
        events: list[ConnectorEvent] = []
        for blocks in self._writers():
            if self._rng.random() < 0.3:
                self.runner._kv[blocks] = GARBAGE
        while self._due and self._due[0][0] <= self.now:
            _, number, event, load = heapq.heappop(self._due)
            if isinstance(event, LoadFinished):
                events += self._end(number, event, load)
            elif isinstance(event, LoadFenced):
                self._unfenced.pop(event.key)
                events.append(event)
            else:
                events.append(event)
            if self._rng.random() < 0.2 and not isinstance(event, LoadFinished):
                events.append(event)
        return events

    # ---- inside ----

    def _writers(self) -> list[np.ndarray]:
        return [blocks for several in self._unfenced.values() for blocks in several]

    def _later(self, delay: int, event: ConnectorEvent, load: tuple | None = None, number: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + delay, number or self._count, event, load))

    def _begin(self, load: tuple[KvRequest, np.ndarray, int, int]) -> None:
        rng, key = self._rng, load[0].key
        _, _, first, last = load
        fate = rng.choice(list(Fate))
        self.fates.add(fate)
        delay = DEADLINE if fate in (Fate.SILENT, Fate.SILENT_UNFENCED) else rng.choice([0, 1, 3, 10])
        if fate in (Fate.WELL, Fate.SLOW):
            event = LoadFinished(key)
            delay = delay if fate is Fate.SLOW else 0
        elif fate is Fate.FAILS:
            num_valid = rng.choice([0, first, rng.randint(first, last)])
            event = LoadFinished(key, num_valid, rng.choice(["peer_lost", ""]))
        else:
            event = LoadFinished(key, first, "timeout", is_fenced=fate is Fate.SILENT)
        self._later(delay, event, load, self.current[key])

    def _end(self, number: int, event: LoadFinished, load: tuple | None) -> list[ConnectorEvent]:
        key = event.key
        if load is None:
            # Told once more. As events do not say which load they end, connectors do not do so during the next one.
            return [] if key in self.current or key in self._unfenced else [event]
        assert self.current.pop(key) == number
        _, table, first, last = load
        if event.num_valid_tokens is not None:
            self.troubled.add(key)
        if not event.is_fenced:
            columns = table[:, first // self.runner._block_size : -(-last // self.runner._block_size)]
            self._unfenced.setdefault(key, []).append(columns[columns != 0])
            self._later(self._rng.choice([0, 1, 8, DEADLINE]), LoadFenced(key))
        else:
            self._fill(load, last if event.num_valid_tokens is None else event.num_valid_tokens, self.runner)
        if self._rng.random() < 0.3:
            self._later(self._rng.choice([0, 2, 20]), event)
        return [event]

    def _lose(self, load: tuple[KvRequest, np.ndarray, int, int]) -> None:
        """Some of the blocks that a synchronous load was to fill do not arrive."""
        request, table, first, last = load
        size = self.runner._block_size
        columns = range(first // size, -(-last // size))
        lost = table[:, self._rng.sample(columns, self._rng.randint(1, len(columns)))]
        blocks = lost[lost != 0]
        self.runner._kv[blocks] = GARBAGE
        self.lost_blocks |= set(blocks.tolist())
        self.troubled.add(request.key)
