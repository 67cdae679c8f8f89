"""A store of KV blocks by prefix hash: what store connectors need of it, and what is known of its content.

A block's hash stands for all tokens up to the block's end, so equal hashes mean equal KV, if model, dtype and block
size are equal as well: a store adds the geometry's fingerprint to every key (`block_key`) and checks what it reads.

Every call ends within a bounded time, and what goes wrong is a value: a store that is gone, full or damaged costs the
computation that it would have saved, never a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.connector import RequestKey
from kv_transfer.geometry import Geometry

BlockArray = npt.NDArray[np.uint8]
"""Shape [n, block_size_bytes]."""


class StoreReason(StrEnum):
    """Why a block was not stored or loaded."""

    MISSING = "missing"
    """It was there when it was looked for."""
    CORRUPT = "corrupt"
    """What was found is truncated, damaged, or another block."""
    FULL = "full"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """The store does not answer, or has not lately and is left alone for a while."""
    ERROR = "error"
    """The store refuses, or something unexpected has happened."""
    BACKLOG = "backlog"
    """More was computed than could be written; what did not fit into the staging memory was left out."""
    NOT_FINITE = "not_finite"
    """The block holds numbers that are not finite: a computation has gone wrong."""
    ENDED = "ended"
    """Its request has ended, or the rank does."""


@dataclass(frozen=True, slots=True)
class StoreFailure:
    reason: StoreReason
    message: str


@dataclass(frozen=True, slots=True)
class StoreOutcome:
    num_blocks: int
    """How many of the blocks are there, were read or were written: for `contains` and `get` the leading ones."""
    failure: StoreFailure | None = None
    """Why not all, if anything went wrong."""


class BlockStore(Protocol):
    """Of one geometry. Methods may be called from any thread, and end within a bounded time."""

    is_local: bool
    """`put` is a copy within memory, which the step's thread may make."""
    num_blocks_per_call: int
    """At most so many blocks in one `get` or `put`."""

    def start(self) -> None:
        """Called once, first. Raises OSError or ValueError, with the remedy."""
        ...

    @property
    def accepts(self) -> bool:
        """Whether `put` would try at all; False while the store is left alone after a failure."""
        ...

    def contains(self, hashes: Sequence[bytes]) -> StoreOutcome: ...

    def get(self, hashes: Sequence[bytes], into: BlockArray) -> StoreOutcome:
        """Read blocks into the rows of `into`; those behind the leading ones that it tells of are undefined."""
        ...

    def put(self, hashes: Sequence[bytes], blocks: BlockArray) -> StoreOutcome: ...

    def maintain(self) -> None:
        """Called now and then, never together with `put`."""
        ...

    def num_evicted(self) -> int: ...

    def close(self) -> None:
        """Idempotent. Calls under way end soon, those that come later do nothing."""
        ...


class BlockIndex(Protocol):
    """What is known of a store without asking it. May be called from any thread; nothing blocks."""

    def may_hold(self) -> bool:
        """Whether there is any use in asking."""
        ...

    def num_leading(self, key: RequestKey, hashes: Sequence[bytes]) -> int | None:
        """How many leading blocks the store holds; None: not known yet, ask again. `key`: who asks."""
        ...

    def holds(self, block_hash: bytes) -> bool:
        """Whether the block need not be stored: it is there, or on its way, as far as is known."""
        ...

    def forget(self, key: RequestKey) -> None:
        """What was found out for this request is not needed, or was wrong."""
        ...

    def begin_storing(self, hashes: Sequence[bytes]) -> None: ...

    def end_storing(self, hashes: Sequence[bytes]) -> None: ...


def block_key(fingerprint: str, block_hash: bytes) -> bytes:
    """What a block of this geometry is called in any store; shape, model and dtype are part of it."""
    return f"{fingerprint[:32]}:{block_hash.hex()}".encode()


_EXPONENT_BITS = {"float32": ("<u4", 0x7F800000), "bfloat16": ("<u2", 0x7F80), "float16": ("<u2", 0x7C00)}


def finite_rows(blocks: BlockArray, dtype: str) -> npt.NDArray[np.bool_]:
    """Which blocks hold finite numbers only, shape [n]; of a dtype that is not known here, all."""
    kind = _EXPONENT_BITS.get(dtype)
    if kind is None:
        return np.ones(len(blocks), np.bool_)
    word, mask = kind
    finite: npt.NDArray[np.bool_] = ((blocks.view(word) & mask) != mask).all(axis=1)
    return finite


def check_geometry(geometry: Geometry, name: str) -> None:
    """Raises ValueError for blocks that a store cannot take one by one."""
    if geometry.num_groups != 1:
        raise ValueError(
            f"num_groups is {geometry.num_groups}, and {name} stores blocks of models with one group of layers; use "
            "another kv_connector, or set disable_hybrid_kv_cache_manager"
        )
