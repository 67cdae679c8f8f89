"""What a router costs: places for requests, admission, and streamed tokens.

    python -m benchmarks.router [--without-peer]

- **places** (`benchmarks.router_placement`), with 64 and 1,024 ranks: `placements_per_s` and `placement_p99_ms` are the
  worse of the two, `_64` and `_1024` each one's; `long_prompt_cpu_ms` is a place for a prompt of 100,000 tokens, hashes
  included; `placement_frame_us` what a rank's frame with its cache's changes takes;
- **admission** (`benchmarks.admission`): `lease_p99_ms`, to admit a request out of a lease and to give that back;
- **tokens** (`benchmarks.router_streams`): CPU per streamed token through HTTP at 64 and 256 streams, against Ray
  Serve's own handle path in the same run: `token_cpu_ratio_64`, `token_cpu_ratio_256`; not `--without-peer`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform

from benchmarks.admission import lease_p99_ms
from benchmarks.router_placement import measure_long_prompt, measure_placement
from benchmarks.router_streams import measure_streams


async def measure_places(num_requests: int, seed: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    found = {num_ranks: await measure_placement(num_ranks, num_requests, seed) for num_ranks in (64, 1024)}
    for num_ranks, of_these in found.items():
        figures |= {f"{key}_{num_ranks}": round(value, 4) for key, value in of_these.items()}
    figures["placements_per_s"] = round(min(each["placements_per_s"] for each in found.values()), 1)
    figures["placement_p99_ms"] = round(max(each["placement_p99_ms"] for each in found.values()), 4)
    figures["long_prompt_cpu_ms"] = round(await measure_long_prompt(1024, 9, seed), 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=3, help="of the streams, in turn with the peer's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-peer", action="store_true", help="leave the tokens out")
    arguments = parser.parse_args()
    print(f"{platform.platform()}, Python {platform.python_version()}")
    figures = asyncio.run(measure_places(arguments.requests, arguments.seed))
    figures["lease_p99_ms"] = round(lease_p99_ms(), 4)
    if not arguments.without_peer:
        figures |= measure_streams(arguments.rounds)
    for name, value in figures.items():
        print(f"{name:>28} {value:>12}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
