from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model_runner.weights import load_tensors

EXPECTED = {"a": (2, 3), "b": (4,)}
A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4)


def test_one_file(tmp_path: Path) -> None:
    extra = {"lm_head.weight": A, "model.layers.0.self_attn.rotary_emb.inv_freq": B}
    save_file({"a": A, "b": B} | {name: value.clone() for name, value in extra.items()}, tmp_path / "model.safetensors")
    tensors = load_tensors(tmp_path, EXPECTED, frozenset({"lm_head.weight"}), torch.bfloat16)
    assert tensors.keys() == EXPECTED.keys()
    assert torch.equal(tensors["a"], A.bfloat16())


def test_sharded(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "1.safetensors")
    save_file({"b": B}, tmp_path / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_tensors(tmp_path, EXPECTED, frozenset(), torch.float32).keys() == EXPECTED.keys()


def test_errors_name_the_tensor(tmp_path: Path) -> None:
    def load(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        load_tensors(tmp_path, EXPECTED, frozenset(), torch.float32)

    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load_tensors(tmp_path, EXPECTED, frozenset(), torch.float32)
    with pytest.raises(ValueError, match=r"lacks tensors that its config\.json implies: b"):
        load({"a": A})
    with pytest.raises(ValueError, match="does not imply: c"):
        load({"a": A, "b": B, "c": B.clone()})
    with pytest.raises(ValueError, match=r"a has shape \(3, 2\), and config\.json implies \(2, 3\)"):
        load({"a": A.T.contiguous(), "b": B})
    (tmp_path / "model.safetensors").write_bytes(b"not it")
    with pytest.raises(ValueError, match="the checkpoint is damaged"):
        load_tensors(tmp_path, EXPECTED, frozenset(), torch.float32)
