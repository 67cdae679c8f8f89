"""A model's tokens as llguidance needs them, and one request's place in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from rank_scheduler.plan import UInt32Array
from router.grammar_check import shown_reason


class Vocabulary:
    """A model's tokens, as llguidance and the masks need them. Immutable.

    Raises ValueError, with the remedy, if llguidance cannot use the tokenizer.
    """

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`vocab_size`: the model's, which may differ from the tokenizer's."""
        try:
            text = tokenizer_path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"structured output needs the tokenizer {tokenizer_path}, which cannot be read: {error}; "
                "give a Hugging Face checkpoint directory"
            ) from None
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self.vocab_size = vocab_size
        self.tokenizer = _tokenizer(text, vocab_size, sorted(self.eos_token_ids) or None)
        self.num_words = (vocab_size + 31) // 32
        self.eos_mask = _mask_of(self.eos_token_ids, self.num_words)
        self.ordinary_mask = ~_mask_of(self.eos_token_ids | set(self.tokenizer.eos_tokens), self.num_words)
        """Without what ends an output, and without the bits beyond the vocabulary."""
        if vocab_size % 32:
            self.ordinary_mask[-1] &= np.uint32((1 << vocab_size % 32) - 1)

    @property
    def is_short(self) -> bool:
        """The tokenizer has tokens that the model does not."""
        return self.tokenizer.vocab_size > self.vocab_size


def _tokenizer(text: str, vocab_size: int, eos_token_ids: list[int] | None) -> LLTokenizer:
    try:
        try:
            return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids)
        except ValueError as error:
            if "too small" not in str(error):
                raise
            return LLTokenizer(text, eos_token=eos_token_ids)
    except ValueError as error:
        raise ValueError(f"structured output cannot use this model's tokenizer: {error}") from None


def _mask_of(token_ids: frozenset[int] | set[int], num_words: int) -> UInt32Array:
    mask = np.zeros(num_words, np.uint32)
    for token_id in token_ids:
        if token_id < 32 * num_words:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask


class Matcher:
    """One request's place in its grammar; see `GrammarMatcher`. Touched by one thread at a time.

    End-of-sequence tokens are not llguidance's affair here: all of the model's are allowed where the grammar may
    end, and after one of them nothing else is.
    """

    __slots__ = ("_matcher", "_num_eos", "_num_tokens", "_scratch", "_vocabulary")

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_tokens = 0
        self._num_eos = 0
        num_words = (vocabulary.tokenizer.vocab_size + 31) // 32
        self._scratch = np.zeros(num_words, np.uint32) if vocabulary.is_short else None

    def accept(self, token_id: int) -> bool:
        if token_id in self._vocabulary.eos_token_ids:
            is_accepted = self._may_end()
            self._num_eos += is_accepted
            return is_accepted
        if self._num_eos or not self._is_ordinary(token_id):
            return False
        is_accepted = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        self._num_tokens += is_accepted
        return is_accepted

    def num_valid(self, token_ids: Sequence[int]) -> int:
        eos = self._vocabulary.eos_token_ids
        ordinary: list[int] = []
        if not self._num_eos:
            for token_id in token_ids:
                if not self._is_ordinary(token_id):
                    break
                ordinary.append(token_id)
        num_valid = self._matcher.validate_tokens(ordinary) if ordinary else 0
        self._check()
        rest = token_ids[len(ordinary) :]
        if num_valid < len(ordinary) or not rest or rest[0] not in eos:
            return num_valid
        if ordinary:
            self._matcher.consume_tokens(ordinary)
        may_end = self._may_end()
        if ordinary:
            self._matcher.rollback(len(ordinary))
        self._check()
        if may_end:
            num_valid += next((i for i, token_id in enumerate(rest) if token_id not in eos), len(rest))
        return num_valid

    def fill_mask(self, mask: UInt32Array) -> None:
        vocabulary = self._vocabulary
        if mask.shape != (vocabulary.num_words,) or mask.dtype != np.uint32 or not mask.flags.c_contiguous:
            raise ValueError(f"a mask must be {vocabulary.num_words} contiguous uint32, got {mask.dtype} {mask.shape}")
        if self._num_eos:
            mask[:] = vocabulary.eos_mask
            return
        target = mask if self._scratch is None else self._scratch
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        self._check()
        np.bitwise_and(target[: vocabulary.num_words], vocabulary.ordinary_mask, out=mask)
        if self._may_end():
            mask |= vocabulary.eos_mask
        if not mask.any():
            raise ValueError("the grammar of the output allows no token of this model here; loosen the grammar")

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_tokens + self._num_eos:
            raise ValueError(f"cannot take back {num_tokens} of {self._num_tokens + self._num_eos} tokens")
        num_eos = min(num_tokens, self._num_eos)
        self._num_eos -= num_eos
        if num_tokens > num_eos:
            self._num_tokens -= num_tokens - num_eos
            self._matcher.rollback(num_tokens - num_eos)
            self._check()

    def _is_ordinary(self, token_id: int) -> bool:
        vocabulary = self._vocabulary
        return 0 <= token_id < vocabulary.vocab_size and bool(
            vocabulary.ordinary_mask[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1)
        )

    def _may_end(self) -> bool:
        return self._num_eos > 0 or self._matcher.is_accepting()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = shown_reason(self._matcher.get_error())
            raise ValueError(f"the grammar of the output cannot go on here: {reason}; simplify it")
