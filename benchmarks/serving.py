"""Throughput and latency of an OpenAI-compatible server under closed-loop load, alone or against a peer.

    python -m benchmarks.serving http://127.0.0.1:8000
    python -m benchmarks.serving http://127.0.0.1:8000 --peer http://127.0.0.1:8100 --peer-model smollm2

Each request streams `/v1/completions` for a prompt of random token ids (never the same twice, so no prefix is
shared) and runs to its full length. At each concurrency the servers are measured in turn, round by round, and
medians over the rounds are told, so that a machine that changes speed does so for both.

Figures: `<name>_<figure>_c<concurrency>` with TTFT (time to the first token), TPOT (time per token after it) and
ITL (gap between two arrivals) in milliseconds, throughput in generated tokens per second; and
`serving_ratio_<concurrency>` = our throughput / the peer's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import time
from dataclasses import dataclass, field

import aiohttp

# Token ids that any vocabulary of the served family has and that are not special.
_MIN_TOKEN, _MAX_TOKEN = 100, 32_000
# Tokens in and out of the requests that precede each concurrency's first round.
WARM_UP_SIZES = (16, 4)


@dataclass(frozen=True)
class Target:
    name: str
    url: str
    model: str


@dataclass
class Sample:
    """One request as its client saw it; seconds."""

    ttft: float = 0.0
    total: float = 0.0
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    @property
    def tpot(self) -> float:
        return (self.total - self.ttft) / max(self.num_tokens - 1, 1)


async def measure_request(
    session: aiohttp.ClientSession, target: Target, prompt: list[int], num_output_tokens: int, user: str | None = None
) -> Sample:
    """Stream one completion, of this tenant. Raises RuntimeError unless it ends with exactly the tokens asked for."""
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if user is not None:
        body["user"] = user
    sample = Sample()
    start = last = time.perf_counter()
    async with session.post(f"{target.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{target.name}: HTTP {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{target.name}: {event['error']}")
            now = time.perf_counter()
            if event.get("usage"):
                sample.num_tokens = event["usage"]["completion_tokens"]
            if event["choices"]:
                if sample.ttft == 0.0:
                    sample.ttft = now - start
                else:
                    sample.gaps.append(now - last)
                last = now
    sample.total = last - start
    if sample.num_tokens != num_output_tokens:
        raise RuntimeError(f"{target.name}: {sample.num_tokens} tokens instead of {num_output_tokens}")
    return sample


async def measure_round(
    target: Target, concurrency: int, num_requests: int, num_input_tokens: int, num_output_tokens: int, seed: int
) -> dict[str, float]:
    """Keep `concurrency` requests in flight until `num_requests` have ended."""
    generator = random.Random(seed)
    prompts = [
        [generator.randrange(_MIN_TOKEN, _MAX_TOKEN) for _ in range(num_input_tokens)] for _ in range(num_requests)
    ]
    samples: list[Sample] = []

    async def work(session: aiohttp.ClientSession) -> None:
        while prompts:
            samples.append(await measure_request(session, target, prompts.pop(), num_output_tokens))

    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work(session))
        elapsed = time.perf_counter() - start
    gaps = [gap for sample in samples for gap in sample.gaps]
    return {
        "tokens_per_s": sum(sample.num_tokens for sample in samples) / elapsed,
        "ttft_p50_ms": 1e3 * percentile([sample.ttft for sample in samples], 50),
        "ttft_p99_ms": 1e3 * percentile([sample.ttft for sample in samples], 99),
        "tpot_p50_ms": 1e3 * percentile([sample.tpot for sample in samples], 50),
        "itl_p50_ms": 1e3 * percentile(gaps, 50),
        "itl_p99_ms": 1e3 * percentile(gaps, 99),
    }


def percentile(values: list[float], percent: float) -> float:
    """Nearest-rank percentile; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


async def served_model(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        return str((await response.json())["data"][0]["id"])


async def run(arguments: argparse.Namespace) -> dict[str, float]:
    targets = [Target("serried", arguments.url.rstrip("/"), await served_model(arguments.url.rstrip("/")))]
    if arguments.peer:
        peer = arguments.peer.rstrip("/")
        targets.append(Target("peer", peer, arguments.peer_model or await served_model(peer)))
    figures: dict[str, float] = {}
    sizes = (arguments.input_tokens, arguments.output_tokens)
    seed = arguments.seed
    print(f"{platform.platform()}, Python {platform.python_version()}; {sizes[0]} in / {sizes[1]} out")
    header = ("server", "c", "tok/s", "TTFT p50", "TTFT p99", "TPOT p50", "ITL p50", "ITL p99 (ms)")
    print(" ".join(f"{title:>10}" for title in header))
    for concurrency in arguments.concurrency:
        num_requests = max(concurrency * arguments.requests_per_client, arguments.min_requests)
        rounds: dict[str, list[dict[str, float]]] = {target.name: [] for target in targets}
        for target in targets:
            seed += 1
            await measure_round(target, concurrency, concurrency, *WARM_UP_SIZES, seed)
        for _ in range(arguments.rounds):
            for target in targets:
                seed += 1
                rounds[target.name].append(await measure_round(target, concurrency, num_requests, *sizes, seed))
        for target in targets:
            medians = {key: statistics.median(r[key] for r in rounds[target.name]) for key in rounds[target.name][0]}
            print(f"{target.name:>10} {concurrency:>10} " + " ".join(f"{value:>10.1f}" for value in medians.values()))
            figures |= {f"{target.name}_{key}_c{concurrency}": round(value, 3) for key, value in medians.items()}
        if arguments.peer:
            ours, theirs = (figures[f"{target.name}_tokens_per_s_c{concurrency}"] for target in targets)
            figures[f"serving_ratio_{concurrency}"] = round(ours / theirs, 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.split("\n", 1)[0])
    parser.add_argument("url", help="base URL of the server, without /v1")
    parser.add_argument("--peer", help="base URL of a server to measure in the same run, in turn with ours")
    parser.add_argument("--peer-model", help="its model name (default: the first of its /v1/models)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--min-requests", type=int, default=8)
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
