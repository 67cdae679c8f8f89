"""The client's connections to a peer for one kind of request: a queue, and the threads that work it off.

Each connection belongs to one thread, which receives the answer to one request at a time, straight into the pool; both
end when they have been idle. On an idle connection the request is sent by whoever has it: the peer works on it while
the thread wakes up. A request that is stopped has its socket shut: its thread comes back from the call it is
in, and after that nothing can write into the blocks any more, whatever the peer still sends. That is the fence.

Shared state: the queue, which threads are idle, and what they are given, under the lock of the `Connections`. Nobody
but its thread touches a connection that is not idle, except to shut it.
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

from kv_transfer import block_moves
from kv_transfer.memory import KvMemory
from kv_transfer.pulls import Pulls
from kv_transfer.socket_server import PROTOCOL_VERSION, Welcome, enter, shut
from kv_transfer.tcp_line import Job, Line, is_ended
from kv_transfer.tcp_requests import GRANT, ROLE, STATUS, TcpAddress, receive_refusal
from kv_transfer.tcp_stream import configure, receive_data
from kv_transfer.transport import Endpoint, FailureReason, TransferEnd, TransferError
from kv_transfer.wire import WireError

_log = logging.getLogger(__name__)

# A connection that has served no request for so long is closed; by the server if not by the client.
CLIENT_IDLE_S = 60.0
SERVER_IDLE_S = 90.0
CONNECT_TIMEOUT_S = 5.0
# So that requests can be sent without waiting: room for some 50,000 block ids, or what the kernel allows.
REQUEST_BUFFER_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Dialer:
    """Where the peer is, and who it must be."""

    endpoint: Endpoint
    address: TcpAddress
    secret: bytes
    block_size_bytes: int
    """Ours."""

    def make_socket(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in self.address.host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BUFFER_BYTES)
        return sock

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
        # From here on the keeper of the pulls sees to their deadlines: it shuts the socket.
        sock.settimeout(None)


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
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        """Empty while anybody is idle."""
        self._idle: list[Line] = []
        self._num_threads = 0
        self._is_closed = False

    def add(self, sock: socket.socket) -> None:
        """A first connection, open already; the caller's still if this raises."""
        with self._lock:
            self._num_threads += 1
        self._start(sock)

    def _start(self, sock: socket.socket | None) -> None:
        self._start_thread(lambda: self._work(Line(sock)))

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._is_closed:
                self._pulls.stop(job.pull, FailureReason.PEER_LOST, "the peer was closed")
                return
            if self._idle:
                self._idle.pop().give(job)
                return
            self._jobs.append(job)
            if self._num_threads == self._most:
                return
            self._num_threads += 1
        try:
            self._start(None)
        except RuntimeError as error:
            # No more threads for this process: the job is left to the others, if there are any.
            with self._lock:
                self._num_threads -= 1
                if not self._num_threads:
                    self._jobs.clear()
                    self._pulls.stop(job.pull, FailureReason.BACKEND, str(error))

    def close(self) -> None:
        """Begin no request any more. Those under way are the caller's to stop."""
        with self._lock:
            self._is_closed = True
            self._jobs.clear()
            for line in self._idle:
                line.end()

    # ---- a connection's thread ----

    def _work(self, line: Line) -> None:
        try:
            while (job := self._next_job(line)) is not None:
                self._attend(line, *job)
                # While the thread waits, it must not keep what the job's callbacks refer to.
                del job
        finally:
            line.close()

    def _next_job(self, line: Line) -> tuple[Job, bool] | None:
        """A job, and whether it is begun and sent; None: this thread is to end."""
        with self._lock:
            is_idle = (
                line.sock is not None and not self._jobs and not self._is_closed and len(self._idle) < self._most_idle
            )
            if is_idle:
                self._idle.append(line)
        if is_idle:
            line.sleep(CLIENT_IDLE_S)
        with self._lock:
            if is_idle:
                job, is_sent = line.take()
                if job is not None:
                    return job, is_sent
                self._idle.remove(line)
            if self._jobs:
                return self._jobs.popleft(), False
            self._num_threads -= 1
            return None

    def _attend(self, line: Line, job: Job, is_sent: bool) -> None:
        """Work on one request, on the line's connection, or on a new one if it has none."""
        if not is_sent and line.sock is not None and is_ended(line.sock):
            line.close()
        is_open = line.sock is not None
        try:
            sock = line.sock = line.sock or self._dialer.make_socket()
        except OSError as error:
            self._pulls.stop(job.pull, FailureReason.BACKEND, str(error))
            return
        is_in_step = is_open
        if is_sent or job.pull.begin(lambda: shut(sock)):
            is_in_step = self._receive(sock, is_open, is_sent, job)
        if not is_in_step:
            line.close()

    def _receive(self, sock: socket.socket, is_open: bool, is_sent: bool, job: Job) -> bool:
        """True if the socket is connected and in step afterwards."""
        pull = job.pull
        is_in_step = False
        try:
            if not is_open:
                self._dialer.open(sock, min(pull.deadline, time.monotonic() + CONNECT_TIMEOUT_S))
                # A socket that is not connected yet cannot be shut: whoever tried has left the reason.
                if pull.failure is not None:
                    raise ConnectionAbortedError("stopped")
            if not is_sent:
                sock.sendall(job.request)
            end = self._receive_answer(sock, job)
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

    def _receive_answer(self, sock: socket.socket, job: Job) -> TransferEnd:
        if job.on_grant is None:
            status = bytearray(STATUS.size)
            block_moves.receive(sock, status, self._memory.blocks, job.local_blocks)
            return receive_refusal(sock, status) or TransferEnd()
        refusal = receive_refusal(sock, receive_data(sock, STATUS.size))
        if refusal is not None:
            return refusal
        job.on_grant(*GRANT.unpack(receive_data(sock, GRANT.size)))
        block_moves.receive(sock, bytearray(), self._memory.blocks, job.local_blocks)
        return TransferEnd()
