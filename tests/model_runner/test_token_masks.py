from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model_runner.sampling import NON_FINITE, NOTHING_ALLOWED, sample
from model_runner.token_masks import restrict, unpacked
from tests.model_runner.test_sampling import rows

VOCAB_SIZE = 1000


def random_case(num_rows: int, share: float) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Logits, allowed tokens as bool and as bitmasks."""
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(size=(num_rows, VOCAB_SIZE)).astype(np.float32)) * 3
    allowed = rng.random((num_rows, VOCAB_SIZE)) < share
    allowed[:, [0, 31, 32, VOCAB_SIZE - 1]] = True
    masks = np.zeros((num_rows, -(-VOCAB_SIZE // 32)), np.uint32)
    for row, token in zip(*np.nonzero(allowed), strict=True):
        masks[row, token // 32] |= np.uint32(1 << int(token) % 32)
    return logits, allowed, masks


def restricted(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
    copy = logits.clone()
    restrict(copy, *arguments)
    return copy


def test_bits_from_the_lowest() -> None:
    _, allowed, masks = random_case(5, 0.4)
    assert np.array_equal(unpacked(masks, VOCAB_SIZE).numpy(), allowed)
    with pytest.raises(RuntimeError, match=r"shape \(5, 32\), and 1025 tokens need 33 words"):
        unpacked(masks, 1025)


def test_only_masked_rows_change() -> None:
    logits, allowed, masks = random_case(2, 0.3)
    logits = torch.cat((logits, logits))
    copy = restricted(logits, np.array([3, 0], np.int32), masks, {1: (5, 7)})
    expected = logits.clone()
    expected[3][~torch.from_numpy(allowed[0])] = float("-inf")
    expected[0][~torch.from_numpy(allowed[1])] = float("-inf")
    expected[1, [5, 7]] = float("-inf")
    assert torch.equal(copy, expected)
    assert torch.equal(restricted(logits, np.zeros(0, np.int32), None, {}), logits)


@pytest.mark.parametrize(
    "parameters",
    [{"temperature": 0}, {}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_p": 0.999, "temperature": 3.0}],
)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.9])
def test_picks_are_those_of_a_vocabulary_without_the_rest(parameters: dict[str, float], share: float) -> None:
    logits, allowed, masks = random_case(300, share)
    which = np.arange(300, dtype=np.int32)
    settings = rows(300, num_logprobs=0, **parameters)
    result = sample(logits, settings, restricted(logits, which, masks, {}))
    assert allowed[which, result.tokens].all()
    assert not result.failed
    low = torch.where(torch.from_numpy(allowed), logits, -1e4)
    assert result.tokens.tolist() == sample(low, settings).tokens.tolist()
    every = torch.log_softmax(logits, dim=-1)
    for row in range(300):
        assert result.logprobs[row].logprob == pytest.approx(every[row, result.tokens[row]].item(), abs=1e-5)


def test_a_row_that_may_pick_nothing_fails_alone() -> None:
    logits, _, masks = random_case(4, 0.5)
    masks[1] = 0
    logits[2, 8] = float("nan")
    masks[3] = [1] + [0] * 31
    result = sample(logits, rows(4), restricted(logits, np.arange(4, dtype=np.int32), masks, {3: (0,)}))
    assert result.failed == {1: NOTHING_ALLOWED, 2: NON_FINITE, 3: NOTHING_ALLOWED}
    assert result.tokens[1:].tolist() == [-1, -1, -1]
    assert result.tokens[0] >= 0
