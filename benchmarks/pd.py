"""What prefill and decode on ranks of their own bring, against mixed ranks: two servers, measured in turn.

    serried serve --config examples/pd.yaml --port 8000
    serried serve --num-ranks 2 --port 8100
    python -m benchmarks.pd http://127.0.0.1:8000 --mixed http://127.0.0.1:8100

Both serve the same model, with the same number of ranks and threads. One round of each, in turn, is

- **idle**: requests one after another. Time to the first token, the pause between the first token (of the prefill
  rank) and the second (of the decode rank), and the time between the tokens after that;
- **arrivals**: some streams run, while long prompts arrive, one after another. The time between tokens of the
  running streams, which a prompt that is computed on the same rank lengthens.

Figures are medians over the rounds: `ttft_ratio` = P/D's median time to the first token / the mixed ranks', idle (at
most 1.10 is wanted), `pause_ms` and `step_ms` of P/D, `itl_p99_ratio` = P/D's 99th percentile of the time between
tokens of running streams / the mixed ranks', with arrivals (below 1 is the reason for P/D).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
from collections.abc import Callable

import aiohttp

from benchmarks.serving import Sample, Target, measure_request, percentile, served_model

_MIN_TOKEN, _MAX_TOKEN = 100, 32_000


class Prompts:
    """Random token ids, never the same twice, so that no prefix is shared."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(_MIN_TOKEN, _MAX_TOKEN) for _ in range(num_tokens)]


async def measure_idle(
    session: aiohttp.ClientSession, target: Target, prompts: Prompts, arguments: argparse.Namespace
) -> dict[str, float]:
    samples = [
        await measure_request(session, target, prompts.make(arguments.prompt_tokens), 8)
        for _ in range(arguments.idle_requests)
    ]
    return {
        "ttft_ms": 1e3 * statistics.median(sample.ttft for sample in samples),
        "pause_ms": 1e3 * statistics.median(sample.gaps[0] for sample in samples),
        "step_ms": 1e3 * statistics.median(gap for sample in samples for gap in sample.gaps[1:]),
    }


async def measure_arrivals(
    session: aiohttp.ClientSession, target: Target, prompts: Prompts, arguments: argparse.Namespace
) -> dict[str, float]:
    """Long prompts arrive, one when the one before it has ended, as long as the streams run."""
    streams_end = asyncio.Event()
    arrived: list[Sample] = []

    async def arrive() -> None:
        while not streams_end.is_set():
            arrived.append(await measure_request(session, target, prompts.make(arguments.prompt_tokens), 2))

    arrivals = asyncio.create_task(arrive())
    try:
        streams = await asyncio.gather(
            *(
                measure_request(session, target, prompts.make(16), arguments.stream_tokens)
                for _ in range(arguments.streams)
            )
        )
    finally:
        streams_end.set()
        await arrivals
    gaps = [gap for stream in streams for gap in stream.gaps]
    return {
        "itl_p50_ms": 1e3 * percentile(gaps, 50),
        "itl_p99_ms": 1e3 * percentile(gaps, 99),
        "long_ttft_ms": 1e3 * statistics.median(sample.ttft for sample in arrived),
        "num_arrived": len(arrived),
    }


async def run(arguments: argparse.Namespace) -> dict[str, float]:
    targets = [
        Target(name, url.rstrip("/"), await served_model(url.rstrip("/")))
        for name, url in (("pd", arguments.url), ("mixed", arguments.mixed))
    ]
    prompts = Prompts(arguments.seed)
    print(f"{platform.platform()}, Python {platform.python_version()}; prompts of {arguments.prompt_tokens} tokens")
    rounds: dict[str, list[dict[str, float]]] = {target.name: [] for target in targets}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        for target in targets:
            await measure_request(session, target, prompts.make(arguments.prompt_tokens), 4)
        for index in range(arguments.rounds):
            for target in targets if index % 2 == 0 else targets[::-1]:
                idle = await measure_idle(session, target, prompts, arguments)
                rounds[target.name].append(idle | await measure_arrivals(session, target, prompts, arguments))
    print(f"{'':>10}" + "".join(f"{name:>14}" for name in rounds["pd"][0]))
    figures: dict[str, float] = {}
    for target in targets:
        medians = {key: statistics.median(r[key] for r in rounds[target.name]) for key in rounds[target.name][0]}
        print(f"{target.name:>10}" + "".join(f"{value:>14.1f}" for value in medians.values()))
        figures |= {f"{target.name}_{key}": round(value, 3) for key, value in medians.items()}

    def ratio(figure: Callable[[dict[str, float]], float]) -> float:
        pairs = zip(rounds["pd"], rounds["mixed"], strict=True)
        return round(statistics.median(figure(ours) / figure(theirs) for ours, theirs in pairs), 3)

    figures["ttft_ratio"] = ratio(lambda one: one["ttft_ms"])
    figures["itl_p99_ratio"] = ratio(lambda one: one["itl_p99_ms"])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pd", description=__doc__.split("\n", 1)[0])
    parser.add_argument("url", help="base URL of a server with prefill and decode ranks, without /v1")
    parser.add_argument("--mixed", required=True, help="base URL of a server with mixed ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the long prompts")
    parser.add_argument("--idle-requests", type=int, default=5, help="per round, one after another")
    parser.add_argument("--streams", type=int, default=8, help="that run while long prompts arrive")
    parser.add_argument("--stream-tokens", type=int, default=96, help="of each stream")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
