"""What two pull connectors say to each other over their control connection; see `kv_transfer.wire` for what precedes.

The reader of KV connects to its holder. Its first message is a `Greeting`; the holder answers with a `Welcome`, or
with a `Rejection` and the connection's end. Requests with a `ref` are answered, in order, by a reply with the same
`ref`; the holder may say `Ready` and `Gone` at any time. Both ends ignore fields that they do not know.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from kv_transfer.geometry import Geometry
from kv_transfer.transport import Endpoint

MAX_MESSAGE_BYTES = 1 << 20
MAX_IDS = 4096
"""Leases in one `Heartbeat`."""

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Ids = Annotated[list[_Id], msgspec.Meta(max_length=MAX_IDS)]


class Opening(msgspec.Struct, frozen=True):
    """The part of a `Greeting` and of its answers that all versions share."""

    version: int


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    version: int
    engine_id: str
    """Whom the reader believes to speak with."""
    geometry: Geometry


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    version: int
    engine_id: str
    geometry: Geometry
    lease_s: float
    endpoints: list[Endpoint]
    """The transports by which the holder's pool can be read."""


class Rejection(msgspec.Struct, frozen=True, tag="rejection"):
    version: int
    reason: str
    """A `kv_transfer.transport.FailureReason`."""
    message: str


class PushTo(msgspec.Struct, frozen=True):
    """Where the blocks go that a reader does not fetch itself."""

    grant: _Id
    """Of the transport (`kv_transfer.transport.PushTransport`), for as many blocks as there are cells."""
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    """Those wanted: a block is complete with its last token of these."""
    cells: bytes
    """The blocks wanted, in the order in which they are sent, int32 little-endian: column * num_groups + group."""


class Acquire(msgspec.Struct, frozen=True, tag="acquire"):
    """Begin to read under a lease → `Granted` or `Denied`. `Ready` is told from then on, unless `is_ahead`."""

    ref: _Id
    lease_id: _Id
    is_ahead: bool = False
    """Read what is ready now, and leave the lease to whoever reads it in the end."""
    push_to: PushTo | None = None
    """Send what is wanted, as it gets ready; `Ready` and `Gone` are told until all is sent, also if `is_ahead`."""


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """The first `num_tokens` tokens have been read: was the lease held all the time? → `Confirmed` or `Denied`.

    It ends the lease, unless `is_ahead`.
    """

    ref: _Id
    lease_id: _Id
    num_tokens: _Id
    is_ahead: bool = False


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """These leases will be read, or are being read → `Heard`."""

    ref: _Id
    lease_ids: _Ids


class Release(msgspec.Struct, frozen=True, tag="release"):
    """This lease will not be read (any further); no answer."""

    lease_id: _Id


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    ref: _Id
    num_ready_tokens: _Id


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    ref: _Id


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """The lease is not held (for this reader), or cannot be read like this, and why."""

    ref: _Id
    message: str
    is_lost: bool = True
    """False: the lease is held, and the reader asks for what cannot be."""


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    ref: _Id
    gone: _Ids
    """Those of the leases that are not held."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """So many tokens of an acquired lease are complete now."""

    lease_id: _Id
    num_ready_tokens: _Id


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """An acquired lease has ended, not through its reader."""

    lease_id: _Id
    message: str


Request = Acquire | Confirm | Heartbeat | Release
Reply = Granted | Confirmed | Denied | Heard
Notice = Ready | Gone
Answer = Welcome | Rejection

T = TypeVar("T")


class BadMessageError(Exception):
    """The other end broke the protocol."""


_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_GREETINGS: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_OPENINGS: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
_FROM_HOLDER: msgspec.msgpack.Decoder[Reply | Notice] = msgspec.msgpack.Decoder(Reply | Notice)

encode = msgspec.msgpack.encode


def _decode(payload: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise BadMessageError(f"a message of {len(payload)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadMessageError(f"a malformed message: {error}") from None


def decode_version(payload: bytes) -> int:
    """Of a `Greeting` or its answer, in whatever version. All of these raise BadMessageError."""
    return _decode(payload, _OPENINGS).version


def decode_greeting(payload: bytes) -> Greeting:
    return _decode(payload, _GREETINGS)


def decode_answer(payload: bytes) -> Answer:
    return _decode(payload, _ANSWERS)


def decode_request(payload: bytes) -> Request:
    return _decode(payload, _REQUESTS)


def decode_from_holder(payload: bytes) -> Reply | Notice:
    return _decode(payload, _FROM_HOLDER)
