"""One answer for several clients: it is recorded as it comes, and each of them reads it from its beginning.

Ownership: the run belongs to the answer, not to a client; when the last reader leaves before its end, it is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Message, Send

Run = Callable[[Send], Awaitable[bool]]
"""Sends an answer; whether it is whole."""
REPLAYED = (b"idempotent-replayed", b"true")


@dataclass(slots=True, eq=False)
class _Reader:
    position: int
    """Of the next message, counted from the answer's first."""


class SharedAnswer:
    """Use from one event loop."""

    def __init__(self, digest: bytes, max_bytes: int, on_end: Callable[[SharedAnswer, bool], None]) -> None:
        """`digest`: of what it answers. `on_end` hears once of its end, and whether it is whole then."""
        self.digest = digest
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._on_end = on_end
        self._log: deque[Message] = deque()
        self._num_dropped = 0
        self._readers: set[_Reader] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_ended = False
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    @property
    def is_joinable(self) -> bool:
        """Its beginning is still there."""
        return not self._num_dropped

    def start(self, run: Run) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(run), name="shared answer")

    async def read(self, send: Send, *, is_joining: bool) -> None:
        """Send all of it. Raises what its run raised."""
        reader = _Reader(0)
        self._readers.add(reader)
        try:
            while True:
                while (index := reader.position - self._num_dropped) < len(self._log):
                    message = dict(self._log[index])
                    if is_joining and message["type"] == "http.response.start":
                        message["headers"] = [*message["headers"], REPLAYED]
                    await send(message)
                    reader.position += 1
                    self._drop()
                if self._is_ended:
                    break
                await self._news.wait()
        finally:
            self._readers.discard(reader)
            if not self._readers and not self._is_ended:
                self._end(False)
                if self._task is not None:
                    self._task.cancel()
        if self._failure is not None:
            raise self._failure

    async def _run(self, run: Run) -> None:
        is_whole = False
        try:
            is_whole = await run(self._record)
        except Exception as failure:
            self._failure = failure
        finally:
            self._end(is_whole)

    async def _record(self, message: Message) -> None:
        self._log.append(message)
        self.num_bytes += len(message.get("body", b""))
        self._drop()
        self._tell()

    def _drop(self) -> None:
        """Of one that is too large to be kept, what all readers have had."""
        if self.num_bytes <= self._max_bytes:
            return
        first = min((reader.position for reader in self._readers), default=0)
        while self._num_dropped < first:
            self._log.popleft()
            self._num_dropped += 1

    def _end(self, is_whole: bool) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        self._tell()
        self._on_end(self, is_whole and self.num_bytes <= self._max_bytes)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
