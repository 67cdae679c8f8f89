"""Which ranks are alive; pure.

The caller owns the connections: it registers a rank when its connection has said who it is, and reports it lost when
that connection ends. A rank's id is `<pool>/<index>`: the one it asks for, which it had before, if that is free, else
the lowest free one. An id is given anew after its holder is gone.
"""

from __future__ import annotations

import re

import msgspec

from router.control_messages import RankRecord

_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")


class MembershipError(ValueError):
    """A registration that cannot be accepted; the message says why."""


class Membership:
    """Members by id. `version` grows with every change."""

    def __init__(self) -> None:
        self.version = 0
        self._members: dict[str, RankRecord] = {}

    def register(self, record: RankRecord) -> RankRecord:
        """Admit a rank; returns its record with the id it was given. Raises MembershipError.

        The same incarnation (`boot_id`) registering again, over a new connection, keeps its id: the caller drops the
        old connection without reporting it lost.
        """
        if not record.pool or "/" in record.pool:
            raise MembershipError(f"pool {record.pool!r} is not a pool name; send a name without '/'")
        if not 0 < record.port < 65536:
            raise MembershipError(f"port {record.port} is no TCP port; send the port the rank listens on")
        wish = record.rank_id
        if wish and not (wish.startswith(f"{record.pool}/") and _INDEX.fullmatch(wish.removeprefix(f"{record.pool}/"))):
            raise MembershipError(
                f"rank_id {wish!r} is no id of pool {record.pool!r}; send the id that was given before, or none"
            )
        rank_id = self._rank_id_of(record) or (
            wish if wish and wish not in self._members else self._lowest_free_id(record.pool)
        )
        admitted = msgspec.structs.replace(record, rank_id=rank_id)
        if self._members.get(rank_id) != admitted:
            self._members[rank_id] = admitted
            self.version += 1
        return admitted

    def lost(self, rank_id: str, boot_id: str) -> bool:
        """The rank's connection ended. False, and nothing changes, if that incarnation is no member (any more)."""
        record = self._members.get(rank_id)
        if record is None or record.boot_id != boot_id:
            return False
        del self._members[rank_id]
        self.version += 1
        return True

    def records(self) -> list[RankRecord]:
        """All members, in order of pool and index."""
        return sorted(self._members.values(), key=_order)

    def _rank_id_of(self, record: RankRecord) -> str | None:
        for rank_id, member in self._members.items():
            if (member.boot_id, member.pool) == (record.boot_id, record.pool):
                return rank_id
        return None

    def _lowest_free_id(self, pool: str) -> str:
        index = 0
        while f"{pool}/{index}" in self._members:
            index += 1
        return f"{pool}/{index}"

    def check_integrity(self) -> None:
        """Raises AssertionError if the books are wrong."""
        incarnations = [(record.pool, record.boot_id) for record in self._members.values()]
        assert len(incarnations) == len(set(incarnations)), f"an incarnation is a member twice: {incarnations}"
        for rank_id, record in self._members.items():
            assert record.rank_id == rank_id, f"{rank_id} holds the record of {record.rank_id}"
            assert rank_id.startswith(record.pool + "/"), f"{rank_id} is in pool {record.pool}"
        assert self.version >= len(self._members), f"version {self.version} is older than its members"


def _order(record: RankRecord) -> tuple[str, int]:
    return record.pool, int(record.rank_id.rpartition("/")[2])
