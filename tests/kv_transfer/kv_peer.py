"""A rank as small as KV transfer lets it be: a pool filled by pattern, a `PullConnector`, and who drives its halves.

`KvRank` does what a scheduler and a step executor would do, and checks what they rely on: blocks are handed out once,
come back once, and hold what they should. Blocks that come back are overwritten at once, so that whoever still reads
them reads what is wrong. As a program, it serves one over pipes, a JSON object per line each way; `PeerProcess`, on the
other end, starts, stops and kills it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kv_transfer.config import KvRole, KVTransferConfig
from kv_transfer.connector import (
    ConnectorContext,
    ConnectorEvent,
    KvRequest,
    LoadFenced,
    LoadFinished,
    SendFinished,
)
from kv_transfer.geometry import Geometry
from kv_transfer.memory import KvMemory
from kv_transfer.pull_connector import PullConnector
from kv_transfer.pull_orders import AdvanceLease, OpenLease
from kv_transfer.ticket import Ticket

NO_BLOCKS = np.zeros((1, 0), np.int32)

HOST = "127.0.0.1"
SECRET = b"the cluster's secret"
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30.0
GARBAGE = 0xEE
RIGHT = {"cause": "", "fenced": True, "right": True}
"""Of a load's end."""


def geometry(**changes: Any) -> Geometry:
    plain = Geometry(
        model="m",
        dtype="float32",
        num_layers=2,
        num_kv_heads=1,
        head_dim=8,
        block_size=4,
        num_groups=2,
        block_size_bytes=512,
    )
    return Geometry(**{name: changes.get(name, getattr(plain, name)) for name in plain.__struct_fields__})


def pattern(seed: int, group: int, column: int, size_bytes: int) -> np.ndarray:
    """What a block of a request holds."""
    mixed = (seed * 1_000_003 + group * 10_007 + column) % 251
    return ((np.arange(size_bytes, dtype=np.int64) * 7 + mixed) % 251).astype(np.uint8)


def until(condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.002)
    return result


@dataclasses.dataclass
class _Request:
    request: KvRequest
    seed: int
    table: np.ndarray
    num_local: int = 0
    num_computed: int = 0
    lease_id: int = 0
    ended: bool = False
    loads: bool = False


