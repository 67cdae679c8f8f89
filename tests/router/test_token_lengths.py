"""What is said of a text's length without encoding it must be true of every text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from router.detokenizer import BYTE_OF
from router.token_lengths import TokenLengths
from tests.router.small_tokenizer import byte_tokenizer


def tokenizer_without(*missing: int, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """Byte-level, with merges for runs of "a", and without the tokens of some bytes."""
    tokens = [character for character, byte in BYTE_OF.items() if byte not in missing] + ["aa", "aaaa"]
    merges = [("a", "a"), ("aa", "aa")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


TOKENIZERS = {
    "plain": tokenizer_without(),
    "added tokens": byte_tokenizer(),
    "control bytes are dropped": tokenizer_without(0x04, 0x1D, 0xC0, 0xF1),
    "composing": tokenizer_without(normalizer=normalizers.NFC()),
}
TEXTS = st.text("a\x04\x1d日😀\N{LATIN SMALL LETTER E WITH ACUTE}\U00040000", max_size=60) | st.text(max_size=40)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(text=TEXTS, times=st.integers(1, 30))
def test_never_more_than_there_are(name: str, text: str, times: int) -> None:
    tokenizer = TOKENIZERS[name]
    assert TokenLengths(tokenizer).min_num_tokens(text * times) <= len(tokenizer.encode(text * times).ids)


def test_the_bound_is_reached() -> None:
    lengths = TokenLengths(tokenizer_without())
    assert [lengths.min_num_tokens("a" * n) for n in (4, 5, 8, 4_000)] == [0, 2, 2, 1_000]
    assert TokenLengths(tokenizer_without(0x04)).min_num_tokens("\x04" * 10_000 + "a" * 40) == 10


def test_a_composed_character_may_stand_for_four() -> None:
    tokenizer = TOKENIZERS["composing"]
    text = "\u03b1\u0313\u0300\u0345" * 1_000  # alpha, psili, varia, ypogegrammeni: one character
    assert 0 < TokenLengths(tokenizer).min_num_tokens(text) <= len(tokenizer.encode(text).ids)


@pytest.mark.parametrize("kind", ["no byte level", "other normalizer", "tokens that take in spaces", "bytes missing"])
def test_nothing_is_said_where_nothing_is_known(kind: str) -> None:
    tokenizer = tokenizer_without(*([0x80] if kind == "bytes missing" else []))
    if kind == "no byte level":
        tokenizer.decoder = decoders.ByteFallback()
    elif kind == "other normalizer":
        tokenizer.normalizer = normalizers.Strip()
    elif kind == "tokens that take in spaces":
        tokenizer.add_tokens([AddedToken("<x>", lstrip=True)])
    assert TokenLengths(tokenizer).min_num_tokens("a" * 10_000) == 0
