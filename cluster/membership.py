"""Which ranks are alive; pure.

The caller owns the connections: it registers a rank when its connection has said who it is, and reports it lost when
that connection ends. A rank's id is `<pool>/<lowest free index>`, given anew after its holder is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from router.control_messages import RankRecord


class MembershipError(ValueError):
    """A registration that cannot be accepted; the message says why."""


@dataclass(frozen=True, slots=True)
class Member:
    record: RankRecord
    registered_at: float


class Membership:
    """Members by id. `version` grows with every change."""

    def __init__(self) -> None:
        self.version = 0
        self._members: dict[str, Member] = {}

    def register(self, record: RankRecord, now: float) -> RankRecord:
        """Admit a rank; returns its record with the id it was given. Raises MembershipError.

        The same incarnation (`boot_id`) registering again, over a new connection, keeps its id: the caller drops the
        old connection without reporting it lost.
        """
        if not record.pool or "/" in record.pool:
            raise MembershipError(f"pool {record.pool!r} is not a pool name; send a name without '/'")
        if record.rank_id:
            raise MembershipError(f"rank_id {record.rank_id!r} was sent; leave it empty, the control actor gives it")
        if not 0 < record.port < 65536:
            raise MembershipError(f"port {record.port} is no TCP port; send the port the rank listens on")
        rank_id = self._rank_id_of(record) or self._lowest_free_id(record.pool)
        admitted = msgspec.structs.replace(record, rank_id=rank_id)
        previous = self._members.get(rank_id)
        if previous is None or previous.record != admitted:
            self._members[rank_id] = Member(admitted, now)
            self.version += 1
        return admitted

    def lost(self, rank_id: str, boot_id: str) -> bool:
        """The rank's connection ended. False, and nothing changes, if that incarnation is no member (any more)."""
        member = self._members.get(rank_id)
        if member is None or member.record.boot_id != boot_id:
            return False
        del self._members[rank_id]
        self.version += 1
        return True

    def records(self) -> list[RankRecord]:
        """All members, in order of pool and index."""
        return [member.record for _, member in sorted(self._members.items(), key=_order)]

    def members(self) -> list[Member]:
        """All members with the time they registered, in order of pool and index."""
        return [member for _, member in sorted(self._members.items(), key=_order)]

    def _rank_id_of(self, record: RankRecord) -> str | None:
        for rank_id, member in self._members.items():
            if (member.record.boot_id, member.record.pool) == (record.boot_id, record.pool):
                return rank_id
        return None

    def _lowest_free_id(self, pool: str) -> str:
        index = 0
        while f"{pool}/{index}" in self._members:
            index += 1
        return f"{pool}/{index}"

    def check_integrity(self) -> None:
        """Raises AssertionError if the books are wrong."""
        incarnations = [(member.record.pool, member.record.boot_id) for member in self._members.values()]
        assert len(incarnations) == len(set(incarnations)), f"an incarnation is a member twice: {incarnations}"
        for rank_id, member in self._members.items():
            assert member.record.rank_id == rank_id, f"{rank_id} holds the record of {member.record.rank_id}"
            assert rank_id.startswith(member.record.pool + "/"), f"{rank_id} is in pool {member.record.pool}"
        assert self.version >= len(self._members), f"version {self.version} is older than its members"


def _order(item: tuple[str, Member]) -> tuple[str, int]:
    pool, index = item[0].split("/")
    return pool, int(index)
