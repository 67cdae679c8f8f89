"""The pulls and peers of a transport whose library runs in an agent: what is sent to it, and how each pull ends.

    waiting ──Read sent──▶ reading ──ReadEnded──▶ ended
       │                      │ timeout, cancel, peer closed or lost, library gave up: the end is told, not fenced
       ▼                      ▼
     ended                 loose ──ReadEnded, or the agent's death──▶ ended (`on_fenced`)

A loose pull's read is cancelled as far as the library can do that, and has FENCE_GRACE_S to end; most do, since a
healthy read takes milliseconds. Then the agent is killed. The other pulls have had that time to finish; those that
have not fail as `backend`, with the fence, and their requests are computed instead: they are few, and starting them
again on the new agent would cost whoever waits for them longer than that.

A peer outlives agents, ours and its own: its link is opened again by the next pull. Used from the transport's event
loop only; callbacks run there.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable
from enum import Enum, auto

from kv_transfer.agent_host import AgentHost
from kv_transfer.agent_messages import (
    Address,
    CancelRead,
    CloseLink,
    Event,
    LinkFailed,
    LinkLost,
    LinkOpened,
    OpenLink,
    Read,
    ReadEnded,
)
from kv_transfer.transport import BlockIds, FailureReason, OnEnd, TransferEnd, TransferError, TransportStats

_log = logging.getLogger(__name__)

FENCE_GRACE_S = 0.5
# For a peer that had been connected, and has to be again: not the pull's time, since others wait for it too.
LINK_TIMEOUT_S = 5.0
# The agent answers within the time that it was given; one that is this late is stuck.
ANSWER_GRACE_S = 2.0


class _State(Enum):
    WAITING = auto()
    READING = auto()
    LOOSE = auto()
    ENDED = auto()


class PeerState:
    def __init__(self, address: Address) -> None:
        self.address = address
        self.link_id: int | None = None
        """In the agent that runs now; None if that has none."""
        self.is_closed = False
        self.connecting: asyncio.Future[None] | None = None
        self.connect_until = 0.0
        self.watch: asyncio.TimerHandle | None = None
        """While the link is being opened: when the agent is stuck."""


class Pull:
    def __init__(
        self,
        pull_id: int,
        peer: PeerState,
        remote_blocks: BlockIds,
        local_blocks: BlockIds,
        num_bytes: int,
        timeout_s: float,
        on_end: OnEnd,
        on_fenced: Callable[[], None] | None,
    ) -> None:
        self.pull_id = pull_id
        self.peer = peer
        self.remote_blocks = remote_blocks
        self.local_blocks = local_blocks
        self.num_bytes = num_bytes
        self.started_at = time.monotonic()
        self.timeout_s = timeout_s
        self.on_end = on_end
        self.on_fenced = on_fenced
        self.link_id: int | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Of its timeout, then of its fence."""
        self.state = _State.WAITING


