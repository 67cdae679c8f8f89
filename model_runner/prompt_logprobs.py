"""How likely a prompt's own tokens were, from the hidden states of the positions before them."""

from __future__ import annotations

import numpy as np
import torch

from model_runner.batch import PersistentBatch, StepRows
from model_runner.llama import LlamaModel
from rank_scheduler.messages import PromptLogprobs, TokenLogprobs

_NUM_POSITIONS = 64
"""At a time: their logits take a few times the vocabulary's size each."""


def prompt_logprobs(
    hidden: torch.Tensor, rows: StepRows, batch: PersistentBatch, model: LlamaModel
) -> dict[int, PromptLogprobs]:
    """By row, for rows that computed positions of a prompt whose logprobs are asked for.

    `hidden`: of the step's tokens, [tokens, hidden_size]. What a position says is of the token behind it, if that is
    the prompt's as well.
    """
    found = {}
    for row, slot in enumerate(rows.slots.tolist()):
        if slot not in batch.prompt_logprobs:
            continue
        num_top, num_prompt = batch.prompt_logprobs[slot]
        first, last = int(rows.starts[row]), min(int(rows.context_lens[row]), num_prompt - 1)
        if first >= last:
            continue
        places = np.flatnonzero((rows.token_slots == slot) & (rows.positions < last))
        states = hidden[torch.from_numpy(places[np.argsort(rows.positions[places])]).to(hidden.device)]
        targets = torch.from_numpy(batch.token_ids[slot, first + 1 : last + 1].astype(np.int64)).to(hidden.device)
        tokens: list[TokenLogprobs] = []
        for begin in range(0, len(targets), _NUM_POSITIONS):
            part = slice(begin, begin + _NUM_POSITIONS)
            tokens += _logprobs(model.logits(states[part]), targets[part], num_top)
        found[row] = PromptLogprobs(first + 1, tokens)
    return found


def _logprobs(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    every = torch.log_softmax(logits, dim=-1)
    chosen = every.gather(1, targets[:, None])
    ranks = (every > chosen).sum(dim=-1) + 1
    top = every.topk(min(num_top, every.shape[1]), dim=-1)
    return [
        TokenLogprobs(logprob, tuple(ids), tuple(values), rank)
        for logprob, ids, values, rank in zip(
            chosen[:, 0].tolist(), top.indices.tolist(), top.values.tolist(), ranks.tolist(), strict=True
        )
    ]
