"""Pulls between two pools that both lie in this process's memory.

A pull of a part or less is copied by its caller, and has ended when the call returns: a thread would take about as
long to begin and to tell the end, and with a busy interpreter far longer. Others are copied by one thread, one at a
time, in parts of about PART_BYTES, and may be stopped between two of them. Small runs of blocks are gathered and
scattered by numpy, a part per call: it lets go of the interpreter once per part, not once per block, which with a busy
interpreter costs 5 ms each time.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.block_runs import check_block_ids, check_pairs, find_runs
from kv_transfer.memory import KvMemory
from kv_transfer.pulls import Pull, Pulls, join
from kv_transfer.transport import BlockIds, Endpoint, FailureReason, OnEnd, Peer, TransferEnd, TransportStats

_log = logging.getLogger(__name__)

Blocks = npt.NDArray[np.uint8]

PART_BYTES = 1 << 20
# From this mean length on, a run is copied by a call of its own, without the detour over a gathered copy.
LONG_RUN_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class _Job:
    pull: Pull
    source: Blocks
    source_blocks: BlockIds
    target: Blocks
    target_blocks: BlockIds


class CopyPeer:
    """A peer whose pool lies in this process's memory; `blocks` is None once either end has closed it."""

    def __init__(self, endpoint: Endpoint, blocks: Blocks, pulls: Pulls) -> None:
        self.endpoint = endpoint
        self.blocks: Blocks | None = blocks
        self._pulls = pulls

    def close(self) -> None:
        # In this order: a pull that still finds the blocks has been added before, and is stopped.
        self.blocks = None
        self._pulls.stop_all(self, FailureReason.PEER_LOST, "the peer was closed")


class CopyLane:
    """What in-memory transports do behind `connect`. The thread is started by the first pull."""

    def __init__(self, name: str) -> None:
        self._thread_name = f"kv-{name}-copy"
        self._pulls = Pulls(name)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def make_peer(self, endpoint: Endpoint, blocks: Blocks) -> CopyPeer:
        return CopyPeer(endpoint, blocks, self._pulls)

    def pull(
        self,
        peer: Peer,
        memory: KvMemory,
        remote_blocks: BlockIds,
        local_blocks: BlockIds,
        timeout_s: float,
        on_end: OnEnd,
    ) -> Pull:
        """`KvTransport.pull` into `memory`."""
        assert isinstance(peer, CopyPeer)
        check_pairs(remote_blocks, local_blocks)
        target_blocks = check_block_ids(local_blocks, memory.num_blocks, "this rank's")
        num_bytes = len(target_blocks) * memory.block_size_bytes
        pull = self._pulls.add(peer, len(target_blocks), num_bytes, timeout_s, on_end)
        source = peer.blocks
        if source is None:
            self._pulls.stop(pull, FailureReason.PEER_LOST, "the peer was closed")
            return pull
        try:
            source_blocks = check_block_ids(remote_blocks, len(source), "the peer's")
        except ValueError as error:
            self._pulls.stop(pull, FailureReason.BACKEND, str(error))
            return pull
        job = _Job(pull, source, source_blocks, memory.blocks, target_blocks)
        if num_bytes <= PART_BYTES:
            if pull.begin():
                pull.finish(_copy(job))
        else:
            self._start_thread()
            # Behind the end of the thread, it is left to the keeper.
            self._jobs.put(job)
        return pull

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closed:
                thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.pull.begin():
                job.pull.finish(_copy(job))
            # While the thread waits, it must not keep a mapping that its owner has given up.
            del job

    def stats(self) -> TransportStats:
        return self._pulls.stats()

    def close(self, deadline: float) -> None:
        """Stop all pulls, and end the threads. Idempotent."""
        self._pulls.stop_all(None, FailureReason.PEER_LOST, "the transport is being closed")
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)
            thread = self._thread
        if thread is not None:
            join(thread, deadline)
        self._pulls.close(deadline)


def _copy(job: _Job) -> TransferEnd:
    try:
        for _ in copy_blocks(job.source, job.source_blocks, job.target, job.target_blocks):
            if job.pull.failure is not None:
                break
    except Exception as error:
        _log.exception("A copy between pools has failed")
        return TransferEnd(FailureReason.BACKEND, repr(error))
    return TransferEnd()


def copy_blocks(source: Blocks, source_blocks: BlockIds, target: Blocks, target_blocks: BlockIds) -> Iterator[None]:
    """Copy pair by pair; yields after each part."""
    block_size_bytes = source.shape[1]
    if block_size_bytes >= LONG_RUN_BYTES:
        # (Looking for neighbours would take as long as it could spare.)
        num_bytes = 0
        for source_block, target_block in zip(source_blocks.tolist(), target_blocks.tolist(), strict=True):
            target[target_block] = source[source_block]
            num_bytes += block_size_bytes
            if num_bytes >= PART_BYTES:
                num_bytes = 0
                yield
        return
    firsts, lengths = find_runs(source_blocks, target_blocks)
    if not len(firsts):
        return
    num_blocks_per_part = PART_BYTES // block_size_bytes
    if len(source_blocks) * block_size_bytes < LONG_RUN_BYTES * len(firsts):
        for first in range(0, len(source_blocks), num_blocks_per_part):
            part = slice(first, first + num_blocks_per_part)
            target[target_blocks[part]] = source[source_blocks[part]]
            yield
        return
    runs = zip(source_blocks[firsts].tolist(), target_blocks[firsts].tolist(), lengths.tolist(), strict=True)
    for source_first, target_first, length in runs:
        for offset in range(0, length, num_blocks_per_part):
            num_blocks = min(num_blocks_per_part, length - offset)
            start, end = source_first + offset, target_first + offset
            target[end : end + num_blocks] = source[start : start + num_blocks]
            yield
