"""Stop strings, matched where tokens are made, so that a stop costs no round trip and no extra token.

Contract with the router, which cuts the text: the text is looked at after each token; the first token after
which any stop string occurs ends the request; of several strings the one that begins earliest counts, and of
those that begin together the one listed first. What occurs before `min_tokens` have been generated does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """Incremental detokenizer: returns the text that became certain with these tokens."""

    def step(self, token_ids: list[int]) -> str: ...


class StopStringMatcher:
    """Watches one request's text."""

    def __init__(self, stop: Sequence[str], decoder: TextDecoder) -> None:
        self._stop = stop
        self._decoder = decoder
        self._tail = ""
        self._keep = max(len(string) for string in stop) - 1

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Take one more token; returns the stop string that it completed, if any, and if it `may_stop`."""
        num_before = len(self._tail)
        self._tail += self._decoder.step([token_id])
        found = [
            (begin, index)
            for index, string in enumerate(self._stop)
            if (begin := self._tail.find(string, max(0, num_before - len(string) + 1))) >= 0
        ]
        if found and may_stop:
            return self._stop[min(found)[1]]
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return None
