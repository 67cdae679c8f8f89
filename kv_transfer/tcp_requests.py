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

from kv_transfer.tcp_stream import receive_views, send_views
from kv_transfer.transport import FailureReason, TransferEnd
from kv_transfer.wire import WireError

ROLE = "kv-tcp"


class TcpAddress(msgspec.Struct, frozen=True):
    host: str
    port: int
    instance: bytes


class PullRequest(msgspec.Struct, frozen=True, tag="pull"):
    blocks: bytes
    """Ids, int32 little-endian."""
    timeout_s: float
    """How long the client waits."""


class PushRequest(msgspec.Struct, frozen=True, tag="push"):
    num_blocks: int
    timeout_s: float


Request = PullRequest | PushRequest

# Padded, so that blocks lie in the kernel's buffers as they lie in the pools: copies between places that are not
# aligned to each other took twice the time (8 MB in 180 KiB blocks over loopback, AMD EPYC).
STATUS = struct.Struct("<I60x")
GRANT = struct.Struct("<Q56x")
MAX_REFUSAL_BYTES = 4096


def send_refusal(sock: socket.socket, text: str, deadline: float) -> None:
    """As `send_views`."""
    refusal = text.encode()[:MAX_REFUSAL_BYTES]
    send_views(sock, [memoryview(STATUS.pack(len(refusal)) + refusal)], deadline)


def receive_status(sock: socket.socket) -> TransferEnd:
    """What the server says before it sends blocks. Raises ConnectionError or WireError."""
    num_bytes = _receive_number(sock, STATUS)
    if not num_bytes:
        return TransferEnd()
    if num_bytes > MAX_REFUSAL_BYTES:
        raise WireError(f"peer announced a refusal of {num_bytes} bytes, the limit is {MAX_REFUSAL_BYTES}")
    refusal = bytearray(num_bytes)
    receive_views(sock, [memoryview(refusal)])
    return TransferEnd(FailureReason.BACKEND, refusal.decode(errors="replace"))


def receive_grant(sock: socket.socket) -> int:
    """Raises ConnectionError."""
    return _receive_number(sock, GRANT)


def _receive_number(sock: socket.socket, form: struct.Struct) -> int:
    data = bytearray(form.size)
    receive_views(sock, [memoryview(data)])
    return int(form.unpack(data)[0])
