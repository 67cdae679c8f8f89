"""What it takes to admit a request: out of a lease, and by asking the ledger over a socket.

`lease_p99_ms` is the share of a router's request path that limits cost while there is room, acquire and release
together. Asking (near the limit) is for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

from cluster.control import ControlEndpoint
from rank_scheduler.config import SchedulerConfig
from router.control_link import ControlLink

HOST = "127.0.0.1"
SECRET = b"of the benchmark"
NUM_ROUNDS = 9


def lease_p99_ms(num_requests: int = 20_000) -> float:
    """Acquire and release of one request and its prompt's tokens, 64 in flight, while there is much room."""
    return _p99_ms(SchedulerConfig(max_num_queued_reqs=100_000, max_num_queued_tokens=10**9), num_requests)


def asking_p99_ms(num_requests: int = 5_000) -> float:
    """The same where the ledger lends nothing ahead: each acquire is a message there and back."""
    return _p99_ms(SchedulerConfig(max_num_queued_reqs=84, max_num_queued_tokens=84_000), num_requests)


def _p99_ms(scheduler: SchedulerConfig, num_requests: int) -> float:
    return asyncio.run(_measure(scheduler, num_requests))


async def _measure(scheduler: SchedulerConfig, num_requests: int, num_in_flight: int = 64) -> float:
    endpoint = ControlEndpoint(scheduler, SECRET)
    port = await endpoint.start(HOST)

    async def address() -> tuple[str, int]:
        return HOST, port

    link = ControlLink(
        address,
        SECRET,
        "router",
        acquire_timeout_s=2.0,
        on_members=lambda ranks: None,
        on_shutting_down=lambda: None,
        on_inquired=lambda inquired: False,
        count=lambda fault: None,
    )
    link.start()
    held: list[int] = []
    durations: list[float] = []
    try:
        for number in range(num_requests):
            key = link.new_key()
            begin = time.perf_counter()
            await link.acquire(key, 1, 0)
            await link.acquire(key, 0, 1000)
            acquired = time.perf_counter()
            held.append(key)
            if len(held) > num_in_flight:
                first = held.pop(0)
                release = time.perf_counter()
                link.computed(first, 1000)
                link.release(first)
                acquired += time.perf_counter() - release
            if number >= num_requests // 10:
                durations.append(acquired - begin)
            # Others have their turn, as between two requests.
            await asyncio.sleep(0)
    finally:
        await link.close()
        await endpoint.stop()
    # What else the machine does in between spoils a round, not the figure.
    size = len(durations) // NUM_ROUNDS
    rounds = [sorted(durations[first : first + size]) for first in range(0, len(durations), size)]
    return statistics.median(each[int(0.99 * len(each))] for each in rounds) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(json.dumps({"lease_p99_ms": lease_p99_ms(), "asking_p99_ms": asking_p99_ms()}, indent=2))


if __name__ == "__main__":
    main()
