"""The sending end of pushed blocks: an outbox for each receiver that waits.

An outbox exists exactly as long as a connection's thread serves its `PushRequest`. That thread alone sends. Between
two pushes it sleeps in one `poll` on the connection, which has something to say only when the receiver has gone, and
on an eventfd, by which `push` wakes it. `revoke` shuts the connection: once it has returned, nothing is read from the
pool any more for this receiver, though the thread may be in the middle of a call.

Shared state: the outboxes, and all in them, under the one lock. While an outbox is entered its descriptors are open,
so nobody writes to the number of a closed one.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from kv_transfer import block_moves
from kv_transfer.block_runs import check_block_ids
from kv_transfer.memory import KvMemory
from kv_transfer.socket_server import shut
from kv_transfer.tcp_requests import GRANT, STATUS, send_refusal
from kv_transfer.tcp_stream import send_data
from kv_transfer.transport import BlockIds

_GRANT_BITS = 63


class OutboxesFullError(Exception):
    """As many receivers wait as may."""


@dataclass(slots=True, eq=False)
class _Outbox:
    sock: socket.socket
    num_awaited: int
    """Blocks of which the receiver does not know yet which they are."""
    event: int
    """The eventfd."""
    next: list[BlockIds] = field(default_factory=list)
    """Pushed, and not taken by the thread yet."""


class Outboxes:
    """`push` and `revoke` may be called from any thread; `serve` by the thread that serves the connection."""

    def __init__(self, memory: KvMemory, most: int) -> None:
        self._memory = memory
        self._most = most
        self._lock = threading.Lock()
        self._outboxes: dict[int, _Outbox] = {}
        """By grant."""

    def push(self, grant: int, blocks: BlockIds) -> bool:
        """As `PushTransport.push`."""
        blocks = check_block_ids(blocks, self._memory.num_blocks, "this rank's")
        with self._lock:
            outbox = self._outboxes.get(grant)
            if outbox is None:
                return False
            if len(blocks) > outbox.num_awaited:
                raise ValueError(f"{len(blocks)} blocks are pushed, the receiver waits for {outbox.num_awaited} more")
            if len(blocks):
                outbox.num_awaited -= len(blocks)
                outbox.next.append(blocks)
                os.eventfd_write(outbox.event, 1)
            return True

    def revoke(self, grant: int) -> None:
        with self._lock:
            outbox = self._outboxes.pop(grant, None)
            if outbox is not None:
                shut(outbox.sock)

    def serve(self, sock: socket.socket, num_blocks: int, deadline: float) -> None:
        """Answer a request for so many blocks; afterwards the connection is good for another.

        Raises OSError if the receiver has gone, the grant is revoked, or at `deadline` (monotonic).
        """
        try:
            grant, outbox = self._open(sock, num_blocks)
        except (ValueError, OutboxesFullError, OSError) as error:
            send_refusal(sock, str(error), deadline)
            return
        try:
            send_data(sock, STATUS.pack(0) + GRANT.pack(grant), deadline)
            poller = select.poll()
            poller.register(sock, select.POLLIN)
            poller.register(outbox.event, select.POLLIN)
            while num_blocks:
                blocks = self._take(outbox, poller, deadline)
                block_moves.send(sock, b"", self._memory.blocks, blocks, deadline)
                num_blocks -= len(blocks)
        finally:
            with self._lock:
                self._outboxes.pop(grant, None)
                os.close(outbox.event)

    def _open(self, sock: socket.socket, num_blocks: int) -> tuple[int, _Outbox]:
        if num_blocks < 1:
            raise ValueError(f"{num_blocks} blocks are to be pushed; at least one must be")
        grant = secrets.randbits(_GRANT_BITS)
        with self._lock:
            if len(self._outboxes) >= self._most:
                raise OutboxesFullError(f"{self._most} receivers wait for this rank to push, and no more may")
            event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            outbox = self._outboxes[grant] = _Outbox(sock, num_blocks, event)
        return grant, outbox

    def _take(self, outbox: _Outbox, poller: select.poll, deadline: float) -> BlockIds:
        """Wait for what has been pushed since the last time; at least one block."""
        remaining_s = deadline - time.monotonic()
        ready = {descriptor for descriptor, _ in poller.poll(max(remaining_s, 0.0) * 1000)}
        if outbox.sock.fileno() in ready:
            raise ConnectionResetError("the receiver has gone, or the grant is revoked")
        if outbox.event not in ready:
            raise TimeoutError("not all blocks have been pushed in time")
        with self._lock:
            os.eventfd_read(outbox.event)
            pushed, outbox.next = outbox.next, []
        return np.concatenate(pushed)
