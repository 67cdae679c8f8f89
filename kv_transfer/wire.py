"""Frames and the handshake of every control connection in the cluster; pure, bytes in and bytes out.

A frame is a 4-byte little-endian length and a payload. The first three frames of a connection prove that both
ends hold the cluster secret (HMAC-SHA256 over both nonces and what the client claims to be); only after that is
anything else decoded, and nothing is ever unpickled:

    server → client   Challenge   version, nonce
    client → server   Hello       version, nonce, role, name, mac
    server → client   Proof       mac
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TypeVar

import msgspec

T = TypeVar("T")

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 << 20
# Before a peer has proved itself it may send no more than a handshake needs.
MAX_HANDSHAKE_FRAME_BYTES = 4096
NONCE_BYTES = 32
_LENGTH = struct.Struct("<I")


class WireError(Exception):
    """The other end broke the protocol; the connection is of no further use."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    nonce: bytes
    role: str
    """What the client is: `router`, `rank`, …"""
    name: str
    """Which one: unique per process incarnation."""
    mac: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    mac: bytes


def frame(payload: bytes) -> bytes:
    """`payload` with its length in front. Raises WireError beyond MAX_FRAME_BYTES."""
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Cuts a byte stream into payloads, of which the first `num_handshake_frames` must be small.

    The limit is tied to the frames' places, not to the time at which the handshake is found to be complete: large
    frames may come right behind it, in the same packet.
    """

    def __init__(self, num_handshake_frames: int = 0) -> None:
        self._buffer = bytearray()
        self._num_handshake_frames = num_handshake_frames

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; returns the payloads completed by them. Raises WireError on an oversized length."""
        if not self._buffer and not self._num_handshake_frames and _is_one_frame(data):
            return [data[_LENGTH.size :]]
        self._buffer += data
        payloads = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            limit = MAX_HANDSHAKE_FRAME_BYTES if self._num_handshake_frames else MAX_FRAME_BYTES
            if length > limit:
                raise WireError(f"peer announced a frame of {length} bytes, the limit is {limit}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(memoryview(self._buffer)[start + _LENGTH.size : end]))
            self._num_handshake_frames = max(self._num_handshake_frames - 1, 0)
            start = end
        if start:
            del self._buffer[:start]
        return payloads


def _is_one_frame(data: bytes) -> bool:
    """As nearly all that is received at once is."""
    length = len(data) - _LENGTH.size
    return 0 <= length <= MAX_FRAME_BYTES and _LENGTH.unpack_from(data)[0] == length


def _mac(secret: bytes, *parts: bytes) -> bytes:
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(_LENGTH.pack(len(part)) + part)
    return digest.digest()


def _client_mac(secret: bytes, server_nonce: bytes, client_nonce: bytes, role: str, name: str) -> bytes:
    return _mac(secret, b"client", server_nonce, client_nonce, role.encode(), name.encode())


def _decode(payload: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"expected {kind.__name__}: {error}") from None


def _check_opening(opening: Challenge | Hello) -> None:
    if opening.version != PROTOCOL_VERSION:
        raise WireError(f"peer speaks protocol version {opening.version}, this process {PROTOCOL_VERSION}")
    if len(opening.nonce) != NONCE_BYTES:
        raise WireError(f"nonce has {len(opening.nonce)} bytes, expected {NONCE_BYTES}")


class ServerHandshake:
    """The server's half: `challenge()`, then `accept(payload)` → (Hello, bytes to send)."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        self._secret = secret
        self._nonce = nonce

    def challenge(self) -> bytes:
        return msgspec.msgpack.encode(Challenge(PROTOCOL_VERSION, self._nonce))

    def accept(self, payload: bytes) -> tuple[Hello, bytes]:
        """Raises WireError unless the client speaks this version and holds the secret."""
        hello = _decode(payload, Hello)
        _check_opening(hello)
        expected = _client_mac(self._secret, self._nonce, hello.nonce, hello.role, hello.name)
        if not hmac.compare_digest(hello.mac, expected):
            raise WireError(f"{hello.role} {hello.name!r} does not hold the cluster secret")
        return hello, msgspec.msgpack.encode(Proof(_mac(self._secret, b"server", hello.nonce, self._nonce)))


class ClientHandshake:
    """The client's half: `answer(challenge)` → bytes to send, then `verify(proof)`."""

    def __init__(self, secret: bytes, nonce: bytes, role: str, name: str) -> None:
        self._secret = secret
        self._nonce = nonce
        self._role = role
        self._name = name
        self._server_nonce = b""

    def answer(self, payload: bytes) -> bytes:
        """Raises WireError unless the server speaks this version."""
        challenge = _decode(payload, Challenge)
        _check_opening(challenge)
        self._server_nonce = challenge.nonce
        mac = _client_mac(self._secret, challenge.nonce, self._nonce, self._role, self._name)
        return msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, self._nonce, self._role, self._name, mac))

    def verify(self, payload: bytes) -> None:
        """Raises WireError unless the server holds the secret."""
        proof = _decode(payload, Proof)
        if not hmac.compare_digest(proof.mac, _mac(self._secret, b"server", self._nonce, self._server_nonce)):
            raise WireError("the server does not hold the cluster secret")
