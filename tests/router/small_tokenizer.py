"""A byte-level tokenizer in which every byte is one token, plus a few added ones; written as a model directory."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.name is defined %}{{ raise_exception('names are unknown here') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(IM_START, special=True), AddedToken(IM_END, special=True)])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("日本")])
    return tokenizer


def write_model_dir(path: Path) -> Path:
    """A directory as `ChatTokenizer` wants it."""
    tokenizer = byte_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": IM_END}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}), encoding="utf-8")
    return path
