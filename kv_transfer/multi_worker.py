"""The moving half of the `MultiConnector`: several worker halves as one.

**A child that raises** is given up, the others go on: it is closed, after which it neither reads nor writes; what it
was to load has failed, and what it kept is let go. Its scheduler half hears of it by `broken`.

**A step that has lost blocks** was not computed, as far as the other children are concerned, nor was the one after it,
which may have been planned on top of it: so none of them stores or hands out what is wrong. To hear of it in time, who
loads within the step is asked first.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from kv_transfer.connector import (
    ConnectorEvent,
    ConnectorStats,
    LoadFenced,
    LoadFinished,
    RequestKey,
    SendFinished,
    WorkerConnector,
)
from kv_transfer.memory import KvMemory
from kv_transfer.multi_scheduler import ChildLoad, MultiMetadata

_log = logging.getLogger(__name__)

# To close a child that has raised, within a step.
_GIVE_UP_TIMEOUT_S = 5.0


class MultiWorker:
    """The worker half of one rank."""

    def __init__(self, children: Sequence[WorkerConnector], names: Sequence[str], broken: set[int]) -> None:
        self._children = children
        self._names = names
        self._broken = broken
        self._receiver: Callable[[ConnectorEvent], None] | None = None
        self._step_loads: tuple[ChildLoad, ...] = ()
        """Of the present step, those within it."""
        self._is_tainted = False
        """The step before has lost blocks."""
        self._num_conflicts = 0
        self._lock = threading.Lock()
        """Over the fields below; events come from any thread."""
        self._loading: dict[RequestKey, ChildLoad] = {}
        self._unfenced: dict[RequestKey, int] = {}
        self._kept: dict[RequestKey, set[int]] = {}
        self._is_closed = False

    def start(self, memory: KvMemory, post: Callable[[ConnectorEvent], None]) -> None:
        self._receiver = post
        for index, child in enumerate(self._children):
            try:
                child.start(memory, partial(self._take, index))
            except BaseException:
                for started in reversed(self._children[: index + 1]):
                    started.close(0.0)
                raise

    # ---- the step's thread ----

    def handle_preemptions(self, metadata: object) -> None:
        for index, child_metadata in enumerate(cast(MultiMetadata, metadata).children):
            if child_metadata is not None and index not in self._broken:
                self._call(index, self._children[index].handle_preemptions, child_metadata)

    def start_load_kv(self, metadata: object) -> None:
        metadata = cast(MultiMetadata, metadata)
        for message in metadata.conflicts:
            _log.error("KV connectors contradict each other: %s", message)
        self._num_conflicts += len(metadata.conflicts)
        self._step_loads = tuple(load for load in metadata.loads if not load.is_async)
        with self._lock:
            self._loading.update({load.key: load for load in metadata.loads if load.is_async})
            self._kept.update({key: set(keepers) for key, keepers in metadata.kept})
        for index, child_metadata in enumerate(metadata.children):
            if child_metadata is not None and index not in self._broken:
                self._call(index, self._children[index].start_load_kv, child_metadata)
        # Also what was planned before it was known that they are broken.
        self._let_go()

    def wait_for_layer_load(self, layer: int) -> None:
        for index, child in enumerate(self._children):
            if index not in self._broken:
                self._call(index, child.wait_for_layer_load, layer)

    def save_kv_layer(self, layer: int) -> None:
        for index, child in enumerate(self._children):
            if index not in self._broken:
                self._call(index, child.save_kv_layer, layer)

    def finish_step(self, metadata: object | None, *, was_computed: bool) -> frozenset[int]:
        loads, self._step_loads = self._step_loads, ()
        loaders = {load.child for load in loads}
        invalid: set[int] = set()
        for index in sorted(range(len(self._children)), key=lambda index: index not in loaders):
            if index in self._broken:
                continue
            child_metadata = None if metadata is None else cast(MultiMetadata, metadata).children[index]
            is_right = was_computed and (index in loaders or not (invalid or self._is_tainted))
            finish = partial(self._children[index].finish_step, was_computed=is_right)
            invalid |= self._call(index, finish, child_metadata) or frozenset()
            if index in self._broken and index in loaders:
                invalid |= _blocks_of(loads, index)
        for index in loaders & self._broken:
            invalid |= _blocks_of(loads, index)
        self._let_go()
        self._is_tainted = bool(invalid)
        return frozenset(invalid)

    # ---- any thread ----

    def stats(self) -> ConnectorStats:
        total = ConnectorStats(num_rejected_params=self._num_conflicts)
        for child in self._children:
            stats = child.stats()
            for field in dataclasses.fields(ConnectorStats):
                ours, theirs = getattr(total, field.name), getattr(stats, field.name)
                if isinstance(ours, dict):
                    for name, count in theirs.items():
                        ours[name] = ours.get(name, 0) + count
                elif isinstance(ours, list):
                    ours[:] = [a + b for a, b in zip(ours, theirs, strict=True)]
                else:
                    setattr(total, field.name, ours + theirs)
        return total

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for index in reversed(range(len(self._children))):
            self._close_child(index, max(deadline - time.monotonic(), 0.0))
        with self._lock:
            self._is_closed = True

    # ---- inside ----

    def _take(self, child: int, event: ConnectorEvent) -> None:
        with self._lock:
            if self._is_closed or self._receiver is None:
                return
            match event:
                case LoadFinished(key):
                    load = self._loading.get(key)
                    if load is None or load.child != child:
                        # Late, or twice.
                        return
                    del self._loading[key]
                    if not event.is_fenced:
                        self._unfenced[key] = child
                case LoadFenced(key):
                    self._unfenced.pop(key, None)
                case SendFinished(key):
                    keepers = self._kept.get(key)
                    if keepers is None or child not in keepers:
                        return
                    keepers.remove(child)
                    if keepers:
                        return
                    del self._kept[key]
            receiver = self._receiver
        receiver(event)

    def _call(self, index: int, call: Callable[..., frozenset[int] | None], *args: object) -> frozenset[int] | None:
        try:
            return call(*args)
        except Exception:
            _log.exception("The KV connector %s has failed, and is given up until a restart", self._names[index])
            self._broken.add(index)
            self._close_child(index, _GIVE_UP_TIMEOUT_S)
            return None

    def _close_child(self, index: int, timeout_s: float) -> None:
        try:
            self._children[index].close(timeout_s)
        except Exception:
            _log.exception("The KV connector %s could not be closed in order", self._names[index])

    def _let_go(self) -> None:
        """What broken children leave behind: they are closed, so nobody reads or writes for them any more."""
        if not self._broken:
            return
        with self._lock:
            loads = [load for load in self._loading.values() if load.child in self._broken]
            unfenced = [(key, child) for key, child in self._unfenced.items() if child in self._broken]
            kept = [(key, child) for key, keepers in self._kept.items() for child in keepers & self._broken]
        for load in loads:
            name = self._names[load.child]
            self._take(load.child, LoadFinished(load.key, load.num_local_tokens, f"{name} has failed"))
        for key, child in unfenced:
            self._take(child, LoadFenced(key))
        for key, child in kept:
            self._take(child, SendFinished(key))


def _blocks_of(loads: Sequence[ChildLoad], child: int) -> set[int]:
    return {block for load in loads if load.child == child for block in load.blocks.ravel().tolist() if block}
