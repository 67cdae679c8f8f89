"""Prompt lookup: draft the tokens that followed an earlier occurrence of a sequence's last n-gram.

Saxena, "Prompt Lookup Decoding" (2023). Which occurrence: of the longest n-gram that occurred before, the earliest
one; it may overlap the last.
"""

from __future__ import annotations

from rank_scheduler.plan import Int32Array

_TOKEN_SIZE_BYTES = 4


class NgramIndex:
    """Finds the last n-gram's earlier occurrences in a growing sequence, in time that follows the new tokens.

    About 150 bytes per token. A sequence whose tokens are replaced needs a new index.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n is {min_n} and max_n is {max_n}: set 1 <= min_n <= max_n")
        self._min_size = _TOKEN_SIZE_BYTES * min_n
        self._max_size = _TOKEN_SIZE_BYTES * max_n
        self._data = bytearray()
        # n-gram → byte offset of its earliest end. Has every n-gram of min_n tokens; of longer ones, those whose
        # last n - 1 tokens occurred more than once: the others have no second occurrence that could be looked for.
        self._first_ends: dict[bytes, int] = {}
        self._match_end = 0
        """Where the tokens start that followed the last n-gram; 0: it did not occur before."""

    def __len__(self) -> int:
        """How many tokens it has been given."""
        return len(self._data) // _TOKEN_SIZE_BYTES

    def extend(self, token_ids: Int32Array) -> None:
        """Append tokens, shape [n]."""
        data, min_size, max_size, first_ends = self._data, self._min_size, self._max_size, self._first_ends
        old_size = len(data)
        data += token_ids.tobytes()
        base = max(0, old_size - max_size)
        recent = bytes(data[base:])
        for end in range(max(old_size, min_size - _TOKEN_SIZE_BYTES) + _TOKEN_SIZE_BYTES, len(data) + 1, 4):
            self._match_end = 0
            tail_end = end - base
            size = min_size
            while size <= max_size and size <= end:
                first_end = first_ends.setdefault(recent[tail_end - size : tail_end], end)
                if first_end == end:
                    break
                self._match_end = first_end
                size += _TOKEN_SIZE_BYTES
                if size <= max_size and size <= first_end:
                    first_ends.setdefault(bytes(data[first_end - size : first_end]), first_end)

    def propose(self, k: int) -> list[int]:
        """Up to `k` drafts; fewer where the sequence ends before, none where the last n-gram is new."""
        if not self._match_end:
            return []
        return memoryview(self._data[self._match_end : self._match_end + _TOKEN_SIZE_BYTES * k]).cast("i").tolist()
