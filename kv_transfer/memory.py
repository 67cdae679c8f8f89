"""A rank's KV pool as bytes: what transports read and write, and what the model runner computes in."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt


class KvMemory:
    """`num_blocks` blocks of `block_size_bytes` each, block-major, in one anonymous memory file.

    The file has no name anywhere: other processes map it only if they are sent its descriptor, and it is gone with
    the last process that has it open, however that ends. Its pages are shared memory (`Shmem` in /proc/meminfo), and
    count against a container's memory, not against its /dev/shm.
    """

    is_mirror = False
    """The runner computes elsewhere: `to_host` and `to_device` have work to do."""

    def __init__(self, num_blocks: int, block_size_bytes: int) -> None:
        """Raises ValueError for sizes below 1, OSError if there is not so much address space."""
        if num_blocks < 1 or block_size_bytes < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size_bytes} bytes holds nothing")
        self.num_blocks = num_blocks
        self.block_size_bytes = block_size_bytes
        self.fd = os.memfd_create("serried-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """Of the memory file; `size_bytes` long. Owned by this object."""
        try:
            os.ftruncate(self.fd, self.size_bytes)
            # Who maps a file that shrinks is killed by SIGBUS; peers map this one only because it cannot.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, self.size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.blocks: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8).reshape(num_blocks, block_size_bytes)
        """Shape [num_blocks, block_size_bytes]; writes are seen by everybody who maps the file."""

    @property
    def size_bytes(self) -> int:
        return self.num_blocks * self.block_size_bytes

    @property
    def buffer(self) -> mmap.mmap:
        """All blocks as one writable buffer."""
        return self._map

    def to_host(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Bring these blocks, shape [n], up to date here, before somebody reads them here; returns when that is done.

        By the thread that executes steps, after the step that has written them. Nothing to do where the runner
        computes in this very memory.
        """

    def to_device(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Bring these blocks, which were written here, to where the runner computes; returns when that is done.

        By any thread, before a step that reads them is executed. Nothing to do where it computes in this memory.
        """

    def close(self) -> None:
        """Give the descriptor back. The mapping itself lives as long as arrays over it do. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
