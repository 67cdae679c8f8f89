"""The scheduler half of a KV connector: what a rank's scheduler asks about KV that lies elsewhere.

Names and call order follow the field's reference. Everything here is called from the scheduler, between steps; it
decides and remembers, it does not move data. What must be moved goes to the connector's worker half as the
metadata of a step's plan, and comes back as `LoadFinished` and `SendFinished` events, at any time, perhaps late or
twice.

A connector must end every load that it was asked for with a `LoadFinished`, and every request whose blocks it asked
to keep with a `SendFinished`, each within a lease of its own, whatever its peers do: also if they die, and also if
the request has ended meanwhile or its owner is gone. The scheduler has no timer for them. Until then the request
waits, and the blocks, which somebody may still write or read, are nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

RequestKey = tuple[int, int]
"""A request on this rank: its owner's number, and the number that its owner gave it."""


@dataclass(frozen=True, slots=True)
class KvRequest:
    """A request as a connector sees it."""

    key: RequestKey
    token_ids: npt.NDArray[np.int32]
    """Known tokens, shape [n]."""
    block_hashes: tuple[bytes, ...]
    """Of the full blocks among them; empty without prefix caching."""
    params: dict[str, str | int]


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """Tokens beyond the local prefix hit that a connector could supply."""

    num_tokens: int
    is_async: bool
    """True: blocks are taken and filled while the request waits. False: they are filled within its first step."""


@dataclass(frozen=True, slots=True)
class LoadFinished:
    """Event: an asynchronous load has ended; nothing writes into its blocks any more."""

    key: RequestKey
    num_valid_tokens: int | None = None
    """How many leading tokens of the request have right KV in its blocks; None: all that were to be loaded."""
    cause: str = ""
    """Why it failed, if it did."""


@dataclass(frozen=True, slots=True)
class SendFinished:
    """Event: nobody reads the blocks of this ended request any more (or its lease has expired)."""

    key: RequestKey


class SchedulerConnector(Protocol):
    """Owned and called by one scheduler."""

    def may_load_async(self, request: KvRequest) -> bool:
        """Whether the request may wait for an asynchronous load. No side effects.

        Asked whenever it is queued for an attempt: when it is added, after a load that failed, and for a session's
        next turn.
        """
        ...

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> ExternalMatch | None:
        """What could be supplied beyond a local hit of `num_computed_tokens`; None: not known yet, ask again.

        No side effects; may be called again for each attempt to admit.
        """
        ...

    def update_state_after_alloc(
        self, request: KvRequest, block_ids: npt.NDArray[np.int32], num_external_tokens: int
    ) -> None:
        """The request has blocks, shape [num_groups, columns]; load `num_external_tokens` into them (0: nothing).

        An asynchronous load ends with a `LoadFinished`; another is done within the request's first step.
        """
        ...

    def build_connector_meta(self) -> object | None:
        """For the worker half, what has come up since the last call; ends up in the step's plan."""
        ...

    def request_finished(self, request: KvRequest, block_ids: npt.NDArray[np.int32]) -> bool:
        """The request has ended; True: keep its blocks until `SendFinished`. Called once for every request.

        `block_ids` has no columns if it held no blocks when it ended, or if a load may still write into them: then
        nothing is kept, whatever the answer, and that load's `LoadFinished` is still due.
        """
        ...

    def has_pending_work(self) -> bool:
        """Whether `build_connector_meta` would return something."""
        ...
