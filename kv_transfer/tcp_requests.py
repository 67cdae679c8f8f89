"""What is said on a connection of the TCP transport, behind the handshake of `kv_transfer.socket_server`.

    client → server   PullRequest       which blocks
    server → client   STATUS            zero, and the blocks' bytes; or the length of a refusal, and its text

    client → server   PushRequest       how many blocks
    server → client   STATUS            zero, GRANT, and the bytes of blocks as they are pushed; or as above

One request at a time is on a connection. After the last byte of its answer the next may follow.
"""

from __future__ import annotations

import socket
import struct

import msgspec
import numpy as np

from kv_transfer.tcp_stream import receive_data, send_data
from kv_transfer.transport import FailureReason, TransferEnd
from kv_transfer.wire import WireError, frame

ROLE = "kv-tcp"


class TcpAddress(msgspec.Struct, frozen=True):
    host: str
    port: int
    instance: bytes


class PullRequest(msgspec.Struct, frozen=True, tag="pull"):
    blocks: bytes
    """Ids, as `IDS`."""
    timeout_s: float
    """How long the client waits."""


class PushRequest(msgspec.Struct, frozen=True, tag="push"):
    num_blocks: int
    timeout_s: float


Request = PullRequest | PushRequest


IDS = np.dtype("<i4")
"""Block ids as they are sent."""
_ENCODER = msgspec.msgpack.Encoder()
# To make it for a union takes as long as to copy 100 KB.
_DECODER = msgspec.msgpack.Decoder(Request)


def encode_request(request: Request) -> bytes:
    """As it is sent."""
    return frame(_ENCODER.encode(request))


def decode_request(payload: bytes) -> Request:
    """Raises msgspec.DecodeError."""
    return _DECODER.decode(payload)


# Padded, so that blocks lie in the kernel's buffers as they lie in the pools: copies between places that are not
# aligned to each other took twice the time (8 MB in 180 KiB blocks over loopback, AMD EPYC).
STATUS = struct.Struct("<I60x")
GRANT = struct.Struct("<Q56x")
MAX_REFUSAL_BYTES = 4096


def send_refusal(sock: socket.socket, text: str, deadline: float) -> None:
    """As `send_data`."""
    refusal = text.encode()[:MAX_REFUSAL_BYTES]
    send_data(sock, STATUS.pack(len(refusal)) + refusal, deadline)


def receive_refusal(sock: socket.socket, status: bytearray) -> TransferEnd | None:
    """What a status announces, if that is not what was asked for. Raises OSError or WireError."""
    (num_bytes,) = STATUS.unpack(status)
    if not num_bytes:
        return None
    if num_bytes > MAX_REFUSAL_BYTES:
        raise WireError(f"peer announced a refusal of {num_bytes} bytes, the limit is {MAX_REFUSAL_BYTES}")
    return TransferEnd(FailureReason.BACKEND, receive_data(sock, num_bytes).decode(errors="replace"))
