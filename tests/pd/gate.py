"""A gate in the way of pulls: while it is shut, half of a pull's blocks arrive, and the rest when it is opened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kv_transfer.transport import (
    BlockIds,
    FailureReason,
    KvTransport,
    OnEnd,
    Peer,
    Transfer,
    TransferEnd,
)


class Gate:
    """Stands in the pulls of all transports of one class. Its methods may be called from any thread."""

    def __init__(self, kind: type[KvTransport]) -> None:
        self._pull = kind.pull
        self._lock = threading.Lock()
        self._is_shut = False
        self._waiting: dict[HalfPull, Callable[[], None]] = {}
        """Guarded by the lock, as `_is_shut`."""
        gate = self

        def pull(transport: KvTransport, peer: Peer, remote: BlockIds, local: BlockIds, *rest: Any) -> Transfer:
            return gate.pull(transport, peer, remote, local, *rest)

        kind.pull = pull  # type: ignore[method-assign, assignment]

    @property
    def num_waiting(self) -> int:
        """Pulls that are halfway through."""
        return len(self._waiting)

    def shut(self) -> None:
        with self._lock:
            self._is_shut = True

    def open(self) -> None:
        with self._lock:
            self._is_shut = False
            waiting, self._waiting = self._waiting, {}
        for go_on in waiting.values():
            go_on()

    def pull(
        self,
        transport: KvTransport,
        peer: Peer,
        remote: BlockIds,
        local: BlockIds,
        timeout_s: float,
        on_end: OnEnd,
        on_fenced: Callable[[], None] | None = None,
    ) -> Transfer:
        if not self._is_shut:
            return self._pull(transport, peer, remote, local, timeout_s, on_end, on_fenced)
        half, pulled = len(remote) // 2, HalfPull(self, on_end)

        def go_on() -> None:
            pulled.transfer = self._pull(transport, peer, remote[half:], local[half:], timeout_s, on_end, on_fenced)

        def on_half(end: TransferEnd) -> None:
            if end.reason is not None:
                on_end(end)
                return
            with self._lock:
                if self._is_shut:
                    self._waiting[pulled] = go_on
                    return
            go_on()

        pulled.transfer = self._pull(transport, peer, remote[:half], local[:half], timeout_s, on_half, on_fenced)
        return pulled

    def forget(self, pulled: HalfPull) -> bool:
        """False: it does not wait (any more)."""
        with self._lock:
            return self._waiting.pop(pulled, None) is not None


class HalfPull:
    def __init__(self, gate: Gate, on_end: OnEnd) -> None:
        self._gate = gate
        self._on_end = on_end
        self.transfer: Transfer

    def cancel(self) -> None:
        if self._gate.forget(self):
            self._on_end(TransferEnd(FailureReason.TIMEOUT, "cancelled halfway"))
        else:
            self.transfer.cancel()
