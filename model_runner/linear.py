"""Linear layers, on the CPU with weights packed once for oneDNN's kernels.

Packed weights are quicker for small batches, and a row's result is bit for bit the same whatever other rows are in
the batch (measured in float32 with torch 2.13), which MKL's kernels behind `F.linear` do not give.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PACKED_FOR_ROWS = 512
"""Batch size that oneDNN is told when it picks the layout; the layout serves every size."""


class Linear:
    """y = x W^T + b on `device`; `weight` is [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device) -> None:
        self._packed = device.type == "cpu" and _packs(weight.dtype)
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
        else:
            self._weight = weight.to(device)
        self._bias = None if bias is None else bias.to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [rows, in] → [rows, out]."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)


def _packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
