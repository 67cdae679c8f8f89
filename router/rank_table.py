"""What a router knows of the ranks it is connected to, in columns, so that a thousand are looked over at once; pure.

A rank has the row that `PrefixIndex.add` gave it, from `add` to `forget`. Its figures are as old as its last frame;
what was submitted since is in them as well, so that a burst does not pile up on the rank that looked empty when it
began.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from rank_scheduler.messages import RankLoad
from router.control_messages import PoolRole, RankRecord
from router.placement import ROLES, Candidate, Leg

_ROLE_CODES = {role: code for code, role in enumerate(PoolRole)}
_HAS_ROLE = {
    leg: tuple(np.array([role in roles for role in PoolRole]) for roles in both) for leg, both in ROLES.items()
}
"""By leg: for those made for it, and for the others, whether the role of that code is one of them."""

_FIRST_CAPACITY = 16


class RankTable:
    """Mutable state: the columns, by row. A row without a rank is no member and has no room."""

    def __init__(self) -> None:
        self.records: dict[int, RankRecord] = {}
        self._loads: dict[int, RankLoad] = {}
        self._unseen: dict[int, tuple[int, int]] = {}
        self.num_sequences = np.zeros(_FIRST_CAPACITY)
        """Running, waiting, deferred, and not in its figures yet."""
        self.num_queued_tokens = np.zeros(_FIRST_CAPACITY)
        """Prompt tokens still to be computed, those of sequences included that are not in its figures yet."""
        self.num_free_tokens = np.zeros(_FIRST_CAPACITY)
        """For so many there is KV room that is neither used nor spoken for."""
        self.block_size = np.ones(_FIRST_CAPACITY)
        self.prefill_s_per_token = np.ones(_FIRST_CAPACITY)
        self.lag = np.ones(_FIRST_CAPACITY)
        self._role = np.zeros(_FIRST_CAPACITY, np.int8)
        self._is_member = np.zeros(_FIRST_CAPACITY, bool)
        self._has_room = np.zeros(_FIRST_CAPACITY, bool)
        self._candidates: dict[tuple[Leg, bool], Candidates] = {}
        """Those asked for since room or membership changed."""

    @property
    def capacity(self) -> int:
        """Rows are below this."""
        return len(self._role)

    def add(self, row: int, record: RankRecord) -> None:
        """A rank that is a member and has room, as long as nobody says otherwise."""
        while row >= self.capacity:
            self._grow()
        self.records[row] = record
        self.block_size[row] = record.block_size
        self._role[row] = _ROLE_CODES[record.role]
        self._is_member[row] = self._has_room[row] = True
        self._candidates.clear()
        self.update(row, RankLoad(num_free_blocks=record.num_blocks, num_blocks=record.num_blocks), 0, 0)

    def forget(self, row: int) -> None:
        """The rank is gone."""
        del self.records[row], self._loads[row], self._unseen[row]
        self._is_member[row] = self._has_room[row] = False
        self._candidates.clear()

    def update(self, row: int, load: RankLoad, num_unseen_sequences: int, num_unseen_tokens: int) -> None:
        """Its figures, and what they do not contain."""
        self._loads[row] = load
        self._unseen[row] = (num_unseen_sequences, num_unseen_tokens)
        num_queued = load.num_waiting_tokens + num_unseen_tokens
        self.num_sequences[row] = load.num_running + load.num_waiting + load.num_deferred + num_unseen_sequences
        self.num_queued_tokens[row] = num_queued
        self.num_free_tokens[row] = load.num_free_blocks * self.records[row].block_size - num_queued

    def set_room(self, row: int, has_room: bool) -> None:
        """Whether it takes another sequence now."""
        if self._has_room[row] != has_room:
            self._has_room[row] = has_room
            self._candidates.clear()

    def set_member(self, row: int, is_member: bool) -> None:
        """Whether it gets new work at all."""
        if self._is_member[row] != is_member:
            self._is_member[row] = is_member
            self._candidates.clear()

    def suitable(self, leg: Leg, *, falls_back: bool) -> NDArray[np.intp]:
        """Rows of the members that may take this leg; `falls_back`: if none is made for it, any."""
        made_for_it, others = _HAS_ROLE[leg]
        rows = np.flatnonzero(self._is_member & made_for_it[self._role])
        if rows.size or not falls_back:
            return rows
        return np.flatnonzero(self._is_member & others[self._role])

    def candidates(self, leg: Leg, *, falls_back: bool) -> Candidates:
        """Of the suitable ones, those that have room."""
        found = self._candidates.get((leg, falls_back))
        if found is None:
            rows = self.suitable(leg, falls_back=falls_back)
            found = self._candidates[leg, falls_back] = Candidates(self, rows[self._has_room[rows]])
        return found

    def candidate(self, row: int) -> Candidate:
        """What is known of one."""
        record = self.records[row]
        return Candidate(
            row,
            record.rank_id,
            record.role,
            self._loads[row],
            *self._unseen[row],
            float(self.prefill_s_per_token[row]),
            float(self.lag[row]),
        )

    def _grow(self) -> None:
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))


class Candidates(Sequence[Candidate]):
    """Ranks that could take a request. Valid until the table changes, and so for one choice."""

    def __init__(self, table: RankTable, rows: NDArray[np.intp]) -> None:
        """`rows`: of the table, shape [n]."""
        self.table = table
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        if isinstance(index, slice):
            return [self.table.candidate(int(row)) for row in self.rows[index]]
        return self.table.candidate(int(self.rows[index]))
