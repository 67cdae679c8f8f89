"""Attention over the paged KV cache, on torch's scaled-dot-product kernels.

Everything that all layers share (which rows to write, which pages to read, masks) is built once per step. Query
heads that share a KV head are folded into the query positions of tokens that attend alone, and expanded with stride 0
for chunks, so that K and V are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from model_runner.batch import PersistentBatch, StepRows
from model_runner.kv_pool import KvPool
from rank_scheduler.plan import BoolArray, Int32Array, Int64Array

MAX_GROUP_POSITIONS = 2560
"""Padded positions that one group of tokens reads at once: what is gathered stays in the cache."""
MAX_GROUP_STRETCH = 1.25
"""Longest over shortest context within a group: bounds what is read only as padding."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Tokens [first, last) that attend alone, computed together."""

    first: int
    last: int
    pages: torch.Tensor
    """Index into `KvPool.pages` per layer, shape [num_layers, 2 * contexts * blocks]: K, then V.

    One context per token, or a single one if all tokens are of one sequence."""
    context_len: int
    """The longest, in whole blocks."""
    mask: torch.Tensor | None
    """0 or -inf, shape [tokens, 1, 1, context_len]; None if all contexts are as long."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive tokens [first, last) of one sequence."""

    first: int
    last: int
    pages: torch.Tensor
    """Shape [num_layers, 2 * blocks]."""
    context_len: int
    mask: torch.Tensor | None
    """0 or -inf, shape [tokens, context_len]; None if the chunk starts the sequence (plainly causal)."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's index arrays and masks, shared by all layers."""

    writes: torch.Tensor
    """Index into `KvPool.slots` per layer, shape [num_layers, tokens, 2]: where each token's K and V go."""
    groups: list[_Group]
    chunks: list[_Chunk]
    gathered: torch.Tensor
    """Room for the pages of the largest group or chunk; reused by all, so that it stays in the processor's cache."""


def plan_attention(rows: StepRows, batch: PersistentBatch, pool: KvPool, dtype: torch.dtype) -> AttentionPlan:
    device = pool.blocks.device
    num_layers, block_size = pool.num_layers, pool.block_size
    layers = 2 * np.arange(num_layers, dtype=np.int64)[:, None]

    def page_index(table: Int32Array) -> torch.Tensor:
        keys = (table.astype(np.int64) * (2 * num_layers)).reshape(-1)
        return torch.from_numpy(np.concatenate((keys, keys + 1)) + layers).to(device)

    keys = (rows.block_ids[0] * (2 * num_layers) + layers) * block_size + rows.block_offsets
    writes = torch.from_numpy(np.stack((keys, keys + block_size), axis=-1)).to(device)
    block_table = batch.block_table[0]

    lengths, slots = rows.positions[: rows.num_single] + 1, rows.token_slots[: rows.num_single]
    groups = []
    for first, last in _cut_groups(lengths, slots):
        num_blocks = -(-int(lengths[first:last].max()) // block_size)
        # Whole blocks, so that a token's sums are split in the same way whoever else is in the group.
        longest = num_blocks * block_size
        table = block_table[slots[first:last] if slots[first] != slots[last - 1] else slots[first], :num_blocks]
        mask = None
        if lengths[first] < longest:
            hidden = np.arange(longest) >= lengths[first:last, None]
            mask = _additive(hidden, dtype, device)[:, None, None]
        groups.append(_Group(first, last, page_index(table), longest, mask))

    chunks = []
    first = rows.num_single
    for row in rows.chunk_rows.tolist():
        start, length = int(rows.starts[row]), int(rows.context_lens[row])
        table = block_table[rows.slots[row], : -(-length // block_size)]
        mask = None
        if start:
            hidden = np.arange(length) > np.arange(start, length)[:, None]
            mask = _additive(hidden, dtype, device)
        last = first + length - start
        chunks.append(_Chunk(first, last, page_index(table), length, mask))
        first = last
    parts: list[_Group | _Chunk] = [*groups, *chunks]
    num_pages = max((part.pages.shape[1] for part in parts), default=0)
    return AttentionPlan(writes, groups, chunks, pool.pages.new_empty(num_pages, pool.pages.shape[1]))


def paged_attention(
    query: torch.Tensor, kv: torch.Tensor, layer: int, plan: AttentionPlan, pool: KvPool, out: torch.Tensor
) -> None:
    """Write this layer's K and V of all tokens into the pool, then attend.

    `query`: [tokens, num_kv_heads, query heads per KV head, head_dim]; `kv`: [tokens, 2, num_kv_heads * head_dim];
    `out`: as `query`, written.
    """
    # All writes come first: a row may read blocks that another row of this very step fills (shared prefixes).
    pool.slots.index_put_((plan.writes[layer],), kv)
    num_kv_heads, head_dim = pool.num_kv_heads, pool.head_dim
    for group in plan.groups:
        tokens = group.last - group.first
        pages = _gather(group, layer, plan, pool).view(2, -1, group.context_len, num_kv_heads, head_dim)
        keys, values = pages.transpose(2, 3).expand(-1, tokens, -1, -1, -1)
        out[group.first : group.last] = F.scaled_dot_product_attention(
            query[group.first : group.last], keys, values, attn_mask=group.mask
        )
    for chunk in plan.chunks:
        pages = _gather(chunk, layer, plan, pool).view(2, -1, num_kv_heads, head_dim)
        keys, values = (
            part.transpose(0, 1)[:, None].expand(-1, query.shape[2], -1, -1) for part in pages[:, : chunk.context_len]
        )
        attended = F.scaled_dot_product_attention(
            query[chunk.first : chunk.last].permute(1, 2, 0, 3),
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        out[chunk.first : chunk.last] = attended.permute(2, 0, 1, 3)


def _gather(part: _Group | _Chunk, layer: int, plan: AttentionPlan, pool: KvPool) -> torch.Tensor:
    pages = part.pages[layer]
    return torch.index_select(pool.pages, 0, pages, out=plan.gathered[: len(pages)])


def _cut_groups(lengths: Int64Array, slots: Int64Array) -> list[tuple[int, int]]:
    """Ranges of tokens to compute together: several tokens of one sequence (drafts), or one token each of several.

    `lengths` rises from sequence to sequence.
    """
    groups = []
    first = 0
    joined = np.append(slots[1:] == slots[:-1], False)
    for token in range(1, len(lengths) + 1):
        if token < len(lengths) and joined[token - 1]:
            continue
        if (
            token == len(lengths)
            or joined[first]
            or joined[token]
            or lengths[token] > MAX_GROUP_STRETCH * lengths[first]
            or (token + 1 - first) * lengths[token] > MAX_GROUP_POSITIONS
        ):
            groups.append((first, token))
            first = token
    return groups


def _additive(hidden: BoolArray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(device)
