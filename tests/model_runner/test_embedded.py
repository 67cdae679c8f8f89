from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from model_runner.embedded import INSTALL_COMMAND, embedded_model_dir, resolve_model
from model_runner.model_config import read_model_config
from tests.model_runner.conftest import load_runner, write_tiny_checkpoint

TOKENS = ["<|endoftext|>", "<|im_start|>", *"abcdefghij0123456789Ġ", "ab", "Ġa"]
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, checkpoint: Path, *, architecture: str = "llama", pre: str = "smollm") -> Path:
    """`checkpoint` as llama.cpp's converter would write it, in float32."""
    config = read_model_config(checkpoint)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, values in load_file(checkpoint / "model.safetensors").items():
        parts = name.split(".")
        if name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", values)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", values)
        elif name == "lm_head.weight":
            writer.add_tensor("output.weight", values)
        else:
            kind = ".".join(parts[3:-1])
            if kind in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if "q_proj" in kind else config.num_key_value_heads
                halves = values.reshape(heads, 2, config.head_dim // 2, -1)
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
            writer.add_tensor(f"blk.{parts[2]}.{GGUF_NAMES[kind]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERRIED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "checkpoint", vocab_size=len(TOKENS))


def test_gguf_file_becomes_the_checkpoint_that_it_was(cache: Path, checkpoint: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    path = write_gguf(tmp_path / "tiny.gguf", checkpoint)
    model_dir = resolve_model(str(path), messages.append)
    assert cache in model_dir.parents
    assert len(messages) == 2

    weights, expected = load_file(model_dir / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)
    config = read_model_config(model_dir)
    assert config.eos_token_ids == {0}
    assert config.rms_norm_eps == read_model_config(checkpoint).rms_norm_eps
    load_runner(model_dir).close()

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab a12").tokens == ["<|im_start|>", "ab", "Ġa", "1", "2"]
    tokenizer_config = json.loads((model_dir / "tokenizer_config.json").read_text())
    assert tokenizer_config["eos_token"] == "<|endoftext|>"
    assert tokenizer_config["chat_template"]

    assert resolve_model(str(path), messages.append) == model_dir
    assert len(messages) == 2
    assert resolve_model(str(model_dir), messages.append) == model_dir


def test_changed_file_is_converted_again(cache: Path, checkpoint: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", checkpoint)
    first = resolve_model(str(path), print)
    os.utime(path, ns=(1, 1))
    assert resolve_model(str(path), print) != first


def test_killed_conversion_leaves_nothing_in_the_way(cache: Path, checkpoint: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", checkpoint)
    model_dir = resolve_model(str(path), print)
    partial = model_dir.with_name(model_dir.name + ".partial")
    model_dir.rename(partial)
    (partial / "model.safetensors").write_bytes(b"half")
    assert resolve_model(str(path), print) == model_dir
    assert not partial.exists()
    load_runner(model_dir).close()


def _resolve_together(path: str, barrier: Any, results: Any) -> None:
    messages: list[str] = []
    barrier.wait(60)
    results.put((str(resolve_model(path, messages.append)), sum("Converted" in message for message in messages)))


def test_two_processes_at_once(cache: Path, checkpoint: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", checkpoint)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (str(path), barrier, results)
    processes = [context.Process(target=_resolve_together, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert found[0][0] == found[1][0]
    assert sum(conversions for _, conversions in found) == 1
    assert sorted(entry.suffix for entry in (cache / "models").iterdir()) == ["", ".lock"]


def test_what_is_not_converted_is_refused(cache: Path, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="architecture 'phi3'"):
        resolve_model(str(write_gguf(tmp_path / "a.gguf", checkpoint, architecture="phi3")), print)
    with pytest.raises(ValueError, match=r"pre-tokenizer 'tekken'.*'gpt-2', 'smollm'"):
        resolve_model(str(write_gguf(tmp_path / "b.gguf", checkpoint, pre="tekken")), print)
    with pytest.raises(ValueError, match="does not exist"):
        resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct", print)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(str(tmp_path), print)
    assert not list((cache / "models").glob("*.partial"))


def test_missing_package_names_the_command(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=INSTALL_COMMAND):
        embedded_model_dir(print)


@pytest.mark.model
def test_embedded_model(embedded_dir: Path) -> None:
    assert resolve_model(None, pytest.fail) == embedded_dir
    assert (embedded_dir / "LICENSE").read_text().lstrip().startswith("Apache License")
    assert read_model_config(embedded_dir).eos_token_ids == {2}

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_dir)
    assert tokenizer.model_max_length == 8192
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(prompt)["input_ids"][:3] == [1, 9690, 198]
    for text in ("Hello world", "  def f(x):\n    return x+1", "naïve café 東京 12345 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
