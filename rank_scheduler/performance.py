"""What a step costs, from the model's shape, and how well the machine was used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    flops: float
    """Of linears and attention; norms, rotations and sampling are not counted."""
    size_bytes: float
    """Weights and KV that must be read or written at least once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerformanceModel:
    """A model's shape and its machine's calibrated limits."""

    num_layer_weights: int
    """Weights of all layers' linears (not embedding, not head)."""
    num_head_weights: int
    num_layers: int
    num_attention_heads: int
    head_dim: int
    weight_dtype_size_bytes: int
    kv_size_bytes_per_token: int
    """K and V of all layers."""
    peak_flops_per_s: float
    peak_bytes_per_s: float

    def estimate(self, *, num_tokens: int, num_sampled: int, num_attended: int, num_context_tokens: int) -> StepCost:
        """`num_tokens`: computed; `num_sampled`: of them, those with logits.

        `num_attended`: positions attended to, the token's own included, summed over the computed tokens;
        `num_context_tokens`: computed before the step, summed over rows. Where layers have windows: means over layers.
        """
        if not num_tokens:
            return StepCost(0.0, 0.0)
        head = self.num_head_weights if num_sampled else 0
        linears = 2 * self.num_layer_weights * num_tokens + 2 * head * num_sampled
        # A product with K and one with V, each a multiplication and an addition per head, dimension and position.
        attention = 4 * self.num_layers * self.num_attention_heads * self.head_dim * num_attended
        weights = self.weight_dtype_size_bytes * (self.num_layer_weights + head)
        kv = self.kv_size_bytes_per_token * (num_context_tokens + num_tokens)
        return StepCost(float(linears + attention), float(weights + kv))

    def utilisation(self, cost: StepCost, duration_s: float) -> float:
        """The larger share of the two limits that a step of this cost reached in this time, 0..1 or so."""
        if duration_s <= 0:
            return 0.0
        return max(cost.flops / self.peak_flops_per_s, cost.size_bytes / self.peak_bytes_per_s) / duration_s
