from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from rank_scheduler.stop_strings import StopStringMatcher
from router.detokenizer import IncrementalDetokenizer, StopText
from tests.router.small_tokenizer import byte_tokenizer

CERTAIN = settings(deadline=None, derandomize=True)
TOKENIZER = byte_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size()
TEXT_IDS = st.text("é日😀a\N{COMBINING ACUTE ACCENT}", min_size=1, max_size=4).map(lambda t: TOKENIZER.encode(t).ids)
TOKEN_IDS = st.lists(
    st.integers(0, VOCAB_SIZE + 2).map(lambda i: [i])
    | TEXT_IDS
    | st.integers(VOCAB_SIZE - 4, VOCAB_SIZE - 1).map(lambda i: [i]),
    max_size=12,
).map(lambda parts: [i for part in parts for i in part])


@pytest.mark.parametrize("skip", [True, False])
@CERTAIN
@given(token_ids=TOKEN_IDS, seed=st.integers(0, 1000))
def test_any_split_gives_the_whole_text(skip: bool, token_ids: list[int], seed: int) -> None:
    rng = random.Random(seed)
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=skip)
    text, rest = "", token_ids
    while rest:
        size = rng.randint(1, 4)
        text += detokenizer.step(rest[:size])
        rest = rest[size:]
    assert text + detokenizer.flush() == TOKENIZER.decode(token_ids, skip_special_tokens=skip)


def byte_fallback_tokenizer() -> Tokenizer:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "s", "▁", "日"]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


FALLBACK = byte_fallback_tokenizer()


@CERTAIN
@given(
    parts=st.lists(
        st.sampled_from(["▁Hello", "▁world", "s", "日"]).map(lambda w: [FALLBACK.token_to_id(w)])
        | st.sampled_from("é😀€\n").map(lambda c: [1 + byte for byte in c.encode()]),
        max_size=12,
    )
)
def test_byte_fallback_gives_the_whole_text(parts: list[list[int]]) -> None:
    token_ids = [i for part in parts for i in part]
    detokenizer = IncrementalDetokenizer(FALLBACK)
    pieces = [detokenizer.step([i]) for i in token_ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == FALLBACK.decode(token_ids)


def test_bytes_that_never_make_a_character_do_not_pile_up() -> None:
    detokenizer = IncrementalDetokenizer(FALLBACK)
    pieces = [detokenizer.step([1 + 0xFF]) for _ in range(100)]
    assert any(pieces)
    assert len("".join(pieces) + detokenizer.flush()) == 100


def test_half_a_character_is_held_back_and_flushed() -> None:
    first, second = TOKENIZER.encode("é").ids
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert detokenizer.step([first]) == ""
    assert detokenizer.step([second]) == "é"
    assert detokenizer.step([first]) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@CERTAIN
@given(stops=STOPS, text=st.text("abé", max_size=30))
def test_router_and_rank_find_the_same_stop(stops: list[str], text: str) -> None:
    matcher = StopStringMatcher(stops, IncrementalDetokenizer(TOKENIZER))
    detokenizer, stop_text = IncrementalDetokenizer(TOKENIZER), StopText(stops)
    seen, released = "", ""
    for token_id in TOKENIZER.encode(text).ids:
        piece = detokenizer.step([token_id])
        seen += piece
        released += stop_text.feed(piece)
        matched = matcher.push(token_id)
        assert stop_text.matched == matched
        if matched is not None:
            break
    ended_by_stop = stop_text.matched is not None
    released += stop_text.end(ended_by_stop)
    if ended_by_stop:
        assert released == seen[: min(begin for stop in stops if (begin := seen.find(stop)) >= 0)]
    else:
        assert released == text
        assert not any(stop in text for stop in stops)


@CERTAIN
@given(stops=STOPS, text=st.text("ab", max_size=20))
def test_nothing_is_held_back_longer_than_needed(stops: list[str], text: str) -> None:
    stop_text = StopText(stops)
    released = "".join(stop_text.feed(character) for character in text)
    if stop_text.matched is None:
        held = text[len(released) :]
        assert any(stop.startswith(held) for stop in stops)


def test_a_match_that_did_not_end_the_request_is_given_out() -> None:
    stop_text = StopText(["b"])
    assert stop_text.feed("a") + stop_text.feed("b") == "a"
    assert stop_text.end(stopped=False) == "b"
