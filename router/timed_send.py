"""A deadline for clients that stop reading: without one, they would hold their sequences on the ranks for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Send


class ClientTooSlow(Exception):
    """The client has not taken what was sent to it in time; its answer ends here."""


class TimedSend:
    """An ASGI `send` that raises ClientTooSlow where one message waits for more than `timeout_s`.

    The timer belongs to the answer, not to each message: there is a message per token. One task sends at a time.
    """

    def __init__(self, send: Send, timeout_s: float, cut: Callable[[], None] | None = None) -> None:
        """`cut`: resets the connection, where the server offers that. Otherwise it closes it, which takes as long as
        the client does not read what is on its way."""
        self._cut = cut
        self._send = send
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._sender: asyncio.Task[object] | None = None
        """The task that is in `send` now, since `_began_at`."""
        self._began_at = 0.0
        self._has_expired = False
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, message: Message) -> None:
        self._began_at = self._loop.time()
        self._sender = asyncio.current_task()
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._check)
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._has_expired and self._sender is not None and self._sender.uncancel() == 0:
                raise ClientTooSlow(f"the client has read nothing for {self._timeout_s:g} s") from None
            raise  # somebody else wants the task to end as well
        finally:
            self._sender = None

    def close(self) -> None:
        """No more is sent."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        began_at = now if self._sender is None else self._began_at
        remaining_s = began_at + self._timeout_s - now
        if remaining_s > 0:
            self._timer = self._loop.call_later(remaining_s, self._check)
        elif self._sender is not None:
            self._has_expired = True
            self._sender.cancel()
            if self._cut is not None:
                self._cut()
