"""Transports whose library runs in an agent: agents and peers that are killed, stopped or missing."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.agent_host import StartBudget
from kv_transfer.agent_transport import AgentTransport, MooncakeTransport, NixlTransport, UcxTransport
from kv_transfer.memory import KvMemory
from kv_transfer.transport import Endpoint, FailureReason, Peer, Transfer, TransferEnd, TransferError

SECRET = b"s" * 32
BLOCK_SIZE_BYTES = 64 << 10
NUM_BLOCKS = 256
HALF = NUM_BLOCKS // 2
TRANSPORTS: dict[str, type[AgentTransport]] = {
    "nixl": NixlTransport,
    "ucx": UcxTransport,
    "mooncake": MooncakeTransport,
}


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come true in time"
        time.sleep(0.005)


def usable(name: str) -> type[AgentTransport]:
    """Skips the test if the library does not work here, with the reason."""
    memory = KvMemory(1, 4096)
    try:
        transport = TRANSPORTS[name](SECRET)
        transport.start(memory, "127.0.0.1")
        transport.close(5.0)
    except TransferError as error:
        pytest.skip(error.message)
    finally:
        memory.close()
    return TRANSPORTS[name]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


class Rank:
    """One end: a pool and a transport that serves it."""

    def __init__(self, kind: type[AgentTransport]) -> None:
        self.memory = KvMemory(NUM_BLOCKS, BLOCK_SIZE_BYTES)
        self.transport = kind(SECRET)
        self.endpoint: Endpoint = self.transport.start(self.memory, "127.0.0.1")

    @property
    def agent_pid(self) -> int:
        pid = self.transport.agent_pid
        assert pid is not None
        return pid

    def signal_agent(self, number: signal.Signals) -> int:
        """Returns the agent's pid."""
        pid = self.agent_pid
        os.kill(pid, number)
        return pid

    def wait_for_another_agent(self, old_pid: int) -> None:
        host = self.transport._host
        assert host is not None
        until(lambda: host.pid not in (None, old_pid) and host.is_ready)

    def close(self) -> None:
        self.transport.close(5.0)
        self.memory.close()


class Watched:
    """A pull, and what was told of it, in order."""

    def __init__(self, rank: Rank, peer: Peer, remote: range, local: range, timeout_s: float = 20.0) -> None:
        self.events: list[TransferEnd | str] = []
        self.transfer: Transfer = rank.transport.pull(
            peer,
            np.array(remote, np.int32),
            np.array(local, np.int32),
            timeout_s,
            self.events.append,
            lambda: self.events.append("fenced"),
        )

    def end(self) -> TransferEnd:
        """How it ended, once nothing writes any more."""
        until(lambda: bool(self.events))
        end = self.events[0]
        assert isinstance(end, TransferEnd)
        until(lambda: len(self.events) == (1 if end.is_fenced else 2))
        return end


class Pair:
    """`target`, whose pool is read, and `reader`."""

    def __init__(self, kind: type[AgentTransport]) -> None:
        self.target = Rank(kind)
        self.reader = Rank(kind)
        for rank in (self.target, self.reader):
            assert rank.transport._host is not None
            rank.transport._host._budget = StartBudget(max_starts=100)
        random = np.random.default_rng(0)
        self.target.memory.blocks[:] = random.integers(0, 256, self.target.memory.blocks.shape, np.uint8)
        self.peer = self.reader.transport.connect(self.target.endpoint, 20.0)

    def pull(self, remote: range, local: range, timeout_s: float = 20.0) -> Watched:
        return Watched(self.reader, self.peer, remote, local, timeout_s)

    def check_pull(self) -> None:
        """All is well."""
        self.reader.memory.blocks[HALF:] = 0
        pull = self.pull(range(HALF), range(HALF, NUM_BLOCKS))
        assert pull.end() == TransferEnd()
        assert np.array_equal(self.reader.memory.blocks[HALF:], self.target.memory.blocks[:HALF])
        assert pull.events == [TransferEnd()]
        until(lambda: self.reader.transport.stats().num_unfenced == 0)


