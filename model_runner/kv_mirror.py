"""A KV pool on a device, as bytes in host memory: what connectors and their transports read and write of it.

The mirror has a place for every block of the pool, and a block is copied only when somebody asks: `to_host` before it
is read here, `to_device` after it has been written here. In between, the two may differ. Copies are made by runs of
neighbouring blocks, with nothing between pool and mirror, by the thread that calls; several may at the same time.

**On CUDA** the runner computes on the device's default stream. A copy is queued on a stream of its own behind what has
been queued there so far, so it neither reads what is still to be written nor is overwritten by it (by a step's zeroing
of fresh blocks); whoever asked is kept until it is done, so what is queued after that, in any thread, sees it. The
mirror is page-locked: the device copies by itself, and other streams go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.block_runs import check_block_ids, find_runs
from kv_transfer.memory import KvMemory


class KvMirror(KvMemory):
    is_mirror = True

    def __init__(self, pool: torch.Tensor) -> None:
        """`pool`: contiguous, shape [num_blocks, ...]. Raises ValueError if the mirror cannot be page-locked."""
        self._pool = pool.view(len(pool), -1).view(torch.uint8)
        super().__init__(*self._pool.shape)
        # Filled: pages that were never written would only be promised by the system.
        self._host = torch.frombuffer(self.buffer, dtype=torch.uint8).view(self._pool.shape).fill_(0)
        self._is_locked = pool.device.type == "cuda"
        if self._is_locked:
            _lock_pages(self._host)

    def to_host(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Raises ValueError for ids that the pool does not have."""
        self._copy(self._pool, self._host, block_ids)

    def to_device(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Raises ValueError for ids that the pool does not have."""
        self._copy(self._host, self._pool, block_ids)

    def close(self) -> None:
        """Called when nobody copies any more."""
        super().close()
        if self._is_locked:
            self._is_locked = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr()))

    def _copy(self, source: torch.Tensor, target: torch.Tensor, block_ids: npt.NDArray[np.int32]) -> None:
        # Sorted, so that runs are as long as can be.
        ids = np.unique(check_block_ids(block_ids, self.num_blocks, "this rank's"))
        firsts, lengths = find_runs(ids)
        with _in_order(self._pool.device):
            for first, length in zip(ids[firsts].tolist(), lengths.tolist(), strict=True):
                target[first : first + length].copy_(source[first : first + length], non_blocking=True)


@contextlib.contextmanager
def _in_order(device: torch.device) -> Iterator[None]:
    """Copies within it follow what the device has been given to compute so far, and are done at its end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        # Also after an error: a copy that was queued before it would write later.
        stream.synchronize()


def _lock_pages(host: torch.Tensor) -> None:
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0))
    except RuntimeError as error:
        raise ValueError(
            f"{host.numel()} bytes of host memory, the mirror of the KV pool, cannot be page-locked ({error}): lower "
            "num_blocks or memory_gib, or leave kv_transfer.kv_connector out"
        ) from error
