"""TCP sockets that block: their options, timeouts of the kernel's, and short messages beside the blocks."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from kv_transfer.socket_server import MAX_WAIT_S

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


def send_data(sock: socket.socket, data: bytes, deadline: float) -> None:
    """Raises TimeoutError at `deadline` (monotonic), OSError if the peer has gone."""
    view = memoryview(data)
    while view:
        set_timeout(sock, socket.SO_SNDTIMEO, deadline - time.monotonic())
        with contextlib.suppress(BlockingIOError):
            view = view[sock.send(view) :]


def receive_data(sock: socket.socket, num_bytes: int) -> bytearray:
    """From a socket that somebody shuts in time. Raises OSError when it has ended."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        num_received = sock.recv_into(view, len(view), socket.MSG_WAITALL)
        if not num_received:
            raise ConnectionResetError("the peer closed the connection")
        view = view[num_received:]
    return data


def set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    """SO_SNDTIMEO or SO_RCVTIMEO. Raises TimeoutError if there is no time."""
    if seconds <= 0:
        raise TimeoutError("out of time")
    whole, rest = divmod(min(seconds, MAX_WAIT_S), 1)
    # Zero would mean no timeout.
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), max(int(rest * 1e6), 1)))
