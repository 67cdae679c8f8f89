"""A pool whose KV lies elsewhere than the memory that others map: block for block, and only when it is asked for."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kv_transfer.memory import KvMemory
from model_runner import kv_mirror, torch_runner
from model_runner.kv_mirror import KvMirror
from model_runner.kv_pool import KvPool
from tests.model_runner.conftest import load_runner

NUM_BLOCKS = 40
NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 3, 4, 2, 8

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def make_pool(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, *, mirrored: bool = True) -> KvPool:
    return KvPool(
        NUM_BLOCKS,
        NUM_LAYERS,
        BLOCK_SIZE,
        NUM_KV_HEADS,
        HEAD_DIM,
        dtype,
        torch.device(device),
        shared=True,
        mirrored=mirrored,
    )


def memory_of(pool: KvPool) -> KvMemory:
    assert pool.memory is not None
    return pool.memory


def fill(pool: KvPool) -> None:
    """No two blocks alike, and within a block no two positions."""
    torch.manual_seed(5)
    pool.blocks.copy_(torch.randn(pool.blocks.shape))


def pool_bytes(pool: KvPool) -> np.ndarray:
    """What the runner computes in; shape [num_blocks, block_size_bytes]."""
    return pool.blocks.reshape(NUM_BLOCKS, -1).view(torch.uint8).cpu().numpy()


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


SOME = [
    ids(7),
    ids(1, 2, 3, 4),
    ids(NUM_BLOCKS - 1, 0),
    ids(9, 3, 4, 21, 5, 20, 38),
    np.random.default_rng(3).permutation(NUM_BLOCKS)[:25].astype(np.int32),
]


def test_only_a_pool_whose_device_has_memory_of_its_own_is_mirrored() -> None:
    plain = make_pool(mirrored=False)
    assert not memory_of(plain).is_mirror
    fill(plain)
    assert (memory_of(plain).blocks == pool_bytes(plain)).all()
    assert memory_of(make_pool()).is_mirror


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_that_are_asked_for_come_to_the_host_and_no_others(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pool = make_pool(device, dtype)
        memory = memory_of(pool)
        assert memory.block_size_bytes == pool.blocks[0].numel() * dtype.itemsize
        fill(pool)
        for blocks in SOME:
            memory.blocks[:] = 0xEE
            memory.to_host(blocks)
            others = np.setdiff1d(np.arange(NUM_BLOCKS), blocks)
            assert (memory.blocks[blocks] == pool_bytes(pool)[blocks]).all(), blocks
            assert (memory.blocks[others] == 0xEE).all(), blocks
        memory.close()


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_that_are_asked_for_come_to_the_device_and_no_others(device: str) -> None:
    pool = make_pool(device)
    memory = memory_of(pool)
    memory.blocks[:] = np.random.default_rng(4).integers(0, 256, memory.blocks.shape, np.uint8)
    for blocks in SOME:
        fill(pool)
        before = pool_bytes(pool).copy()
        memory.to_device(blocks)
        others = np.setdiff1d(np.arange(NUM_BLOCKS), blocks)
        assert (pool_bytes(pool)[blocks] == memory.blocks[blocks]).all(), blocks
        assert (pool_bytes(pool)[others] == before[others]).all(), blocks
    memory.close()


def test_what_others_have_mapped_is_the_mirror() -> None:
    pool = make_pool()
    fill(pool)
    memory = memory_of(pool)
    memory.to_host(ids(3))
    size = memory.block_size_bytes
    assert os.pread(memory.fd, size, 3 * size) == pool_bytes(pool)[3].tobytes()


def test_a_host_too_small_for_the_mirror_is_told_before_weights_are_loaded(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([1 << 34, 1 << 16])
    monkeypatch.setattr(torch_runner, "available_memory_bytes", lambda: next(free))
    monkeypatch.setattr(torch_runner, "load_tensors", None)
    with pytest.raises(ValueError, match=r"mirror of the KV pool .* set num_blocks \(64\) to \d+ or less"):
        load_runner(tiny_dir, shared_kv=True, mirrored_kv=True)


@pytest.mark.parametrize("copy", ["to_host", "to_device"])
def test_blocks_that_there_are_none_of_are_refused_and_nothing_is_copied(copy: str) -> None:
    pool = make_pool()
    fill(pool)
    memory = memory_of(pool)
    memory.blocks[:] = 0xEE
    before = pool_bytes(pool).copy()
    for wrong in (ids(3, NUM_BLOCKS), ids(-1, 3)):
        message = f"pool has blocks 0 to {NUM_BLOCKS - 1}, and block {wrong[wrong != 3][0]} was asked for"
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(memory, copy)(wrong)
    getattr(memory, copy)(ids())
    assert (memory.blocks == 0xEE).all()
    assert (pool_bytes(pool) == before).all()


@pytest.mark.parametrize("device", DEVICES)
def test_closed_it_has_given_its_descriptor_back(device: str) -> None:
    pool = make_pool(device)
    num_before = len(os.listdir("/proc/self/fd"))
    memory = memory_of(make_pool(device))
    memory.close()
    memory.close()
    del memory
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == num_before
    memory_of(pool).close()


def test_memory_that_cannot_be_locked_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            return 2

    def check_error(result: int) -> None:
        raise RuntimeError(f"out of memory ({result})")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    with pytest.raises(ValueError, match=r"16 bytes .* page-locked \(out of memory \(2\)\): lower num_blocks"):
        kv_mirror._lock_pages(torch.zeros(16, dtype=torch.uint8))


@pytest.mark.parametrize("fails", [False, True])
def test_on_cuda_copies_wait_for_what_is_computed_and_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """As far as that can be seen without a device: what is called, in which order."""
    calls: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda"

        def wait_stream(self, other: str) -> None:
            calls.append(f"waits for {other}")

        def synchronize(self) -> None:
            calls.append("is waited for")

    @contextlib.contextmanager
    def current(stream: Stream) -> Iterator[None]:
        calls.append("is current")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"the default stream of {device}")
    with contextlib.suppress(RuntimeError), kv_mirror._in_order(torch.device("cuda", 0)):
        calls.append("copies")
        if fails:
            raise RuntimeError
    assert calls == ["waits for the default stream of cuda:0", "is current", "copies", "is waited for"]


@needs_cuda
def test_copies_follow_what_has_been_queued_before() -> None:
    """A kernel that takes long still runs when the copies are asked for."""
    pool = make_pool("cuda")
    memory = memory_of(pool)
    assert isinstance(memory, KvMirror)
    square = torch.randn(4096, 4096, device="cuda")
    for _ in range(100):
        square = square @ square
        square /= square.norm()
    pool.blocks[5].fill_(1.0)
    memory.to_host(ids(5))
    assert (memory.blocks[5].view(np.uint16) == 0x3F80).all()
    for _ in range(100):
        square = square @ square
        square /= square.norm()
    pool.blocks[6].fill_(1.0)
    memory.blocks[6].view(np.uint16)[:] = 0x4000
    memory.to_device(ids(6))
    assert (pool.blocks[6] == 2.0).all()
    memory.close()
