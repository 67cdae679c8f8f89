"""What the conformance suite of the transports works with: peers in processes, and records of ends."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_transfer.memory import KvMemory
from kv_transfer.transport import BlockIds, Endpoint, Peer, Transfer, TransferEnd, TransferError
from tests.kv_transfer.transport_peer import CLOSE_TIMEOUT_S, HOST, expected_words, fill, make

SECRET = b"the cluster's secret"
# How long anything may take here before the test fails.
PATIENCE_S = 30.0
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """A transport in the suite, and what is known of it."""

    name: str
    has_process: bool = True
    """The peer may be a process of its own."""
    reads_stopped_peer: bool = False
    """A pull needs nothing of the peer's process: it ends well though that stands still or is dead."""
    authenticates: bool = True
    """Refuses a peer with another secret by itself, not only in the control plane before it."""
    has_port: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    """Of the environment, for the suite's time."""


class PeerProcess:
    """A peer in a process of its own. Skips the test if its transport does not work here."""

    program = "tests.kv_transfer.transport_peer"

    def __init__(
        self,
        case: Case,
        num_blocks: int,
        block_size_bytes: int,
        *,
        secret: bytes = SECRET,
        seed: int = 1,
        port: int = 0,
    ) -> None:
        settings = {
            "transport": case.name,
            "secret": secret.decode(),
            "num_blocks": num_blocks,
            "block_size_bytes": block_size_bytes,
            "seed": seed,
            "port": port,
        }
        self.seed = seed
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.program, json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @functools.cached_property
    def endpoint(self) -> Endpoint:
        """Waits for it when it is asked for: starting takes as long as it takes our own end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode().strip()
        if line.startswith("unavailable: "):
            self.close()
            pytest.skip(line)
        return msgspec.msgpack.decode(bytes.fromhex(line), type=Endpoint)

    def send(self, number: signal.Signals) -> None:
        """To the process; if it is to stand still or go on, to all that it has started too."""
        if number in (signal.SIGSTOP, signal.SIGCONT):
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def num_resources(self) -> tuple[int, int]:
        """(threads, descriptors) of the process, once it serves."""
        assert self.endpoint
        directory = Path(f"/proc/{self.process.pid}")
        return len(list((directory / "task").iterdir())), len(list((directory / "fd").iterdir()))

    def close(self) -> None:
        """End it, however it stands; if it lives, it must go orderly and in time."""
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()


class LocalPeer:
    """A peer in this process."""

    def __init__(
        self, case: Case, num_blocks: int, block_size_bytes: int, *, secret: bytes = SECRET, seed: int = 1
    ) -> None:
        self.seed = seed
        self.memory = KvMemory(num_blocks, block_size_bytes)
        fill(self.memory, seed)
        self.transport = make(case.name, secret)
        self.endpoint = self.transport.start(self.memory, HOST)

    def close(self) -> None:
        self.transport.close(CLOSE_TIMEOUT_S)
        self.memory.close()


AnyPeer = PeerProcess | LocalPeer


def start_peer(case: Case, num_blocks: int, block_size_bytes: int, **settings: bytes | int) -> AnyPeer:
    kind: Callable[..., AnyPeer] = PeerProcess if case.has_process else LocalPeer
    return kind(case, num_blocks, block_size_bytes, **settings)


class Ends:
    """Records what a pull tells."""

    def __init__(self) -> None:
        self.ends: list[TransferEnd] = []
        self.num_fenced = 0
        self._changed = threading.Condition()

    def on_end(self, end: TransferEnd) -> None:
        with self._changed:
            self.ends.append(end)
            self._changed.notify_all()

    def on_fenced(self) -> None:
        with self._changed:
            self.num_fenced += 1
            self._changed.notify_all()

    def wait(self) -> TransferEnd:
        """The one end."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.ends, PATIENCE_S), "the pull has not ended"
        return self.only()

    def wait_until_fenced(self) -> None:
        """Until nothing writes into the blocks any more."""
        if not self.wait().is_fenced:
            with self._changed:
                assert self._changed.wait_for(lambda: self.num_fenced, PATIENCE_S), "the pull is not fenced"
        assert self.num_fenced == (0 if self.only().is_fenced else 1)

    def only(self) -> TransferEnd:
        assert len(self.ends) == 1, self.ends
        return self.ends[0]


class Rank:
    """Our end: a pool of zeros and a transport."""

    def __init__(self, case: Case, num_blocks: int, block_size_bytes: int, secret: bytes = SECRET) -> None:
        self.memory = KvMemory(num_blocks, block_size_bytes)
        self.memory.blocks[:] = 0
        try:
            self.transport = make(case.name, secret)
            self.transport.start(self.memory, HOST)
        except TransferError as error:
            pytest.skip(f"{case.name}: {error.message}")

    def connect(self, peer: AnyPeer) -> Peer:
        return self.transport.connect(peer.endpoint, PATIENCE_S)

    def pull(self, peer: Peer, remote: BlockIds, local: BlockIds, timeout_s: float = PATIENCE_S) -> Ends:
        return self.start_pull(peer, remote, local, timeout_s)[1]

    def start_pull(
        self, peer: Peer, remote: BlockIds, local: BlockIds, timeout_s: float = PATIENCE_S
    ) -> tuple[Transfer, Ends]:
        ends = Ends()
        transfer = self.transport.pull(peer, remote, local, timeout_s, ends.on_end, ends.on_fenced)
        return transfer, ends

    def words(self, blocks: BlockIds) -> np.ndarray:
        return self.memory.blocks.view(np.uint32)[blocks]

    def close(self) -> None:
        self.transport.close(CLOSE_TIMEOUT_S)
        self.memory.close()


def assert_has(rank: Rank, local: BlockIds, remote: BlockIds, seed: int) -> None:
    """Our blocks hold what the peer's hold, whole."""
    assert np.array_equal(
        rank.words(local), np.broadcast_to(expected_words(remote, seed)[:, None], rank.words(local).shape)
    )


@contextlib.contextmanager
def closing(*closed_last_first: Rank | AnyPeer) -> Iterator[None]:
    try:
        yield
    finally:
        for one in reversed(closed_last_first):
            one.close()


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.001)


def own_resources() -> tuple[set[str], int, set[str]]:
    """(names of threads, number of descriptors, files in /dev/shm)."""
    return (
        {f"{thread.name}-{thread.ident}" for thread in threading.enumerate()},
        len(os.listdir("/proc/self/fd")),
        set(os.listdir("/dev/shm")),
    )
