"""Hash chain over full blocks of tokens: equal hashes mean equal content from the sequence's start on.

hash(block) = SHA-256(hash(previous block) or the root, the block's tokens as little-endian int32, its extra keys).

Whoever wants to know what a rank may have computed already makes the same chain here, without numpy; ranks do it with
arrays (`prefix_hash`). To others, hashes go by their first HASH_BYTES: should two of them ever be alike there, somebody
expects a hit that a rank does not find, or the other way round. What a rank reuses is decided by whole hashes alone.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from kv_transfer.extension import ExtensionMissingError, load

HASH_BYTES = 8
"""Of a hash, in what others are told."""
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


def chain(token_ids: bytes, block_size: int, extra: ExtraKeys | None = None) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, little-endian int32."""
    row_size = 4 * block_size
    size = len(token_ids) // row_size * row_size
    hashes: list[bytes] = []
    parent, at = ROOT_HASH, 0
    while extra is not None and at < size and at // 4 < extra.end:
        keys = extra.for_block(at // 4, at // 4 + block_size)
        parent = hashlib.sha256(parent + token_ids[at : at + row_size] + keys).digest()
        hashes.append(parent)
        at += row_size
    return hashes + _hash_run(parent, token_ids[at:size], block_size)


def pack(hashes: Iterable[bytes]) -> bytes:
    """The first HASH_BYTES of each."""
    return b"".join([block_hash[:HASH_BYTES] for block_hash in hashes])


def unpack(packed: bytes) -> tuple[int, ...]:
    """A number for each hash that was packed. Raises ValueError if these are not whole hashes."""
    count, rest = divmod(len(packed), HASH_BYTES)
    if rest:
        raise ValueError(f"{len(packed)} bytes are not hashes of {HASH_BYTES} each")
    return struct.unpack(f"<{count}Q", packed)


def hash_run_in_python(parent: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
    """Hashes of blocks without extra keys, which follow the block of `parent`."""
    size = 4 * block_size
    rows = (token_ids[at : at + size] for at in range(0, len(token_ids), size))
    return [parent := hashlib.sha256(parent + row).digest() for row in rows]


def _item_end(item: tuple[bytes, int, int]) -> int:
    return item[1] + item[2]


def _prefixed(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value


_hash_run: Callable[[bytes, bytes, int], list[bytes]] = hash_run_in_python
if sys.byteorder == "little":
    with suppress(ExtensionMissingError):
        _twin = load("rank_scheduler._prefix_hash")

        def _hash_run(parent: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
            hashes: list[bytes] = _twin.hash_run(parent, memoryview(token_ids).cast("i"), block_size)
            return hashes
