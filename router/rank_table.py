"""What a router knows of the ranks it is connected to, in columns, so that a thousand are looked over at once; pure.

A rank has the row that `PrefixIndex.add` gave it, from `add` to `forget`. Its figures are as old as its last frame;
what was submitted since is in them as well, so that a burst does not pile up on the rank that looked empty when it
began. Its speed is measured (`rank_rates`) and compared with that of its peers, the ranks of the same role. All of it
comes from the ranks' own frames, so several routers know much the same without asking each other.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from rank_scheduler.messages import KvTransferLoad, RankLoad
from router.control_messages import PoolRole, RankRecord
from router.placement import ROLES, Candidate, Leg
from router.rank_rates import Column, RankRates, lags, like_peers, lower_median
from router.room import Room

TOKENS_PER_SEQUENCE = 64
"""What a sequence on a rank weighs beside its waiting prompt tokens: it takes a token of each step while it runs."""
DEFAULT_PREFILL_S_PER_TOKEN = 1e-4
"""While no rank has computed a prompt."""
LOADED_TOKENS_PER_COMPUTED = 16
"""So many tokens of KV are loaded from another rank in about the time that one is computed, while none were."""

_ROLE_CODES = {role: code for code, role in enumerate(PoolRole)}
_HAS_ROLE = {
    leg: tuple(np.array([role in roles for role in PoolRole]) for roles in both) for leg, both in ROLES.items()
}
"""By leg: for those made for it, and for the others, whether the role of that code is one of them."""

_NEEDED_ROOM = {Leg.WHOLE: Room.STEP, Leg.PREFILL: Room.STEP, Leg.DECODE: Room.SLOT}

_FIRST_CAPACITY = 16


class RankTable:
    """Mutable state: the columns, by row. A row without a rank is no member and has no room."""

    def __init__(self, router: str = "") -> None:
        """`router`: whose it is."""
        self.first_turn = zlib.crc32(router.encode())
        """With whom, among equals, this router begins: not all with the same one."""
        self.records: dict[int, RankRecord] = {}
        self._rows: dict[str, int] = {}
        """By rank id; of two with the same one, of which the older is about to go, the newer."""
        self._loads: dict[int, RankLoad] = {}
        self._unseen: dict[int, tuple[int, int]] = {}
        self._rates: dict[int, RankRates] = {}
        self._num_queued_tokens = _column()
        self._num_sequences = _column()
        self.work = _column()
        """Prompt tokens still to be computed, and TOKENS_PER_SEQUENCE for each sequence there and one more, times its
        lag; with those that are not in its figures yet."""
        self.wait_s = _column()
        """How long that takes."""
        self.num_free_tokens = _column()
        """For so many there is KV room that is neither used nor spoken for."""
        self.num_step_tokens_left = _column()
        """So many more its next step could compute."""
        self.prefill_s_per_token = _column()
        """Measured, or of its peers."""
        self.load_s_per_token = _column()
        """Of KV from another rank, the same."""
        self.lag = _column()
        """How much longer its steps take than its peers', 1.0 if that is little."""
        self.seeds = np.zeros(_FIRST_CAPACITY, np.uint64)
        """Of a rank's incarnation, the same in every router."""
        self._shown_prefill_s = _column()
        self._shown_load_s = _column()
        self._shown_step_s = _column()
        self._shown_running = _column()
        """What its own figures have shown; NaN: nothing."""
        self._num_news = 0
        """Rows whose speed may have changed since they were compared."""
        self._role = np.zeros(_FIRST_CAPACITY, np.int8)
        self._is_member = np.zeros(_FIRST_CAPACITY, bool)
        self._room = np.zeros(_FIRST_CAPACITY, np.int8)
        self._candidates: dict[tuple[Leg, bool], Candidates] = {}
        """Those asked for since room or membership changed."""
        self._suitable: dict[tuple[Leg, bool], NDArray[np.intp]] = {}
        """The same since membership changed."""

    @property
    def capacity(self) -> int:
        """Rows are below this."""
        return len(self._role)

    def add(self, row: int, record: RankRecord) -> None:
        """A rank that is a member and has room, as long as nobody says otherwise."""
        while row >= self.capacity:
            self._grow()
        load = RankLoad(num_free_blocks=record.num_blocks, num_blocks=record.num_blocks)
        self.records[row] = record
        self._rows[record.rank_id] = row
        self._loads[row] = load
        self._rates[row] = RankRates(load)
        self._role[row] = _ROLE_CODES[record.role]
        digest = hashlib.blake2b(record.boot_id.encode(), digest_size=8).digest()
        self.seeds[row] = int.from_bytes(digest, "little")
        self._is_member[row], self._room[row] = True, Room.ANYTHING
        for shown in (self._shown_prefill_s, self._shown_load_s, self._shown_step_s, self._shown_running):
            shown[row] = np.nan
        self._candidates.clear()
        self._suitable.clear()
        self.update(row, load, 0, 0)
        self._compare()

    def forget(self, row: int) -> None:
        """The rank is gone."""
        record = self.records.pop(row)
        if self._rows[record.rank_id] == row:
            del self._rows[record.rank_id]
        del self._loads[row], self._unseen[row], self._rates[row]
        self._is_member[row], self._room[row] = False, Room.NONE
        self._candidates.clear()
        self._suitable.clear()

    def update(self, row: int, load: RankLoad, num_unseen_sequences: int, num_unseen_tokens: int) -> None:
        """Its figures, and what they do not contain."""
        if load is not self._loads[row]:
            self._loads[row] = load
            rates = self._rates[row]
            rates.learn(load)
            if rates.prefill_s_per_token is not None:
                self._shown_prefill_s[row] = rates.prefill_s_per_token
            if rates.step_s is not None:
                self._shown_step_s[row], self._shown_running[row] = rates.step_s, rates.num_running
            self._on_news()
        self._unseen[row] = (num_unseen_sequences, num_unseen_tokens)
        num_queued = load.num_waiting_tokens + num_unseen_tokens
        num_sequences = load.num_running + load.num_waiting + load.num_deferred + num_unseen_sequences
        self._num_queued_tokens[row], self._num_sequences[row] = num_queued, num_sequences
        self.work[row] = work = num_queued + TOKENS_PER_SEQUENCE * float(self.lag[row]) * (num_sequences + 1)
        self.wait_s[row] = work * float(self.prefill_s_per_token[row])
        self.num_free_tokens[row] = load.num_free_blocks * self.records[row].block_size - num_queued

    def update_transfers(self, row: int, transfers: KvTransferLoad) -> None:
        """Its figures of loads of KV."""
        record = self.records[row]
        if transfers.num_loaded_bytes > 0 and record.block_size_bytes > 0:
            num_tokens = transfers.num_loaded_bytes / record.block_size_bytes * record.block_size
            self._shown_load_s[row] = transfers.load_seconds_sum / num_tokens
            self._on_news()

    def set_room(self, row: int, room: Room, num_step_tokens_left: int = 0) -> None:
        """What it takes now, and how many tokens its next step has left."""
        self.num_step_tokens_left[row] = num_step_tokens_left
        if self._room[row] != room:
            self._room[row] = room
            self._candidates.clear()

    def set_member(self, row: int, is_member: bool) -> None:
        """Whether it gets new work at all."""
        if self._is_member[row] != is_member:
            self._is_member[row] = is_member
            self._candidates.clear()
            self._suitable.clear()

    def is_member(self, row: int) -> bool:
        """Whether it gets new work at all."""
        return bool(self._is_member[row])

    @property
    def takes_any_prompt(self) -> NDArray[np.bool_]:
        """Of each, whether it takes more than its next step has left."""
        takes: NDArray[np.bool_] = self._room >= Room.PROMPT
        return takes

    def is_idle(self, row: int) -> bool:
        """Whether it takes anything."""
        return bool(self._room[row] == Room.ANYTHING)

    def has_room(self, row: int, leg: Leg = Leg.WHOLE) -> bool:
        """Whether it takes this part of a request now."""
        return bool(self._is_member[row] and self._room[row] >= _NEEDED_ROOM[leg])

    def row_of(self, rank_id: str) -> int | None:
        """Of a member; None if there is none of that name."""
        row = self._rows.get(rank_id)
        return row if row is not None and self._is_member[row] else None

    @property
    def rank_ids(self) -> list[str]:
        """Of all members."""
        return sorted(rank_id for rank_id, row in self._rows.items() if self._is_member[row])

    def suitable(self, leg: Leg, *, falls_back: bool) -> NDArray[np.intp]:
        """Rows of the members that may take this leg; `falls_back`: if none is made for it, any."""
        rows = self._suitable.get((leg, falls_back))
        if rows is None:
            made_for_it, others = _HAS_ROLE[leg]
            rows = np.flatnonzero(self._is_member & made_for_it[self._role])
            if not rows.size and falls_back:
                rows = np.flatnonzero(self._is_member & others[self._role])
            self._suitable[leg, falls_back] = rows
        return rows

    def candidates(self, leg: Leg, *, falls_back: bool) -> Candidates:
        """Of the suitable ones, those that have room."""
        found = self._candidates.get((leg, falls_back))
        if found is None:
            suitable = self.suitable(leg, falls_back=falls_back)
            found = Candidates(self, suitable[self._room[suitable] >= _NEEDED_ROOM[leg]], suitable)
            self._candidates[leg, falls_back] = found
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

    def check_integrity(self) -> None:
        """Raises AssertionError unless the columns say what the figures do."""
        known = self.records.keys()
        assert known == self._loads.keys() == self._unseen.keys() == self._rates.keys(), "figures of other ranks"
        assert set(np.flatnonzero(self._is_member).tolist()) <= known, "a row without a rank is a member"
        assert set(self._rows.values()) <= known, "a rank is known by name only"
        for row, load in self._loads.items():
            num_unseen, num_tokens = self._unseen[row]
            assert self._num_queued_tokens[row] == load.num_waiting_tokens + num_tokens, f"row {row}: queued tokens"
            there = load.num_running + load.num_waiting + load.num_deferred + num_unseen
            assert self._num_sequences[row] == there, f"row {row}: sequences"
        work = self._num_queued_tokens + TOKENS_PER_SEQUENCE * self.lag * (self._num_sequences + 1)
        waits_agree = np.allclose(self.wait_s[rows := list(known)], (work * self.prefill_s_per_token)[rows])
        assert waits_agree, "waits are not those of the work"

    def _on_news(self) -> None:
        # As often as each rank has something new, so that it costs each frame little.
        self._num_news += 1
        if self._num_news >= len(self.records):
            self._compare()

    def _compare(self) -> None:
        """Settle each rank's speed, from what it has shown and what its peers have."""
        self._num_news = 0
        everybody = np.fromiter(self.records, np.intp, len(self.records))
        usual_s = lower_median(self._shown_prefill_s[everybody]) or DEFAULT_PREFILL_S_PER_TOKEN
        for code in range(len(_ROLE_CODES)):
            rows = everybody[self._role[everybody] == code]
            if not rows.size:
                continue
            self.lag[rows] = lags(self._shown_step_s[rows], self._shown_running[rows])
            prefill_s = lower_median(self._shown_prefill_s[rows]) or usual_s
            self.prefill_s_per_token[rows] = like_peers(self._shown_prefill_s[rows], prefill_s)
            load_s = lower_median(self._shown_load_s[rows]) or prefill_s / LOADED_TOKENS_PER_COMPUTED
            self.load_s_per_token[rows] = like_peers(self._shown_load_s[rows], load_s)
        self.work = self._num_queued_tokens + TOKENS_PER_SEQUENCE * self.lag * (self._num_sequences + 1)
        self.wait_s = self.work * self.prefill_s_per_token

    def _grow(self) -> None:
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))


class Candidates(Sequence[Candidate]):
    """Ranks that could take a request. Valid until the table changes, and so for one choice."""

    def __init__(self, table: RankTable, rows: NDArray[np.intp], suitable: NDArray[np.intp] | None = None) -> None:
        """`rows`: of the table, in order, shape [n]. `suitable`: with those that have no room; None: there are none."""
        self.table = table
        self.rows = rows
        has_gaps = len(rows) == 0 or rows[-1] - rows[0] >= len(rows)
        self.at: NDArray[np.intp] | slice = rows if has_gaps else slice(int(rows[0]), int(rows[-1]) + 1)
        """The same, as the quickest index of columns."""
        self.suitable = rows if suitable is None else suitable

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


def _column() -> Column:
    return np.zeros(_FIRST_CAPACITY)
