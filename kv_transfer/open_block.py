"""A block's file that is being read, layer by layer."""

from __future__ import annotations

import os
import zlib

import numpy as np
import numpy.typing as npt

from kv_transfer.block_file import BlockFormat
from kv_transfer.block_store import StoreFailure, StoreReason


class OpenBlock:
    """A block's file, whose head is right. Owned by whoever opened it."""

    def __init__(self, fd: int, file_format: BlockFormat, checksums: tuple[int, ...]) -> None:
        self._fd = fd
        self._format = file_format
        self._checksums = checksums

    def read_layer(self, layer: int, into: npt.NDArray[np.uint8]) -> StoreFailure | None:
        """`into`: contiguous, the size of a layer; undefined after a failure."""
        try:
            count = os.preadv(self._fd, [into.data], self._format.offset(layer))
        except OSError as error:
            return StoreFailure(StoreReason.ERROR, f"layer {layer} cannot be read: {error}")
        if count != len(into) or zlib.crc32(into.data) != self._checksums[layer]:
            return StoreFailure(StoreReason.CORRUPT, f"layer {layer} is damaged")
        return None

    def close(self) -> None:
        os.close(self._fd)
