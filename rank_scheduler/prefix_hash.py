"""Hash chain over full blocks of tokens: equal hashes mean equal tokens from the sequence's start on."""

from __future__ import annotations

import hashlib

import numpy as np

from rank_scheduler.plan import Int32Array

# Any fixed value: every rank of every process must compute equal hashes for equal prefixes.
_ROOT = hashlib.sha256(b"serried prefix chain").digest()


def extend_block_hashes(hashes: list[bytes], token_ids: Int32Array, block_size: int) -> None:
    """Append to `hashes` until every full block of `token_ids` (shape [n]) has one.

    hash(block) = SHA-256(hash(previous block) or the root, the block's tokens as little-endian int32).
    """
    tokens = np.ascontiguousarray(token_ids, dtype="<i4")
    parent = hashes[-1] if hashes else _ROOT
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + tokens[start : start + block_size].tobytes()).digest()
        hashes.append(parent)
