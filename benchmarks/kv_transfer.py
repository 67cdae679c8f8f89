"""Scattered pulls of KV blocks between two processes of this host, over each transport that works here.

    python -m benchmarks.kv_transfer --json figures.json

The peer is a process of its own. For each amount and block size the lanes are measured in turn, round by round, and
medians over all pulls are told, so that a machine that changes speed does so for all; read the ratios. Libraries are
measured one by one, each against `tcp`, since their idle threads cost the others time.

Beside the transports: `memcpy`, the same scattered copy by numpy within one process (the faster of a loop over blocks
and of one indexed assignment), and `sendall`, one contiguous buffer of the same amount through a loopback connection,
asked for by a message as a pull is, into memory as warm, and received by the caller, who needs no thread to tell him.
`nixl_tcp` is NIXL over UCX with UCX_TLS=tcp.

Figures: `<lane>_<amount>mb_<block>k_gb_per_s` and `_cpu_ms_per_mb` (of both processes and those that they have
started); and `shm_vs_memcpy`, `tcp_vs_sendall`, `tcp_vs_nixl_tcp`, …, ratios of throughput, by amount and block size,
and without these for the largest amount in the largest blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from kv_transfer.memory import KvMemory
from kv_transfer.transport import BlockIds, Endpoint, KvTransport, Peer, TransferEnd, TransferError
from kv_transfer.transports import make_transport

HOST = "127.0.0.1"
SECRET = b"benchmark"
TIMEOUT_S = 60.0
AMOUNTS_MB = (1, 8, 64)
BLOCK_KIB = (180, 6)
# So much larger than the largest pull is the pool that blocks are picked from.
POOL_FACTOR = 1.5
# Pulls of each lane per round, by amount: small ones vary more.
NUM_PULLS = {1: 20, 8: 8, 64: 4}
_REQUEST = struct.Struct("<QQ")


@dataclass(frozen=True)
class LaneSpec:
    transport: str
    variables: tuple[tuple[str, str], ...] = ()
    """Environment that the transport is made in."""


EMBEDDED_LANES = {"shm": LaneSpec("shm"), "tcp": LaneSpec("tcp")}
LIBRARY_LANES = {
    "nixl_tcp": LaneSpec("nixl", (("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo"))),
    "nixl": LaneSpec("nixl"),
    "ucx": LaneSpec("ucx"),
    "mooncake": LaneSpec("mooncake"),
}
TRANSPORT_LANES = EMBEDDED_LANES | LIBRARY_LANES


@contextlib.contextmanager
def environment(variables: tuple[tuple[str, str], ...]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name, _ in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_transport(lane: str, memory: KvMemory) -> tuple[KvTransport, Endpoint]:
    """Raises TransferError if it does not work here."""
    spec = TRANSPORT_LANES[lane]
    with environment(spec.variables):
        transport = make_transport(spec.transport, SECRET)
        return transport, transport.start(memory, HOST)


# ---- the peer's process ----


def serve(num_blocks: int, block_size_bytes: int, lanes: list[str]) -> None:
    """Tell the endpoints of a pool over each lane, serve until standard input ends."""
    memory = KvMemory(num_blocks, block_size_bytes)
    memory.blocks[:] = np.arange(num_blocks, dtype=np.int64).astype(np.uint8)[:, None]
    transports, endpoints = [], {}
    for lane in lanes:
        try:
            transport, endpoint = start_transport(lane, memory)
        except TransferError as error:
            print(f"without {lane}: {error.message}", file=sys.stderr)
            continue
        transports.append(transport)
        endpoints[lane] = msgspec.msgpack.encode(endpoint).hex()
    listener = socket.create_server((HOST, 0))
    threading.Thread(target=send_plainly, args=(listener, memory), daemon=True).start()
    print(json.dumps({"port": listener.getsockname()[1], "endpoints": endpoints}), flush=True)
    sys.stdin.read()
    for transport in transports:
        transport.close(TIMEOUT_S)
    os._exit(0)


def send_plainly(listener: socket.socket, memory: KvMemory) -> None:
    """Per request, an offset and an amount, so much of the pool by one `sendall`."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    view = memoryview(memory.buffer)
    while request := sock.recv(_REQUEST.size, socket.MSG_WAITALL):
        offset, num_bytes = _REQUEST.unpack(request)
        sock.sendall(view[offset : offset + num_bytes])


