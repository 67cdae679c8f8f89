"""Blocks as a byte stream over TCP: scatter-gather on a blocking socket, straight from and into the pools.

The server sends the blocks in the order in which they were asked for. Each end finds runs of neighbours among its own
block ids, so neither knows how the other's lie.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

from kv_transfer.block_runs import find_runs
from kv_transfer.memory import KvMemory
from kv_transfer.socket_server import MAX_WAIT_S
from kv_transfer.transport import BlockIds

# What the kernel takes in one call (IOV_MAX) is 1024; the reply's status comes before the first.
MAX_IOVECS = 1023
# A peer that has vanished is noticed after about this long, whether we wait for it or send to it.
_DEAD_AFTER_S = 10
_KEEPALIVE_INTERVAL_S, _NUM_KEEPALIVES = 3, 3


def configure(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_S * 1000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_AFTER_S - _KEEPALIVE_INTERVAL_S * _NUM_KEEPALIVES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_KEEPALIVES)


def view_batches(memory: KvMemory, blocks: BlockIds) -> Iterator[list[memoryview]]:
    """The blocks' bytes, in order, a view for each run of neighbours, as many at a time as one call takes."""
    firsts, lengths = find_runs(blocks)
    view = memoryview(memory.buffer)
    starts = blocks[firsts].astype("int64") * memory.block_size_bytes
    ends = starts + lengths * memory.block_size_bytes
    for first in range(0, len(firsts), MAX_IOVECS):
        part = slice(first, first + MAX_IOVECS)
        yield [view[start:end] for start, end in zip(starts[part].tolist(), ends[part].tolist(), strict=True)]


def send_views(sock: socket.socket, views: list[memoryview], deadline: float) -> None:
    """On a socket that blocks. Raises TimeoutError at `deadline` (monotonic), OSError if the peer has gone."""
    while views:
        # The kernel's own timeout: one call moves a whole batch, however often it must wait.
        set_timeout(sock, socket.SO_SNDTIMEO, deadline - time.monotonic())
        with contextlib.suppress(BlockingIOError):
            views = _rest(views, sock.sendmsg(views))


def receive_views(sock: socket.socket, views: list[memoryview]) -> None:
    """Fill them, on a socket that blocks and that somebody shuts in time. Raises ConnectionError when it has ended."""
    while views:
        num_bytes = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not num_bytes:
            raise ConnectionResetError("the peer closed the connection")
        views = _rest(views, num_bytes)


def set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    """SO_SNDTIMEO or SO_RCVTIMEO. Raises TimeoutError if there is no time."""
    if seconds <= 0:
        raise TimeoutError("out of time")
    whole, rest = divmod(min(seconds, MAX_WAIT_S), 1)
    # Zero would mean no timeout.
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), max(int(rest * 1e6), 1)))


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is behind the first `num_bytes`."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
