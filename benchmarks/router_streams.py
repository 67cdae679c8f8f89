"""What a streamed token costs a router, against Ray Serve's own handle path in the same run: see `benchmarks.router`.

On our side: the rank of `benchmarks.token_rank`, the router of `benchmarks.token_router`. On the other: the proxy, the
ingress and the engine of `benchmarks.serve_peer`. The clients, the pace of tokens and the requests are the same, and
each side is measured in turn, with nothing to do for the other. CPU is that of all processes that serve.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STEP_MS = 20
NUM_TOKENS = 64
_TEXT = re.compile(rb'"text": ?"(h+)"')
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Side:
    name: str
    port: int
    pids: tuple[int, ...]

    def cpu_s(self) -> float:
        """Of all its processes so far."""
        total = 0.0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total


@contextmanager
def _process(module: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Started, with the first line that it printed; it ends with the block."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{module} ended before it could serve, with status {process.wait()}")
        yield process, line
    finally:
        process.stdin.close()
        if not module.endswith("serve_peer"):
            process.terminate()
        process.wait(60)


@contextmanager
def our_side() -> Iterator[Side]:
    with (
        _process("benchmarks.token_rank", STEP_MS) as (rank, control_port),
        _process("benchmarks.token_router", control_port.strip()) as (router, port),
    ):
        yield Side("serried", int(port), (rank.pid, router.pid))


@contextmanager
def peer_side() -> Iterator[Side]:
    with _process("benchmarks.serve_peer", STEP_MS) as (_, line):
        told = json.loads(line)
        yield Side("ray serve", told["port"], tuple(told["pids"]))


async def _stream(port: int) -> int:
    """One request; returns how many tokens came."""
    body = json.dumps({"model": "bytes", "prompt": "hi", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
    )
    answer = await reader.read()
    writer.close()
    # An event has more than one token where the reader of its stream was late.
    return sum(len(text) for text in _TEXT.findall(answer))


async def measure(side: Side, num_streams: int) -> float:
    """CPU microseconds per token with so many streams at once."""
    before = side.cpu_s()
    counts = await asyncio.gather(*(_stream(side.port) for _ in range(num_streams)))
    used = side.cpu_s() - before
    if min(counts) < NUM_TOKENS:
        raise RuntimeError(f"{side.name}: a stream of {NUM_TOKENS} tokens had {min(counts)} of them")
    return 1e6 * used / (num_streams * NUM_TOKENS)


def measure_streams(num_rounds: int) -> dict[str, float]:
    """`token_cpu_us_N` of ours, `token_cpu_peer_us_N`, and their `token_cpu_ratio_N`, medians over rounds in turn."""
    figures: dict[str, float] = {}
    with our_side() as ours, peer_side() as peer:
        for num_streams in (64, 256):
            found: dict[str, list[float]] = {ours.name: [], peer.name: []}
            for side in (ours, peer):
                asyncio.run(measure(side, 4))
            for _ in range(num_rounds):
                for side in (ours, peer):
                    found[side.name].append(asyncio.run(measure(side, num_streams)))
            medians = {name: statistics.median(values) for name, values in found.items()}
            figures[f"token_cpu_us_{num_streams}"] = round(medians[ours.name], 1)
            figures[f"token_cpu_peer_us_{num_streams}"] = round(medians[peer.name], 1)
            figures[f"token_cpu_ratio_{num_streams}"] = round(medians[peer.name] / medians[ours.name], 2)
    return figures
