"""Pools of one process: a copy in memory, on a thread. For tests, and for ranks that share a process."""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable

from kv_transfer.copy_lane import CopyLane, CopyPeer
from kv_transfer.host import host_id
from kv_transfer.memory import KvMemory
from kv_transfer.transport import (
    BlockIds,
    Endpoint,
    FailureReason,
    OnEnd,
    Peer,
    Transfer,
    TransferError,
    TransportCaps,
    TransportStats,
    check_block_sizes,
)

# The transports of this process by their endpoints' addresses, and the lock that guards them.
_served: weakref.WeakValueDictionary[bytes, InprocTransport] = weakref.WeakValueDictionary()
_served_lock = threading.Lock()


class InprocTransport:
    """Threads: one that copies, one that watches deadlines; both start with the first pull."""

    name = "inproc"
    caps = TransportCaps(cancel_is_fence=True, same_host=True)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._memory: KvMemory | None = None
        self._address = b""
        self._lane = CopyLane(self.name)
        self._peers: weakref.WeakSet[CopyPeer] = weakref.WeakSet()
        """Other transports' ways to this one's pool. Guarded by `_served_lock`."""

    def start(self, memory: KvMemory, host: str) -> Endpoint:
        self._memory = memory
        self._address = secrets.token_bytes(16)
        with _served_lock:
            _served[self._address] = self
        return Endpoint(self.name, self._address, memory.num_blocks, memory.block_size_bytes, process_id())

    def connect(self, endpoint: Endpoint, timeout_s: float) -> Peer:
        assert self._memory is not None, "start() comes first"
        with _served_lock:
            other = _served.get(endpoint.address)
            if other is None or other._memory is None:
                raise TransferError(FailureReason.NO_ROUTE, "no such pool is served in this process")
            if not hmac.compare_digest(self._secret, other._secret):
                raise TransferError(FailureReason.INCOMPATIBLE, "the peer has another cluster secret")
            check_block_sizes(self._memory.block_size_bytes, other._memory.block_size_bytes)
            peer = self._lane.make_peer(endpoint, other._memory.blocks)
            other._peers.add(peer)
        return peer

    def pull(
        self,
        peer: Peer,
        remote_blocks: BlockIds,
        local_blocks: BlockIds,
        timeout_s: float,
        on_end: OnEnd,
        on_fenced: Callable[[], None] | None = None,
    ) -> Transfer:
        assert self._memory is not None, "start() comes first"
        return self._lane.pull(peer, self._memory, remote_blocks, local_blocks, timeout_s, on_end)

    def stats(self) -> TransportStats:
        return self._lane.stats()

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with _served_lock:
            _served.pop(self._address, None)
            peers = list(self._peers)
        for peer in peers:
            peer.close()
        self._lane.close(deadline)


def process_id() -> str:
    """Equal within one process only."""
    return f"{host_id()}:{os.getpid()}"
