"""The hash chain of `prefix_chain` over arrays of tokens, as a rank's scheduler makes it block by block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kv_transfer.extension import ExtensionMissingError, load
from rank_scheduler.plan import Int32Array
from rank_scheduler.prefix_chain import ROOT_HASH as ROOT_HASH
from rank_scheduler.prefix_chain import ExtraKeys as ExtraKeys

_LITTLE_ENDIAN = np.dtype("<i4")


def extend_block_hashes(
    hashes: list[bytes], token_ids: Int32Array, block_size: int, extra: ExtraKeys | None = None
) -> None:
    """Append to `hashes` until every full block of `token_ids` (shape [n]) has one."""
    first, num_blocks = len(hashes), len(token_ids) // block_size
    if first >= num_blocks:
        return
    token_ids = np.ascontiguousarray(token_ids[first * block_size : num_blocks * block_size], _LITTLE_ENDIAN)
    parent = hashes[-1] if hashes else ROOT_HASH
    if extra is not None:
        keyed = token_ids[: max(0, extra.end - first * block_size + block_size - 1) // block_size * block_size]
        for index, row in enumerate(keyed.reshape(-1, block_size), first):
            keys = extra.for_block(index * block_size, (index + 1) * block_size)
            parent = hashlib.sha256(parent + row.tobytes() + keys).digest()
            hashes.append(parent)
        token_ids = token_ids[len(keyed) :]
    hashes += hash_run(parent, token_ids, block_size)


def hash_blocks(parents: list[bytes], token_rows: Int32Array) -> list[bytes]:
    """Hashes of one block without extra keys per row; `parents`: one each, `token_rows`: shape [n, block_size]."""
    return hash_rows(parents, np.ascontiguousarray(token_rows, _LITTLE_ENDIAN))


def hash_run_in_python(parent: bytes, token_ids: Int32Array, block_size: int, /) -> list[bytes]:
    """Hashes of the full blocks without extra keys in `token_ids` (shape [n]), which follow the block of `parent`."""
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: it must be at least 1")
    rows = token_ids[: len(token_ids) // block_size * block_size].reshape(-1, block_size)
    return [parent := hashlib.sha256(parent + row).digest() for row in _row_bytes(rows)]


def hash_rows_in_python(parents: list[bytes], token_rows: Int32Array, /) -> list[bytes]:
    """`hash_blocks` of a contiguous array."""
    if len(parents) != len(token_rows):
        raise ValueError(f"{len(parents)} parents for {len(token_rows)} rows")
    rows = _row_bytes(token_rows)
    return [hashlib.sha256(parent + row).digest() for parent, row in zip(parents, rows, strict=True)]


def _row_bytes(token_rows: Int32Array) -> list[bytes]:
    # One bytes object per row in a single call: half the time of slicing.
    row_bytes: list[bytes] = token_rows.view(f"V{4 * token_rows.shape[1]}").ravel().tolist()
    return row_bytes


HashRun = Callable[[bytes, Int32Array, int], list[bytes]]
HashRows = Callable[[list[bytes], Int32Array], list[bytes]]

hash_run: HashRun = hash_run_in_python
hash_rows: HashRows = hash_rows_in_python
with suppress(ExtensionMissingError):
    _twin = load("rank_scheduler._prefix_hash")
    hash_run, hash_rows = _twin.hash_run, _twin.hash_rows
