"""The embedded model's tokenizer and chat template, against `transformers` itself."""

from __future__ import annotations

import asyncio
import random

import pytest

from model_runner.embedded import embedded_model_dir
from router.detokenizer import IncrementalDetokenizer
from router.tokenizer import ChatTokenizer

pytestmark = pytest.mark.model

CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 日本 😀\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<|im_end|> c"},
    ],
]


def test_same_tokens_as_transformers() -> None:
    from transformers import AutoTokenizer

    model_dir = embedded_model_dir(lambda _: None)
    tokenizer, reference = ChatTokenizer(model_dir), AutoTokenizer.from_pretrained(model_dir)
    for messages in CHATS:
        for prompted in (True, False):
            text = tokenizer.render_chat(messages, add_generation_prompt=prompted)
            token_ids = asyncio.run(tokenizer.encode(text, add_special_tokens=False))
            assert token_ids == reference.apply_chat_template(
                messages, add_generation_prompt=prompted, tokenize=True, return_dict=False
            )
    for text in ("Hi there", " leading", "日本 😀"):
        assert asyncio.run(tokenizer.encode(text, add_special_tokens=True)) == reference(text)["input_ids"]
    tokenizer.close()


def test_any_tokens_give_the_whole_text() -> None:
    tokenizer = ChatTokenizer(embedded_model_dir(lambda _: None))
    rng = random.Random(3)
    for _ in range(300):
        token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 20))]
        for skip in (True, False):
            detokenizer = IncrementalDetokenizer(tokenizer.tokenizer, skip_special_tokens=skip)
            text = "".join(detokenizer.step([token_id]) for token_id in token_ids) + detokenizer.flush()
            assert text == tokenizer.tokenizer.decode(token_ids, skip_special_tokens=skip)
    tokenizer.close()
