"""A KV block as a file: a head that says what it is, then its layers one after another; pure.

    magic (8) | fingerprint of the geometry (32) | block hash (32) | layers (4) | bytes of a layer (8)
    | CRC-32 of each layer (4 each) | CRC-32 of all of the head before (4) | layer 0 | layer 1 | ...

Each layer has a checksum of its own, since it is used before the rest has been read. A file has exactly the length
that follows from the head: a write that was cut short shows.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

_MAGIC = b"SRRDKV01"
_FIXED = struct.Struct("<8s32s32sIQ")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Of the files of one geometry."""

    fingerprint: str
    num_layers: int
    layer_size_bytes: int

    @property
    def head_size_bytes(self) -> int:
        return _FIXED.size + 4 * self.num_layers + 4

    @property
    def file_size_bytes(self) -> int:
        return self.head_size_bytes + self.num_layers * self.layer_size_bytes

    def offset(self, layer: int) -> int:
        return self.head_size_bytes + layer * self.layer_size_bytes

    def head(self, block_hash: bytes, block: memoryview) -> bytes:
        """Of a block, which has the size of all layers."""
        size = self.layer_size_bytes
        sums = [zlib.crc32(block[layer * size : (layer + 1) * size]) for layer in range(self.num_layers)]
        head = self._fixed(block_hash) + struct.pack(f"<{self.num_layers}I", *sums)
        return head + struct.pack("<I", zlib.crc32(head))

    def checksums(self, head: bytes, block_hash: bytes) -> tuple[int, ...] | str:
        """Those of the layers, or what is wrong with the head."""
        if len(head) != self.head_size_bytes:
            return f"its head has {len(head)} of {self.head_size_bytes} bytes"
        if struct.unpack("<I", head[-4:])[0] != zlib.crc32(head[:-4]):
            return "its head is damaged"
        if head[: _FIXED.size] != self._fixed(block_hash):
            return "it is another block, or of another model, dtype or block size"
        sums: tuple[int, ...] = struct.unpack(f"<{self.num_layers}I", head[_FIXED.size : -4])
        return sums

    def _fixed(self, block_hash: bytes) -> bytes:
        return _FIXED.pack(
            _MAGIC, bytes.fromhex(self.fingerprint), block_hash, self.num_layers, self.layer_size_bytes
        )  # fmt: skip
