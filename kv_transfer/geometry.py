"""What two ranks must have in common for one to use the other's KV."""

from __future__ import annotations

import hashlib

import msgspec

KV_PROTOCOL_VERSION = 1
"""Of the control plane's messages and of the layout of a block."""


class Geometry(msgspec.Struct, frozen=True):
    """Shape and meaning of a KV block."""

    model: str
    """Fingerprint of the checkpoint: equal only for equal weights."""
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Token positions."""
    num_groups: int
    block_size_bytes: int

    @property
    def layer_size_bytes(self) -> int:
        """K and V of one layer of a block; layer l of a block begins at l times this."""
        return self.block_size_bytes // self.num_layers

    def check_pool(self, block_size_bytes: int) -> None:
        """Raises ValueError unless blocks of so many bytes are what this describes."""
        if block_size_bytes != self.block_size_bytes:
            raise ValueError(
                f"the pool's blocks have {block_size_bytes} bytes, and the geometry says {self.block_size_bytes}: "
                "one of them is wrong"
            )

    def fingerprint(self) -> str:
        """Equal for ranks that may exchange KV."""
        return hashlib.sha256(msgspec.json.encode((KV_PROTOCOL_VERSION, self))).hexdigest()

    def differences(self, other: Geometry) -> str:
        """What differs, for people; empty if nothing does."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__]
        return ", ".join(f"{name} {ours!r} here and {theirs!r} there" for name, ours, theirs in pairs if ours != theirs)
