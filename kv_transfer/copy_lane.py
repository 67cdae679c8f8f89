"""Pulls between two pools that both lie in this process's memory.

A pull of a part or less is copied by its caller, and has ended when the call returns: a thread would take about as
long to begin and to tell the end, and with a busy interpreter far longer. Others are copied by one thread, one at a
time, in parts of PART_BYTES, and may be stopped between two of them.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass

from kv_transfer import block_moves
from kv_transfer.block_moves import Pool
from kv_transfer.block_runs import check_block_ids, check_pairs
from kv_transfer.memory import KvMemory
from kv_transfer.pulls import Pull, Pulls, join
from kv_transfer.transport import BlockIds, Endpoint, FailureReason, OnEnd, Peer, Transfer, TransferEnd, TransportStats

_log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
_DONE = TransferEnd()
_CLOSED = "the peer was closed"


@dataclass(frozen=True, slots=True)
class _Job:
    pull: Pull
    source: Pool
    source_blocks: BlockIds
    target: Pool
    target_blocks: BlockIds


class CopyPeer:
    """A peer whose pool lies in this process's memory; `blocks` is None once either end has closed it."""

    def __init__(self, endpoint: Endpoint, blocks: Pool, pulls: Pulls) -> None:
        self.endpoint = endpoint
        self.blocks: Pool | None = blocks
        self._pulls = pulls

    def close(self) -> None:
        # In this order: a pull that still finds the blocks has been added before, and is stopped.
        self.blocks = None
        self._pulls.stop_all(self, FailureReason.PEER_LOST, _CLOSED)


class CopyLane:
    """What in-memory transports do behind `connect`. The thread is started by the first pull."""

    def __init__(self, name: str) -> None:
        self._thread_name = f"kv-{name}-copy"
        self._pulls = Pulls(name)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def make_peer(self, endpoint: Endpoint, blocks: Pool) -> CopyPeer:
        return CopyPeer(endpoint, blocks, self._pulls)

    def pull(
        self,
        peer: Peer,
        memory: KvMemory,
        remote_blocks: BlockIds,
        local_blocks: BlockIds,
        timeout_s: float,
        on_end: OnEnd,
    ) -> Transfer:
        """`KvTransport.pull` into `memory`."""
        assert isinstance(peer, CopyPeer)
        check_pairs(remote_blocks, local_blocks)
        target_blocks = check_block_ids(local_blocks, memory.num_blocks, "this rank's")
        num_bytes = len(target_blocks) * memory.block_size_bytes
        if num_bytes <= PART_BYTES:
            return self._pulls.do_at_once(
                len(target_blocks), num_bytes, lambda: _copy_at_once(peer, remote_blocks, memory, target_blocks), on_end
            )
        pull = self._pulls.add(peer, len(target_blocks), num_bytes, timeout_s, on_end)
        source = peer.blocks
        if source is None:
            self._pulls.stop(pull, FailureReason.PEER_LOST, _CLOSED)
            return pull
        try:
            source_blocks = check_block_ids(remote_blocks, len(source), "the peer's")
        except ValueError as error:
            self._pulls.stop(pull, FailureReason.BACKEND, str(error))
            return pull
        self._start_thread()
        # Behind the end of the thread, it is left to the keeper.
        self._jobs.put(_Job(pull, source, source_blocks, memory.blocks, target_blocks))
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


def _copy_at_once(peer: CopyPeer, remote_blocks: BlockIds, memory: KvMemory, target_blocks: BlockIds) -> TransferEnd:
    source = peer.blocks
    if source is None:
        return TransferEnd(FailureReason.PEER_LOST, _CLOSED)
    try:
        source_blocks = check_block_ids(remote_blocks, len(source), "the peer's")
        block_moves.copy(source, source_blocks, memory.blocks, target_blocks)
    except ValueError as error:
        return TransferEnd(FailureReason.BACKEND, str(error))
    except Exception as error:
        return _failed(error)
    return _DONE


def _failed(error: Exception) -> TransferEnd:
    _log.exception("A copy between pools has failed")
    return TransferEnd(FailureReason.BACKEND, repr(error))


def _copy(job: _Job) -> TransferEnd:
    num_blocks_per_part = max(PART_BYTES // job.source.shape[1], 1)
    try:
        for first in range(0, len(job.source_blocks), num_blocks_per_part):
            part = slice(first, first + num_blocks_per_part)
            block_moves.copy(job.source, job.source_blocks[part], job.target, job.target_blocks[part])
            if job.pull.failure is not None:
                break
    except Exception as error:
        return _failed(error)
    return _DONE
