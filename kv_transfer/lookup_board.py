"""What a remote store holds, asked by a thread: a `BlockIndex` whose answers come a little later.

A request's look-up begins when the scheduler half first asks, and is answered once for all of its blocks. Blocks that
were stored or seen lately are remembered for a while, so that they are not stored over and over.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.block_store import StoreOutcome
from kv_transfer.connector import RequestKey

_log = logging.getLogger(__name__)

_MAX_NUM_SEEN = 1 << 20
# A request that waits for long asks again: what it would load may have gone.
_ANSWER_S = 30.0


@dataclass(slots=True)
class _Lookup:
    hashes: tuple[bytes, ...]
    num_found: int | None = None
    answered_at: float = 0.0


class LookupBoard:
    """May be used from any thread; its own thread asks. The lock is held for bookkeeping only."""

    def __init__(self, seen_s: float, now: Callable[[], float]) -> None:
        """`seen_s`: for how long a block that was seen counts as being there."""
        self._seen_s = seen_s
        self._now = now
        self._contains: Callable[[Sequence[bytes]], StoreOutcome] | None = None
        self._is_reachable: Callable[[], bool] | None = None
        self._lock = threading.Lock()
        """Over the fields below."""
        self._lookups: dict[RequestKey, _Lookup] = {}
        self._seen: OrderedDict[bytes, float] = OrderedDict()
        """Until when; oldest first."""
        self._storing: Counter[bytes] = Counter()
        self._is_closed = False
        self._queue: queue.SimpleQueue[_Lookup | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-store-lookup", daemon=True)

    def start(self, contains: Callable[[Sequence[bytes]], StoreOutcome], is_reachable: Callable[[], bool]) -> None:
        """`contains` asks the store, and ends within a bounded time; `is_reachable` tells whether that is of use now.

        Called by the store, when it starts.
        """
        self._contains, self._is_reachable = contains, is_reachable
        self._thread.start()

    # ---- BlockIndex ----

    def may_hold(self) -> bool:
        return self._is_reachable is not None and not self._is_closed and self._is_reachable()

    def num_leading(self, key: RequestKey, hashes: Sequence[bytes]) -> int | None:
        if not self.may_hold():
            return 0
        with self._lock:
            lookup = self._lookups.get(key)
            if lookup is not None:
                # The local hit may have grown since.
                skipped = len(lookup.hashes) - len(hashes)
                is_same = skipped >= 0 and lookup.hashes[skipped] == hashes[0]
                if is_same and lookup.num_found is None:
                    return None
                if is_same and lookup.num_found is not None and self._now() - lookup.answered_at < _ANSWER_S:
                    return max(lookup.num_found - skipped, 0)
            lookup = self._lookups[key] = _Lookup(tuple(hashes))
        self._queue.put(lookup)
        return None

    def holds(self, block_hash: bytes) -> bool:
        with self._lock:
            return block_hash in self._storing or self._seen.get(block_hash, 0.0) > self._now()

    def forget(self, key: RequestKey) -> None:
        with self._lock:
            self._lookups.pop(key, None)

    def begin_storing(self, hashes: Sequence[bytes]) -> None:
        with self._lock:
            self._storing.update(hashes)

    def end_storing(self, hashes: Sequence[bytes]) -> None:
        with self._lock:
            self._storing.subtract(hashes)
            for block_hash in hashes:
                if not self._storing[block_hash]:
                    del self._storing[block_hash]

    # ---- the store ----

    def see(self, hashes: Sequence[bytes]) -> None:
        """They are there."""
        until = self._now() + self._seen_s
        with self._lock:
            for block_hash in hashes:
                self._seen[block_hash] = until
                self._seen.move_to_end(block_hash)
            while self._seen and (len(self._seen) > _MAX_NUM_SEEN or next(iter(self._seen.values())) <= self._now()):
                self._seen.popitem(last=False)

    def miss(self, hashes: Sequence[bytes]) -> None:
        """They are not there."""
        with self._lock:
            for block_hash in hashes:
                self._seen.pop(block_hash, None)

    def miss_all(self) -> None:
        """The store is gone; when it comes back, nobody knows with what."""
        with self._lock:
            self._seen.clear()

    def close(self, timeout_s: float) -> None:
        self._is_closed = True
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # ---- its thread ----

    def _run(self) -> None:
        assert self._contains is not None
        while (lookup := self._queue.get()) is not None:
            with self._lock:
                is_wanted = any(other is lookup for other in self._lookups.values())
            num_found = 0
            if is_wanted:
                try:
                    num_found = self._contains(lookup.hashes).num_blocks
                except Exception:
                    _log.exception("A KV store has failed in an unforeseen way")
            with self._lock:
                lookup.num_found, lookup.answered_at = num_found, self._now()
            del lookup
