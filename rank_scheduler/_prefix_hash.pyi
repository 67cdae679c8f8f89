"""See `rank_scheduler.prefix_hash`, which has the first two in Python."""

from rank_scheduler.plan import Int32Array

SOURCE_HASH: str

def hash_run(parent: bytes, token_ids: Int32Array, block_size: int, /) -> list[bytes]: ...
def hash_rows(parents: list[bytes], token_rows: Int32Array, /) -> list[bytes]: ...
def sha256(data: bytes, /) -> bytes: ...
def sha256_portably(data: bytes, /) -> bytes:
    """Without the processor's own instructions for it."""
