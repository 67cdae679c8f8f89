"""Hash chain over full blocks of tokens: equal hashes mean equal content from the sequence's start on.

hash(block) = SHA-256(hash(previous block) or the root, the block's tokens as little-endian int32, its extra keys).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rank_scheduler.plan import Int32Array

# Any fixed value: every rank of every process must compute equal hashes for equal prefixes.
ROOT_HASH = hashlib.sha256(b"serried prefix chain").digest()
"""Parent of a sequence's first block."""


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What besides tokens makes two sequences differ."""

    salt: str = ""
    """Goes into the first block, and so into all."""
    items: tuple[tuple[bytes, int, int], ...] = ()
    """(identifier, offset, length) of encoder items, in positions; in order of offset, not overlapping."""

    @property
    def end(self) -> int:
        """Blocks that start here or later have no extra keys."""
        if self.items:
            _, offset, length = self.items[-1]
            return offset + length
        return 1 if self.salt else 0

    def for_block(self, start: int, end: int) -> bytes:
        """Extra keys of the block at positions [start, end); empty if it has none.

        The salt (empty but in the first block), then each overlapping item's identifier and its offset from the
        block's start, which may be negative. Strings carry their length, so that no two lists of keys read alike.
        """
        salt = self.salt.encode() if start == 0 else b""
        overlapping = []
        for identifier, offset, _ in self.items[bisect_right(self.items, start, key=_item_end) :]:
            if offset >= end:
                break
            overlapping.append(_prefixed(identifier) + (offset - start).to_bytes(8, "little", signed=True))
        return _prefixed(salt) + b"".join(overlapping) if salt or overlapping else b""


class HashMemo:
    """Hashes of stretches of tokens that came lately, so that a prefix that comes again is not hashed again.

    Keys are the tokens themselves, with the hash that they follow: what is found is exact. Stretches have
    `NUM_BLOCKS` blocks and begin at multiples of it. One is kept when it comes for the second time, as most come
    once. When it is full, the older half goes.

    A token takes 4 bytes, and a block's hash 73: with blocks of 16, a million tokens take 9 MB.
    """

    NUM_BLOCKS = 16
    _MAX_NUM_SEEN = 1 << 16

    def __init__(self, capacity: int = 1 << 20) -> None:
        """`capacity` in tokens, of all stretches."""
        self._capacity = capacity
        self._num_tokens = 0
        self._hashes: dict[tuple[bytes, bytes], list[bytes]] = {}
        self._seen: set[int] = set()
        """Python's hashes of the keys that came once."""

    def get(self, parent: bytes, tokens: bytes) -> list[bytes] | None:
        """Hashes of the blocks of `tokens` (little-endian int32) behind the block with hash `parent`."""
        return self._hashes.get((parent, tokens))

    def put(self, parent: bytes, tokens: bytes, hashes: list[bytes]) -> None:
        key_hash = hash((parent, tokens))
        if key_hash not in self._seen:
            if len(self._seen) >= self._MAX_NUM_SEEN:
                self._seen.clear()
            self._seen.add(key_hash)
            return
        num_tokens = len(tokens) // 4
        if self._num_tokens + num_tokens > self._capacity:
            for key in list(self._hashes)[: (len(self._hashes) + 1) // 2]:
                del self._hashes[key]
                self._num_tokens -= len(key[1]) // 4
        self._hashes[parent, tokens] = hashes
        self._num_tokens += num_tokens


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Int32Array,
    block_size: int,
    extra: ExtraKeys | None = None,
    memo: HashMemo | None = None,
) -> None:
    """Append to `hashes` until every full block of `token_ids` (shape [n]) has one."""
    if memo is not None and extra is None and len(hashes) % HashMemo.NUM_BLOCKS == 0:
        _extend_by_memo(hashes, token_ids, block_size, memo)
    first, num_blocks = len(hashes), len(token_ids) // block_size
    if first >= num_blocks:
        return
    rows = _row_bytes(token_ids[first * block_size : num_blocks * block_size].reshape(-1, block_size))
    parent = hashes[-1] if hashes else ROOT_HASH
    num_keyed = 0 if extra is None else max(0, -(-extra.end // block_size) - first)
    sha256 = hashlib.sha256
    if extra is not None:
        for index, row in enumerate(rows[:num_keyed], first):
            keys = extra.for_block(index * block_size, (index + 1) * block_size)
            parent = sha256(parent + row + keys).digest()
            hashes.append(parent)
    hashes += [parent := sha256(parent + row).digest() for row in rows[num_keyed:]]


def _extend_by_memo(hashes: list[bytes], token_ids: Int32Array, block_size: int, memo: HashMemo) -> None:
    """Append the hashes of whole stretches; those that are new are remembered."""
    stretch = HashMemo.NUM_BLOCKS * block_size
    first = len(hashes) * block_size
    num_stretches = (len(token_ids) - first) // stretch
    if num_stretches <= 0:
        return
    before = parent = hashes[-1] if hashes else ROOT_HASH
    data = token_ids[first : first + num_stretches * stretch].astype("<i4", copy=False).tobytes()
    sha256, size, block_bytes = hashlib.sha256, 4 * stretch, 4 * block_size
    for start in range(0, len(data), size):
        tokens = data[start : start + size]
        known = memo.get(before, tokens)
        if known is None:
            known = [
                parent := sha256(parent + data[at : at + block_bytes]).digest()
                for at in range(start, start + size, block_bytes)
            ]
            memo.put(before, tokens, known)
        hashes += known
        before = parent = known[-1]


def hash_blocks(parents: Sequence[bytes], token_rows: Int32Array) -> list[bytes]:
    """Hashes of one block without extra keys per row; `parents`: one each, `token_rows`: shape [n, block_size]."""
    sha256 = hashlib.sha256
    return [sha256(parent + row).digest() for parent, row in zip(parents, _row_bytes(token_rows), strict=True)]


def _row_bytes(token_rows: Int32Array) -> list[bytes]:
    rows = np.ascontiguousarray(token_rows, dtype="<i4")
    # One bytes object per row in a single call: half the time of slicing.
    row_bytes: list[bytes] = rows.view(f"V{4 * rows.shape[1]}").ravel().tolist()
    return row_bytes


def _item_end(item: tuple[bytes, int, int]) -> int:
    return item[1] + item[2]


def _prefixed(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value
