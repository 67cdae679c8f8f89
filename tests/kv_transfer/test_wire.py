"""Frames and the handshake as bytes, from both ends."""

from __future__ import annotations

import struct
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.wire import (
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_FRAME_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    ClientHandshake,
    FrameBuffer,
    Hello,
    Proof,
    ServerHandshake,
    WireError,
    frame,
)

SECRET = b"the cluster's secret"
SERVER_NONCE, CLIENT_NONCE = b"s" * NONCE_BYTES, b"c" * NONCE_BYTES
# Deeper than any decoder follows, in a field that nobody asked for.
BOTTOMLESS = b"\xa1x" + b"\x91" * 3000 + b"\xc0"
GARBAGE = [b"", b"\xc1", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x80", msgspec.msgpack.encode({"type": "unknown"})]


def server(secret: bytes = SECRET, nonce: bytes = SERVER_NONCE) -> ServerHandshake:
    return ServerHandshake(secret, nonce)


def client(secret: bytes = SECRET, role: str = "router", name: str = "r-1") -> ClientHandshake:
    return ClientHandshake(secret, CLIENT_NONCE, role, name)


def hello() -> Hello:
    """What an honest client says to `server()`."""
    return msgspec.msgpack.decode(client().answer(server().challenge()), type=Hello)


def with_bottomless_field(payload: bytes) -> bytes:
    assert payload[0] & 0xF0 == 0x80, "a short map"
    return bytes([payload[0] + 1]) + payload[1:] + BOTTOMLESS


# ---- frames ----


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_frames_cut_anywhere(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    buffer = FrameBuffer()
    received = [
        payload for start, end in pairwise([0, *cuts, len(stream)]) for payload in buffer.feed(stream[start:end])
    ]
    assert received == payloads


def test_frames_byte_by_byte() -> None:
    payloads = [b"", b"a", b"", b"bc" * 200]
    buffer = FrameBuffer(num_handshake_frames=2)
    stream = b"".join(map(frame, payloads))
    assert [payload for i in range(len(stream)) for payload in buffer.feed(stream[i : i + 1])] == payloads


def test_a_frame_is_complete_with_its_last_byte() -> None:
    buffer = FrameBuffer()
    data = frame(b"payload")
    assert buffer.feed(data[:-1]) == []
    assert buffer.feed(data[-1:] + data[:5]) == [b"payload"]
    assert buffer.feed(data[5:]) == [b"payload"]


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_oversize_length_is_refused_before_the_payload_comes(length: int) -> None:
    with pytest.raises(WireError, match=str(length)):
        FrameBuffer().feed(struct.pack("<I", length))


def test_the_largest_frame_is_let_in() -> None:
    assert FrameBuffer().feed(struct.pack("<I", MAX_FRAME_BYTES)) == []
    assert FrameBuffer(1).feed(struct.pack("<I", MAX_HANDSHAKE_FRAME_BYTES)) == []


def test_only_handshake_frames_must_be_small() -> None:
    small, large = b"s" * MAX_HANDSHAKE_FRAME_BYTES, b"l" * (MAX_HANDSHAKE_FRAME_BYTES + 1)
    stream = b"".join(map(frame, [small, small, large, small, large]))
    assert FrameBuffer(num_handshake_frames=2).feed(stream) == [small, small, large, small, large]
    with pytest.raises(WireError, match=f"{MAX_HANDSHAKE_FRAME_BYTES + 1} bytes, the limit is"):
        FrameBuffer(num_handshake_frames=3).feed(stream)


def test_no_oversize_frame_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.wire.MAX_FRAME_BYTES", 10)
    assert frame(b"x" * 10) == b"\x0a\0\0\0" + b"x" * 10
    with pytest.raises(WireError, match="frame of 11 bytes"):
        frame(b"x" * 11)


# ---- handshake ----


@given(role=st.text(max_size=50), name=st.text(max_size=50), secret=st.binary())
def test_handshake(role: str, name: str, secret: bytes) -> None:
    one, other = client(secret, role, name), server(secret)
    peer, proof = other.accept(one.answer(other.challenge()))
    one.verify(proof)
    assert (peer.role, peer.name) == (role, name)


def test_each_end_finds_out_that_the_other_lacks_the_secret() -> None:
    one, other = client(b"another"), server()
    answer = one.answer(other.challenge())
    with pytest.raises(WireError, match="does not hold the cluster secret"):
        other.accept(answer)
    one, other = client(), server(b"another")
    one.answer(other.challenge())
    proof = msgspec.msgpack.encode(Proof(b"\0" * 32))
    with pytest.raises(WireError, match="the server does not hold the cluster secret"):
        one.verify(proof)


def test_a_server_cannot_prove_itself_with_what_the_client_sent() -> None:
    one = client()
    answer = msgspec.msgpack.decode(one.answer(server().challenge()), type=Hello)
    with pytest.raises(WireError, match="the server does not hold the cluster secret"):
        one.verify(msgspec.msgpack.encode(Proof(answer.mac)))


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
def test_another_version_is_refused_by_both(version: int) -> None:
    with pytest.raises(WireError, match=f"peer speaks protocol version {version}"):
        server().accept(msgspec.msgpack.encode(msgspec.structs.replace(hello(), version=version)))
    with pytest.raises(WireError, match=f"peer speaks protocol version {version}"):
        client().answer(msgspec.msgpack.encode(Challenge(version, SERVER_NONCE)))


@pytest.mark.parametrize("nonce", [b"", b"n" * (NONCE_BYTES - 1), b"n" * (NONCE_BYTES + 1)])
def test_a_nonce_of_another_length_is_refused_by_both(nonce: bytes) -> None:
    with pytest.raises(WireError, match=f"nonce has {len(nonce)} bytes"):
        server().accept(msgspec.msgpack.encode(msgspec.structs.replace(hello(), nonce=nonce)))
    with pytest.raises(WireError, match=f"nonce has {len(nonce)} bytes"):
        client().answer(msgspec.msgpack.encode(Challenge(PROTOCOL_VERSION, nonce)))


@pytest.mark.parametrize(
    "change",
    [
        {"role": "rank"},
        {"name": "r-2"},
        {"role": "routerr", "name": "-1"},
        {"nonce": b"x" * NONCE_BYTES},
        {"mac": b""},
        {"mac": b"\0" * 32},
    ],
)
def test_a_changed_hello_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(WireError, match="does not hold the cluster secret"):
        server().accept(msgspec.msgpack.encode(msgspec.structs.replace(hello(), **change)))


def test_a_replayed_hello_is_refused() -> None:
    recorded = msgspec.msgpack.encode(hello())
    assert server().accept(recorded)[0].name == "r-1"
    with pytest.raises(WireError, match="does not hold the cluster secret"):
        server(nonce=b"t" * NONCE_BYTES).accept(recorded)


def test_a_replayed_proof_is_refused() -> None:
    recorded = server().accept(msgspec.msgpack.encode(hello()))[1]
    other = ClientHandshake(SECRET, b"d" * NONCE_BYTES, "router", "r-1")
    other.answer(server().challenge())
    with pytest.raises(WireError, match="the server does not hold the cluster secret"):
        other.verify(recorded)


def test_a_proof_for_another_challenge_is_refused() -> None:
    one = client()
    proof = server().accept(one.answer(server().challenge()))[1]
    one.answer(server(nonce=b"t" * NONCE_BYTES).challenge())
    with pytest.raises(WireError, match="the server does not hold the cluster secret"):
        one.verify(proof)


@pytest.mark.parametrize("payload", GARBAGE)
def test_garbage_is_refused_by_both(payload: bytes) -> None:
    with pytest.raises(WireError, match="expected Hello"):
        server().accept(payload)
    with pytest.raises(WireError, match="expected Challenge"):
        client().answer(payload)
    with pytest.raises(WireError, match="expected Proof"):
        client().verify(payload)


def test_bottomless_messages_are_refused_by_both() -> None:
    challenge, answer = server().challenge(), msgspec.msgpack.encode(hello())
    proof = server().accept(answer)[1]
    for payload in (challenge, answer, proof):
        assert len(with_bottomless_field(payload)) < MAX_HANDSHAKE_FRAME_BYTES
    with pytest.raises(WireError, match="expected Hello"):
        server().accept(with_bottomless_field(answer))
    with pytest.raises(WireError, match="expected Challenge"):
        client().answer(with_bottomless_field(challenge))
    with pytest.raises(WireError, match="expected Proof"):
        client().verify(with_bottomless_field(proof))


@given(st.binary(max_size=300))
def test_any_bytes_end_in_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError):
        server().accept(payload)
    with pytest.raises(WireError):
        client().answer(payload)
    with pytest.raises(WireError):
        client().verify(payload)


@given(st.data())
def test_any_changed_byte_of_a_hello_is_noticed(data: st.DataObject) -> None:
    """What is accepted says the same as what was sent (a byte may change a number's encoding only)."""
    honest = hello()
    payload = bytearray(msgspec.msgpack.encode(honest))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] = data.draw(st.integers(0, 255))
    try:
        peer, _ = server().accept(bytes(payload))
    except WireError:
        return
    assert peer == honest
