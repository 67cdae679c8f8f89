"""The client's connections to a peer for one kind of request: a queue, and the threads that work it off.

Each connection belongs to one thread, which receives the answer to one request at a time, straight into the pool; both
end when they have been idle. A request that is stopped has its socket shut: its thread comes back from the call it is
in, and after that nothing can write into the blocks any more, whatever the peer still sends. That is the fence.

Shared state: the queue and the threads' numbers, under the lock of the `Connections`.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kv_transfer.memory import KvMemory
from kv_transfer.pulls import Pull, Pulls
from kv_transfer.socket_server import PROTOCOL_VERSION, Welcome, enter, shut
from kv_transfer.tcp_requests import ROLE, Request, TcpAddress, receive_grant, receive_status
from kv_transfer.tcp_stream import configure, receive_views, view_batches
from kv_transfer.transport import BlockIds, Endpoint, FailureReason, TransferEnd, TransferError
from kv_transfer.wire import WireError, frame

_log = logging.getLogger(__name__)

# A connection that has served no request for so long is closed; by the server if not by the client.
CLIENT_IDLE_S = 60.0
SERVER_IDLE_S = 90.0
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and where the blocks go that answer it."""

    pull: Pull
    request: Request
    local_blocks: BlockIds
    on_grant: Callable[[int], None] | None = None
    """Given with a `PushRequest`."""


@dataclass(frozen=True, slots=True)
class Dialer:
    """Where the peer is, and who it must be."""

    endpoint: Endpoint
    address: TcpAddress
    secret: bytes
    block_size_bytes: int
    """Ours."""

    def make_socket(self) -> socket.socket:
        return socket.socket(socket.AF_INET6 if ":" in self.address.host else socket.AF_INET, socket.SOCK_STREAM)

    def open(self, sock: socket.socket, deadline: float) -> None:
        """Connect it, and prove both ends. Raises TransferError."""
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        where = f"{self.address.host}:{self.address.port}"
        try:
            configure(sock)
            sock.connect((self.address.host, self.address.port))
        except TimeoutError:
            raise TransferError(FailureReason.TIMEOUT, f"no answer from {where}") from None
        except OSError as error:
            raise TransferError(FailureReason.NO_ROUTE, f"{where}: {error}") from None
        expected = Welcome(PROTOCOL_VERSION, self.address.instance, self.endpoint.num_blocks, self.block_size_bytes)
        enter(sock, self.secret, ROLE, expected, deadline)


class Connections:
    def __init__(
        self,
        dialer: Dialer,
        memory: KvMemory,
        pulls: Pulls,
        start_thread: Callable[[Callable[[], None]], None],
        *,
        most: int,
        most_idle: int,
    ) -> None:
        """`most` connections at a time; of those with nothing to do, `most_idle` are kept for CLIENT_IDLE_S."""
        self._dialer = dialer
        self._memory = memory
        self._pulls = pulls
        self._start_thread = start_thread
        self._most = most
        self._most_idle = most_idle
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._num_threads = 0
        self._num_idle = 0
        self._is_closed = False

    def add(self, sock: socket.socket) -> None:
        """A first connection, open already; the caller's still if this raises."""
        with self._changed:
            self._num_threads += 1
        self._start_thread(lambda: self._work(sock))

    def submit(self, job: Job) -> None:
        with self._changed:
            if self._is_closed:
                self._pulls.stop(job.pull, FailureReason.PEER_LOST, "the peer was closed")
                return
            self._jobs.append(job)
            if self._num_idle >= len(self._jobs) or self._num_threads == self._most:
                self._changed.notify()
                return
            self._num_threads += 1
        try:
            self._start_thread(lambda: self._work(None))
        except RuntimeError as error:
            # No more threads for this process: the job is left to the others, if there are any.
            with self._changed:
                self._num_threads -= 1
                if not self._num_threads:
                    self._jobs.clear()
                    self._pulls.stop(job.pull, FailureReason.BACKEND, str(error))

    def close(self) -> None:
        """Begin no request any more. Those under way are the caller's to stop."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()

    # ---- a connection's thread ----

    def _work(self, sock: socket.socket | None) -> None:
        try:
            while (job := self._next_job()) is not None:
                if sock is not None and _is_ended(sock):
                    sock.close()
                    sock = None
                sock = self._attend(sock, job)
                # While the thread waits, it must not keep what the job's callbacks refer to.
                del job
        finally:
            if sock is not None:
                sock.close()

    def _next_job(self) -> Job | None:
        """None: this thread is to end."""
        with self._changed:
            if not self._jobs and not self._is_closed and self._num_idle < self._most_idle:
                self._num_idle += 1
                self._changed.wait_for(lambda: self._jobs or self._is_closed, CLIENT_IDLE_S)
                self._num_idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._num_threads -= 1
            return None

    def _attend(self, sock: socket.socket | None, job: Job) -> socket.socket | None:
        """Work on one request, on a connection if there is one; returns it, or a new one, if it is good for another."""
        is_open = sock is not None
        try:
            sock = sock or self._dialer.make_socket()
        except OSError as error:
            self._pulls.stop(job.pull, FailureReason.BACKEND, str(error))
            return None
        if self._receive(sock, is_open, job):
            return sock
        sock.close()
        return None

    def _receive(self, sock: socket.socket, is_open: bool, job: Job) -> bool:
        """True if the socket is connected and in step."""
        pull = job.pull
        if not pull.begin(lambda: shut(sock)):
            return is_open
        is_in_step = False
        try:
            if not is_open:
                self._dialer.open(sock, min(pull.deadline, time.monotonic() + CONNECT_TIMEOUT_S))
                # A socket that is not connected yet cannot be shut: whoever tried has left the reason.
                if pull.failure is not None:
                    raise ConnectionAbortedError("stopped")
            # From here on the pull's keeper sees to its deadline: it shuts the socket.
            sock.settimeout(None)
            sock.sendall(frame(msgspec.msgpack.encode(job.request)))
            # Made while the server makes its own.
            batches = view_batches(self._memory, job.local_blocks)
            views = next(batches, [])
            end = receive_status(sock)
            if end.reason is None:
                if job.on_grant is not None:
                    job.on_grant(receive_grant(sock))
                receive_views(sock, views)
                for views in batches:
                    receive_views(sock, views)
            is_in_step = True
        except TransferError as error:
            end = TransferEnd(error.reason, error.message)
        except TimeoutError:
            end = TransferEnd(FailureReason.TIMEOUT, f"not done after {pull.timeout_s:g} s")
        except OSError as error:
            end = TransferEnd(FailureReason.PEER_LOST, str(error))
        except (WireError, msgspec.DecodeError) as error:
            end = TransferEnd(FailureReason.BACKEND, f"the peer broke the protocol: {error}")
        except Exception as error:
            _log.exception("A transfer over tcp has failed")
            end = TransferEnd(FailureReason.BACKEND, repr(error))
        if not is_in_step:
            shut(sock)
        told = pull.finish(end)
        # Asked to stop when all had arrived: the socket has been shut.
        return is_in_step and told == end


def _is_ended(sock: socket.socket) -> bool:
    """Whether the server has closed an idle connection (or said something out of turn)."""
    sock.setblocking(False)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
