from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_runner.model_config import ARCHITECTURES, Llama3RopeScaling, ModelConfig, read_model_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eos_token_id": 2,
}


def read(directory: Path, generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(BASE | fields))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(directory)


def test_plain_llama(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.head_dim, config.num_query_groups, config.rope_theta) == (16, 2, 5000.0)
    assert not config.qkv_bias
    assert config.eos_token_ids == {2}


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=[2, 5]).eos_token_ids == {2, 5}
    assert read(tmp_path, eos_token_id=None).eos_token_ids == frozenset()
    assert read(tmp_path, generation={"eos_token_id": [7, 8]}).eos_token_ids == {7, 8}


def test_architectures(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=64).qkv_bias
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=32)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.head_dim) == (True, False, 32)
    with pytest.raises(ValueError, match=f"'PhiForCausalLM' is not supported.*{', '.join(ARCHITECTURES)}"):
        read(tmp_path, architectures=["PhiForCausalLM"])


def test_rope(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    expected = Llama3RopeScaling(8.0, 1.0, 4.0, 128)
    assert read(tmp_path, rope_scaling={"rope_type": "llama3"} | scaling).rope_scaling == expected
    new = read(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 7.0} | scaling)
    assert (new.rope_theta, new.rope_scaling) == (7.0, expected)
    with pytest.raises(ValueError, match="rope type 'yarn'"):
        read(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, "sliding_window is 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_key_value_heads": 3}, "num_attention_heads .4. is not a multiple of num_key_value_heads .3."),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_what_is_not_served_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **fields)


def test_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_model_config(tmp_path)
