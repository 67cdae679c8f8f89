"""A client's connection to a peer, while it is idle: what its thread sleeps on, and how a request is given to it.

Whoever gives a request sends it at once, and the thread sleeps on until the answer comes: it is woken once per
request. Only what could not be sent at once wakes it before, by an eventfd.
"""

from __future__ import annotations

import os
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
    """A connection, or none yet, and what its thread is to do. Everything but `sleep` and `close` under the lock."""

    def __init__(self, sock: socket.socket | None) -> None:
        """Takes the socket over. Raises OSError, and leaves it to the caller."""
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.sock = sock
        """Its thread's, while that does not sleep."""
        self.job: Job | None = None
        """Given, and not taken yet."""
        self.unsent: bytes | None = None
        """What is left to send of the job that was taken; None if it has not been begun."""
        self._is_woken = False

    def give(self, job: Job) -> None:
        """While the thread sleeps. Never blocks."""
        self.job = job
        sock = self.sock
        if sock is not None and not is_ended(sock) and job.pull.begin(lambda: shut(sock)):
            self.unsent = _send_at_once(sock, job.request)
        if self.unsent != b"":
            self.wake()

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._event, 1)

    def sleep(self, timeout_s: float) -> None:
        """Until something comes on the connection, or it ends, or somebody wakes the thread."""
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        if self.sock is not None:
            poller.register(self.sock, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def take(self) -> Job | None:
        """What has been given."""
        if self._is_woken:
            self._is_woken = False
            os.eventfd_read(self._event)
        job, self.job = self.job, None
        return job

    def hang_up(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def close(self) -> None:
        """When nobody can give or wake any more."""
        self.hang_up()
        os.close(self._event)


def is_ended(sock: socket.socket) -> bool:
    """Whether the server has closed an idle connection (or said something out of turn)."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _send_at_once(sock: socket.socket, data: bytes) -> bytes:
    """What the kernel does not take at once."""
    try:
        return data[sock.send(data, socket.MSG_DONTWAIT) :]
    except OSError:
        # If it is not only full, whoever sends the rest will find out.
        return data
