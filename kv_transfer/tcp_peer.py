"""The pulling end of the TCP transport: a peer's queue of pulls, and the one or two connections that work it off.

Each connection belongs to one thread, which receives one pull at a time, straight into the pool; both end when they
have been idle. A pull that is stopped has its socket shut: its thread comes back from the call it is in, and after
that nothing can write into the blocks any more, whatever the peer still sends. That is the fence.

Shared state: the queue and the threads' number, under the peer's lock.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kv_transfer.memory import KvMemory
from kv_transfer.pulls import Pull, Pulls
from kv_transfer.socket_server import PROTOCOL_VERSION, Welcome, enter, shut
from kv_transfer.tcp_stream import configure, receive_views, view_batches
from kv_transfer.transport import BlockIds, Endpoint, FailureReason, TransferEnd, TransferError
from kv_transfer.wire import WireError, frame

_log = logging.getLogger(__name__)

ROLE = "kv-tcp"
MAX_CONNECTIONS_PER_PEER = 2
# A connection that has served no pull for so long is closed; by the server if not by the client.
CLIENT_IDLE_S = 60.0
SERVER_IDLE_S = 90.0
CONNECT_TIMEOUT_S = 5.0


class TcpAddress(msgspec.Struct, frozen=True):
    host: str
    port: int
    instance: bytes


class PullRequest(msgspec.Struct, frozen=True):
    blocks: bytes
    """Ids, int32 little-endian."""
    timeout_s: float


# The answer is the length of a refusal's text, and that text; or zero, and the blocks.
STATUS = struct.Struct("<I")
MAX_REFUSAL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Job:
    pull: Pull
    remote_blocks: BlockIds
    local_blocks: BlockIds


class TcpPeer:
    def __init__(
        self,
        endpoint: Endpoint,
        address: TcpAddress,
        secret: bytes,
        memory: KvMemory,
        pulls: Pulls,
        start_thread: Callable[[Callable[[], None]], None],
    ) -> None:
        self.endpoint = endpoint
        self._address = address
        self._secret = secret
        self._memory = memory
        self._pulls = pulls
        self._start_thread = start_thread
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._num_threads = 0
        self._num_idle = 0
        self._is_closed = False

    def connect(self, deadline: float) -> None:
        """Open the first connection. Raises TransferError."""
        sock = self._make_socket()
        try:
            self._open(sock, deadline)
            with self._changed:
                self._num_threads += 1
            self._start_thread(lambda: self._work(sock))
        except BaseException:
            sock.close()
            raise

    def submit(self, pull: Pull, remote_blocks: BlockIds, local_blocks: BlockIds) -> None:
        with self._changed:
            if self._is_closed:
                self._pulls.stop(pull, FailureReason.PEER_LOST, "the peer was closed")
                return
            self._jobs.append(_Job(pull, remote_blocks, local_blocks))
            if self._num_idle >= len(self._jobs) or self._num_threads == MAX_CONNECTIONS_PER_PEER:
                self._changed.notify()
                return
            self._num_threads += 1
        try:
            self._start_thread(lambda: self._work(None))
        except RuntimeError as error:
            # No more threads for this process: the job is left to the first connection's, if that is still there.
            with self._changed:
                self._num_threads -= 1
                if not self._num_threads:
                    self._jobs.clear()
                    self._pulls.stop(pull, FailureReason.BACKEND, str(error))

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
        self._pulls.stop_all(self, FailureReason.PEER_LOST, "the peer was closed")

    # ---- a connection's thread ----

    def _work(self, sock: socket.socket | None) -> None:
        try:
            while (job := self._next_job()) is not None:
                if sock is not None and _is_ended(sock):
                    sock.close()
                    sock = None
                sock = self._pull(sock, job)
        finally:
            if sock is not None:
                sock.close()

    def _next_job(self) -> _Job | None:
        """None: this thread is to end."""
        with self._changed:
            if not self._jobs and not self._is_closed:
                self._num_idle += 1
                self._changed.wait_for(lambda: self._jobs or self._is_closed, CLIENT_IDLE_S)
                self._num_idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._num_threads -= 1
            return None

    def _pull(self, sock: socket.socket | None, job: _Job) -> socket.socket | None:
        """Work on one pull, on a connection if there is one; returns it, or a new one, if it is good for another."""
        pull = job.pull
        is_open = sock is not None
        try:
            sock = sock or self._make_socket()
        except OSError as error:
            self._pulls.stop(pull, FailureReason.BACKEND, str(error))
            return None
        if self._receive(sock, is_open, job):
            return sock
        sock.close()
        return None

    def _receive(self, sock: socket.socket, is_open: bool, job: _Job) -> bool:
        """True if the socket is connected and in step."""
        pull = job.pull
        if not pull.begin(lambda: shut(sock)):
            return is_open
        is_in_step = False
        try:
            if not is_open:
                self._open(sock, min(pull.deadline, time.monotonic() + CONNECT_TIMEOUT_S))
                # A socket that is not connected yet cannot be shut: whoever tried has left the reason.
                if pull.failure is not None:
                    raise ConnectionAbortedError("stopped")
            request = PullRequest(job.remote_blocks.astype("<i4").tobytes(), pull.timeout_s)
            # From here on the pull's keeper sees to its deadline: it shuts the socket.
            sock.settimeout(None)
            sock.sendall(frame(msgspec.msgpack.encode(request)))
            # Made while the server makes its own.
            batches = view_batches(self._memory, job.local_blocks)
            views = next(batches, [])
            end = _receive_status(sock)
            if end.reason is None:
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
            _log.exception("A pull over tcp has failed")
            end = TransferEnd(FailureReason.BACKEND, repr(error))
        if not is_in_step:
            shut(sock)
        told = pull.finish(end)
        # Asked to stop when all had arrived: the socket has been shut.
        return is_in_step and told == end

    # ---- connections ----

    def _make_socket(self) -> socket.socket:
        return socket.socket(socket.AF_INET6 if ":" in self._address.host else socket.AF_INET, socket.SOCK_STREAM)

    def _open(self, sock: socket.socket, deadline: float) -> None:
        """Raises TransferError."""
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        where = f"{self._address.host}:{self._address.port}"
        try:
            configure(sock)
            sock.connect((self._address.host, self._address.port))
        except TimeoutError:
            raise TransferError(FailureReason.TIMEOUT, f"no answer from {where}") from None
        except OSError as error:
            raise TransferError(FailureReason.NO_ROUTE, f"{where}: {error}") from None
        expected = Welcome(
            PROTOCOL_VERSION, self._address.instance, self.endpoint.num_blocks, self._memory.block_size_bytes
        )
        enter(sock, self._secret, ROLE, expected, deadline)


def _receive_status(sock: socket.socket) -> TransferEnd:
    """What the server says before it sends the blocks. Raises ConnectionError or WireError."""
    status = bytearray(STATUS.size)
    receive_views(sock, [memoryview(status)])
    (num_bytes,) = STATUS.unpack(status)
    if not num_bytes:
        return TransferEnd()
    if num_bytes > MAX_REFUSAL_BYTES:
        raise WireError(f"peer announced a refusal of {num_bytes} bytes, the limit is {MAX_REFUSAL_BYTES}")
    refusal = bytearray(num_bytes)
    receive_views(sock, [memoryview(refusal)])
    return TransferEnd(FailureReason.BACKEND, refusal.decode(errors="replace"))


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
