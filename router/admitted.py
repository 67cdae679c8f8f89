"""A place in the cluster's queue that was taken before its request was read."""

from __future__ import annotations

import asyncio

from router.caller import Caller
from router.control_link import ControlLink
from router.errors import ApiError, deadline_exceeded
from router.explanation import WAITS_FOR_ADMISSION, InRouter, RouterStage


class Admitted:
    """Counts as one request. Whoever has it calls `release`, unless a flow has taken its key over."""

    def __init__(self, key: int, request_id: str, caller: Caller, control: ControlLink) -> None:
        """`request_id`: the answer's public id."""
        self.request_id = request_id
        self.caller = caller
        self._key: int | None = key
        self._control = control

    async def acquire(self) -> None:
        """Once, before anything else. Raises ApiError if there is no place, or its deadline comes before."""
        assert self._key is not None
        caller, loop = self.caller, asyncio.get_running_loop()
        expiry: asyncio.TimerHandle | None = None
        if caller.deadline_s is not None and caller.arrived_at is not None:
            expires_at = caller.arrived_at + caller.deadline_s
            if expires_at <= loop.time():
                raise deadline_exceeded(caller.deadline_s)
            expiry = loop.call_at(expires_at, self.fail, deadline_exceeded(caller.deadline_s))
        try:
            await self._control.acquire(self._key, 1, 0, retry_token=caller.retry_token, alias=caller.retry_alias)
        finally:
            if expiry is not None:
                expiry.cancel()

    def in_router(self) -> InRouter:
        """What it waits for, within `acquire`."""
        now = asyncio.get_running_loop().time()
        arrived_at = now if self.caller.arrived_at is None else self.caller.arrived_at
        return InRouter(RouterStage.ADMISSION, WAITS_FOR_ADMISSION, {"num_sequences": 1}, 0, arrived_at, now)

    def fail(self, error: ApiError) -> None:
        """Who waits for the place gets `error`."""
        if self._key is not None:
            self._control.refuse(self._key, error)

    def take_over(self) -> int:
        """The key in the queue counts, which its new owner releases."""
        assert self._key is not None, "it has been released, or taken over by another"
        key, self._key = self._key, None
        return key

    def release(self) -> None:
        """The place is free again. Idempotent; nothing happens once it has been taken over."""
        if self._key is not None:
            self._control.release(self.take_over())
