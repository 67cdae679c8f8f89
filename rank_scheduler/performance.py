"""What a step costs, from the model's shape, and how well the machine was used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    flops: float
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
    weight_size_bytes: int
    """Of all weights that one step reads."""
    kv_size_bytes_per_token: int
    peak_flops_per_s: float
    peak_bytes_per_s: float

    def estimate(
        self, *, num_tokens: int, num_sampled: int, num_attended: int, num_context_tokens: int
    ) -> StepCost:
        """`num_attended`: positions attended to, summed over computed tokens; `num_context_tokens`: summed over rows."""
        linears = 2 * self.num_layer_weights * num_tokens + 2 * self.num_head_weights * num_sampled
        attention = 4 * self.num_layers * self.num_attention_heads * self.head_dim * num_attended
        moved = self.weight_size_bytes + self.kv_size_bytes_per_token * (num_context_tokens + num_tokens)
        return StepCost(float(linears + attention), float(moved))

    def utilisation(self, cost: StepCost, duration_s: float) -> float:
        """The larger share of the two limits that a step of this cost reached in this time, 0..1 or so."""
        if duration_s <= 0:
            return 0.0
        return max(cost.flops / self.peak_flops_per_s, cost.size_bytes / self.peak_bytes_per_s) / duration_s
