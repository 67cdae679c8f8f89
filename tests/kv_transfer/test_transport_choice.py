"""Which lane two ranks take, and that another follows one that does not connect."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import kv_transfer.transports
from kv_transfer.memory import KvMemory
from kv_transfer.transport import Endpoint, FailureReason, KvTransport, TransferError
from kv_transfer.transports import (
    TRANSPORTS,
    choose_lanes,
    connect_lane,
    make_transport,
    transports_to_start,
)

SECRET = b"s"


def endpoints(host: str, process: str, *names: str) -> dict[str, Endpoint]:
    host_ids = {"inproc": f"{host}:{process}", "shm": host}
    return {name: Endpoint(name, b"", 8, 64, host_ids.get(name, "")) for name in names}


def lanes(ours: dict[str, Endpoint], theirs: dict[str, Endpoint], configured: str = "auto") -> list[str]:
    return [lane.transport for lane in choose_lanes(ours, list(theirs.values()), configured)]


EMBEDDED = ("tcp", "shm", "inproc")


def test_order_of_auto() -> None:
    here = endpoints("h", "1", *EMBEDDED)
    assert lanes(here, endpoints("h", "1", *EMBEDDED)) == ["inproc", "shm", "tcp"]
    assert lanes(here, endpoints("h", "2", *EMBEDDED)) == ["shm", "tcp"]
    assert lanes(here, endpoints("i", "1", *EMBEDDED)) == ["tcp"]
    with_nixl = endpoints("i", "1", "nixl", *EMBEDDED)
    assert lanes(here, with_nixl) == ["tcp"]
    assert lanes(endpoints("h", "1", "nixl", *EMBEDDED), with_nixl) == ["nixl", "tcp"]


def test_a_host_that_does_not_know_itself_is_no_other_ones() -> None:
    unknown = {name: Endpoint(name, b"", 8, 64, "") for name in EMBEDDED}
    assert lanes(unknown, unknown) == ["tcp"]


def test_auto_takes_no_lane_that_is_for_those_who_name_it() -> None:
    everything = endpoints("h", "1", *TRANSPORTS)
    assert lanes(everything, everything) == ["inproc", "shm", "nixl", "tcp"]


def test_a_named_lane_is_the_only_one() -> None:
    here, there = endpoints("h", "1", *EMBEDDED), endpoints("h", "2", *EMBEDDED)
    assert lanes(here, there, "tcp") == ["tcp"]
    assert lanes(here, there, "mooncake") == []


def test_reasons_name_what_was_passed_over() -> None:
    (lane,) = choose_lanes(endpoints("h", "1", *EMBEDDED), list(endpoints("i", "1", "shm", "tcp").values()), "auto")
    assert "inproc: not offered by the peer" in lane.reason
    assert "shm: another host" in lane.reason
    assert "nixl: not started here" in lane.reason


def test_what_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer.transports, "has_rdma", lambda: False)
    assert transports_to_start("auto") == ("inproc", "shm", "tcp")
    monkeypatch.setattr(kv_transfer.transports, "has_rdma", lambda: True)
    assert transports_to_start("auto") == ("inproc", "shm", "nixl", "tcp")
    assert transports_to_start("shm") == ("shm",)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'smb'; choose auto or one of inproc, shm, tcp"):
        make_transport("smb", SECRET)
    with pytest.raises(ValueError, match="'smb'"):
        transports_to_start("smb")


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kv_transfer.agent_transport", None)
    with pytest.raises(TransferError, match=r"install serried\[nixl\]") as caught:
        make_transport("nixl", SECRET)
    assert caught.value.reason is FailureReason.BACKEND


# ---- connecting ----


class Node:
    def __init__(self, block_size_bytes: int = 64) -> None:
        self.memory = KvMemory(8, block_size_bytes)
        self.transports: dict[str, KvTransport] = {name: make_transport(name, SECRET) for name in EMBEDDED}
        self.endpoints = {name: one.start(self.memory, "127.0.0.1") for name, one in self.transports.items()}

    def close(self, *names: str) -> None:
        for name in names or EMBEDDED:
            self.transports[name].close(5.0)


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    first, second = Node(), Node()
    yield first, second
    first.close()
    second.close()


def test_the_next_lane_follows_one_that_does_not_connect(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    there.memory.blocks[3] = 7
    choice = choose_lanes(here.endpoints, list(there.endpoints.values()), "auto")
    taken = []
    for name in EMBEDDED[::-1]:
        transport, peer, lane = connect_lane(here.transports, choice, 5.0)
        taken.append(lane.transport)
        assert transport is here.transports[lane.transport]
        assert peer.endpoint == there.endpoints[lane.transport]
        there.close(name)
    assert taken == ["inproc", "shm", "tcp"]
    assert "inproc: " in lane.reason
    assert "shm: " in lane.reason
    with pytest.raises(TransferError, match=r"inproc: .*; shm: .*; tcp: ") as caught:
        connect_lane(here.transports, choice, 5.0)
    assert caught.value.reason is FailureReason.NO_ROUTE


def test_no_lane_at_all() -> None:
    with pytest.raises(TransferError) as caught:
        connect_lane({}, [], 5.0)
    assert caught.value.reason is FailureReason.NO_ROUTE


def test_another_block_size_is_refused_on_all_lanes(nodes: tuple[Node, Node]) -> None:
    other = Node(128)
    choice = choose_lanes(nodes[0].endpoints, list(other.endpoints.values()), "auto")
    with pytest.raises(TransferError) as caught:
        connect_lane(nodes[0].transports, choice, 5.0)
    assert caught.value.reason is FailureReason.INCOMPATIBLE
    other.close()
