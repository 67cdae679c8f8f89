"""What a checkpoint's config.json says, for the architectures that one Llama-shaped forward serves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequencies below `low_freq_factor` are divided by `factor`, with a ramp up to `high_freq_factor` (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder with grouped-query attention, rotary positions, RMSNorm and a SiLU-gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    max_position_embeddings: int
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    """RMSNorm over each head of q and k, before the rotation (Qwen3)."""
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]

    @property
    def num_query_groups(self) -> int:
        """Query heads per KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def num_held_parameters(self) -> int:
        """Weights in memory; embedding and head count both, even if tied: the head is packed for its kernel."""
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = self.hidden_size * (q + 2 * kv) + q * self.hidden_size + 3 * self.hidden_size * self.intermediate_size
        return self.num_hidden_layers * layer + 2 * self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True)
class _Architecture:
    qkv_bias: bool | None
    """None: as `attention_bias` says, which then holds for the output projection too."""
    qk_norm: bool


ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(qkv_bias=None, qk_norm=False),
    "MistralForCausalLM": _Architecture(qkv_bias=False, qk_norm=False),
    "Qwen2ForCausalLM": _Architecture(qkv_bias=True, qk_norm=False),
    "Qwen3ForCausalLM": _Architecture(qkv_bias=None, qk_norm=True),
}


def read_model_config(model_dir: Path) -> ModelConfig:
    """Raises ValueError, naming the file, the field and the value, if the checkpoint cannot be served."""
    path = model_dir / "config.json"
    raw = _read_json(path)
    names = raw.get("architectures") or []
    name = names[0] if names else None
    if name not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    _refuse_unsupported(path, raw)

    def positive(field: str, default: int | None = None) -> int:
        value = raw.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}: {field} is {value!r}, and must be a positive integer")
        return value

    hidden_size, num_heads = positive("hidden_size"), positive("num_attention_heads")
    num_kv_heads = positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
        )
    head_dim = positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(f"{path}: head_dim is {head_dim}; rotary positions need an even one")
    theta, scaling = _rope(path, raw)
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=name,
        vocab_size=positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive("intermediate_size"),
        num_hidden_layers=positive("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positive("max_position_embeddings"),
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        o_bias=attention_bias if architecture.qkv_bias is None else False,
        qk_norm=architecture.qk_norm,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(model_dir, raw),
    )


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"{path}: hidden_act is {act!r}; supported is 'silu'")
    if raw.get("mlp_bias", False):
        raise ValueError(f"{path}: mlp_bias is true; supported is false")
    if raw.get("quantization_config"):
        raise ValueError(f"{path}: quantization_config is set; give the checkpoint with plain bf16 or float32 weights")
    if (factor := raw.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise ValueError(f"{path}: partial_rotary_factor is {factor!r}; supported is 1.0")
    # Qwen checkpoints carry a window that `use_sliding_window: false` turns off.
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window is not None and window < raw.get("max_position_embeddings", 0):
        raise ValueError(
            f"{path}: sliding_window is {window}; sliding-window attention is not supported, and set to null "
            f"the model's answers would differ beyond {window} tokens: give a checkpoint without it"
        )
    others = sorted({kind for kind in raw.get("layer_types") or () if kind != "full_attention"})
    if others:
        raise ValueError(f"{path}: layer_types has {', '.join(others)}; supported is full_attention")


def _rope(path: Path, raw: dict[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Base and scaling, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    parameters = raw.get("rope_parameters") or {}
    scaling = parameters or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{path}: rope type {kind!r} is not supported; supported are default, llama3")
    return theta, Llama3RopeScaling(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
    )


def _eos_token_ids(model_dir: Path, raw: dict[str, Any]) -> frozenset[int]:
    """From generation_config.json, which lists all that end a turn, else from config.json."""
    path = model_dir / "generation_config.json"
    eos = _read_json(path).get("eos_token_id") if path.is_file() else None
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}): give a Hugging Face checkpoint directory") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): the checkpoint is damaged, fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object: the checkpoint is damaged, fetch it again")
    return content
