"""Transports by NIXL, UCX and Mooncake, whose libraries run in a process of their own: the rank's agent.

UCX can abort or crash the process it is in when a peer dies, Mooncake's calls may never return, NIXL's reads cannot be
cancelled: none of that may happen to a rank. The agent maps the same memory file, reads the peers' blocks into it, and
is killed and replaced when a read does not stop: **its death is the fence** (`kv_transfer.agent_pulls`). It is also
the target of the peers' reads, which fail as `peer_lost` then. Agents find each other by a connection that proves the
cluster's secret, to a socket that stays open as long as the transport: the rank's endpoint is the same for all its
agents, and a peer is reached again by the next pull.

What the libraries' own sockets do not authenticate: whoever can connect to Mooncake's ports can read and write the
registered pool; UCX's (NIXL's too) take connections of whoever has the worker's address, which only proved peers are
told, and data of one-sided reads needs keys that come with it. Keep those ports within the cluster's network.

Threads: one with an event loop, on which callbacks run. The agent: `kv_transfer.agent_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np

from kv_transfer.agent_host import START_TIMEOUT_S, AgentHost
from kv_transfer.agent_messages import Address, Start
from kv_transfer.agent_pulls import ANSWER_GRACE_S, AgentPulls, PeerState, Pull
from kv_transfer.block_runs import check_block_ids, check_pairs
from kv_transfer.memory import KvMemory
from kv_transfer.transport import (
    BlockIds,
    Endpoint,
    FailureReason,
    OnEnd,
    Peer,
    Transfer,
    TransferError,
    TransportCaps,
    TransportStats,
    check_block_sizes,
)

T = TypeVar("T")

_BACKLOG = 128


class AgentPeer:
    def __init__(self, endpoint: Endpoint, state: PeerState, close: Callable[[], None]) -> None:
        self.endpoint = endpoint
        self.state = state
        self._close = close

    def close(self) -> None:
        self._close()


class _Transfer:
    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        self._cancel()


class AgentTransport:
    """The base of the three. `close` must not be called from a callback."""

    name: ClassVar[str]
    module: ClassVar[str]
    """What the agent imports."""
    remedy: ClassVar[str]
    """What to install where that does not work."""
    caps = TransportCaps(cancel_is_fence=False, same_host=False)

    def __init__(self, secret: bytes) -> None:
        """Raises TransferError (`backend`) if the library is not installed.

        Whether it can be imported is found out in the agent only, and told by `start` in the same way.
        """
        if importlib.util.find_spec(self.module) is None:
            message = f"{self.name} is not usable here: there is no module {self.module}; {self.remedy}"
            raise TransferError(FailureReason.BACKEND, message)
        self._secret = secret
        self._num_blocks = 0
        self._block_size_bytes = 0
        self._pulls = AgentPulls()
        self._host: AgentHost | None = None
        self._pull_ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Of what follows: nothing is given to the loop after it was closed."""
        self._is_closed = False

    @property
    def agent_pid(self) -> int | None:
        """The process that hosts the library now; None while there is none."""
        return None if self._host is None else self._host.pid

    def start(self, memory: KvMemory, host: str) -> Endpoint:
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise TransferError(FailureReason.BACKEND, f"host {host!r}: {error}") from None
        with contextlib.ExitStack() as undo:
            undo.callback(listener.close)
            try:
                listener.bind(where)
                listener.listen(_BACKLOG)
            except OSError as error:
                message = f"cannot listen on {host!r}: {error}; give an address of this host's"
                raise TransferError(FailureReason.BACKEND, message) from None
            memory_fd = os.dup(memory.fd)
            undo.pop_all()
        bound_host, port = listener.getsockname()[:2]
        address = Address(bound_host, port, secrets.token_bytes(16))
        command = Start(self._secret, address, memory.num_blocks, memory.block_size_bytes)
        # Not the memory itself: its mapping is not to live for as long as somebody holds a closed transport.
        self._num_blocks = memory.num_blocks
        self._block_size_bytes = memory.block_size_bytes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"kv-{self.name}", daemon=True)
        self._thread.start()
        try:
            self._wait(self._start(command, memory_fd, listener), START_TIMEOUT_S + ANSWER_GRACE_S)
        except BaseException:
            self.close(ANSWER_GRACE_S)
            raise
        encoded = msgspec.msgpack.encode(address)
        return Endpoint(self.name, encoded, memory.num_blocks, memory.block_size_bytes)

    def _run(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _start(self, command: Start, memory_fd: int, listener: socket.socket) -> None:
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pulls = self._pulls

        def on_started() -> None:
            if not started.done():
                started.set_result(None)
            pulls.on_started()

        def on_ended(message: str) -> None:
            if not started.done():
                started.set_exception(TransferError(FailureReason.BACKEND, f"{message}; {self.remedy}"))
            pulls.on_ended(message)

        self._host = pulls.host = AgentHost(
            self.name,
            memory_fd,
            listener,
            command,
            on_started=on_started,
            on_event=pulls.on_event,
            on_ended=on_ended,
        )
        try:
            self._host.spawn()
        except OSError as error:
            raise TransferError(FailureReason.BACKEND, f"the agent does not start: {error}") from error
        await started

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Have the loop do it; `timeout_s` is only there for a loop that does not turn."""
        assert self._loop is not None, "start() comes first"
        with self._lock:
            if self._is_closed:
                work.close()
                raise TransferError(FailureReason.BACKEND, f"the {self.name} transport is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise TransferError(FailureReason.TIMEOUT, f"the {self.name} transport does not answer") from None
        except CancelledError:
            raise TransferError(FailureReason.BACKEND, f"the {self.name} transport is closed") from None

    def _post(self, work: Callable[[], None]) -> None:
        """Have the loop do it, soon; of a transport that is closed nothing is left to be done."""
        assert self._loop is not None
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(work)

    def connect(self, endpoint: Endpoint, timeout_s: float) -> Peer:
        assert self._num_blocks, "start() comes first"
        if endpoint.transport != self.name:
            message = f"the endpoint is one of {endpoint.transport!r}, and this is {self.name}"
            raise TransferError(FailureReason.INCOMPATIBLE, message)
        check_block_sizes(self._block_size_bytes, endpoint.block_size_bytes)
        try:
            address = msgspec.msgpack.decode(endpoint.address, type=Address)
        except msgspec.DecodeError as error:
            raise TransferError(FailureReason.INCOMPATIBLE, f"the peer's {self.name} address: {error}") from None
        state = PeerState(address)
        self._wait(self._pulls.connect(state, timeout_s), timeout_s + 2 * ANSWER_GRACE_S)
        return AgentPeer(endpoint, state, lambda: self._post(lambda: self._pulls.close_peer(state)))

    def pull(
        self,
        peer: Peer,
        remote_blocks: BlockIds,
        local_blocks: BlockIds,
        timeout_s: float,
        on_end: OnEnd,
        on_fenced: Callable[[], None] | None = None,
    ) -> Transfer:
        assert self._loop is not None, "start() comes first"
        assert isinstance(peer, AgentPeer)
        check_pairs(remote_blocks, local_blocks)
        local = check_block_ids(local_blocks, self._num_blocks, "this rank's")
        remote = np.ascontiguousarray(remote_blocks, np.int32)
        num_bytes = len(local) * self._block_size_bytes
        pull = Pull(next(self._pull_ids), peer.state, remote, local, num_bytes, timeout_s, on_end, on_fenced)
        with self._lock:
            if self._is_closed:
                raise TransferError(FailureReason.BACKEND, f"the {self.name} transport is closed")
            self._loop.call_soon_threadsafe(self._pulls.add, pull)
        return _Transfer(lambda: self._post(lambda: self._pulls.cancel(pull)))

    def stats(self) -> TransportStats:
        return self._pulls.stats()

    def close(self, timeout_s: float) -> None:
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if is_first and self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        if self._thread is not None:
            self._thread.join(timeout_s)

    async def _close(self) -> None:
        if self._host is not None:
            self._pulls.close()
            await self._host.close()
        loop = asyncio.get_running_loop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        loop.stop()


class NixlTransport(AgentTransport):
    name = "nixl"
    module = "nixl_cu12"
    remedy = "pip install --no-deps nixl-cu12==1.5.1 (it declares CUDA's torch, and needs only numpy)"


class UcxTransport(AgentTransport):
    name = "ucx"
    module = "ucxx"
    remedy = "pip install ucxx-cu12==0.52.0"


class MooncakeTransport(AgentTransport):
    name = "mooncake"
    module = "mooncake"
    remedy = (
        "pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1, and the system's libibverbs1 "
        "librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1"
    )
