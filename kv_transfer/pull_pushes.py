"""The holder's pushes: blocks that readers have asked to be sent, each as soon as it is ready.

A reader's load is one push: the cells that it wants, in order, and the grant under which it takes them. It is fed
whenever its lease advances, and over when all is sent, when the reader does not wait any more, or soon after the lease
is gone. What has been sent proves nothing: as with a pull, the reader asks for confirmation when it has all (`leases`).
Runs on the event loop of the thread `kv-io`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.kv_messages import PushTo
from kv_transfer.leases import GoneNotice, ReadyNotice
from kv_transfer.transport import BlockIds, PushTransport

BlockTable = npt.NDArray[np.int32]
"""Shape [num_groups, columns]."""


@dataclass(slots=True)
class _Push:
    reader: str
    is_ahead: bool
    grant: int
    columns: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    complete_at: npt.NDArray[np.int64]
    """With how many tokens each cell is complete; ascending."""
    num_sent: int = 0


class Pushes:
    """All of one rank's."""

    def __init__(self, transport: PushTransport, block_size: int) -> None:
        self._transport = transport
        self._block_size = block_size
        self._tables: dict[int, BlockTable] = {}
        """The blocks of each lease, as far as they are computed."""
        self._pushes: dict[int, list[_Push]] = {}
        """By lease."""

    def __len__(self) -> int:
        """Pushes under way."""
        return sum(map(len, self._pushes.values()))

    def show(self, lease_id: int, block_ids: BlockTable) -> None:
        """The blocks of this lease by now."""
        self._tables[lease_id] = block_ids

    def add(self, lease_id: int, reader: str, is_ahead: bool, push_to: PushTo, num_ready_tokens: int) -> str:
        """Begin one; returns why it cannot be, or nothing."""
        table = self._tables.get(lease_id)
        if table is None:
            return "nothing of it has been computed, or this rank does not push (mode in kv_connector_extra_config)"
        if len(push_to.cells) % 4:
            return "its cells are cut short"
        cells = np.frombuffer(push_to.cells, "<i4").astype(np.int64)
        columns, groups = np.divmod(cells, len(table))
        num_columns = -(-push_to.num_tokens // self._block_size)
        if not len(cells) or cells[0] < 0 or columns[-1] >= num_columns or np.any(np.diff(cells) <= 0):
            return f"its cells are not an ascending choice of {num_columns} columns of {len(table)} groups"
        complete_at = np.minimum((columns + 1) * self._block_size, push_to.num_tokens)
        push = _Push(reader, is_ahead, push_to.grant, columns, groups, complete_at)
        self._pushes.setdefault(lease_id, []).append(push)
        self._feed(lease_id, num_ready_tokens)
        return ""

    def advance(self, lease_id: int, num_ready_tokens: int) -> list[ReadyNotice]:
        """So many tokens of the blocks that were shown are complete. Returns what those who read ahead are told."""
        pushes = self._pushes.get(lease_id, ())
        notices = [ReadyNotice(push.reader, lease_id, num_ready_tokens) for push in pushes if push.is_ahead]
        if pushes:
            self._feed(lease_id, num_ready_tokens)
        return notices

    def end(self, lease_id: int, why: str) -> list[GoneNotice]:
        """The lease is gone. Returns what those who read ahead are told."""
        self._tables.pop(lease_id, None)
        pushes = self._pushes.pop(lease_id, ())
        for push in pushes:
            self._transport.revoke(push.grant)
        return [GoneNotice(push.reader, lease_id, why) for push in pushes if push.is_ahead]

    def keep(self, lease_ids: Collection[int]) -> list[GoneNotice]:
        """End those of all other leases."""
        gone = self._tables.keys() - set(lease_ids)
        return [notice for lease_id in gone for notice in self.end(lease_id, "its request has ended")]

    def forget(self, reader: str) -> None:
        """It cannot be told anything any more."""
        for lease_id, pushes in list(self._pushes.items()):
            for push in [push for push in pushes if push.reader == reader]:
                self._transport.revoke(push.grant)
                self._drop(lease_id, push)

    # ---- inside ----

    def _feed(self, lease_id: int, num_ready_tokens: int) -> None:
        table = self._tables[lease_id]
        for push in list(self._pushes[lease_id]):
            num_ready = int(np.searchsorted(push.complete_at, num_ready_tokens, side="right"))
            if num_ready == push.num_sent:
                continue
            part = slice(push.num_sent, num_ready)
            blocks: BlockIds = table[push.groups[part], push.columns[part]]
            if not blocks.all():
                # A block that this rank has given up already, which the reader should not have asked for.
                self._transport.revoke(push.grant)
                self._drop(lease_id, push)
            elif not self._push(push.grant, blocks) or num_ready == len(push.columns):
                self._drop(lease_id, push)
            else:
                push.num_sent = num_ready

    def _push(self, grant: int, blocks: BlockIds) -> bool:
        try:
            return self._transport.push(grant, blocks)
        except ValueError:
            # Granted for fewer blocks than the reader has named.
            self._transport.revoke(grant)
            return False

    def _drop(self, lease_id: int, push: _Push) -> None:
        pushes = self._pushes[lease_id]
        pushes.remove(push)
        if not pushes:
            del self._pushes[lease_id]
