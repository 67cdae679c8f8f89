from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model_runner import sampling
from model_runner.sampling import SamplingRows, sample, uniforms

NUM_DRAWS = 20_000
PINNED_DRAWS = [[0.13870941014555432, 0.9711020828012884], [0.7012947216054994, 0.9019319312375116]]
LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.9, -3.0, 0.5, 0.0, -40.0, 1.0, -0.3])


def rows(count: int, **values: Any) -> SamplingRows:
    """The same parameters for `count` rows, at positions 0, 1, …"""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 11, "num_logprobs": -1} | values
    types = {"temperature": "f4", "top_k": "i8", "top_p": "f4", "min_p": "f4", "seeds": "u8", "num_logprobs": "i8"}
    arrays: dict[str, Any] = {name: np.full(count, defaults[name], types[name]) for name in types}
    return SamplingRows(positions=np.arange(count, dtype=np.int64), **arrays)


def exact_distribution(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """One row, straight from the definitions."""
    probabilities = torch.softmax(logits.double() / temperature, dim=-1).numpy()
    probabilities = np.where(probabilities >= min_p * probabilities.max(), probabilities, 0)
    if top_k:
        kth = np.sort(probabilities)[::-1][min(top_k, len(probabilities)) - 1]
        probabilities = np.where(probabilities >= kth, probabilities, 0)
    probabilities = probabilities / probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[(before >= top_p) & (before > 0)]] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 5},
        {"top_k": 50},
        {"top_p": 0.1},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("num_candidates", [3, 512])
def test_frequencies(parameters: dict[str, Any], num_candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square at the 0.1 % level, with few candidates (whole sort needed) and with many."""
    monkeypatch.setattr(sampling, "NUM_CANDIDATES", num_candidates)
    result = sample(LOGITS.expand(NUM_DRAWS, -1), rows(NUM_DRAWS, **parameters))
    counts = np.bincount(result.tokens, minlength=len(LOGITS))
    expected = exact_distribution(LOGITS, **parameters) * NUM_DRAWS
    assert not counts[expected == 0].any()
    likely = expected > 5
    statistic = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    # 99.9 % quantiles of chi-square with 0 to 9 degrees of freedom.
    assert statistic <= [1e-9, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88][likely.sum() - 1]


def test_greedy_and_random_rows_side_by_side() -> None:
    mixed = rows(6)
    mixed.temperature[::2] = 0
    tokens = sample(LOGITS.expand(6, -1), mixed).tokens
    assert tokens[::2].tolist() == [0, 0, 0]
    alone = sample(LOGITS.expand(6, -1), rows(6)).tokens
    assert tokens[1::2].tolist() == alone[1::2].tolist()


def test_row_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 3000, generator=generator)
    parameters = rows(64, top_p=0.9)
    parameters.top_p[::3] = 1.0
    parameters.top_k[::5] = 20
    together = sample(logits, parameters).tokens
    for row in range(64):
        fields = {name: getattr(parameters, name)[row : row + 1] for name in SamplingRows.__slots__}
        assert sample(logits[row : row + 1], SamplingRows(**fields)).tokens[0] == together[row]


def test_few_candidates_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Coarse values: many equals, also where the candidates end.
    logits = (torch.randn(200, 500, generator=torch.Generator().manual_seed(2)) * 3).round() / 2
    parameters = [rows(200, top_p=0.7), rows(200, top_k=10), rows(200, min_p=0.1, top_p=0.99)]
    whole = [sample(logits, each).tokens.tolist() for each in parameters]
    monkeypatch.setattr(sampling, "NUM_CANDIDATES", 16)
    assert [sample(logits, each).tokens.tolist() for each in parameters] == whole


def test_seed_position_and_index_decide() -> None:
    seeds = np.arange(100, dtype=np.uint64).repeat(50)
    positions = np.tile(np.arange(50), 100)
    draws = uniforms(seeds, positions, 10)
    assert draws.shape == (5000, 10)
    assert draws.min() > 0
    assert draws.max() < 1
    assert len(np.unique(draws)) == draws.size
    assert np.array_equal(draws[:, :4], uniforms(seeds, positions, 4))
    grid = draws.reshape(100, 50, 10)
    for axis in range(3):
        series = np.moveaxis(grid, axis, 0)
        correlation = np.corrcoef(series[:-1].ravel(), series[1:].ravel())[0, 1]
        assert abs(correlation) < 0.02
    assert np.histogram(draws, bins=20, range=(0, 1))[0] == pytest.approx(2500, abs=250)
    # Written down: another version must not give running requests other tokens.
    assert uniforms(np.array([0, 2**64 - 1], np.uint64), np.array([0, 7]), 2).tolist() == PINNED_DRAWS


def test_noise_in_the_last_bits_of_the_logits_changes_no_token() -> None:
    """A real vocabulary's size, a flat distribution: most of what is drawn is unlikely, edges are everywhere."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(60, 49_152, generator=generator)
    noisy = logits + 1e-6 * torch.randn(60, 49_152, generator=generator)
    for parameters in (rows(60), rows(60, top_p=0.9), rows(60, top_k=200)):
        assert sample(logits, parameters).tokens.tolist() == sample(noisy, parameters).tokens.tolist()


def test_rows_that_are_not_finite_fail_alone() -> None:
    logits = LOGITS.repeat(4, 1)
    logits[1, 3] = float("nan")
    logits[2, 0] = float("inf")
    result = sample(logits, rows(4, num_logprobs=1, temperature=0))
    assert result.tokens.tolist() == [0, -1, -1, 0]
    assert sorted(result.failed) == [1, 2]
    assert sorted(result.logprobs) == [0, 3]


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    parameters = rows(3, temperature=0.01, top_k=2, num_logprobs=0)
    parameters.num_logprobs[1:] = (3, -1)
    result = sample(LOGITS.expand(3, -1), parameters)
    expected = torch.log_softmax(LOGITS, dim=-1)
    assert result.logprobs[0].logprob == pytest.approx(expected[0].item())
    assert result.logprobs[0].top_ids == ()
    assert result.logprobs[1].top_ids == (0, 3, 8)
    assert result.logprobs[1].top_logprobs == pytest.approx(expected[[0, 3, 8]].tolist())
    assert 2 not in result.logprobs


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    tokens = sample(LOGITS.expand(50, -1) * 50, rows(50, temperature=temperature, top_p=0.99)).tokens
    assert tokens.min() >= 0
    if temperature < 1:
        assert set(tokens.tolist()) == {0}
