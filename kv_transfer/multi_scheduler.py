"""The deciding half of the `MultiConnector`: several scheduler halves as one; pure.

All are told everything. **Loading**: all are asked, and the first that has tokens loads; the others hear that they
load none. While one does not know, nobody does, for `lookup_timeout_s` at most; after that it counts as having nothing.
Loads within a step come from one of them only, the first that offered any: what another's lost blocks mean for a step
is known only when that has been asked. **Keeping**: blocks are kept until all that asked for them are done.
**What the owner hears** at the end is what all have to say together; two that say something under one key cannot both
be heard, so then it hears nothing, and that is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.connector import ExternalMatch, KvRequest, RequestKey, SchedulerConnector
from kv_transfer.params import KvParams


@dataclass(frozen=True, slots=True, eq=False)
class ChildLoad:
    key: RequestKey
    child: int
    is_async: bool
    blocks: npt.NDArray[np.int32]
    """All of the request's that are no local hit, shape [num_groups, columns]."""
    num_local_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class MultiMetadata:
    children: tuple[object | None, ...]
    """The metadata of each."""
    loads: tuple[ChildLoad, ...]
    """What begins with this plan."""
    kept: tuple[tuple[RequestKey, frozenset[int]], ...]
    """Requests that have ended, and who keeps their blocks."""
    conflicts: tuple[str, ...]
    """What could not be told to owners of requests."""


_NO_MATCH = ExternalMatch(0, False)


@dataclass(slots=True)
class _Request:
    num_local_tokens: int = 0
    asked_at: float | None = None
    """When somebody did not know for the first time."""
    loader: int | None = None
    """Whose tokens were answered last."""
    is_async: bool = False


class MultiScheduler:
    """The scheduler half of one rank."""

    def __init__(
        self,
        children: Sequence[SchedulerConnector],
        names: Sequence[str],
        broken: AbstractSet[int],
        now: Callable[[], float],
        *,
        block_size: int,
        lookup_timeout_s: float,
    ) -> None:
        """`broken`: children whose worker half has been given up, as it goes; they load and keep nothing any more."""
        self._children = children
        self._names = names
        self._broken = broken
        self._now = now
        self._block_size = block_size
        self._lookup_timeout_s = lookup_timeout_s
        self._requests: dict[RequestKey, _Request] = {}
        self._step_loader: int | None = None
        """Who loads within steps."""
        self._loads: list[ChildLoad] = []
        self._kept: list[tuple[RequestKey, frozenset[int]]] = []
        self._conflicts: list[str] = []

    def on_new_request(self, request: KvRequest) -> None:
        self._requests[request.key] = _Request()
        for child in self._children:
            child.on_new_request(request)

    def may_load_async(self, request: KvRequest) -> bool:
        return any(
            child.may_load_async(request) for index, child in enumerate(self._children) if index not in self._broken
        )

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> ExternalMatch | None:
        known = self._requests[request.key]
        known.num_local_tokens, known.loader = num_computed_tokens, None
        matches = [
            _NO_MATCH if index in self._broken else child.get_num_new_matched_tokens(request, num_computed_tokens)
            for index, child in enumerate(self._children)
        ]
        if None in matches:
            now = self._now()
            if known.asked_at is None:
                known.asked_at = now
            if now - known.asked_at < self._lookup_timeout_s:
                return None
        for index, match in enumerate(matches):
            if match is None or match.num_tokens <= 0:
                continue
            if match.is_async or self._step_loader in (None, index) or self._step_loader in self._broken:
                known.loader, known.is_async = index, match.is_async
                return match
        return _NO_MATCH

    def update_state_after_alloc(
        self, request: KvRequest, block_ids: npt.NDArray[np.int32], num_external_tokens: int
    ) -> None:
        known = self._requests[request.key]
        loader = known.loader if num_external_tokens > 0 else None
        known.loader = None
        if loader is not None:
            if not known.is_async:
                self._step_loader = loader
            first = known.num_local_tokens // self._block_size
            self._loads.append(
                ChildLoad(request.key, loader, known.is_async, block_ids[:, first:], known.num_local_tokens)
            )
        for index, child in enumerate(self._children):
            child.update_state_after_alloc(request, block_ids, num_external_tokens if index == loader else 0)

    def request_computed(self, key: RequestKey, num_tokens: int, block_ids: npt.NDArray[np.int32]) -> None:
        for child in self._children:
            child.request_computed(key, num_tokens, block_ids)

    def partial_ticket(self, key: RequestKey, num_tokens: int, block_ids: npt.NDArray[np.int32]) -> KvParams | None:
        told = [
            (index, params)
            for index, child in enumerate(self._children)
            if index not in self._broken and (params := child.partial_ticket(key, num_tokens, block_ids)) is not None
        ]
        return self._merged(key, told)

    def request_preempted(self, key: RequestKey) -> None:
        for child in self._children:
            child.request_preempted(key)

    def build_connector_meta(self) -> MultiMetadata | None:
        children = tuple(child.build_connector_meta() for child in self._children)
        metadata = MultiMetadata(children, tuple(self._loads), tuple(self._kept), tuple(self._conflicts))
        if not (self._loads or self._kept or self._conflicts or any(child is not None for child in children)):
            return None
        self._loads, self._kept, self._conflicts = [], [], []
        return metadata

    def request_finished(
        self, request: KvRequest, block_ids: npt.NDArray[np.int32], *, hands_off: bool
    ) -> tuple[bool, KvParams | None]:
        del self._requests[request.key]
        keepers: set[int] = set()
        told: list[tuple[int, KvParams]] = []
        for index, child in enumerate(self._children):
            keeps, params = child.request_finished(request, block_ids, hands_off=hands_off)
            if keeps and block_ids.shape[1] and index not in self._broken:
                keepers.add(index)
            if params is not None:
                told.append((index, params))
        if keepers:
            self._kept.append((request.key, frozenset(keepers)))
        return bool(keepers), self._merged(request.key, told)

    def still_wanted(self, key: RequestKey) -> None:
        for child in self._children:
            child.still_wanted(key)

    def abandoned(self, key: RequestKey) -> None:
        for child in self._children:
            child.abandoned(key)

    def has_pending_work(self) -> bool:
        mine = self._loads or self._kept or self._conflicts
        return bool(mine) or any(child.has_pending_work() for child in self._children)

    def check_integrity(self) -> None:
        assert all(0 <= load.child < len(self._children) for load in self._loads)
        for child in self._children:
            if (check := getattr(child, "check_integrity", None)) is not None:
                check()

    def _merged(self, key: RequestKey, told: Sequence[tuple[int, KvParams]]) -> KvParams | None:
        merged: KvParams = {}
        said_by: dict[str, int] = {}
        for index, params in told:
            for name, value in params.items():
                if name in said_by:
                    self._conflicts.append(
                        f"request {key}: {self._names[said_by[name]]} and {self._names[index]} both have something to "
                        f"say as {name!r} of kv_transfer_params, so nothing is said: configure one of them"
                    )
                    return None
                said_by[name] = index
                merged[name] = value
        return merged if told else None