@pytest.fixture(scope="module", params=sorted(TRANSPORTS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    kind = usable(request.param)
    with pytest.MonkeyPatch.context() as patch:
        # On one host UCX would read the memory of a target that stands still.
        patch.setenv("UCX_TLS", "tcp")
        pair = Pair(kind)
        yield pair
    for rank in (pair.target, pair.reader):
        rank.close()


@pytest.fixture(scope="module")
def kind() -> type[AgentTransport]:
    """The one that starts fastest, for what does not depend on the library."""
    return usable("mooncake")


def test_own_agent_killed_while_idle(pair: Pair) -> None:
    pair.check_pull()
    pid = pair.reader.signal_agent(signal.SIGKILL)
    pair.reader.wait_for_another_agent(pid)
    pair.check_pull()


def test_own_agent_killed_in_mid_pull(pair: Pair) -> None:
    pair.target.signal_agent(signal.SIGSTOP)
    pull = pair.pull(range(HALF), range(HALF))
    pid = pair.reader.signal_agent(signal.SIGKILL)
    end = pull.end()
    assert (end.reason, end.is_fenced) == (FailureReason.BACKEND, True)
    assert str(pid) in end.message
    pair.target.signal_agent(signal.SIGCONT)
    pair.reader.wait_for_another_agent(pid)
    pair.check_pull()


def test_own_agent_stopped(pair: Pair) -> None:
    pid = pair.reader.signal_agent(signal.SIGSTOP)
    timed_out, cancelled = pair.pull(range(4), range(4), 0.1), pair.pull(range(4), range(4, 8))
    cancelled.transfer.cancel()
    for pull in (timed_out, cancelled):
        end = pull.end()
        assert (end.reason, end.is_fenced) == (FailureReason.TIMEOUT, False)
        assert pull.events[1:] == ["fenced"]
    assert not is_running(pid)
    pair.reader.wait_for_another_agent(pid)
    pair.check_pull()


def test_peers_agent_killed_in_mid_pull(pair: Pair) -> None:
    pid = pair.target.signal_agent(signal.SIGSTOP)
    pull = pair.pull(range(HALF), range(HALF))
    pair.target.signal_agent(signal.SIGKILL)
    assert pull.end().reason is FailureReason.PEER_LOST
    pair.reader.memory.blocks[:HALF] = 77
    pair.target.wait_for_another_agent(pid)
    # The same peer, over another agent of the same rank.
    pair.check_pull()
    assert (pair.reader.memory.blocks[:HALF] == 77).all()


def test_peers_agent_killed_while_idle(pair: Pair) -> None:
    pair.check_pull()
    pid = pair.target.signal_agent(signal.SIGKILL)
    pair.target.wait_for_another_agent(pid)

    def is_reached_again() -> bool:
        return pair.pull(range(1), range(1)).end() == TransferEnd()

    until(is_reached_again)
    pair.check_pull()


def test_peers_agent_stopped_and_resumed_writes_nothing_late(pair: Pair) -> None:
    pair.check_pull()
    pair.target.signal_agent(signal.SIGSTOP)
    timed_out, cancelled = pair.pull(range(64), range(64), 0.2), pair.pull(range(64), range(64, HALF))
    cancelled.transfer.cancel()
    cancelled.transfer.cancel()
    for pull in (timed_out, cancelled):
        assert pull.end().reason is FailureReason.TIMEOUT
    pair.reader.memory.blocks[:HALF] = 77
    pair.target.signal_agent(signal.SIGCONT)
    pair.check_pull()
    assert (pair.reader.memory.blocks[:HALF] == 77).all()


def test_pulls_of_others_end_before_the_agent_is_killed(pair: Pair) -> None:
    pair.check_pull()
    other = Rank(type(pair.target.transport))
    try:
        peer = pair.reader.transport.connect(other.endpoint, 20.0)
        pair.target.signal_agent(signal.SIGSTOP)
        stuck = pair.pull(range(64), range(64), 0.1)
        until(lambda: bool(stuck.events))
        assert Watched(pair.reader, peer, range(64), range(64, HALF)).end() == TransferEnd()
        stuck.end()
    finally:
        pair.target.signal_agent(signal.SIGCONT)
        other.close()
    pair.check_pull()


def test_closed_peer(pair: Pair) -> None:
    peer = pair.reader.transport.connect(pair.target.endpoint, 20.0)
    pair.target.signal_agent(signal.SIGSTOP)
    try:
        under_way = Watched(pair.reader, peer, range(8), range(8))
        peer.close()
        peer.close()
        late = Watched(pair.reader, peer, range(8), range(8))
        assert under_way.end().reason is FailureReason.PEER_LOST
        assert late.end() == TransferEnd(FailureReason.PEER_LOST, "the peer was closed")
    finally:
        pair.target.signal_agent(signal.SIGCONT)
    pair.check_pull()


def test_connect_to_a_stopped_agent(pair: Pair) -> None:
    pair.target.signal_agent(signal.SIGSTOP)
    try:
        with pytest.raises(TransferError) as caught:
            pair.reader.transport.connect(pair.target.endpoint, 0.3)
        assert caught.value.reason is FailureReason.TIMEOUT
    finally:
        pair.target.signal_agent(signal.SIGCONT)
    pair.check_pull()


def test_pulls_that_wait_for_their_link(pair: Pair) -> None:
    pair.check_pull()
    pid = pair.reader.signal_agent(signal.SIGKILL)
    pair.reader.wait_for_another_agent(pid)
    pid = pair.reader.agent_pid
    pair.target.signal_agent(signal.SIGSTOP)
    pulls = [pair.pull(range(4), range(4 * i, 4 * i + 4), timeout_s) for i, timeout_s in enumerate((0.1, 20.0, 20.0))]
    pulls[1].transfer.cancel()
    for pull in pulls[:2]:
        assert pull.end().reason is FailureReason.TIMEOUT
    pair.target.signal_agent(signal.SIGCONT)
    assert pulls[2].end() == TransferEnd()
    # Nothing had been read for the others: that was no reason for a kill.
    assert pair.reader.agent_pid == pid
    pair.check_pull()


@pytest.mark.parametrize("name", ["nixl", "ucx"])
def test_lanes_of_one_host(name: str) -> None:
    pair = Pair(usable(name))
    pair.check_pull()
    pid = pair.target.signal_agent(signal.SIGKILL)
    pull = pair.pull(range(HALF), range(HALF))
    assert pull.end().reason in (None, FailureReason.PEER_LOST)
    pair.target.wait_for_another_agent(pid)
    pair.check_pull()
    pair.target.close()
    pair.reader.close()


def test_idle_agents_hardly_run(pair: Pair) -> None:
    pair.check_pull()
    pids = (pair.target.agent_pid, pair.reader.agent_pid)
    # Both have just worked, and do not stop at once.
    time.sleep(1.0)
    before = [cpu_s(pid) for pid in pids]
    time.sleep(1.0)
    assert max(cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)) < 0.1


def test_start_budget() -> None:
    budget = StartBudget(max_starts=2, window_s=60.0)
    assert [budget.take(0.0), budget.take(10.0)] == [0.0, 0.0]
    assert budget.take(20.0) == 40.0
    assert budget.take(60.0) == 10.0
    assert budget.take(500.0) == 0.0


def test_too_many_deaths(kind: type[AgentTransport]) -> None:
    target, reader = Rank(kind), Rank(kind)
    try:
        assert reader.transport._host is not None
        reader.transport._host._budget = StartBudget(max_starts=2)
        reader.transport._host._budget.take(time.monotonic())
        peer = reader.transport.connect(target.endpoint, 20.0)
        pid = reader.signal_agent(signal.SIGKILL)
        reader.wait_for_another_agent(pid)
        reader.signal_agent(signal.SIGKILL)
        until(lambda: reader.transport.agent_pid is None)
        end = Watched(reader, peer, range(4), range(4)).end()
        assert (end.reason, end.is_fenced) == (FailureReason.BACKEND, True)
        with pytest.raises(TransferError, match="ended"):
            reader.transport.connect(target.endpoint, 1.0)
    finally:
        target.close()
        reader.close()


def test_nothing_is_left_after_close(kind: type[AgentTransport]) -> None:
    gc.collect()
    fds, threads = num_fds(), threading.active_count()
    pids = use_and_close(kind)
    # Mappings hold descriptors of their own.
    gc.collect()
    assert (num_fds(), threading.active_count()) == (fds, threads)
    assert not any(is_running(pid) for pid in pids)


def use_and_close(kind: type[AgentTransport]) -> tuple[int, int]:
    target, reader = Rank(kind), Rank(kind)
    peer = reader.transport.connect(target.endpoint, 20.0)
    target.signal_agent(signal.SIGSTOP)
    pull = Watched(reader, peer, range(HALF), range(HALF))
    pids = (target.agent_pid, reader.agent_pid)
    reader.close()
    assert pull.events == [pull.end()]
    assert pull.end().reason is FailureReason.PEER_LOST
    target.close()
    reader.close()
    with pytest.raises(TransferError, match="closed"):
        reader.transport.connect(target.endpoint, 1.0)
    pull.transfer.cancel()
    return pids


_PARENT = """
import sys, time
from kv_transfer.agent_transport import {kind}
from kv_transfer.memory import KvMemory
transport = {kind}(b"s" * 32)
transport.start(KvMemory(4, 4096), "127.0.0.1")
print(transport.agent_pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_agent_ends_with_its_rank(kind: type[AgentTransport], is_stopped: bool) -> None:
    script = _PARENT.format(kind=kind.__name__)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        rank.kill()
        until(lambda: not is_running(pid), timeout_s=2.0)


def test_missing_library() -> None:
    class Missing(AgentTransport):
        name = "missing"
        module = "serried_has_no_such_module"
        remedy = "install it"

    with pytest.raises(TransferError, match="install it") as caught:
        Missing(SECRET)
    assert caught.value.reason is FailureReason.BACKEND


def test_library_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libibverbs.so.1: no such file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(MooncakeTransport, "module", "kv_transfer")
    fds, threads = num_fds(), threading.active_count()
    memory = KvMemory(4, 4096)
    with pytest.raises(TransferError, match=r"libibverbs\.so\.1: no such file; pip install") as caught:
        MooncakeTransport(SECRET).start(memory, "127.0.0.1")
    assert caught.value.reason is FailureReason.BACKEND
    memory.close()
    assert threading.active_count() == threads
    del memory, caught
    gc.collect()
    assert num_fds() == fds
