"""What the tests of pushed blocks work with: a receive and its record, and a process that pushes or receives."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np

from kv_transfer.tcp_transport import TcpTransport
from kv_transfer.transport import BlockIds, Peer, Transfer, TransferEnd
from tests.kv_transfer.transport_rig import (
    PATIENCE_S,
    AnyPeer,
    Case,
    Ends,
    LocalPeer,
    PeerProcess,
    Rank,
)

CASE = Case("tcp")
NUM_BLOCKS, BLOCK_SIZE_BYTES = 12_000, 1024
# So much is more than sockets hold.
NUM_LARGE_BLOCKS, LARGE_BLOCK_SIZE_BYTES = 512, 128 << 10
CANARY = 0xA5


def tcp(end: Rank | LocalPeer) -> TcpTransport:
    assert isinstance(end.transport, TcpTransport)
    return end.transport


class Receive(Ends):
    """A receive, and the record of what it tells."""

    def __init__(self, rank: Rank, way: Peer, local: BlockIds, timeout_s: float = PATIENCE_S) -> None:
        super().__init__()
        self.local = local
        self.grants: list[int] = []
        self.transfer: Transfer = tcp(rank).receive(way, local, timeout_s, self.on_grant, self.on_end)

    def on_grant(self, grant: int) -> None:
        with self._changed:
            assert not self.ends, "the end has been told"
            self.grants.append(grant)
            self._changed.notify_all()

    @property
    def grant(self) -> int:
        """Waits for it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.grants or self.ends, PATIENCE_S), "no grant was told"
        assert len(self.grants) == 1, self.ends
        return self.grants[0]

    def wait(self) -> TransferEnd:
        end = super().wait()
        assert end.is_fenced
        return end


class PushProcess(PeerProcess):
    program = "tests.kv_transfer.push_peer"

    def __init__(self, num_blocks: int = NUM_LARGE_BLOCKS, block_size_bytes: int = LARGE_BLOCK_SIZE_BYTES) -> None:
        super().__init__(CASE, num_blocks, block_size_bytes)

    def order(self, **order: Any) -> None:
        assert self.endpoint
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def push(self, grant: int, blocks: BlockIds) -> Any:
        self.order(push=grant, blocks=blocks.tolist())
        return self.answer()

    def receive(self, peer: AnyPeer, num_blocks: int, timeout_s: float = PATIENCE_S) -> int:
        endpoint = msgspec.msgpack.encode(peer.endpoint).hex()
        self.order(receive=endpoint, num_blocks=num_blocks, timeout_s=timeout_s)
        return int(self.answer())


def ids(*blocks: int) -> BlockIds:
    return np.array(blocks, np.int32)


def scattered(num_blocks: int, seed: int, pool: int = NUM_BLOCKS) -> BlockIds:
    return np.random.default_rng(seed).permutation(pool)[:num_blocks].astype(np.int32)


def push_all(peer: LocalPeer, grant: int, blocks: BlockIds) -> None:
    assert tcp(peer).push(grant, blocks) is True


def is_over(peer: LocalPeer, grant: int) -> bool:
    return not tcp(peer).push(grant, ids())
