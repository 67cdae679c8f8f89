"""Blocks copied from pool to pool, sent out of a pool, and received into one; in C where that was built.

`copy`, `send` and `receive` are those of `_block_moves.c`, or else the functions here: both move the same bytes and
raise the same errors. Those in C let go of the interpreter once per call, and spend next to nothing per block.

On a stream blocks follow each other in the order in which they were asked for, behind a header. Each end finds runs of
neighbours among its own ids, so neither knows how the other's lie.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kv_transfer.block_runs import check_block_ids, check_pairs, find_runs
from kv_transfer.extension import ExtensionMissingError, load
from kv_transfer.tcp_stream import set_timeout
from kv_transfer.transport import BlockIds

Pool = npt.NDArray[np.uint8]
"""Of shape [blocks, bytes of each], contiguous."""

# What the kernel takes in one call (IOV_MAX).
_MAX_VIEWS = 1024
# From this size on, a block is copied by a call of its own, without the detour over a gathered copy.
_LARGE_BLOCK_BYTES = 64 << 10


def copy_in_python(source: Pool, source_blocks: BlockIds, target: Pool, target_blocks: BlockIds, /) -> None:
    """Pair by pair. Raises ValueError for what does not pair and for ids out of range, with nothing copied."""
    check_pairs(source_blocks, target_blocks)
    if source.shape[1] != target.shape[1]:
        raise ValueError(f"blocks have {source.shape[1]} bytes in the source and {target.shape[1]} in the target")
    check_block_ids(source_blocks, len(source), "the source's")
    check_block_ids(target_blocks, len(target), "the target's")
    if source.shape[1] < _LARGE_BLOCK_BYTES:
        # One call for all of them lets go of the interpreter once.
        target[target_blocks] = source[source_blocks]
        return
    for source_block, target_block in zip(source_blocks.tolist(), target_blocks.tolist(), strict=True):
        target[target_block] = source[source_block]


def send_in_python(sock: socket.socket, header: bytes, pool: Pool, blocks: BlockIds, deadline: float, /) -> None:
    """The header and the blocks, on a socket that blocks.

    Raises TimeoutError at `deadline` (monotonic), OSError if the peer has gone, ValueError for ids out of range.
    """
    views = _runs(pool, blocks)
    if header:
        views.insert(0, memoryview(header))
    for batch in _batches(views):
        while batch:
            # The kernel's own timeout: one call moves a whole batch, however often it must wait.
            set_timeout(sock, socket.SO_SNDTIMEO, deadline - time.monotonic())
            with contextlib.suppress(BlockingIOError):
                batch = _rest(batch, sock.sendmsg(batch))


def receive_in_python(sock: socket.socket, header: bytearray, pool: Pool, blocks: BlockIds, /) -> None:
    """Fill the header, and if it holds nothing but zeros, the blocks.

    On a socket that blocks, and that somebody shuts in time. Raises OSError when it has ended, ValueError for ids out
    of range.
    """
    views = _runs(pool, blocks)
    if header:
        _fill(sock, [memoryview(header)])
    if not any(header):
        for batch in _batches(views):
            _fill(sock, batch)


def _runs(pool: Pool, blocks: BlockIds) -> list[memoryview]:
    """The blocks' bytes in order, a view for each run of neighbours."""
    check_block_ids(blocks, len(pool), "the")
    firsts, lengths = find_runs(blocks)
    block_size_bytes = pool.shape[1]
    starts = blocks[firsts].astype(np.int64) * block_size_bytes
    ends = starts + lengths * block_size_bytes
    view = pool.reshape(-1).data
    return [view[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _batches(views: list[memoryview]) -> Iterator[list[memoryview]]:
    for first in range(0, len(views), _MAX_VIEWS):
        yield views[first : first + _MAX_VIEWS]


def _fill(sock: socket.socket, views: list[memoryview]) -> None:
    while views:
        num_bytes = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not num_bytes:
            raise ConnectionResetError("the peer closed the connection")
        views = _rest(views, num_bytes)


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is behind the first `num_bytes`."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


copy: Callable[[Pool, BlockIds, Pool, BlockIds], None] = copy_in_python
send: Callable[[socket.socket, bytes, Pool, BlockIds, float], None] = send_in_python
receive: Callable[[socket.socket, bytearray, Pool, BlockIds], None] = receive_in_python
with contextlib.suppress(ExtensionMissingError):
    _twin = load("kv_transfer._block_moves")
    copy, send, receive = _twin.copy, _twin.send, _twin.receive
