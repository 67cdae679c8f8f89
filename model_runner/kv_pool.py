"""The paged KV cache of one rank, block-major: all layers' K and V of a block lie contiguously."""

from __future__ import annotations

import torch

from kv_transfer.memory import KvMemory
from model_runner.kv_mirror import KvMirror


class KvPool:
    """K and V of `num_blocks` blocks; block 0 is the null block, never written.

    `blocks` has shape [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]; index 0 of the third
    dimension is K, 1 is V. Two flat views share its memory:

    - `slots` [num_blocks * num_layers * 2 * block_size, num_kv_heads * head_dim]: one token's K or V per row;
    - `pages` [num_blocks * num_layers * 2, block_size * num_kv_heads * head_dim]: one block's K or V of a layer.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        shared: bool = False,
        mirrored: bool = False,
    ) -> None:
        """`shared`: in a `KvMemory`, which other processes may map.

        That is a copy of the pool (`KvMirror`) if the device has memory of its own; on the CPU too if `mirrored`.
        """
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)
        self.memory: KvMemory | None = None
        """Of a shared pool."""
        is_mirrored = mirrored or device.type != "cpu"
        if shared and not is_mirrored:
            size_bytes = num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize
            self.memory = KvMemory(num_blocks, size_bytes)
            blocks = torch.frombuffer(self.memory.buffer, dtype=dtype).view(shape)
        else:
            blocks = torch.empty(shape, dtype=dtype, device=device)
        # Filled, not `torch.zeros`: pages that were never written would only be promised by the system.
        self.blocks = blocks.fill_(0)
        if shared and is_mirrored:
            self.memory = KvMirror(self.blocks)
        self.slots = self.blocks.view(num_blocks * num_layers * 2 * block_size, num_kv_heads * head_dim)
        self.pages = self.blocks.view(num_blocks * num_layers * 2, block_size * num_kv_heads * head_dim)

    def copy_block(self, source: int, destination: int) -> None:
        self.blocks[destination].copy_(self.blocks[source])

    def zero_blocks(self, block_ids: torch.Tensor) -> None:
        """Forget what the blocks held, so that a position read only under a mask is finite (0 x NaN is NaN)."""
        self.blocks.index_fill_(0, block_ids, 0)
