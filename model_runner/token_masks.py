"""Which tokens may not be picked: grammars' bitmasks, and the ends that `min_tokens` forbids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rank_scheduler.plan import Int32Array, UInt32Array


def unpacked(masks: UInt32Array, vocab_size: int) -> torch.Tensor:
    """Bitmasks [m, ceil(vocab_size / 32)], lowest bit first → bool [m, vocab_size]."""
    words = -(-vocab_size // 32)
    if masks.ndim != 2 or masks.shape[1] != words:
        raise RuntimeError(f"the plan's masks have shape {masks.shape}, and {vocab_size} tokens need {words} words")
    octets = np.ascontiguousarray(masks, "<u4").view(np.uint8)
    return torch.from_numpy(np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little")).view(torch.bool)


def restrict(
    logits: torch.Tensor, masked: Int32Array, masks: UInt32Array | None, forbidden: Mapping[int, Sequence[int]]
) -> None:
    """Put -inf into `logits` [sampled, vocab_size] where a token may not be picked.

    `masked`: the rows that `masks` are for; `forbidden`: row → token ids.
    """
    if masks is not None:
        refused = unpacked(masks, logits.shape[1]).logical_not_().to(logits.device)
        for row, tokens in zip(masked.tolist(), refused, strict=True):
            logits[row].masked_fill_(tokens, float("-inf"))
    if forbidden:
        rows = np.repeat(np.fromiter(forbidden, np.int64), [len(ids) for ids in forbidden.values()])
        ids = np.concatenate([np.asarray(ids, np.int64) for ids in forbidden.values()])
        logits[torch.from_numpy(rows).to(logits.device), torch.from_numpy(ids).to(logits.device)] = float("-inf")
