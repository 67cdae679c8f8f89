"""The process that hosts a transfer library for a rank: `python -m kv_transfer.agent_process --library nixl …`.

Started by `kv_transfer.agent_host` with three descriptors: the socket to the rank, the pool's memory file, and the
listening socket for peers' agents, which outlives any one agent. One thread with an event loop does everything. With
nothing under way it sleeps in the kernel; while something is, it polls the library, with short pauses; while peers
are connected and nothing is under way, it polls some times a second, so that the library's own keepalives work.

It ends with its rank: when the socket closes, or by the kernel (PR_SET_PDEATHSIG) if it is stuck in the library. And
it ends, saying so, when the library is broken: its rank starts another.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

import numpy as np

from kv_transfer.agent_library import (
    LIBRARIES,
    AgentBroken,
    AgentError,
    ClientLost,
    LibraryAgent,
    Pool,
    load_library,
)
from kv_transfer.agent_links import Clients, Link
from kv_transfer.agent_messages import (
    Broken,
    CancelRead,
    CloseLink,
    Command,
    LinkFailed,
    LinkLost,
    LinkOpened,
    OpenLink,
    Pipe,
    Read,
    ReadBegan,
    ReadDone,
    ReadEnded,
    Start,
    Started,
    Want,
)
from kv_transfer.block_runs import check_block_ids
from kv_transfer.connection import Listener
from kv_transfer.library_environment import configure
from kv_transfer.transport import BlockIds, FailureReason

# Between two polls of the library while something has moved lately, and when nothing has.
POLL_PAUSE_S = 50e-6
SLOW_POLL_PAUSE_S = 1e-3
_FAST_POLLS_FOR_S = 0.2
IDLE_POLL_INTERVAL_S = 0.1
# After a client has gone the library still has to take its end in; a peer that we leave, its last messages.
_LINGER_S = 0.5
# Of the agent's own, whose links could not be opened in time: each costs polling until it ends, if it ever does.
MAX_ABANDONED_READS = 8
_PR_SET_PDEATHSIG = 1
EXIT_BROKEN = 70


class _ReadUnderWay:
    def __init__(self, link: Link, future: asyncio.Future[None] | None) -> None:
        self.link = link
        self.future = future
        """Of a read that the agent does for itself."""


class AgentProcess:
    """The agent's state; used from its event loop only."""

    def __init__(self, library: str, memory_fd: int, listener: socket.socket) -> None:
        self._library = library
        self._memory_fd = memory_fd
        self._listener = listener
        self._pipe: Pipe[Command]
        self._start: Start
        self._agent: LibraryAgent
        self._pool: Pool
        self._clients: Clients
        self._links: dict[int, Link] = {}
        self._closing: dict[Link, float] = {}
        """Links that are only there for their last reads, and how long we wait for what nobody needs any more."""
        self._opening: dict[int, list[Read]] = {}
        """Reads that wait until their link is open, by link."""
        self._reads: dict[int, _ReadUnderWay] = {}
        """The rank's have its ids; the agent's own have negative ones."""
        self._num_own_reads = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        """Of the next poll."""
        self._moved_at = 0.0

    async def run(self, rank: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self._break(context.get("exception") or context["message"]))
        started: asyncio.Future[Start] = loop.create_future()

        def on_command(command: Command) -> None:
            if isinstance(command, Start):
                started.set_result(command)
            else:
                self._on_command(command)

        # Nothing here is worth an orderly end: the rank that would care for it has gone.
        self._pipe = Pipe(Command, on_command, lambda: os._exit(0))
        await loop.create_unix_connection(lambda: self._pipe, sock=rank)
        self._start = start = await started
        try:
            configure(start.address.host)
            self._pool = Pool(self._memory_fd, start.num_blocks, start.block_size_bytes)
            os.close(self._memory_fd)
            self._agent = load_library(self._library)(self._pool, start.address.host, self._ask)
        except Exception as error:
            self._break(error)
        self._clients = Clients(start, self._agent, self._on_clients_changed)
        await Listener(start.secret, self._clients.add).start("", sock=self._listener)
        self._pipe.send(Started())
        await loop.create_future()

    def _break(self, error: object) -> NoReturn:
        if isinstance(error, Exception):
            traceback.print_exception(error)
        message = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
        self._pipe.send(Broken(message))
        sys.stderr.flush()
        os._exit(EXIT_BROKEN)

    def _on_command(self, command: Command) -> None:
        match command:
            case OpenLink():
                self._links[command.link_id] = link = Link(command.link_id, self._on_link_lost)
                self._opening[command.link_id] = []
                task = asyncio.get_running_loop().create_task(self._open(link, command))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case CloseLink():
                self._close(command.link_id)
            case Read():
                self._on_read(command)
            case CancelRead():
                self._on_cancel(command.read_id)

    def _on_cancel(self, read_id: int) -> None:
        if read_id in self._reads:
            self._agent.cancel_read(read_id)
            self._wake()
        for reads in self._opening.values():
            for read in [read for read in reads if read.read_id == read_id]:
                reads.remove(read)
                self._pipe.send(ReadEnded(read_id, FailureReason.TIMEOUT, "cancelled"))

    async def _open(self, link: Link, command: OpenLink) -> None:
        try:
            await link.open(command, self._start, self._agent, self._pool, self)
        except AgentError as error:
            # First the link, which ends its waiting reads with the right reason.
            self._pipe.send(LinkFailed(link.link_id, error.reason, error.message))
            self._close(link.link_id)
        except Exception as error:
            self._break(error)
        else:
            self._pipe.send(LinkOpened(link.link_id))
            for read in self._opening.pop(link.link_id, []):
                self._on_read(read)

    def _on_link_lost(self, link: Link, message: str) -> None:
        if link.is_open:
            self._pipe.send(LinkLost(link.link_id, f"the peer's agent is gone: {message}"))
            self._close(link.link_id)
        else:
            for read in self._reads.values():
                if read.link is link and read.future is not None and not read.future.done():
                    read.future.set_exception(AgentError(FailureReason.PEER_LOST, message))

    def _close(self, link_id: int) -> None:
        link = self._links.pop(link_id, None)
        if link is None:
            return
        for waiting in self._opening.pop(link_id, []):
            self._pipe.send(ReadEnded(waiting.read_id, FailureReason.PEER_LOST, "the link was closed"))
        link.is_closed = True
        self._closing[link] = time.monotonic() + _LINGER_S
        for read_id in [read_id for read_id, read in self._reads.items() if read.link is link]:
            self._agent.cancel_read(read_id)
        self._wake()

    def _release_closed_links(self) -> None:
        """Not before their reads have ended, which some would never do without the peer's help."""
        reading = {read.link for read in self._reads.values()}
        for link, patience_until in list(self._closing.items()):
            is_awaited = link.is_connected and time.monotonic() < patience_until
            if link in reading or (is_awaited and self._agent.has_leftovers(link.link_id)):
                continue
            del self._closing[link]
            link.close()
            if link.is_known:
                self._agent.remove_link(link.link_id)

    def _on_read(self, command: Read) -> None:
        link = self._links.get(command.link_id)
        if link is None:
            self._pipe.send(ReadEnded(command.read_id, FailureReason.PEER_LOST, "the peer's agent is gone"))
        elif not link.is_open:
            self._opening[command.link_id].append(command)
        else:
            try:
                remote = check_block_ids(np.frombuffer(command.remote_blocks, np.int32), link.num_blocks, "the peer's")
            except ValueError as error:
                self._pipe.send(ReadEnded(command.read_id, FailureReason.BACKEND, str(error)))
                return
            self._begin(command.read_id, link, remote, np.frombuffer(command.local_blocks, np.int32), None)

    def read(self, link: Link, remote_blocks: BlockIds, local_blocks: BlockIds) -> asyncio.Future[None]:
        num_abandoned = sum(read.future is not None and read.future.done() for read in self._reads.values())
        if num_abandoned > MAX_ABANDONED_READS:
            raise AgentBroken(f"{num_abandoned} reads neither ended nor could be cancelled")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_own_reads += 1
        self._begin(-self._num_own_reads, link, remote_blocks, local_blocks, future)
        return future

    def _begin(
        self, read_id: int, link: Link, remote: BlockIds, local: BlockIds, future: asyncio.Future[None] | None
    ) -> None:
        self._reads[read_id] = _ReadUnderWay(link, future)
        link.send(ReadBegan(read_id))
        self._agent.begin_read(read_id, link.link_id, remote, local)
        self._wake()

    def _ask(self, link_id: int, request: bytes) -> None:
        self._links[link_id].send(Want(request))

    def _on_clients_changed(self) -> None:
        if self._agent.needs_target_poll:
            self._wake()

    def _wake(self) -> None:
        self._moved_at = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_soon(self._poll)

    def _poll(self) -> None:
        for item in self._agent.poll():
            self._moved_at = time.monotonic()
            if isinstance(item, ClientLost):
                self._clients.abort(item.client_id, item.message)
                continue
            read = self._reads.pop(item.read_id)
            read.link.send(ReadDone(item.read_id))
            if read.future is None:
                self._pipe.send(ReadEnded(item.read_id, item.reason, item.message, item.is_fenced))
            elif not read.future.done():
                if item.reason is None:
                    read.future.set_result(None)
                else:
                    read.future.set_exception(AgentError(item.reason, item.message))
        if self._closing:
            self._release_closed_links()
        self._timer = self._next_poll()

    def _next_poll(self) -> asyncio.Handle | None:
        loop = asyncio.get_running_loop()
        quiet_s = time.monotonic() - self._moved_at
        serves = self._agent.needs_target_poll and (
            self._clients.are_reading or (self._clients and quiet_s < _LINGER_S)
        )
        if self._reads or self._agent.is_busy or serves:
            # Not the loop's timers: they count milliseconds.
            time.sleep(POLL_PAUSE_S if quiet_s < _FAST_POLLS_FOR_S else SLOW_POLL_PAUSE_S)
            return loop.call_soon(self._poll)
        if self._agent.needs_target_poll and (self._clients or self._links):
            return loop.call_later(IDLE_POLL_INTERVAL_S, self._poll)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kv_transfer.agent_process", description=__doc__)
    parser.add_argument("--library", required=True, choices=LIBRARIES)
    parser.add_argument("--rank-pid", type=int, required=True, help="the parent; if it is another, this process ends")
    parser.add_argument("--rank-fd", type=int, required=True, help="socket to the rank")
    parser.add_argument("--memory-fd", type=int, required=True, help="memory file of the pool")
    parser.add_argument("--listen-fd", type=int, required=True, help="listening socket for peers' agents")
    args: Any = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The signal is sent for a death after the call only.
    if os.getppid() != args.rank_pid:
        sys.exit("the rank has gone")
    # A terminal's Ctrl-C is for the rank to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = AgentProcess(args.library, args.memory_fd, socket.socket(fileno=args.listen_fd))
    asyncio.run(process.run(socket.socket(fileno=args.rank_fd)))


if __name__ == "__main__":
    main()
