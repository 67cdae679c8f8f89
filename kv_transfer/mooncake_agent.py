"""Mooncake's transfer engine (its TCP transport) in an agent: one-sided reads.

The engine's batches end as a whole only for a caller that spins in C, and the state it tells of a batch without
waiting is its first entry's. So every run of blocks is a batch of its own, and a bounded number of them is under way:
states are exact, the engine's queue never overflows, and a cancelled read has ended as soon as its last runs have.
The engine has threads of its own; one that serves needs no polling. Opening a peer blocks in C.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from kv_transfer.agent_library import AgentBroken, ClientLost, Finished, LibraryAgent, Pool
from kv_transfer.block_runs import find_runs
from kv_transfer.transport import BlockIds, FailureReason

# Enough to keep the engine's connections busy: more is not faster, and far from its limit of 2,048.
MAX_RUNS_UNDER_WAY = 64
# Longer runs would make cancelled reads end later.
MAX_RUN_BYTES = 4 << 20

_COMPLETED = 1
_UNDER_WAY = 0


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    segment: str
    pool_address: int


class _ReadState:
    """One read: runs of blocks that still have to be posted, and batches under way."""

    def __init__(self, segment: str, runs: deque[tuple[int, int, int]]) -> None:
        self.segment = segment
        self.runs = runs
        """(remote address, local address, bytes)"""
        self.batches: list[int] = []
        self.failure: Finished | None = None


class MooncakeAgent(LibraryAgent):
    name = "mooncake"
    needs_target_poll = False

    def __init__(self, pool: Pool, host: str, ask: Callable[[int, bytes], None]) -> None:
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        self._pool = pool
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"Mooncake's engine does not start on {host}")
        for address, size in (
            (pool.address, pool.num_blocks * pool.block_size_bytes),
            (pool.scratch_address, pool.block_size_bytes),
        ):
            if self._engine.register_memory(address, size):
                raise RuntimeError(f"Mooncake's engine does not register {size} bytes of memory")
        self.metadata = msgspec.msgpack.encode(_Metadata(f"{host}:{self._engine.get_rpc_port()}", pool.address))
        self._links: dict[int, _Metadata] = {}
        self._segments: dict[str, int] = {}
        """Pool addresses of all peers ever seen, by segment: the engine never forgets one."""
        self._reads: dict[int, _ReadState] = {}

    def add_link(self, link_id: int, metadata: bytes, num_blocks: int) -> None:
        described = msgspec.msgpack.decode(metadata, type=_Metadata)
        known = self._segments.setdefault(described.segment, described.pool_address)
        if known != described.pool_address:
            raise AgentBroken(f"{described.segment} is another process than before, and Mooncake caches the old one")
        self._links[link_id] = described

    def remove_link(self, link_id: int) -> None:
        self._links.pop(link_id, None)

    def begin_read(self, read_id: int, link_id: int, remote_blocks: BlockIds, local_blocks: BlockIds) -> None:
        link = self._links[link_id]
        self._reads[read_id] = _ReadState(link.segment, self._runs(link, remote_blocks, local_blocks))

    def _runs(self, link: _Metadata, remote_blocks: BlockIds, local_blocks: BlockIds) -> deque[tuple[int, int, int]]:
        size = self._pool.block_size_bytes
        max_run = max(MAX_RUN_BYTES // size, 1)
        runs = deque[tuple[int, int, int]]()
        for first, length in zip(*find_runs(remote_blocks, local_blocks), strict=True):
            for start in range(int(first), int(first + length), max_run):
                n = min(max_run, int(first + length) - start)
                remote = link.pool_address + int(remote_blocks[start]) * size
                runs.append((remote, self._address(int(local_blocks[start])), n * size))
        return runs

    def _address(self, block_id: int) -> int:
        if block_id == self._pool.scratch_id:
            return self._pool.scratch_address
        return self._pool.address + block_id * self._pool.block_size_bytes

    def cancel_read(self, read_id: int) -> None:
        read = self._reads.get(read_id)
        if read is not None:
            self._fail(read_id, read, FailureReason.TIMEOUT, "cancelled")

    def _fail(self, read_id: int, read: _ReadState, reason: FailureReason, message: str) -> None:
        """No run is posted any more; the read ends with the last one that is under way."""
        read.runs.clear()
        read.failure = read.failure or Finished(read_id, reason, message)

    def poll(self) -> list[Finished | ClientLost]:
        num_under_way = 0
        finished: list[Finished | ClientLost] = []
        for read_id, read in list(self._reads.items()):
            for batch in list(read.batches):
                status = self._engine.transfer_check_status(batch)
                if status == _UNDER_WAY:
                    continue
                read.batches.remove(batch)
                if status != _COMPLETED:
                    self._fail(read_id, read, FailureReason.PEER_LOST, "Mooncake lost its connection to the peer")
            num_under_way += len(read.batches)
        for read_id, read in list(self._reads.items()):
            while read.runs and num_under_way < MAX_RUNS_UNDER_WAY:
                remote, local, size = read.runs.popleft()
                batch = self._engine.batch_transfer_async_read(read.segment, [local], [remote], [size])
                if not batch:
                    self._fail(read_id, read, FailureReason.NO_ROUTE, "Mooncake found no way to the peer")
                    break
                read.batches.append(batch)
                num_under_way += 1
            if not read.runs and not read.batches:
                del self._reads[read_id]
                finished.append(read.failure or Finished(read_id))
        return finished
