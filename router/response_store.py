"""Responses that may be asked for again or gone on with: of this router, bounded in time, number and size."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from router.errors import ApiError, Cause

MAX_NUM_RESPONSES = 10_000
MAX_NUM_BYTES = 256 << 20
KEEP_S = 3600.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: bytes
    """As JSON."""
    messages: bytes
    """The conversation up to its answer, as JSON."""
    account: str
    """Whose it is: nobody else finds it."""
    stored_at: float

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """The oldest are given up first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]], account: str) -> None:
        now = self._clock()
        stored = StoredResponse(msgspec.json.encode(response), msgspec.json.encode(messages), account, now)
        self.drop(response["id"])
        self._responses[response["id"]] = stored
        self._num_bytes += stored.num_bytes
        while self._responses and (
            len(self._responses) > MAX_NUM_RESPONSES
            or self._num_bytes > MAX_NUM_BYTES
            or next(iter(self._responses.values())).stored_at <= now - KEEP_S
        ):
            self.drop(next(iter(self._responses)))

    def get(self, response_id: str, account: str) -> StoredResponse:
        """Raises ApiError if it is not known, or not any more."""
        stored = self._responses.get(response_id)
        if stored is None or stored.account != account or stored.stored_at <= self._clock() - KEEP_S:
            raise ApiError(
                Cause.NOT_FOUND,
                f"response_id: {response_id!r} is not stored by this router: it never was, is more than "
                f"{KEEP_S / 60:.0f} minutes old, or has made room for others; send the whole conversation as input",
                "response_id",
            )
        return stored

    def drop(self, response_id: str) -> bool:
        """False if it is not known."""
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes
        return stored is not None
