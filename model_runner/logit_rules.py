"""What a request changes in its logits before a token is picked: penalties, biases, words and tokens that it refuses.

A row's change is a function of its logits and its tokens so far alone, drafts included, as its token is
(`sampling`). In this order, which is vLLM's: tokens that are not allowed and the last token of each bad word that
would be completed become -inf; biases are added; then the repetition penalty, over prompt and output, then the
frequency and the presence penalty, over the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rank_scheduler.messages import SamplingParams
from rank_scheduler.plan import BoolArray, Int32Array

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class LogitRules:
    """Of one sequence. The scheduler refuses token ids outside of the vocabulary before."""

    num_prompt_tokens: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    bias_ids: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    refused: BoolArray | None
    """Shape [vocab_size], True where a token is never allowed."""
    bad_words: tuple[Int32Array, ...]

    @classmethod
    def of(cls, sampling: SamplingParams, num_prompt_tokens: int, vocab_size: int) -> LogitRules | None:
        """None: the logits stay as they are."""
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        lists = (sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words)
        if penalties == (1.0, 0.0, 0.0) and not any(lists):
            return None
        ids = [token for token, _ in sampling.logit_bias]
        refused = None
        if sampling.allowed_token_ids:
            refused = np.ones(vocab_size, np.bool_)
            refused[list(sampling.allowed_token_ids)] = False
        return cls(
            num_prompt_tokens,
            *penalties,
            np.array(ids, np.int64),
            np.array([bias for _, bias in sampling.logit_bias], np.float32),
            refused,
            tuple(np.array(word, np.int32) for word in sampling.bad_words),
        )

    def apply(self, logits: torch.Tensor, token_ids: Int32Array) -> None:
        """Change `logits` [vocab_size], float32, of the token that follows `token_ids` [n]."""
        import torch  # a batch knows of rules, and some runners have no torch

        device = logits.device
        if self.refused is not None:
            logits.masked_fill_(torch.from_numpy(self.refused).to(device), float("-inf"))
        for word in self.bad_words:
            if _ends_with(token_ids, word[:-1]):
                logits[int(word[-1])] = float("-inf")
        if len(self.bias_ids):
            logits.index_add_(0, torch.from_numpy(self.bias_ids).to(device), torch.from_numpy(self.biases).to(device))
        if self.repetition_penalty != 1:
            seen = torch.from_numpy(np.unique(token_ids).astype(np.int64)).to(device)
            values = logits[seen]
            logits[seen] = torch.where(values > 0, values / self.repetition_penalty, values * self.repetition_penalty)
        if self.frequency_penalty or self.presence_penalty:
            generated, counts = np.unique(token_ids[self.num_prompt_tokens :], return_counts=True)
            less = self.frequency_penalty * counts.astype(np.float32) + np.float32(self.presence_penalty)
            ids = torch.from_numpy(generated.astype(np.int64)).to(device)
            logits.index_add_(0, ids, torch.from_numpy(-less.astype(np.float32)).to(device))


def _ends_with(token_ids: Int32Array, ending: Int32Array) -> bool:
    n = len(ending)
    return n == 0 or (n <= len(token_ids) and bool((token_ids[len(token_ids) - n :] == ending).all()))
