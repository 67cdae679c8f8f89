"""An agent's connections to other agents, as client and as server; on the agent's event loop, reading no pool itself.

A link is proved, greeted and **tried** (one block is read into the scratch block) before it counts as open: what the
library cannot reach is found out here, and its lanes are made here, not on the first request's time. The connection
stays as long as the link: when a peer's process dies, its end is what tells so, whichever library is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from kv_transfer.agent_library import AgentError, LibraryAgent, Pool
from kv_transfer.agent_messages import (
    AGENT_ROLE,
    Greeting,
    OpenLink,
    PeerMessage,
    ReadBegan,
    ReadDone,
    Start,
    Want,
    Welcome,
)
from kv_transfer.connection import Connection, connect
from kv_transfer.transport import BlockIds, FailureReason
from kv_transfer.wire import WireError

_messages = msgspec.msgpack.Decoder(PeerMessage)


class Reader(Protocol):
    """The part of the agent that reads blocks."""

    def read(self, link: Link, remote_blocks: BlockIds, local_blocks: BlockIds) -> asyncio.Future[None]:
        """The future raises AgentError."""
        ...


class Link:
    """A peer to read from."""

    def __init__(self, link_id: int, on_lost: Callable[[Link, str], None]) -> None:
        self.link_id = link_id
        self.num_blocks = 0
        """Of the peer's pool."""
        self.is_open = False
        self.is_closed = False
        """Nobody wants to hear of it any more; it may still be there for its last reads."""
        self.is_known = False
        """The library has it."""
        self._on_lost = on_lost
        self._connection: Connection | None = None
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()

    async def open(self, command: OpenLink, start: Start, agent: LibraryAgent, pool: Pool, reader: Reader) -> None:
        """Raises AgentError within the command's time, AgentBroken."""
        try:
            async with asyncio.timeout(command.timeout_s):
                welcome = await self._enter(command, start, agent)
                agent.add_link(self.link_id, welcome.metadata, welcome.num_blocks)
                self.num_blocks = welcome.num_blocks
                self.is_known = True
                await reader.read(self, np.zeros(1, np.int32), np.array([pool.scratch_id], np.int32))
        except TimeoutError:
            raise AgentError(FailureReason.TIMEOUT, "the peer's agent does not answer") from None
        except (OSError, WireError) as error:
            raise AgentError(FailureReason.NO_ROUTE, f"the peer's agent is not reached: {error}") from None
        if self.is_closed or not self.is_connected:
            raise AgentError(FailureReason.PEER_LOST, "closed while it was opened")
        self.is_open = True

    async def _enter(self, command: OpenLink, start: Start, agent: LibraryAgent) -> Welcome:
        address = command.address
        name = start.address.incarnation.hex()
        self._connection = await connect(
            address.host, address.port, secret=start.secret, role=AGENT_ROLE, name=name, timeout_s=command.timeout_s
        )
        if self.is_closed:
            self._connection.close()
        self._connection.closed.add_done_callback(lambda closed: self._end(closed.result()))
        self._connection.start(self._on_frame)
        self.send(Greeting(agent.name, agent.metadata))
        welcome = await self._welcome
        if welcome.incarnation != address.incarnation:
            raise AgentError(FailureReason.EPOCH_MISMATCH, "the peer was restarted since its endpoint was told")
        for ours, theirs, what in (
            (agent.name, welcome.library, "the library"),
            (start.block_size_bytes, welcome.block_size_bytes, "the size of a block in bytes"),
        ):
            if ours != theirs:
                raise AgentError(FailureReason.INCOMPATIBLE, f"{what} is {ours} here and {theirs} there")
        return welcome

    def _on_frame(self, payload: bytes) -> None:
        try:
            message = _messages.decode(payload)
            if not isinstance(message, Welcome):
                raise msgspec.ValidationError(f"{type(message).__name__} is nothing for a client")
            if not self._welcome.done():
                self._welcome.set_result(message)
        except msgspec.DecodeError as error:
            assert self._connection is not None
            self._connection.abort(f"the peer's agent broke the protocol: {error}")

    def _end(self, reason: str) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(WireError(reason))
            self._welcome.exception()
        elif not self.is_closed:
            self._on_lost(self, reason)

    def send(self, message: PeerMessage) -> None:
        if self._connection is not None:
            self._connection.send(msgspec.msgpack.encode(message))

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.closed.done()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.is_closed = True
        if not self._welcome.done():
            self._welcome.set_exception(AgentError(FailureReason.PEER_LOST, "closed while it was opened"))
            # Whoever waits for it hears of it; often nobody does yet.
            self._welcome.exception()
        if self._connection is not None:
            self._connection.close()


class Clients:
    """Peers that read from us."""

    def __init__(self, start: Start, agent: LibraryAgent, on_change: Callable[[], None]) -> None:
        self._start = start
        self._agent = agent
        self._on_change = on_change
        """Called when the library may have something to do for a client."""
        self._connections: dict[int, Connection] = {}
        self._reads: dict[int, set[int]] = {}
        """Under way, by client."""
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def are_reading(self) -> bool:
        return any(self._reads.values())

    def add(self, connection: Connection) -> None:
        """It has been proved."""
        assert connection.peer is not None
        if connection.peer.role != AGENT_ROLE:
            connection.abort(f"a client for {connection.peer.role!r} came to a KV agent")
            return
        client_id = self._next_id
        self._next_id += 1
        self._connections[client_id] = connection
        self._reads[client_id] = set()
        metadata = b""

        def on_frame(payload: bytes) -> None:
            nonlocal metadata
            try:
                message = _messages.decode(payload)
                if isinstance(message, Greeting):
                    if message.library != self._agent.name:
                        raise msgspec.ValidationError(f"a client with {message.library!r}")
                    metadata = message.metadata
                    connection.send(msgspec.msgpack.encode(self._welcome()))
                elif metadata:
                    self._on_message(client_id, metadata, message)
                else:
                    raise msgspec.ValidationError("a client did not introduce itself")
            except (msgspec.DecodeError, AgentError) as error:
                connection.abort(f"a client's request was refused: {error}")
            self._on_change()

        connection.closed.add_done_callback(lambda _: self._remove(client_id))
        connection.start(on_frame)

    def _welcome(self) -> Welcome:
        start = self._start
        return Welcome(
            self._agent.name,
            self._agent.metadata,
            start.address.incarnation,
            start.num_blocks,
            start.block_size_bytes,
        )

    def _on_message(self, client_id: int, metadata: bytes, message: PeerMessage) -> None:
        match message:
            case ReadBegan():
                self._reads[client_id].add(message.read_id)
            case ReadDone():
                self._reads[client_id].discard(message.read_id)
            case Want():
                self._agent.serve(client_id, metadata, message.request)
            case _:
                raise msgspec.ValidationError(f"{type(message).__name__} is nothing for a server")

    def abort(self, client_id: int, reason: str) -> None:
        connection = self._connections.get(client_id)
        if connection is not None:
            connection.abort(reason)

    def _remove(self, client_id: int) -> None:
        del self._connections[client_id], self._reads[client_id]
        self._agent.forget_client(client_id)
        self._on_change()
