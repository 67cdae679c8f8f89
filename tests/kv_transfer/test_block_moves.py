"""Blocks moved by C and by Python: the same bytes and the same errors, whatever ids, sockets and signals do."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kv_transfer import block_moves, extension
from kv_transfer.block_moves import Pool
from kv_transfer.transport import BlockIds
from tests.kv_transfer.transport_rig import PATIENCE_S

MODULE = "kv_transfer._block_moves"
# More runs than one call of the kernel's takes.
NUM_BLOCKS, BLOCK_SIZE_BYTES = 5000, 64


@dataclass(frozen=True)
class Moves:
    copy: Any
    send: Any
    receive: Any


IN_PYTHON = Moves(block_moves.copy_in_python, block_moves.send_in_python, block_moves.receive_in_python)


def in_c(module: ModuleType) -> Moves:
    return Moves(module.copy, module.send, module.receive)


@pytest.fixture(params=["python", "c"])
def moves(request: pytest.FixtureRequest) -> Moves:
    if request.param == "python":
        return IN_PYTHON
    if (why := extension.why_missing().get(MODULE)) is not None:
        pytest.skip(why)
    return in_c(import_module(MODULE))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with contextlib.ExitStack() as stack:
        first, second = socket.socketpair()
        yield stack.enter_context(first), stack.enter_context(second)


def deadline() -> float:
    return time.monotonic() + PATIENCE_S


def make_pool(num_blocks: int = NUM_BLOCKS, block_size_bytes: int = BLOCK_SIZE_BYTES) -> Pool:
    words = np.arange(num_blocks * block_size_bytes // 4, dtype=np.uint32) * np.uint32(2654435761)
    return words.view(np.uint8).reshape(num_blocks, block_size_bytes)


def ids(*blocks: int) -> BlockIds:
    return np.array(blocks, np.int32)


def some_ids(chance: random.Random, num_blocks: int, count: int) -> BlockIds:
    """All different; scattered, in runs of neighbours, or both."""
    starts = chance.sample(range(0, num_blocks, 8), min(num_blocks // 8, count))
    longest = chance.choice([1, 2, 8])
    chosen = [start + offset for start in starts for offset in range(chance.randint(1, longest))]
    return np.array(chosen[:count], np.int32)


def send_in_thread(moves: Moves, sock: socket.socket, header: bytes, pool: Pool, blocks: BlockIds) -> threading.Thread:
    thread = threading.Thread(target=moves.send, args=(sock, header, pool, blocks, deadline()))
    thread.start()
    return thread


def run_moves(c: Moves, seed: int, num_rounds: int) -> None:
    """Both against the definition, and against each other on a stream."""
    chance = random.Random(seed)
    for number in range(num_rounds):
        source = make_pool(block_size_bytes=chance.choice([4, 64, 1000]))
        from_ = some_ids(chance, NUM_BLOCKS, chance.choice([0, 1, 5, 600, 2500]))
        to = some_ids(chance, NUM_BLOCKS, len(from_))
        from_ = from_[: len(to)]
        expected = np.zeros_like(source)
        expected[to] = source[from_]

        target = np.zeros_like(source)
        c.copy(source, from_, target, to)
        assert np.array_equal(target, expected)

        sender, receiver = [(c, c), (c, IN_PYTHON), (IN_PYTHON, c)][number % 3]
        target = np.zeros_like(source)
        first, second = socket.socketpair()
        with first, second:
            # The least that the kernel lets one have: calls end in the middle of blocks.
            for sock in (first, second):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, chance.choice([1, 1 << 20]))
            header = bytes(chance.choice([0, 4, 64]))
            thread = send_in_thread(sender, first, header, source, from_)
            received = bytearray(b"\xff" * len(header))
            receiver.receive(second, received, target, to)
            thread.join(PATIENCE_S)
        assert received == header
        assert np.array_equal(target, expected)


def test_twins_move_the_same(moves: Moves) -> None:
    run_moves(moves, 1, 30)


@pytest.mark.parametrize("block_size_bytes", [4, 128 << 10])
def test_copies_of_blocks_of_any_size(moves: Moves, block_size_bytes: int) -> None:
    source = make_pool(16, block_size_bytes)
    target = np.zeros_like(source)
    moves.copy(source, ids(3, 4, 15, 0, 3), target, ids(0, 1, 7, 15, 2))
    assert np.array_equal(target[ids(0, 1, 7, 15, 2)], source[ids(3, 4, 15, 0, 3)])
    assert not target[3:7].any()
    assert not target[8:15].any()


# ---- refusals ----


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS, 2**31 - 1, -(2**31)])
def test_ids_out_of_range_move_nothing(moves: Moves, ends: tuple[socket.socket, socket.socket], block: int) -> None:
    source, target = make_pool(), np.zeros((NUM_BLOCKS, BLOCK_SIZE_BYTES), np.uint8)
    wrong, right = ids(1, block), ids(1, 2)
    with pytest.raises(ValueError, match=f"block {block}\\b"):
        moves.copy(source, wrong, target, right)
    with pytest.raises(ValueError, match=f"block {block}\\b"):
        moves.copy(source, right, target, wrong)
    with pytest.raises(ValueError, match=f"block {block}\\b"):
        moves.send(ends[0], b"header", source, wrong, deadline())
    ends[0].sendall(bytes(4))
    with pytest.raises(ValueError, match=f"block {block}\\b"):
        moves.receive(ends[1], bytearray(4), target, wrong)
    assert ends[1].recv(100) == bytes(4)
    assert not target.any()


def test_copies_that_do_not_pair_are_refused(moves: Moves) -> None:
    with pytest.raises(ValueError, match="pairs"):
        moves.copy(make_pool(), ids(1, 2), make_pool(), ids(1))
    with pytest.raises(ValueError, match="64 bytes in the source and 32 in the target"):
        moves.copy(make_pool(), ids(1), make_pool(9, 32), ids(1))


def test_what_is_no_pool_is_refused_in_c() -> None:
    if (why := extension.why_missing().get(MODULE)) is not None:
        pytest.skip(why)
    copy = import_module(MODULE).copy
    pool = make_pool()
    for wrong in (pool.view(np.int32), pool[0], pool[:, ::2], b"bytes", None):
        with pytest.raises((TypeError, ValueError, BufferError)):
            copy(wrong, ids(1), pool, ids(1))
    for wrong in (np.array([1]), np.array([[1]], np.int32), np.array([1.0], np.float32), ids(1, 2, 3)[::2], [1]):
        with pytest.raises((TypeError, ValueError, BufferError)):
            copy(pool, wrong, pool, ids(1))
    read_only = make_pool()
    read_only.flags.writeable = False
    with pytest.raises((TypeError, ValueError, BufferError)):
        copy(pool, ids(1), read_only, ids(1))
    copy(read_only, ids(1), pool, ids(2))
    assert np.array_equal(pool[2], pool[1])


# ---- streams ----


def test_behind_a_header_that_is_not_zero_no_block_is_awaited(
    moves: Moves, ends: tuple[socket.socket, socket.socket]
) -> None:
    target = np.zeros((NUM_BLOCKS, BLOCK_SIZE_BYTES), np.uint8)
    ends[0].sendall(b"\0\0\0\1rest")
    header = bytearray(4)
    moves.receive(ends[1], header, target, ids(1))
    assert header == b"\0\0\0\1"
    assert ends[1].recv(100) == b"rest"
    assert not target.any()


def test_an_end_in_the_middle(moves: Moves, ends: tuple[socket.socket, socket.socket]) -> None:
    target = np.zeros((NUM_BLOCKS, BLOCK_SIZE_BYTES), np.uint8)
    ends[0].sendall(bytes(4) + b"x" * BLOCK_SIZE_BYTES + b"y")
    ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="the peer closed the connection"):
        moves.receive(ends[1], bytearray(4), target, ids(7, 3))
    assert (target[7] == ord("x")).all()
    ends[1].close()
    with pytest.raises(BrokenPipeError):
        moves.send(ends[0], b"header", target, ids(1), deadline())


def test_a_thread_that_receives_is_woken_by_a_shutdown(moves: Moves, ends: tuple[socket.socket, socket.socket]) -> None:
    failures: list[OSError] = []

    def receive() -> None:
        try:
            moves.receive(ends[1], bytearray(4), make_pool(), ids(1))
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    ends[1].shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE_S)
    assert len(failures) == 1


def test_nobody_takes_what_is_sent(moves: Moves, ends: tuple[socket.socket, socket.socket]) -> None:
    pool = make_pool(512, 128 << 10)
    started_at = time.monotonic()
    with pytest.raises(TimeoutError):
        moves.send(ends[0], b"", pool, np.arange(512, dtype=np.int32), started_at + 0.05)
    assert time.monotonic() >= started_at + 0.05
    for past in (started_at, -1.0, float("-inf")):
        with pytest.raises(TimeoutError):
            moves.send(ends[0], b"header", pool, ids(1), past)


def test_no_deadline_is_a_deadline_too(moves: Moves, ends: tuple[socket.socket, socket.socket]) -> None:
    moves.send(ends[0], b"header", make_pool(), ids(), float("inf"))
    assert ends[1].recv(100) == b"header"


def test_a_signal_is_handled_while_it_waits(moves: Moves, ends: tuple[socket.socket, socket.socket]) -> None:
    source, target = make_pool(), np.zeros((NUM_BLOCKS, BLOCK_SIZE_BYTES), np.uint8)
    header = bytearray(b"\xff" * 4)
    # Half of it has come when the signal does.
    ends[0].sendall(bytes(2))
    before = signal.signal(signal.SIGALRM, lambda *_: IN_PYTHON.send(ends[0], bytes(2), source, ids(4, 9), deadline()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        moves.receive(ends[1], header, target, ids(1, 2))
        assert np.array_equal(target[1:3], source[[4, 9]])

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            moves.receive(ends[1], header, target, ids(1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