def descendants(root: int) -> list[int]:
    """A process and those that it, or they, have started and that are alive."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def cpu_seconds(processes: list[int]) -> float:
    """Of their threads that are alive."""
    total_ns = 0
    for process in processes:
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


# ---- measuring ----


Copy = Callable[[BlockIds, BlockIds], None]


@dataclass
class Lane:
    copy: Copy
    """Move the peer's blocks (first) to ours (second), and return when they are there."""
    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


def pull_by(transport: KvTransport, peer: Peer) -> Copy:
    def copy(remote: BlockIds, local: BlockIds) -> None:
        # (An Event alone would take a tenth of what a pull of 1 MB takes.)
        told = threading.Lock()
        told.acquire()
        ends: list[TransferEnd] = []

        def on_end(end: TransferEnd) -> None:
            ends.append(end)
            told.release()

        transport.pull(peer, remote, local, TIMEOUT_S, on_end)
        told.acquire()
        if ends[0].reason is not None:
            raise RuntimeError(f"{transport.name}: {ends[0]}")

    return copy


def copy_in_loop(source: KvMemory, target: KvMemory) -> Copy:
    def copy(remote: BlockIds, local: BlockIds) -> None:
        for first, second in zip(remote.tolist(), local.tolist(), strict=True):
            target.blocks[second] = source.blocks[first]

    return copy


def copy_at_once(source: KvMemory, target: KvMemory) -> Copy:
    def copy(remote: BlockIds, local: BlockIds) -> None:
        target.blocks[local] = source.blocks[remote]

    return copy


