"""Ranks with nothing but a connector, as fixtures; whatever they do, nothing of it is left."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kv_transfer.kv_peer import KvRank, PeerProcess, StartProcess, StartRank, until


def _open_fds() -> dict[str, str]:
    """What each descriptor is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Threads have ended and descriptors are closed when the test is over."""
    threads, fds = set(threading.enumerate()), _open_fds()
    yield
    gc.collect()
    until(lambda: set(threading.enumerate()) <= threads, "threads end", 5.0)
    with contextlib.suppress(AssertionError):
        until(lambda: len(_open_fds()) <= len(fds), "descriptors are closed", 5.0)
    left = _open_fds()
    assert len(left) <= len(fds), f"left open: {set(left.values()) - set(fds.values())}"


@pytest.fixture
def ranks(nothing_is_left: None) -> Iterator[StartRank]:
    """Starts ranks in this process, with the arguments of `KvRank`."""
    started: list[KvRank] = []

    def start(role: str = "kv_both", **options: Any) -> KvRank:
        started.append(KvRank(role, **options))
        return started[-1]

    yield start
    while started:
        started.pop().close()


@pytest.fixture
def processes(nothing_is_left: None) -> Iterator[StartProcess]:
    """Starts ranks in processes of their own, likewise; those that still live in the end are killed."""
    started: list[PeerProcess] = []

    def start(role: str = "kv_both", **options: Any) -> PeerProcess:
        started.append(PeerProcess(role, **options))
        return started[-1]

    yield start
    while started:
        started.pop().kill()
