"""Tokens to text as they come, and the hold-back of text that may be the start of a stop string.

The rank uses the same `IncrementalDetokenizer` to find stop strings, so that both ends see the same text after
each token.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer, decoders

# No character spans more tokens than this; what is undecodable for longer is emitted as replacement characters.
_MAX_PENDING_TOKENS = 16


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2): character → byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


BYTE_OF = _byte_alphabet()


class TokenTable(dict[int, bytes]):
    """Token id → its bytes, filled as ids occur. Ids outside the vocabulary have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )

    def __missing__(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            data = b""
        elif self.is_byte_level:
            data = self._byte_level(token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            data = bytes.fromhex(token[3:5])
        else:
            data = token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        self[token_id] = data
        return data

    @staticmethod
    def _byte_level(token: str) -> bytes:
        try:
            return bytes(BYTE_OF[character] for character in token)
        except KeyError:  # an added token, which stands for itself
            return token.encode()


@lru_cache(maxsize=8)
def token_table(tokenizer: Tokenizer) -> TokenTable:
    """The table of this tokenizer object, shared by all its detokenizers."""
    return TokenTable(tokenizer)


class IncrementalDetokenizer:
    """One sequence's text. What all `step`s and the `flush` return, joined, is `tokenizer.decode` of all tokens.

    For byte-level tokenizers this is exact and costs a look-up per token. For others (byte fallback) the last few
    tokens are decoded anew; there, a run of byte tokens that turns invalid after a valid beginning keeps that
    beginning, where `decode` would replace all of it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._table = token_table(tokenizer)
        self._skipped: frozenset[int] = self._table.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._token_ids: list[int] = []
        self._prefix = 0
        self._read = 0
        """Without byte level: tokens before `_read` have been emitted, those from `_prefix` give them context."""

    def step(self, token_ids: list[int]) -> str:
        """The text that these tokens complete; never half a character. May be empty."""
        skipped = self._skipped
        if self._table.is_byte_level:
            table = self._table
            if len(token_ids) == 1:
                return "" if token_ids[0] in skipped else self._utf8.decode(table[token_ids[0]])
            return self._utf8.decode(b"".join([table[i] for i in token_ids if i not in skipped]))
        text = ""
        for token_id in token_ids:
            if token_id not in skipped:
                self._token_ids.append(token_id)
                text += self._read_on(len(self._token_ids) - self._read > _MAX_PENDING_TOKENS)
        return text

    def flush(self) -> str:
        """What is left at the end: a character that never became whole, as U+FFFD."""
        return self._utf8.decode(b"", final=True) if self._table.is_byte_level else self._read_on(forced=True)

    def _read_on(self, forced: bool) -> str:
        """The prefix/read-offset method: decode with and without the new tokens, emit the difference when whole."""
        emitted = self._tokenizer.decode(self._token_ids[self._prefix : self._read], skip_special_tokens=False)
        text = self._tokenizer.decode(self._token_ids[self._prefix :], skip_special_tokens=False)
        if len(text) <= len(emitted) or (text.endswith("\N{REPLACEMENT CHARACTER}") and not forced):
            return ""
        del self._token_ids[: self._prefix]
        self._prefix, self._read = self._read - self._prefix, len(self._token_ids)
        return text[len(emitted) :]


class StopText:
    """Holds back text that may be the start of a stop string.

    The rule, which the rank follows as well: the text is searched after each token; the first token after which
    any stop string occurs ends the request; among several the one that begins earliest counts, and of those that
    begin at the same place the first in the list. The text before it is the answer, the stop string is not part of it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self._num_exempt = 0
        """Leading characters of `_held` within which a stop string does not count."""
        self.matched: str | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Add the text of one token; returns what can be no part of a stop string.

        Not `may_stop` (`min_tokens` are not generated yet): what is complete with this text does not count.
        """
        self._held += text
        if not may_stop:
            self._num_exempt = len(self._held)
        if self.matched is not None or not text:
            return ""
        begin, matched = self._find()
        if matched is None:
            begin = len(self._held) - self._num_held_back()
        self.matched = matched
        released, self._held = self._held[:begin], self._held[begin:]
        self._num_exempt = max(0, self._num_exempt - begin)
        return released

    def end(self, stopped: bool) -> str:
        """The rest, once the request has ended: nothing after a match if a stop string ended it, else what is held."""
        rest, self._held = self._held, ""
        return "" if stopped and self.matched is not None else rest

    def _find(self) -> tuple[int, str | None]:
        earliest, matched = -1, None
        for stop in self._stop:
            begin = self._held.find(stop, max(0, self._num_exempt - len(stop) + 1))
            if begin >= 0 and (matched is None or begin < earliest):
                earliest, matched = begin, stop
        return earliest, matched

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that some stop string begins with."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