def receive_plainly(port: int, target: KvMemory) -> Copy:
    sock = socket.create_connection((HOST, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def copy(remote: BlockIds, local: BlockIds) -> None:
        # As much, from and to places that are as little in the caches.
        num_bytes = len(remote) * target.block_size_bytes
        last = target.size_bytes - num_bytes
        theirs, ours = (min(int(blocks[0]) * target.block_size_bytes, last) for blocks in (remote, local))
        sock.sendall(_REQUEST.pack(theirs, num_bytes))
        view = memoryview(target.buffer)[ours : ours + num_bytes]
        while view:
            view = view[sock.recv_into(view, len(view), socket.MSG_WAITALL) :]

    return copy


def measure_group(block_kib: int, names: list[str], num_rounds: int) -> dict[str, float]:
    """Transports side by side, and the baselines."""
    block_size_bytes = block_kib << 10
    num_blocks = int(POOL_FACTOR * (max(AMOUNTS_MB) << 20)) // block_size_bytes
    settings = json.dumps([num_blocks, block_size_bytes, names])
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kv_transfer", "--serve", settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    served = json.loads(process.stdout.readline())
    target, source = KvMemory(num_blocks, block_size_bytes), KvMemory(num_blocks, block_size_bytes)
    target.blocks[:] = 0
    source.blocks[:] = 1
    lanes = {
        "memcpy_loop": Lane(copy_in_loop(source, target)),
        "memcpy_at_once": Lane(copy_at_once(source, target)),
        "sendall": Lane(receive_plainly(served["port"], target)),
    }
    transports = []
    everything = np.arange(num_blocks, dtype=np.int32)
    for name, encoded in served["endpoints"].items():
        transport, _ = start_transport(name, target)
        transports.append(transport)
        endpoint = msgspec.msgpack.decode(bytes.fromhex(encoded), type=Endpoint)
        lanes[name] = Lane(pull_by(transport, transport.connect(endpoint, TIMEOUT_S)))
        # What is touched for the first time must be mapped, once.
        lanes[name].copy(everything, everything)
    figures: dict[str, float] = {}
    for amount_mb in AMOUNTS_MB:
        measure_amount(amount_mb, lanes, target, num_rounds, descendants(os.getpid()))
        figures |= tell(amount_mb, block_kib, lanes)
    for transport in transports:
        transport.close(TIMEOUT_S)
    process.stdin.close()
    process.wait()
    process.stdout.close()
    return figures


def measure_amount(
    amount_mb: int, lanes: dict[str, Lane], target: KvMemory, num_rounds: int, processes: list[int]
) -> None:
    """Fill `lanes` anew; the first round only warms up."""
    generator = np.random.default_rng(amount_mb)
    num_blocks = (amount_mb << 20) // target.block_size_bytes
    for lane in lanes.values():
        lane.seconds, lane.cpu_s = [], 0.0
    for round_ in range(num_rounds + 1):
        for name, lane in lanes.items():
            picks = [
                tuple(generator.permutation(target.num_blocks)[:num_blocks].astype(np.int32) for _ in range(2))
                for _ in range(NUM_PULLS[amount_mb])
            ]
            seconds = []
            before_s = cpu_seconds(processes)
            for remote, local in picks:
                start = time.perf_counter()
                lane.copy(remote, local)
                seconds.append(time.perf_counter() - start)
            spent_s = cpu_seconds(processes) - before_s
            if round_:
                lane.seconds += seconds
                lane.cpu_s += spent_s
            if name in TRANSPORT_LANES and not np.array_equal(target.blocks[local, -1], remote.astype(np.uint8)):
                raise RuntimeError(f"{name} has brought wrong data")


def tell(amount_mb: int, block_kib: int, lanes: dict[str, Lane]) -> dict[str, float]:
    """Print a line per lane; the figures of these."""
    num_bytes = (amount_mb << 20) // (block_kib << 10) * (block_kib << 10)
    suffix = f"{amount_mb}mb_{block_kib}k"
    rates: dict[str, float] = {}
    figures: dict[str, float] = {}
    for name, lane in lanes.items():
        rates[name] = num_bytes / statistics.median(lane.seconds) / 1e9
        cpu = 1e3 * lane.cpu_s / (len(lane.seconds) * num_bytes / 1e6)
        print(f"{amount_mb:>6} {block_kib:>6} {name:>14} {rates[name]:>8.2f} {cpu:>10.2f}", flush=True)
        figures |= {f"{name}_{suffix}_gb_per_s": round(rates[name], 3), f"{name}_{suffix}_cpu_ms_per_mb": round(cpu, 3)}
    rates["memcpy"] = max(rates["memcpy_loop"], rates["memcpy_at_once"])
    pairs = [("shm", "memcpy"), ("tcp", "sendall"), *(("tcp", library) for library in LIBRARY_LANES)]
    for ours, theirs in pairs:
        if ours in rates and theirs in rates:
            ratio = round(rates[ours] / rates[theirs], 3)
            print(f"{'':>14}{ours}_vs_{theirs} {ratio:.2f}")
            figures[f"{ours}_vs_{theirs}_{suffix}"] = ratio
            if (amount_mb, block_kib) == (max(AMOUNTS_MB), max(BLOCK_KIB)):
                figures[f"{ours}_vs_{theirs}"] = ratio
    return figures


def run(names: list[str], num_rounds: int) -> dict[str, float]:
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} processors")
    print(f"{'MB':>6} {'KiB':>6} {'lane':>14} {'GB/s':>8} {'CPU ms/MB':>10}")
    figures: dict[str, float] = {}
    for block_kib in BLOCK_KIB:
        for library in (name for name in names if name in LIBRARY_LANES):
            figures |= measure_group(block_kib, ["tcp", library], num_rounds)
        # Last, so that what is told of tcp is what it does undisturbed.
        figures |= measure_group(block_kib, [name for name in names if name in EMBEDDED_LANES], num_rounds)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_transfer", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--lanes", nargs="+", choices=TRANSPORT_LANES, default=list(TRANSPORT_LANES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*json.loads(arguments.serve))
        return
    figures = run(arguments.lanes, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
