"""What happened to the prefix cache, for whoever keeps an index of it. Order is that of the changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one sequence became findable."""

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    """None: the first block starts a sequence."""
    token_ids: tuple[int, ...]
    """Of all these blocks, `block_size` each."""
    group: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block's content was given up."""

    block_hash: bytes
    group: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is findable any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