class AgentPulls:
    def __init__(self) -> None:
        self.host: AgentHost
        """Set once, before all else."""
        self._stats = TransportStats()
        self._stats_lock = threading.Lock()
        self._pulls: dict[int, Pull] = {}
        """All that have not ended."""
        self._peers: set[PeerState] = set()
        self._link_ids = itertools.count()
        self._last_death = ""
        self._is_closing = False

    def stats(self) -> TransportStats:
        """A copy; may be called from any thread."""
        with self._stats_lock:
            return copy.deepcopy(self._stats)

    async def connect(self, peer: PeerState, timeout_s: float) -> None:
        """Raises TransferError. It may take ANSWER_GRACE_S longer if the agent is stuck."""
        if self.host.is_resting:
            raise TransferError(FailureReason.BACKEND, self._last_death)
        self._peers.add(peer)
        peer.connecting = asyncio.get_running_loop().create_future()
        peer.connect_until = time.monotonic() + timeout_s
        if self.host.is_ready:
            self._open_link(peer, timeout_s)
        try:
            async with asyncio.timeout(timeout_s + ANSWER_GRACE_S):
                await peer.connecting
        except TimeoutError:
            self.close_peer(peer)
            raise TransferError(FailureReason.TIMEOUT, "the agent did not connect in time") from None
        except TransferError:
            self.close_peer(peer)
            raise
        finally:
            peer.connecting = None

    def _open_link(self, peer: PeerState, timeout_s: float) -> None:
        peer.link_id = next(self._link_ids)
        self.host.send(OpenLink(peer.link_id, peer.address, timeout_s))
        peer.watch = asyncio.get_running_loop().call_later(
            timeout_s + FENCE_GRACE_S, self.host.kill, "it is stuck in the library: a connection was not answered"
        )

    def _unlink(self, peer: PeerState) -> None:
        peer.link_id = None
        if peer.watch is not None:
            peer.watch.cancel()
            peer.watch = None

    def close_peer(self, peer: PeerState) -> None:
        """Its pulls fail as `peer_lost`. Idempotent."""
        peer.is_closed = True
        self._peers.discard(peer)
        for pull in [pull for pull in self._pulls.values() if pull.peer is peer]:
            self._stop(pull, FailureReason.PEER_LOST, "the peer was closed")
        if peer.link_id is not None and self.host.is_ready:
            self.host.send(CloseLink(peer.link_id))
        self._unlink(peer)

    def add(self, pull: Pull) -> None:
        """Takes it; its end is told."""
        self._pulls[pull.pull_id] = pull
        if pull.peer.is_closed:
            self._end(pull, FailureReason.PEER_LOST, "the peer was closed")
        elif self.host.is_resting:
            self._end(pull, FailureReason.BACKEND, self._last_death)
        elif not len(pull.local_blocks):
            self._end(pull, None, "")
        else:
            message = f"not done after {pull.timeout_s:g} s"
            pull.timer = asyncio.get_running_loop().call_later(
                pull.timeout_s, self._stop, pull, FailureReason.TIMEOUT, message
            )
            if self.host.is_ready:
                self._send(pull)

    def _send(self, pull: Pull) -> None:
        if pull.peer.link_id is None:
            self._open_link(pull.peer, LINK_TIMEOUT_S)
        assert pull.peer.link_id is not None
        pull.link_id = pull.peer.link_id
        pull.state = _State.READING
        self.host.send(Read(pull.pull_id, pull.link_id, pull.remote_blocks.tobytes(), pull.local_blocks.tobytes()))

    def cancel(self, pull: Pull) -> None:
        self._stop(pull, FailureReason.TIMEOUT, "cancelled")

    def _stop(self, pull: Pull, reason: FailureReason, message: str) -> None:
        if pull.state is _State.WAITING:
            self._end(pull, reason, message)
        elif pull.state is _State.READING:
            self.host.send(CancelRead(pull.pull_id))
            self._loosen(pull, reason, message)

    def _loosen(self, pull: Pull, reason: FailureReason, message: str) -> None:
        self._stop_timer(pull)
        pull.state = _State.LOOSE
        pull.timer = asyncio.get_running_loop().call_later(
            FENCE_GRACE_S, self.host.kill, f"a read that failed ({reason}: {message}) did not stop"
        )
        self._tell(pull, TransferEnd(reason, message, is_fenced=False))

    def _end(self, pull: Pull, reason: FailureReason | None, message: str) -> None:
        """It ends here and now, and nothing writes into its blocks any more."""
        self._stop_timer(pull)
        del self._pulls[pull.pull_id]
        is_loose = pull.state is _State.LOOSE
        pull.state = _State.ENDED
        if not is_loose:
            self._tell(pull, TransferEnd(reason, message))
            return
        with self._stats_lock:
            self._stats.num_unfenced -= 1
        if pull.on_fenced is not None:
            _call(pull.on_fenced)

    def _stop_timer(self, pull: Pull) -> None:
        if pull.timer is not None:
            pull.timer.cancel()

    def _tell(self, pull: Pull, end: TransferEnd) -> None:
        stats = self._stats
        with self._stats_lock:
            stats.num_transfers += 1
            stats.busy_s += time.monotonic() - pull.started_at
            stats.num_unfenced += not end.is_fenced
            if end.reason is None:
                stats.num_blocks += len(pull.local_blocks)
                stats.num_bytes += pull.num_bytes
            else:
                stats.failures[end.reason] = stats.failures.get(end.reason, 0) + 1
        _call(lambda: pull.on_end(end))

    def on_event(self, event: Event) -> None:
        match event:
            case ReadEnded():
                pull = self._pulls.get(event.read_id)
                if pull is None:
                    return
                if event.is_fenced:
                    self._end(pull, event.reason, event.message)
                elif pull.state is _State.READING:
                    self._loosen(pull, event.reason or FailureReason.BACKEND, event.message)
            case LinkOpened() | LinkFailed() | LinkLost():
                peer = next((peer for peer in self._peers if peer.link_id == event.link_id), None)
                if isinstance(event, LinkOpened):
                    if peer is not None and peer.watch is not None:
                        peer.watch.cancel()
                    if peer is not None and peer.connecting is not None and not peer.connecting.done():
                        peer.connecting.set_result(None)
                    return
                if peer is not None:
                    self._unlink(peer)
                self._on_link_gone(peer, event)

    def _on_link_gone(self, peer: PeerState | None, event: LinkFailed | LinkLost) -> None:
        pulls = [pull for pull in self._pulls.values() if pull.link_id == event.link_id]
        if isinstance(event, LinkLost):
            for pull in pulls:
                if pull.state is _State.READING:
                    self._loosen(pull, FailureReason.PEER_LOST, event.message)
            return
        for pull in pulls:
            self._end(pull, event.reason, event.message)
        if peer is not None and peer.connecting is not None and not peer.connecting.done():
            peer.connecting.set_exception(TransferError(event.reason, event.message))

    def on_started(self) -> None:
        for peer in self._peers:
            if peer.connecting is not None and not peer.connecting.done():
                self._open_link(peer, max(peer.connect_until - time.monotonic(), 0.0))
        for pull in [pull for pull in self._pulls.values() if pull.state is _State.WAITING]:
            self._send(pull)

    def on_ended(self, message: str) -> None:
        """The agent is dead: whatever it read is fenced."""
        self._last_death = message
        reason = FailureReason.PEER_LOST if self._is_closing else FailureReason.BACKEND
        for peer in self._peers:
            self._unlink(peer)
            if peer.connecting is not None and not peer.connecting.done():
                peer.connecting.set_exception(TransferError(reason, message))
        for pull in list(self._pulls.values()):
            if pull.state is not _State.WAITING or self.host.is_resting:
                self._end(pull, reason, message)

    def close(self) -> None:
        """What is left ends as `peer_lost` when the host's last agent does."""
        self._is_closing = True


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:
        _log.exception("The callback of a pull has failed")
