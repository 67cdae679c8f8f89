"""A client's connection to a peer, while it is idle: what its thread sleeps on, and how a request is given to it.

Whoever gives a request sends it, and the thread sleeps on until the answer comes: it is woken once per request. Where
that does not work, the connection is shut: the thread wakes up, and sends the request on another.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.pulls import Pull
from kv_transfer.socket_server import shut
from kv_transfer.transport import BlockIds


@dataclass(slots=True)
class Job:
    """A request, and where the blocks go that answer it."""

    pull: Pull
    request: bytes
    """As it is sent."""
    local_blocks: BlockIds
    on_grant: Callable[[int], None] | None = None
    """Given with a `PushRequest`: its answer begins with a grant."""


class Line:
    """A connection, or none yet, and what its thread is to do. `give` and `take` under the lock."""

    def __init__(self, sock: socket.socket | None) -> None:
        """Takes the socket over."""
        self.sock = sock
        """Its thread's, while that does not sleep."""
        self._job: Job | None = None
        self._is_begun = False

    def give(self, job: Job) -> None:
        """While the thread sleeps. Never blocks."""
        assert self.sock is not None
        sock = self.sock
        self._job = job
        self._is_begun = not is_ended(sock) and _send_at_once(sock, job.request) and job.pull.begin(lambda: shut(sock))
        if not self._is_begun:
            # The peer may have got a part of it, or all though nobody wants it any more. The thread wakes up.
            shut(sock)

    def end(self) -> None:
        """While the thread sleeps: it wakes up, with nothing to do."""
        assert self.sock is not None
        shut(self.sock)

    def sleep(self, timeout_s: float) -> None:
        """Without the lock, on an open connection; until something comes on it, or it ends."""
        assert self.sock is not None
        _poll(self.sock, timeout_s)

    def take(self) -> tuple[Job | None, bool]:
        """What has been given, and whether it is begun and sent."""
        job, is_begun = self._job, self._is_begun
        self._job, self._is_begun = None, False
        return job, is_begun

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


def is_ended(sock: socket.socket) -> bool:
    """Whether the server has closed an idle connection (or said something out of turn)."""
    return _poll(sock, 0.0)


def _poll(sock: socket.socket, timeout_s: float) -> bool:
    """Whether there is something to receive, or the end."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def _send_at_once(sock: socket.socket, data: bytes) -> bool:
    """Whether the kernel takes it, all of it."""
    try:
        return sock.send(data, socket.MSG_DONTWAIT) == len(data)
    except OSError:
        return False
