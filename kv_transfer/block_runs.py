"""Lists of blocks as transports use them: checked against a pool, and cut into runs of neighbours. Pure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.extension import ExtensionMissingError, load
from kv_transfer.transport import BlockIds

Positions = npt.NDArray[np.int64]


def are_blocks_in_python(ids: npt.NDArray[Any], num_blocks: int, /) -> bool:
    """Whether this is a contiguous int32 vector of blocks of a pool of `num_blocks`."""
    if ids.ndim != 1 or ids.dtype != np.int32 or not ids.flags.c_contiguous:
        return False
    return not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < num_blocks)


def check_block_ids(ids: npt.NDArray[Any], num_blocks: int, whose: str) -> BlockIds:
    """`ids` as a contiguous int32 vector. Raises ValueError unless all are blocks of a pool of `num_blocks`."""
    if are_blocks(ids, num_blocks):
        return ids
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{whose} blocks are a list of ids, not {ids.dtype} of shape {list(ids.shape)}")
    if ids.size:
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= num_blocks:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"{whose} pool has blocks 0 to {num_blocks - 1}, and block {wrong} was asked for")
    return np.ascontiguousarray(ids, np.int32)


def check_pairs(remote_blocks: npt.NDArray[Any], local_blocks: npt.NDArray[Any]) -> None:
    """Raises ValueError unless there is one local block for each remote one."""
    if remote_blocks.shape != local_blocks.shape:
        raise ValueError(
            f"{remote_blocks.size} remote and {local_blocks.size} local blocks were given; a pull copies pairs of them"
        )


def find_runs(*ids: BlockIds) -> tuple[Positions, Positions]:
    """Where the lists, all of one length, go up by one together: (first positions, lengths), both of shape [runs]."""
    num_blocks = len(ids[0])
    if not num_blocks:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    is_break = np.zeros(num_blocks, np.bool_)
    is_break[0] = True
    for blocks in ids:
        is_break[1:] |= blocks[1:] != blocks[:-1] + 1
    firsts = np.flatnonzero(is_break)
    return firsts, np.diff(np.append(firsts, num_blocks))


are_blocks: Callable[[npt.NDArray[Any], int], bool] = are_blocks_in_python
with suppress(ExtensionMissingError):
    are_blocks = load("kv_transfer._block_moves").are_blocks
