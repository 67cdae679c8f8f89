"""The pull connector between real processes: this one, and others that are stopped and killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kv_transfer.kv_peer import KvRank, PeerProcess, until


@pytest.fixture
def processes() -> Iterator[Callable[..., PeerProcess]]:
    started: list[PeerProcess] = []

    def start(role: str = "kv_both", **options: Any) -> PeerProcess:
        started.append(PeerProcess(role, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def ranks() -> Iterator[Callable[..., KvRank]]:
    started: list[KvRank] = []

    def start(role: str = "kv_both", **options: Any) -> KvRank:
        started.append(KvRank(role, **options))
        return started[-1]

    yield start
    for rank in started:
        rank.close()


def ends(rank: KvRank, number: int) -> dict[str, Any]:
    """How its load ended."""
    return dict(until(lambda: rank.result(number), f"load {number} ends"))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_blocks_go_from_one_process_to_another(
    processes: Callable[..., PeerProcess], ranks: Callable[..., KvRank], transport: str
) -> None:
    prefill = processes("kv_producer", extra={"transport": transport})
    decode = ranks("kv_consumer", extra={"transport": transport})
    ticket = prefill.call("prefill", number=1, num_tokens=30)
    assert decode.load(5, ticket, seed=1)
    assert ends(decode, 5) == {"valid": 30, "cause": "", "fenced": True, "right": True}
    counts = until(lambda: (c := prefill.call("counts"))["kept"] == 0 and c, "the lease is released")
    assert counts["sends_finished"] == 1
    assert counts["free"] == 255
    stats = decode.worker.stats()
    assert (stats.num_loads, stats.num_loaded_bytes, stats.lanes) == (1, 16 * 512, {transport: 1})
    assert sum(stats.load_seconds) == 1
    prefill.end()
