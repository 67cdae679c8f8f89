"""A place in the cluster's queue that was taken before its request was read."""

from __future__ import annotations

from router.caller import Caller
from router.control_link import ControlLink


class Admitted:
    """Counts as one request. Whoever has it calls `release`, unless a flow has taken its key over."""

    def __init__(self, key: int, caller: Caller, control: ControlLink) -> None:
        self.caller = caller
        self._key: int | None = key
        self._control = control

    async def acquire(self) -> None:
        """Once, before anything else. Raises ApiError if there is no place."""
        assert self._key is not None
        caller = self.caller
        await self._control.acquire(self._key, 1, 0, retry_token=caller.retry_token, alias=caller.retry_alias)

    def take_over(self) -> int:
        """The key in the queue counts, which its new owner releases."""
        assert self._key is not None, "it has been released, or taken over by another"
        key, self._key = self._key, None
        return key

    def release(self) -> None:
        """The place is free again. Idempotent; nothing happens once it has been taken over."""
        if self._key is not None:
            self._control.release(self.take_over())
