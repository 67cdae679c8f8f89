"""A rank that only counts: a token per running request and step, over the real protocol. A process of its own.

    python -m benchmarks.token_rank STEP_MS

With it comes a control endpoint without limits, so that a router needs nothing else. Prints that one's port.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from cluster.control import ControlEndpoint
from kv_transfer.connection import Connection, Listener, connect
from rank_scheduler.config import SchedulerConfig
from rank_scheduler.messages import (
    Abort,
    End,
    FinishReason,
    PrefixSnapshot,
    RankLoad,
    RouterToRank,
    StepFrame,
    Submit,
    WatchPrefixes,
)
from router.control_messages import RankRecord, Register

SECRET = b"a secret of the benchmarks, 32 b."
HOST = "127.0.0.1"
TOKEN = 71
"""The letter h, as `benchmarks.token_router` has it."""


class TokenRank:
    """Use from one event loop."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._live: dict[int, int] = {}
        """Request → how many tokens it still gets."""
        self._begun: list[int] = []
        self._num_steps = 0
        self._connection: Connection | None = None
        self._decoder = msgspec.msgpack.Decoder(RouterToRank)
        self._encoder = msgspec.msgpack.Encoder()
        self.listener = Listener(SECRET, self._accept)

    def _accept(self, connection: Connection) -> None:
        self._connection = connection
        connection.start(self._on_frame)
        self._send(StepFrame(self._load()))

    def _on_frame(self, payload: bytes) -> None:
        message = self._decoder.decode(payload)
        if isinstance(message, Submit):
            self._live[message.id] = message.sampling.max_tokens
            self._begun.append(message.id)
        elif isinstance(message, Abort):
            self._live.pop(message.id, None)
        elif isinstance(message, WatchPrefixes):
            self._send(PrefixSnapshot(0))

    def _load(self) -> RankLoad:
        return RankLoad(num_running=len(self._live), num_free_blocks=1 << 20, num_steps=self._num_steps)

    def _send(self, message: StepFrame | PrefixSnapshot) -> None:
        if self._connection is not None:
            self._connection.send(self._encoder.encode(message))

    async def run(self) -> None:
        """Steps at a steady pace, for ever; an idle rank speaks once a second."""
        loop = asyncio.get_running_loop()
        at, last = loop.time(), 0.0
        while True:
            at = max(at + self._step_s, loop.time())
            await asyncio.sleep(at - loop.time())
            if not self._live and loop.time() < last + 1.0:
                continue
            last = loop.time()
            self._num_steps += 1
            ids, ends = list(self._live), []
            for request in ids:
                self._live[request] -= 1
                if not self._live[request]:
                    del self._live[request]
                    ends.append(End(request, FinishReason.LENGTH))
            begun, self._begun = self._begun, []
            self._send(StepFrame(self._load(), ids, [TOKEN] * len(ids), ends=ends, first_token_ids=begun))


async def serve(step_s: float) -> None:
    control = ControlEndpoint(SchedulerConfig(), SECRET)
    control_port = await control.start(HOST)
    rank = TokenRank(step_s)
    port = await rank.listener.start(HOST)
    registration = await connect(HOST, control_port, secret=SECRET, role="rank", name="rank", timeout_s=5.0)
    registration.start(lambda payload: None)
    record = RankRecord("", "mixed", "boot", HOST, port, 1, "n", 8_192, 1_024, 1 << 20, 16)
    registration.send(msgspec.msgpack.encode(Register(record)))
    print(control_port, flush=True)
    await rank.run()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]) / 1e3))
