"""The queue limit under bursts, with routers and the ledger killed: real Ray actors, real sockets, real kill -9.

`python -m tests.cluster.strictness --routers 8 --attempts 20000` prints what `holdings.judge` says and fails if
the limit was exceeded, anybody was refused in spite of room, or anything is left counted in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.control_actor import CONTROL_NAME, CONTROL_NAMESPACE, ControlActor
from cluster.control_client import ControlClient
from rank_scheduler.config import SchedulerConfig
from tests.cluster.burst_load import BurstLoad
from tests.cluster.holdings import judge, read

HOST = "127.0.0.1"
SECRET = b"s" * 32
LIMIT = 48
END_TIMEOUT_S = 40.0


class RouterActor:
    """One router replica, as far as its limits go."""

    def __init__(self, name: str, journal: str, burst: int) -> None:
        self._load = BurstLoad(ControlClient().address, SECRET, name, Path(journal), burst)

    async def start(self) -> int:
        self._load.start()
        return os.getpid()

    async def run(self) -> None:
        await self._load.run()

    async def stop(self) -> None:
        self._load.stop()

    async def num_attempts(self) -> int:
        return self._load.num_attempts

    async def close(self) -> None:
        await self._load.close()


@dataclass
class Replica:
    actor: Any
    pid: int
    journal: Path
    run: Any
    killed_at: float | None = None


class Strictness:
    """Use in a process that has started Ray."""

    def __init__(self, directory: Path, num_routers: int, seed: int) -> None:
        import ray

        self._ray = ray
        self._directory = directory
        self._num_routers = num_routers
        self._random = random.Random(seed)
        self._replicas: list[Replica] = []
        self._num_done = 0
        self.num_router_kills = 0
        self.num_ledger_kills = 0
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(ControlActor)
        scheduler = SchedulerConfig(max_num_queued_reqs=LIMIT)
        self._control: Any = actor.options(name=CONTROL_NAME, namespace=CONTROL_NAMESPACE, lifetime="detached").remote(
            scheduler, SECRET, num_routers, HOST
        )
        ray.get(self._control.address.remote())

    def run(self, num_attempts: int) -> dict[str, Any]:
        for _ in range(self._num_routers):
            self._start_router()
        next_kill = time.monotonic() + 1.0
        while self._num_attempts() < num_attempts:
            time.sleep(0.2)
            if time.monotonic() >= next_kill:
                self._kill_one()
                next_kill = time.monotonic() + self._random.uniform(0.5, 2.0)
        living = [replica for replica in self._replicas if replica.killed_at is None]
        self._ray.get([replica.actor.stop.remote() for replica in living])
        self._ray.get([replica.run for replica in living])
        left = self._wait_until_nothing_counts()
        self._ray.get([replica.actor.close.remote() for replica in living])
        verdict = judge([(read(replica.journal), replica.killed_at) for replica in self._replicas], LIMIT)
        return {
            "limit": LIMIT,
            "num_routers": self._num_routers,
            **asdict(verdict),
            "num_router_kills": self.num_router_kills,
            "num_ledger_kills": self.num_ledger_kills,
            "num_left_in_the_end": left,
        }

    def _start_router(self) -> None:
        name = f"router-{len(self._replicas)}"
        journal = self._directory / name
        burst = 2 * LIMIT // self._num_routers
        actor = self._ray.remote(num_cpus=0, max_restarts=0, max_concurrency=100)(RouterActor).remote(
            name, str(journal), burst
        )
        pid = self._ray.get(actor.start.remote())
        self._replicas.append(Replica(actor, pid, journal, actor.run.remote()))

    def _num_attempts(self) -> int:
        living = [replica for replica in self._replicas if replica.killed_at is None]
        counts: list[int] = self._ray.get([replica.actor.num_attempts.remote() for replica in living])
        return self._num_done + sum(counts)

    def _kill_one(self) -> None:
        if self._random.random() < 0.4:
            os.kill(self._ray.get(self._control.snapshot.remote())["pid"], signal.SIGKILL)
            self.num_ledger_kills += 1
            return
        replica = self._random.choice([replica for replica in self._replicas if replica.killed_at is None])
        self._num_done += self._ray.get(replica.actor.num_attempts.remote())
        replica.killed_at = time.monotonic()
        os.kill(replica.pid, signal.SIGKILL)
        self.num_router_kills += 1
        self._start_router()

    def _wait_until_nothing_counts(self) -> int:
        """What dead routers held is dropped after its grace."""
        end = time.monotonic() + END_TIMEOUT_S
        while True:
            snapshot = self._ray.get(self._control.snapshot.remote())
            left: int = snapshot["counts"]["num_requests"]
            if left == 0 or time.monotonic() >= end:
                self._ray.get(self._control.check_integrity.remote())
                return left
            time.sleep(0.2)


def main() -> int:
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--attempts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(prefix="strictness-", dir="/tmp") as directory:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=100 << 20,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
        )
        try:
            run = Strictness(Path(directory), arguments.routers, arguments.seed)
            figures = run.run(arguments.attempts)
        finally:
            ray.shutdown()
    print(json.dumps(figures, indent=2))
    is_strict = not (figures["overshoot"] or figures["num_refused_in_spite_of_room"] or figures["num_left_in_the_end"])
    return 0 if is_strict else 1


if __name__ == "__main__":
    sys.exit(main())
