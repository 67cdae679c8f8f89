"""The Llama-shaped decoder: one forward over the flattened tokens of all sequences of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from model_runner.attention import AttentionPlan, paged_attention
from model_runner.kv_pool import KvPool
from model_runner.linear import Linear
from model_runner.model_config import ModelConfig
from model_runner.runner import KvHooks
from model_runner.weights import Shape


@dataclass(frozen=True, slots=True)
class _Layer:
    """q, k and v are one matrix, gate and up another."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    """Per head, shape [num_attention_heads + num_key_value_heads, head_dim]."""
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name → shape of every tensor that a checkpoint of this config holds."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_hidden_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config.qkv_bias:
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        if config.o_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


class LlamaModel:
    """Weights on one device. `tensors` is emptied while they are fused, so that no weight is held twice for long."""

    def __init__(
        self, config: ModelConfig, tensors: dict[str, torch.Tensor], max_model_len: int, device: torch.device
    ) -> None:
        self.config = config
        self._device = device
        self._embedding = tensors.pop("model.embed_tokens.weight").to(device)
        self._norm = tensors.pop("model.norm.weight").to(device)
        head = self._embedding if config.tie_word_embeddings else tensors.pop("lm_head.weight")
        self._head = Linear(head, None, device)
        self._layers = [self._take_layer(index, tensors) for index in range(config.num_hidden_layers)]
        self._rotation = _rotation_table(config, max_model_len).to(device=device, dtype=self._embedding.dtype)

    def _take_layer(self, index: int, tensors: dict[str, torch.Tensor]) -> _Layer:
        config = self.config

        def take(*names: str) -> torch.Tensor:
            parts = [tensors.pop(f"model.layers.{index}.{name}") for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        def linear(*names: str, bias: bool = False) -> Linear:
            weight = take(*(f"{name}.weight" for name in names))
            return Linear(weight, take(*(f"{name}.bias" for name in names)) if bias else None, self._device)

        qk_norm = None
        if config.qk_norm:
            q_norms = take("self_attn.q_norm.weight").expand(config.num_attention_heads, -1)
            k_norms = take("self_attn.k_norm.weight").expand(config.num_key_value_heads, -1)
            qk_norm = torch.cat((q_norms, k_norms)).to(self._device)
        return _Layer(
            input_norm=take("input_layernorm.weight").to(self._device),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias),
            qk_norm=qk_norm,
            out=linear("self_attn.o_proj", bias=config.o_bias),
            post_norm=take("post_attention_layernorm.weight").to(self._device),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
            down=linear("mlp.down_proj"),
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        pool: KvPool,
        kv_hooks: KvHooks | None = None,
    ) -> torch.Tensor:
        """Compute `token_ids` [tokens] at `positions` [tokens], K and V into `pool`.

        Returns their hidden states [tokens, hidden_size], for `logits`.
        """
        config = self.config
        num_tokens, head_dim, inner = len(token_ids), config.head_dim, config.intermediate_size
        q_size = config.num_attention_heads * head_dim
        num_rotated = config.num_attention_heads + config.num_key_value_heads
        hidden_shape, eps = (config.hidden_size,), config.rms_norm_eps
        # Halves of a head side by side, so that rotating is: x * cos + swapped halves of x * (-sin, sin).
        cos, sin = self._rotation[positions][:, :, None].unbind(1)

        hidden = F.embedding(token_ids, self._embedding)
        attended = hidden.new_empty(num_tokens, config.num_key_value_heads, config.num_query_groups, head_dim)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(F.rms_norm(hidden, hidden_shape, layer.input_norm, eps))
            qk = qkv[:, : num_rotated * head_dim].view(num_tokens, num_rotated, head_dim)
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, (head_dim,), None, eps) * layer.qk_norm)
            halves = qk.view(num_tokens, num_rotated, 2, head_dim // 2)
            swapped = halves.flip(2).view(num_tokens, num_rotated, head_dim)
            qk.mul_(cos).addcmul_(swapped, sin)
            query, kv = qkv[:, :q_size].view(attended.shape), qkv[:, q_size:].view(num_tokens, 2, -1)
            if kv_hooks is not None:
                kv_hooks.wait_for_layer_load(index)
            paged_attention(query, kv, index, plan, pool, attended)
            if kv_hooks is not None:
                kv_hooks.save_kv_layer(index)
            hidden += layer.out(attended.view(num_tokens, q_size))
            gate_up = layer.gate_up(F.rms_norm(hidden, hidden_shape, layer.post_norm, eps))
            hidden += layer.down(F.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:]))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 [rows, vocab_size], of what follows the tokens with the states `hidden` [rows, hidden_size]."""
        config = self.config
        return self._head(F.rms_norm(hidden, (config.hidden_size,), self._norm, config.rms_norm_eps)).float()


def _rotation_table(config: ModelConfig, max_model_len: int) -> torch.Tensor:
    """(cos, cos) and (-sin, sin) over the halves of a head, shape [max_model_len, 2, head_dim], float32."""
    half = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.float32(config.rope_theta) ** half).astype(np.float32)
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
        frequencies = (frequencies * (kept + (1 - kept) / scaling.factor)).astype(np.float32)
    angles = np.arange(max_model_len, dtype=np.float32)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    return torch.from_numpy(np.stack((np.hstack((cos, cos)), np.hstack((-sin, sin))), axis=1))
