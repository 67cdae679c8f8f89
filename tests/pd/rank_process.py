"""One real rank without Ray: a `RankServer` around the real model, told what to do over a connection.

It is asked for `stats`, `integrity`, `shut` and `open` (a gate in the way of pulls, see `gate`), and answers each in
JSON; what it says first, unasked, is the rank's id. `drain MOVES_IN_S LIMIT_S` is answered when it has drained, and
then it stops, as does a rank that Serve stops. It ends when the connection is closed.
"""

from __future__ import annotations

import json
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cluster.rank_server import RankServer
from kv_transfer.config import KVTransferConfig
from kv_transfer.pull_orders import LoadBlocks
from kv_transfer.pull_worker import PullWorker
from kv_transfer.tcp_transport import TcpTransport
from model_runner.torch_runner import TorchRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from router.control_messages import PoolRole
from tests.pd.gate import Gate


def serve(options: dict[str, Any], connection: Connection) -> None:
    """All that the process does, and in it only: it changes classes."""
    gate, most_loads = Gate(TcpTransport), 0
    start_load_kv = PullWorker.start_load_kv

    def count_loads(worker: PullWorker, metadata: Any) -> None:
        nonlocal most_loads
        most_loads = max(most_loads, sum(isinstance(order, LoadBlocks) for order in metadata))
        start_load_kv(worker, metadata)

    PullWorker.start_load_kv = count_loads  # type: ignore[method-assign, assignment]
    scheduler = SchedulerConfig(**options["scheduler"])
    cache = CacheConfig(**options["cache"])
    model_dir = Path(options["model_dir"])
    runner = TorchRunner(
        model_dir,
        scheduler=scheduler,
        cache=cache,
        dtype="float32",
        num_threads=1,
        max_model_len=options["max_model_len"],
        shared_kv=True,
    )

    async def control_address() -> tuple[str, int]:
        return "127.0.0.1", options["control_port"]

    server = RankServer(
        runner,
        runner.load(),
        config=scheduler,
        cache=cache,
        pool=options["pool"],
        secret=bytes.fromhex(options["secret"]),
        control_address=control_address,
        advertise_host="127.0.0.1",
        node_id="n",
        tokenizer_path=model_dir / "tokenizer.json",
        role=PoolRole(options["role"]),
        kv_transfer=KVTransferConfig(**options["kv_transfer"]),
    )
    answer: Any = server.start()
    while True:
        connection.send_bytes(json.dumps(answer).encode())
        try:
            question = connection.recv_bytes().decode()
        except EOFError:
            break
        match question:
            case "stats":
                answer = server.stats() | {
                    "num_threads": len(os.listdir("/proc/self/task")),
                    "num_fds": len(os.listdir("/proc/self/fd")),
                    "num_halfway_pulls": gate.num_waiting,
                    "most_loads_of_a_step": most_loads,
                }
            case "integrity":
                server.check_integrity()
                answer = "well"
            case "shut":
                gate.shut()
                answer = "well"
            case "open":
                gate.open()
                answer = "well"
            case drain if drain.startswith("drain "):
                _, moves_in_s, limit_s = drain.split()
                answer = server.drain(float(moves_in_s), float(limit_s))
                server.stop()
            case other:
                raise ValueError(f"{other!r} is no question; ask for stats, integrity, shut, open or drain")
    server.stop()