class KvRank:
    def __init__(
        self,
        role: str = "kv_both",
        *,
        num_blocks: int = 256,
        extra: dict[str, Any] | None = None,
        port: int = 0,
        engine_id: str = "",
        secret: bytes = SECRET,
        connector: Any = PullConnector,
        **changes: Any,
    ) -> None:
        config = KVTransferConfig(
            kv_connector="PullConnector", kv_role=KvRole(role), kv_connector_extra_config=extra or {}, kv_port=port
        )
        self.geometry = geometry(**changes)
        self.context = ConnectorContext(
            config=config,
            role=KvRole(role),
            engine_id=engine_id or config.new_engine_id(),
            host=HOST,
            secret=secret,
            geometry=self.geometry,
        )
        self.memory = KvMemory(num_blocks, self.geometry.block_size_bytes)
        self.memory.blocks[:] = GARBAGE
        self.scheduler = connector.make_scheduler_half(self.context)
        self.worker = connector.make_worker_half(self.context)
        self.events: queue.SimpleQueue[ConnectorEvent] = queue.SimpleQueue()
        try:
            self.worker.start(self.memory, self.events.put)
        except BaseException:
            self.memory.close()
            raise
        self.free = set(range(1, num_blocks))
        self.requests: dict[int, _Request] = {}
        self.kept: dict[int, np.ndarray] = {}
        self.quarantined: dict[int, np.ndarray] = {}
        self.loads: dict[int, dict[str, Any]] = {}
        self.pending_loads: set[int] = set()
        self.num_sends_finished = 0
        self._plans: list[tuple[object | None, dict[int, int]]] = []

    # ---- blocks ----

    def take(self, num_columns: int) -> np.ndarray:
        ids = [self.free.pop() for _ in range(self.geometry.num_groups * num_columns)]
        return np.array(ids, np.int32).reshape(self.geometry.num_groups, num_columns)

    def give_back(self, table: np.ndarray) -> None:
        for block in table.ravel().tolist():
            if block:
                assert block not in self.free, f"block {block} comes back twice"
                self.free.add(block)
                self.memory.blocks[block] = GARBAGE

    def fill(self, table: np.ndarray, seed: int, first: int, last: int) -> None:
        for group in range(len(table)):
            for column in range(first, last):
                if table[group, column]:
                    size = self.geometry.block_size_bytes
                    self.memory.blocks[table[group, column]] = pattern(seed, group, column, size)

    def holds(self, table: np.ndarray, seed: int, num_columns: int) -> bool:
        size = self.geometry.block_size_bytes
        return all(
            bool((self.memory.blocks[table[group, column]] == pattern(seed, group, column, size)).all())
            for group in range(len(table))
            for column in range(num_columns)
            if table[group, column]
        )

    # ---- steps ----

    def step(self, *, was_computed: bool = True) -> None:
        """Plan and execute one, and take what has come up."""
        self.finish_step(self.begin_step(), was_computed=was_computed)
        self.take_events()

    def begin_step(self) -> object | None:
        metadata = self.scheduler.build_connector_meta()
        if metadata is not None:
            for order in metadata:
                if isinstance(order, OpenLease):
                    self.requests[order.key[1]].lease_id = order.lease_id
            self.worker.handle_preemptions(metadata)
            self.worker.start_load_kv(metadata)
        return metadata

    def finish_step(self, metadata: object | None, *, was_computed: bool = True) -> None:
        if was_computed:
            for order in metadata or ():  # type: ignore[attr-defined]
                if isinstance(order, AdvanceLease):
                    for number, request in self.requests.items():
                        if request.lease_id == order.lease_id:
                            columns = -(-order.num_tokens // self.geometry.block_size)
                            self.fill(request.table, request.seed, 0, columns)
                            assert number not in self.kept
        assert self.worker.finish_step(metadata, was_computed=was_computed) == frozenset()

    def take_events(self) -> None:
        while not self.events.empty():
            event = self.events.get()
            number = event.key[1]
            match event:
                case SendFinished():
                    self.num_sends_finished += 1
                    self.give_back(self.kept.pop(number))
                case LoadFinished():
                    self._load_finished(number, event)
                case LoadFenced():
                    self.give_back(self.quarantined.pop(number))

    def _load_finished(self, number: int, event: LoadFinished) -> None:
        self.pending_loads.remove(number)  # a second one is an error
        request = self.requests[number]
        block_size = self.geometry.block_size
        ticket = request.request.params
        is_whole = event.num_valid_tokens is None
        assert is_whole == (event.cause == "")
        valid = int(str(ticket["num_tokens"])) if is_whole else event.num_valid_tokens
        assert valid is not None
        self.loads[number] = {
            "valid": valid,
            "cause": event.cause,
            "fenced": event.is_fenced,
            "right": self.holds(request.table, request.seed, -(-valid // block_size)),
        }
        request.loads = False
        if not event.is_fenced:
            self.quarantined[number] = request.table.copy()
            request.table = request.table[:, :0]
        elif request.ended or event.cause:
            self.give_back(request.table)
            request.table = request.table[:, :0]
        if request.ended:
            del self.requests[number]
        else:
            self.scheduler.update_state_after_alloc(request.request, request.table, 0)

    # ---- producing ----

    def begin(self, number: int, num_tokens: int, params: dict[str, Any] | None = None) -> None:
        """A request that is to hand off is queued and admitted."""
        tokens = np.arange(num_tokens, dtype=np.int32)
        request = KvRequest((1, number), tokens, (), {"do_remote_decode": True} if params is None else params)
        self.scheduler.on_new_request(request)
        self.requests[number] = _Request(request, number, self.take(-(-num_tokens // self.geometry.block_size)))
        self.scheduler.update_state_after_alloc(request, self.requests[number].table, 0)

    def compute(self, number: int, num_tokens: int, *, was_computed: bool = True) -> dict[str, Any] | None:
        """A step that brings it so far; what its owner may hear then."""
        held = self.requests[number].table if number in self.requests else NO_BLOCKS
        self.scheduler.request_computed((1, number), num_tokens, held)
        ticket = None
        if number in self.requests and num_tokens < len(self.requests[number].request.token_ids):
            ticket = self.scheduler.partial_ticket((1, number), num_tokens, self.requests[number].table)
        self.step(was_computed=was_computed)
        return ticket if was_computed else None

    def early_ticket(self, number: int) -> dict[str, Any]:
        """What its ticket will be."""
        request = self.requests[number]
        num_tokens = len(request.request.token_ids)
        return Ticket(
            do_remote_prefill=True,
            remote_engine_id=self.context.engine_id,
            remote_host=HOST,
            remote_port=self.context.ports["PullConnector"],
            remote_lease_id=request.lease_id,
            remote_block_ids=request.table.ravel().tolist(),
            num_groups=self.geometry.num_groups,
            num_tokens=num_tokens,
            block_size=self.geometry.block_size,
            fingerprint=self.geometry.fingerprint(),
        ).params()

    def finish(self, number: int, *, hands_off: bool = True) -> dict[str, Any] | None:
        """It ends; its ticket, if it has one."""
        request = self.requests.pop(number)
        keeps, params = self.scheduler.request_finished(request.request, request.table, hands_off=hands_off)
        if keeps:
            self.kept[number] = request.table
        else:
            self.step()  # the worker half learns of it before the blocks are used again
            self.give_back(request.table)
        return params

    def preempt(self, number: int) -> None:
        """It loses its blocks, which are written at once, and gets others."""
        request = self.requests[number]
        self.scheduler.request_preempted((1, number))
        self.step()
        columns = request.table.shape[1]
        self.give_back(request.table)
        request.table = self.take(columns)
        self.scheduler.update_state_after_alloc(request.request, request.table, 0)
        self.step()

    def prefill(self, number: int, num_tokens: int) -> dict[str, Any] | None:
        self.begin(number, num_tokens)
        self.compute(number, num_tokens)
        params = self.finish(number)
        self.step()
        return params

    def prefill_many(self, numbers: list[int], num_tokens: int) -> list[dict[str, Any] | None]:
        return [self.prefill(number, num_tokens) for number in numbers]

    # ---- consuming ----

    def queue(self, number: int, params: dict[str, Any], seed: int) -> None:
        num_tokens = int(params.get("num_tokens", 1)) + 1 if isinstance(params.get("num_tokens"), int) else 1
        request = KvRequest((1, number), np.zeros(num_tokens, np.int32), (), params)
        self.scheduler.on_new_request(request)
        self.requests[number] = _Request(request, seed, np.zeros((self.geometry.num_groups, 0), np.int32))
        self.step()

    def admit(self, number: int, num_local: int = 0) -> bool:
        """Admit what is queued; whether a load has begun."""
        request = self.requests[number]
        match = self.scheduler.get_num_new_matched_tokens(request.request, num_local)
        assert match is not None
        request.table = self.take(-(-len(request.request.token_ids) // self.geometry.block_size))
        self.fill(request.table, request.seed, 0, -(-num_local // self.geometry.block_size))
        if match.num_tokens:
            assert self.scheduler.may_load_async(request.request)
            self.pending_loads.add(number)
            request.loads = True
        self.scheduler.update_state_after_alloc(request.request, request.table, match.num_tokens)
        assert not self.scheduler.may_load_async(request.request)
        self.step()
        return match.num_tokens > 0

    def load(self, number: int, params: dict[str, Any], seed: int, num_local: int = 0) -> bool:
        self.queue(number, params, seed)
        return self.admit(number, num_local)

    def abort(self, number: int) -> None:
        """It ends, wherever it is; its blocks come back when its load has ended."""
        request = self.requests[number]
        table = request.table[:, :0] if request.loads else request.table
        self.scheduler.request_finished(request.request, table, hands_off=False)
        self.step()
        if request.loads:
            request.ended = True
        else:
            self.give_back(request.table)
            del self.requests[number]

    def result(self, number: int) -> dict[str, Any] | None:
        self.step()
        return self.loads.get(number)

    # ---- what there is ----

    def counts(self) -> dict[str, Any]:
        self.step()
        return {
            "free": len(self.free),
            "kept": len(self.kept),
            "pending": len(self.pending_loads),
            "sends_finished": self.num_sends_finished,
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "fds": len(os.listdir("/proc/self/fd")),
            "port": self.context.ports.get("PullConnector"),
            "stats": dataclasses.asdict(self.worker.stats()),
        }

    def close(self) -> None:
        if self.scheduler.has_pending_work():
            self.begin_step()
        self.worker.close(5.0)
        self.take_events()
        assert not self.pending_loads, "a load has had no end"
        assert not self.kept, "a kept request has had no end"
        self.memory.close()


def ends(rank: KvRank, number: int) -> dict[str, Any]:
    """How its load ended."""
    return dict(until(lambda: rank.result(number), f"load {number} ends"))


def give_up(rank: KvRank, number: int, what: str) -> None:
    """A request that was to hand off loses what it has computed: it is preempted, ended, or its step not computed."""
    if what == "preempted":
        rank.preempt(number)
    elif what == "ended":
        assert rank.finish(number, hands_off=False) is None
    else:
        rank.compute(number, 20, was_computed=False)


def serve(options: dict[str, Any]) -> None:
    rank = KvRank(**options)
    print(json.dumps(rank.counts()), flush=True)
    buffer = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.005)
        rank.step()
        if not readable:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        buffer += data
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            command = json.loads(line)
            result = getattr(rank, command.pop("op"))(**command)
            print(json.dumps(result), flush=True)


class PeerProcess:
    """A `KvRank` in a process of its own."""

    def __init__(self, role: str = "kv_both", **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv_transfer.kv_peer", json.dumps({"role": role, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self._buffer = b""
        self._first: dict[str, Any] | None = None

    @property
    def port(self) -> int:
        return int(self.wait_ready()["port"])

    def wait_ready(self) -> dict[str, Any]:
        if self._first is None:
            self._first = self._read()
        return self._first

    def _read(self) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + TIMEOUT_S
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))
            assert readable, "the peer does not answer"
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            assert data, f"the peer has ended ({self._process.poll()})"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def call(self, op: str, **arguments: Any) -> Any:
        self.wait_ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number is signal.SIGSTOP:
            # On a busy machine its other threads may go on until one of them has taken the signal.
            until(self._stands_still, "all threads are stopped")

    def _stands_still(self) -> bool:
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return all((task / "stat").read_text().rsplit(") ", 1)[1].startswith("T") for task in tasks)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def end(self) -> None:
        """Orderly: `KvRank.close` checks that nothing is left."""
        self.call("close")
        self.kill()


StartRank = Callable[..., KvRank]
StartProcess = Callable[..., PeerProcess]


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
