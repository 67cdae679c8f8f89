"""A GGUF file of the Llama architecture, written as a Hugging Face checkpoint directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Float32Array = npt.NDArray[np.float32]

CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
}
"""How text is cut before byte-pair merging, by the name in `tokenizer.ggml.pre`."""


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write config, weights (float32: quantized values are exact in it) and tokenizer of `gguf` into `out`.

    Raises ValueError for an architecture or a tokenizer that is not converted here.
    """
    reader = GGUFReader(str(gguf))
    metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"{gguf} has architecture {architecture!r}, and only GGUF files of 'llama' are converted: "
            "give the model's Hugging Face checkpoint directory instead"
        )
    tokenizer = _tokenizer(gguf, metadata)
    num_heads = int(metadata["llama.attention.head_count"])
    num_kv_heads = int(metadata.get("llama.attention.head_count_kv", num_heads))
    weights = _weights(gguf, reader, num_heads, num_kv_heads)
    config = _config(metadata, num_heads, num_kv_heads, weights)

    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    special = {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad") if f"{name}_token_id" in config}
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {f"{name}_token_id": token for name, token in special.items()})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    }
    for name, token in special.items():
        tokenizer_config[f"{name}_token"] = tokenizer.id_to_token(token)
    if (unknown := metadata.get("tokenizer.ggml.unknown_token_id")) is not None:
        tokenizer_config["unk_token"] = tokenizer.id_to_token(int(unknown))
    if template := metadata.get("tokenizer.chat_template"):
        tokenizer_config["chat_template"] = template
    _write_json(out / "tokenizer_config.json", tokenizer_config)


def _weights(gguf: Path, reader: Any, num_heads: int, num_kv_heads: int) -> dict[str, Float32Array]:
    weights: dict[str, Float32Array] = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in OUTER_TENSORS:
            weights[OUTER_TENSORS[tensor.name]] = values
            continue
        parts = tensor.name.split(".")
        if len(parts) != 4 or parts[0] != "blk" or parts[2] not in LAYER_TENSORS:
            raise ValueError(
                f"{gguf} has a tensor {tensor.name!r} that a plain Llama model does not have: "
                "give the model's Hugging Face checkpoint directory instead"
            )
        _, layer, kind, suffix = parts
        if kind in ("attn_q", "attn_k"):
            values = _rotate_half_order(values, num_heads if kind == "attn_q" else num_kv_heads)
        weights[f"model.layers.{layer}.{LAYER_TENSORS[kind]}.{suffix}"] = values
    return weights


def _rotate_half_order(rows: Float32Array, num_heads: int) -> Float32Array:
    """Rows of a q or k projection from GGUF's order (rotary pairs adjacent) to (first halves, then second halves)."""
    head_dim = rows.shape[0] // num_heads
    paired = rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def _config(
    metadata: dict[str, Any], num_heads: int, num_kv_heads: int, weights: dict[str, Float32Array]
) -> dict[str, Any]:
    hidden_size = int(metadata["llama.embedding_length"])
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // num_heads,
        "max_position_embeddings": int(metadata["llama.context_length"]),
        # Float32 in the file; its shortest decimal is what the model was trained with (1e-05).
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "dtype": "float32",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token_id"] = int(token)
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"rope scaling {scaling!r} of a GGUF file is not converted: give the Hugging Face checkpoint")
    return config


def _tokenizer(gguf: Path, metadata: dict[str, Any]) -> Any:
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{gguf} has a tokenizer {kind!r} with pre-tokenizer {pre!r}; converted are 'gpt2' with "
            f"{sorted(PRE_TOKENIZERS)}: give the model's Hugging Face checkpoint directory instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
    control = [token for token, kind in kinds if kind == CONTROL_TOKEN]
    user_defined = [token for token, kind in kinds if kind == USER_DEFINED_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in user_defined])
    return tokenizer


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
