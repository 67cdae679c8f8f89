"""What a rank and its agent say to each other, and agents among themselves; see `kv_transfer.agent_transport`.

A rank and its agent (the side process that hosts a transfer library) talk over a socket pair that nobody else holds;
agents talk over connections of `kv_transfer.connection`, whose ends have proved that they hold the cluster secret.
On both, a frame holds one message, and nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from kv_transfer.transport import FailureReason
from kv_transfer.wire import FrameBuffer, frame

M = TypeVar("M", bound=msgspec.Struct)

AGENT_ROLE = "kv-agent"


class Address(msgspec.Struct, frozen=True, array_like=True):
    """What an `Endpoint` of an agent's transport carries: where the agents of one rank listen, one after the other."""

    host: str
    port: int
    incarnation: bytes
    """Of the rank's transport, and kept when its agent is replaced: another process on the same port has another."""


# From the rank to its agent.


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first command."""

    secret: bytes
    address: Address
    num_blocks: int
    block_size_bytes: int


class OpenLink(msgspec.Struct, frozen=True, tag="open_link"):
    """Connect to a peer's agent; answered by `LinkOpened` or `LinkFailed`."""

    link_id: int
    address: Address
    timeout_s: float


class CloseLink(msgspec.Struct, frozen=True, tag="close_link"):
    """Its reads are cancelled."""

    link_id: int


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Block ids are int32, in the machine's order. Answered by `ReadEnded`, once the link is open."""

    read_id: int
    link_id: int
    remote_blocks: bytes
    local_blocks: bytes


class CancelRead(msgspec.Struct, frozen=True, tag="cancel_read"):
    """Answered as every read, when nothing writes any more: soon, late or never, as the library can."""

    read_id: int


Command = Start | OpenLink | CloseLink | Read | CancelRead


# From the agent to its rank.


class Started(msgspec.Struct, frozen=True, tag="started"):
    pass


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The agent's last words."""

    message: str


class LinkOpened(msgspec.Struct, frozen=True, tag="link_opened"):
    link_id: int


class LinkFailed(msgspec.Struct, frozen=True, tag="link_failed"):
    """It could not be opened: nothing was read over it."""

    link_id: int
    reason: FailureReason
    message: str


class LinkLost(msgspec.Struct, frozen=True, tag="link_lost"):
    """Its reads are cancelled, and each is still answered."""

    link_id: int
    message: str


class ReadEnded(msgspec.Struct, frozen=True, tag="read_ended"):
    read_id: int
    reason: FailureReason | None = None
    message: str = ""
    is_fenced: bool = True
    """False: the library gave up, and may still write; only the agent's end rules it out."""


Event = Started | Broken | LinkOpened | LinkFailed | LinkLost | ReadEnded


# Among agents: the one that reads (client) and the one that is read from (server).


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    library: str
    metadata: bytes
    """The library's own description of the agent; opaque to all else."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    library: str
    metadata: bytes
    incarnation: bytes
    num_blocks: int
    block_size_bytes: int


class ReadBegan(msgspec.Struct, frozen=True, tag="read_began"):
    """The client waits for blocks: the server has to give its library processor time until `ReadDone`."""

    read_id: int


class Want(msgspec.Struct, frozen=True, tag="want"):
    """From the client's half of a library that has no one-sided reads to the server's half of it."""

    request: bytes


class ReadDone(msgspec.Struct, frozen=True, tag="read_done"):
    read_id: int


PeerMessage = Greeting | Welcome | ReadBegan | Want | ReadDone


class Pipe(asyncio.Protocol, Generic[M]):
    """Either end of the socket pair between a rank and its agent; used from its event loop only."""

    def __init__(self, kind: object, on_message: Callable[[M], None], on_closed: Callable[[], None]) -> None:
        """`kind`: the union of the messages that arrive here."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._on_message = on_message
        self._on_closed = on_closed
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        """Sent before the connection was made."""
        self._is_closed = False

    def send(self, message: msgspec.Struct) -> None:
        """Never blocks: what an end that stands still does not take is kept here. Nothing happens after the close."""
        data = frame(msgspec.msgpack.encode(message))
        if self._transport is None:
            self._early.append(data)
        elif not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """No message arrives after it, and `on_closed` is not called."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_closed:
            self._transport.abort()
        for data in self._early:
            self._transport.write(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            if not self._is_closed:
                self._on_message(self._decoder.decode(payload))

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_closed:
            self._on_closed()
