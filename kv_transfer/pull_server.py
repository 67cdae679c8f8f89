"""The holder's side of the control plane: lets other ranks read under leases, and owns the leases.

Everything but `refuse_at_once` runs on the event loop of the thread `kv-io`, so that an expiry, a confirmation and a
release cannot race: whichever is handled first decides. A connection that goes away changes nothing about leases;
their deadlines do. A peer that sends anything malformed, or anything before a valid greeting, is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from kv_transfer.connection import Connection, Listener
from kv_transfer.connector import RequestKey, SendFinished
from kv_transfer.geometry import KV_PROTOCOL_VERSION, Geometry
from kv_transfer.kv_messages import (
    Acquire,
    BadMessageError,
    Confirm,
    Confirmed,
    Denied,
    Gone,
    Granted,
    Heard,
    Heartbeat,
    PushTo,
    Ready,
    Rejection,
    Release,
    Welcome,
    decode_greeting,
    decode_request,
    decode_version,
    encode,
)
from kv_transfer.leases import GoneNotice, LeaseAction, LeaseTable, ReadyNotice
from kv_transfer.pull_pushes import BlockTable, Pushes
from kv_transfer.transport import Endpoint, FailureReason

_log = logging.getLogger(__name__)

ROLE = "kv"
"""Of those who may connect (`kv_transfer.wire.Hello`)."""
MAX_READERS = 4096
# How often expired leases are looked for, per lease, and at most.
_SWEEPS_PER_LEASE = 20
_MAX_SWEEP_S = 0.5


class PullServer:
    def __init__(
        self,
        *,
        engine_id: str,
        geometry: Geometry,
        secret: bytes,
        lease_s: float,
        greeting_timeout_s: float,
        post: Callable[[SendFinished], None],
        pushes: Pushes | None = None,
    ) -> None:
        """`pushes` None: whoever needs blocks fetches them."""
        self._engine_id = engine_id
        self._geometry = geometry
        self._lease_s = lease_s
        self._greeting_timeout_s = greeting_timeout_s
        self._post = post
        self._table = LeaseTable(lease_s)
        self._pushes = pushes
        self._endpoints: list[Endpoint] = []
        self._listener = Listener(secret, self._accept)
        self._readers: dict[str, Connection] = {}
        """By engine id, the latest connection of each that has been welcomed."""
        self._num_connections = 0
        self._sweeper: asyncio.Task[None] | None = None
        self._refused: set[int] = set()
        """Leases that must not be confirmed any more, though the table may not know yet. Under `_refused_lock`."""
        self._refused_lock = threading.Lock()
        self.num_bad_messages = 0

    async def start(self, host: str, port: int, endpoints: list[Endpoint]) -> int:
        """Listen; returns the port. Raises OSError."""
        self._endpoints = endpoints
        bound = await self._listener.start(host, port)
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return bound

    async def close(self) -> None:
        """All leases end."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        self._act(self._table.close())
        await self._listener.close()

    @property
    def num_leases(self) -> int:
        return self._table.num_complete

    @property
    def num_expired(self) -> int:
        return self._table.num_expired

    # ---- the request's side ----

    def refuse_at_once(self, lease_id: int) -> None:
        """From any thread: nobody can confirm this lease once this has returned. `void` must follow."""
        with self._refused_lock:
            self._refused.add(lease_id)

    def open(self, lease_id: int, key: RequestKey) -> None:
        self._table.open(lease_id, key)

    def show(self, lease_id: int, block_ids: BlockTable) -> None:
        """The blocks of this lease by now, shape [num_groups, columns]."""
        if self._pushes is not None:
            self._pushes.show(lease_id, block_ids)

    def advance(self, lease_id: int, num_tokens: int) -> None:
        self._act(self._table.advance(lease_id, num_tokens))
        if self._pushes is not None:
            self._act(self._pushes.advance(lease_id, num_tokens))

    def void(self, lease_id: int, why: str) -> None:
        self._act(self._table.void(lease_id, why))
        if self._pushes is not None:
            self._act(self._pushes.end(lease_id, why))
        with self._refused_lock:
            self._refused.discard(lease_id)

    def complete(self, lease_id: int, key: RequestKey, num_tokens: int) -> None:
        self._act(self._table.complete(lease_id, key, num_tokens, self._now()))

    def prolong(self, key: RequestKey) -> None:
        """Somebody will ask for what is kept of this request."""
        self._table.prolong(key, self._now())

    def abandon(self, key: RequestKey) -> None:
        """Nobody will ask for what is kept of this request."""
        self._act(self._table.abandon(key))

    # ---- connections ----

    def _accept(self, connection: Connection) -> None:
        assert connection.peer is not None
        if connection.peer.role != ROLE or self._num_connections >= MAX_READERS:
            connection.abort(
                f"a {connection.peer.role}, with {self._num_connections} of {MAX_READERS} readers connected"
            )
            return
        self._num_connections += 1
        _Reader(self, connection, self._greeting_timeout_s)

    def welcome(self, payload: bytes, reader: str, connection: Connection) -> None:
        """Answer a greeting: the peer may go on, or is cut off. Raises BadMessageError."""
        version = decode_version(payload)
        if version != KV_PROTOCOL_VERSION:
            text = f"protocol version {KV_PROTOCOL_VERSION} here and {version} there; run the same release on all ranks"
            self._reject(connection, FailureReason.INCOMPATIBLE, text)
            return
        greeting = decode_greeting(payload)
        if greeting.engine_id != self._engine_id:
            text = f"this is engine {self._engine_id}, and not {greeting.engine_id}: it has been started anew"
            self._reject(connection, FailureReason.EPOCH_MISMATCH, text)
        elif differences := greeting.geometry.differences(self._geometry):
            self._reject(connection, FailureReason.INCOMPATIBLE, differences)
        else:
            self._readers[reader] = connection
            answer = Welcome(KV_PROTOCOL_VERSION, self._engine_id, self._geometry, self._lease_s, self._endpoints)
            connection.send(encode(answer))

    def _reject(self, connection: Connection, reason: FailureReason, message: str) -> None:
        connection.send(encode(Rejection(KV_PROTOCOL_VERSION, reason, message)))
        connection.close(f"rejected: {message}")

    def serve(self, payload: bytes, reader: str, connection: Connection) -> None:
        """One request of a welcomed reader. Raises BadMessageError."""
        answer: msgspec.Struct | None = None
        actions: list[LeaseAction] = []
        match decode_request(payload):
            case Acquire(ref, lease_id, is_ahead, push_to):
                granted = self._table.num_ready(lease_id) if is_ahead else self._table.acquire(lease_id, reader)
                refusal = ""
                if push_to is not None and not isinstance(granted, str):
                    refusal = self._push(lease_id, reader, is_ahead, push_to, granted)
                if isinstance(granted, str):
                    answer = Denied(ref, granted)
                else:
                    answer = Denied(ref, refusal, is_lost=False) if refusal else Granted(ref, granted)
            case Confirm(ref, lease_id, num_tokens, is_ahead):
                denial, actions = "its request has lost its blocks", []
                # Held over the table's answer: a void lease is either refused here, or was confirmed before.
                with self._refused_lock:
                    if lease_id not in self._refused and is_ahead:
                        denial = self._table.confirm_ahead(lease_id, num_tokens)
                    elif lease_id not in self._refused:
                        denial, actions = self._table.confirm(lease_id, reader, num_tokens)
                answer = Denied(ref, denial) if denial else Confirmed(ref)
            case Heartbeat(ref, lease_ids):
                now = self._now()
                answer = Heard(ref, [held for held in lease_ids if not self._table.heartbeat(held, reader, now)])
            case Release(lease_id):
                actions = self._table.release(lease_id, reader)
        if answer is not None:
            connection.send(encode(answer))
        self._act(actions)

    def forget(self, reader: str, connection: Connection) -> None:
        """The connection is gone."""
        self._num_connections -= 1
        # Another of the same reader's may have taken its place, or it has never been welcomed.
        if self._readers.get(reader) is connection:
            del self._readers[reader]
            if self._pushes is not None:
                self._pushes.forget(reader)

    # ---- inside ----

    def _push(self, lease_id: int, reader: str, is_ahead: bool, push_to: PushTo, num_ready_tokens: int) -> str:
        """Begin to send; returns why not, or nothing."""
        if self._pushes is None:
            return "this rank does not send blocks; set the same mode in kv_connector_extra_config of all ranks"
        return self._pushes.add(lease_id, reader, is_ahead, push_to, num_ready_tokens)

    def _act(self, actions: Sequence[LeaseAction]) -> None:
        for action in actions:
            match action:
                case SendFinished():
                    self._post(action)
                case ReadyNotice(reader, lease_id, num_ready_tokens):
                    self._tell(reader, Ready(lease_id, num_ready_tokens))
                case GoneNotice(reader, lease_id, message):
                    self._tell(reader, Gone(lease_id, message))

    def _tell(self, reader: str, notice: Ready | Gone) -> None:
        connection = self._readers.get(reader)
        if connection is not None:
            connection.send(encode(notice))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _sweep(self) -> None:
        interval_s = min(self._lease_s / _SWEEPS_PER_LEASE, _MAX_SWEEP_S)
        while True:
            await asyncio.sleep(interval_s)
            self._act(self._table.expire(self._now()))
            if self._pushes is not None:
                self._act(self._pushes.keep(self._table.lease_ids))


class _Reader:
    """One connection: a greeting within its time, then requests."""

    def __init__(self, server: PullServer, connection: Connection, greeting_timeout_s: float) -> None:
        assert connection.peer is not None
        self._server = server
        self._connection = connection
        self._name = connection.peer.name
        self._is_welcome = False
        self._timer = asyncio.get_running_loop().call_later(
            greeting_timeout_s, connection.abort, "no greeting within its time"
        )
        connection.closed.add_done_callback(self._lost)
        connection.start(self._receive)

    def _receive(self, payload: bytes) -> None:
        try:
            if self._is_welcome:
                self._server.serve(payload, self._name, self._connection)
            else:
                self._timer.cancel()
                self._is_welcome = True
                self._server.welcome(payload, self._name, self._connection)
        except BadMessageError as error:
            self._server.num_bad_messages += 1
            _log.warning("KV reader %s is cut off: %s", self._name, str(error))
            self._connection.abort(str(error))

    def _lost(self, closed: asyncio.Future[str]) -> None:
        self._timer.cancel()
        self._server.forget(self._name, self._connection)
