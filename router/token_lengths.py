"""How many tokens a text has at least, known from its length alone, so that what can never fit is refused at once."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, normalizers

from router.detokenizer import BYTE_OF

# A composed character stands for at most so many that were written: the longest canonical decomposition in Unicode.
_MAX_COMPOSED = 4
_CONTINUATION_BYTES = frozenset(range(0x80, 0xC0))


class TokenLengths:
    """Claims something only of byte-level tokenizers, whose tokens are known to cover all of the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._dropped: list[str] = []
        """Characters that leave no token, since the vocabulary does not have their byte."""
        self._longest: int | None = None
        """Characters of text that one token covers at most; None: unknown."""
        normalizer = tokenizer.normalizer
        is_composing = isinstance(normalizer, normalizers.NFC)
        if not isinstance(tokenizer.decoder, decoders.ByteLevel) or not (normalizer is None or is_composing):
            return
        if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
            return  # these take in any number of spaces
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        missing = {byte for character, byte in BYTE_OF.items() if character not in vocabulary}
        if missing & _CONTINUATION_BYTES:
            return  # a character of several bytes could go without a trace
        self._dropped = [chr(byte) for byte in sorted(missing) if byte < 0x80]
        # Of a byte-level token this is the number of its bytes, of which every character has one or more.
        self._longest = max(map(len, vocabulary)) * (_MAX_COMPOSED if is_composing else 1)

    def min_num_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`, special tokens not included."""
        if self._longest is None or len(text) <= self._longest:
            return 0
        num_covered = len(text) - sum(map(text.count, self._dropped))
        return -(-num_covered // self._longest)
