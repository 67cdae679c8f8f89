"""What the scheduler needs of a structured-output engine; the engine itself, and its threads, are at the edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rank_scheduler.messages import Grammar
from rank_scheduler.plan import UInt32Array


class GrammarMatcher(Protocol):
    """One request's place in its compiled grammar. Methods may raise: that ends this request only."""

    def accept(self, token_id: int) -> bool:
        """Take the next token; False, with nothing changed, if the grammar does not allow it here."""
        ...

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, would be accepted. Changes nothing."""
        ...

    def fill_mask(self, mask: UInt32Array) -> None:
        """Set the bits of the allowed next tokens in `mask`, shape [ceil(vocab_size / 32)], and clear all others."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the latest accepted tokens."""
        ...


@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Action: compile this grammar off the step loop; answered by `Scheduler.grammar_compiled` with the same ids."""

    owner: int
    id: int
    grammar: Grammar
