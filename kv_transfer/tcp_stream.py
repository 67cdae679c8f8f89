"""Blocks as a byte stream over TCP: scatter-gather on a blocking socket, straight from and into the pools.

The server sends the blocks in the order in which they were asked for. Each end finds runs of neighbours among its own
block ids, so neither knows how the other's lie.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from kv_transfer.block_runs import find_runs
from kv_transfer.memory import KvMemory
from kv_transfer.socket_server import MAX_WAIT_S
from kv_transfer.transport import BlockIds

# What the kernel takes in one call (IOV_MAX).
MAX_IOVECS = 1024
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


def block_views(memory: KvMemory, blocks: BlockIds) -> list[memoryview]:
    """The blocks' bytes, in order, a view for each run of neighbours."""
    firsts, lengths = find_runs(blocks)
    view = memoryview(memory.buffer)
    starts = blocks[firsts].astype("int64") * memory.block_size_bytes
    ends = starts + lengths * memory.block_size_bytes
    return [view[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def send_views(sock: socket.socket, views: list[memoryview], deadline: float) -> None:
    """Raises TimeoutError at `deadline` (monotonic), OSError if the peer has gone."""
    # The kernel's own timeouts, on a socket that blocks: one call moves a whole batch, however often it must wait.
    sock.settimeout(None)
    first = 0
    while first < len(views):
        _set_timeout(sock, socket.SO_SNDTIMEO, deadline)
        with contextlib.suppress(BlockingIOError):
            first = _skip(views, first, sock.sendmsg(views[first : first + MAX_IOVECS]))


def receive_views(sock: socket.socket, views: list[memoryview], deadline: float) -> None:
    """Fill the views. Raises TimeoutError at `deadline` (monotonic), ConnectionError if the peer ends before."""
    sock.settimeout(None)
    first = 0
    while first < len(views):
        _set_timeout(sock, socket.SO_RCVTIMEO, deadline)
        with contextlib.suppress(BlockingIOError):
            num_bytes = sock.recvmsg_into(views[first : first + MAX_IOVECS], 0, socket.MSG_WAITALL)[0]
            if not num_bytes:
                raise ConnectionResetError("the peer closed the connection")
            first = _skip(views, first, num_bytes)


def _set_timeout(sock: socket.socket, option: int, deadline: float) -> None:
    remaining = min(deadline - time.monotonic(), MAX_WAIT_S)
    if remaining <= 0:
        raise TimeoutError("out of time")
    seconds = int(remaining)
    # Zero would mean no timeout.
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, max(int((remaining - seconds) * 1e6), 1)))


def _skip(views: list[memoryview], first: int, num_bytes: int) -> int:
    """Where to go on after `num_bytes` from `first` on; a view that was passed in part is cut."""
    while first < len(views) and num_bytes >= len(views[first]):
        num_bytes -= len(views[first])
        first += 1
    if num_bytes:
        views[first] = views[first][num_bytes:]
    return first
