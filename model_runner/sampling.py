"""Logits → tokens, for all rows of a step at once.

A row's token is a function of its logits, its parameters and (seed, position) alone: randomness is a hash of the
latter two. So a request goes on with the same tokens on another rank, and whatever else is in the batch. That must
survive logits that differ in their last bits, so tokens are drawn with the Gumbel-max trick: it flips only if two
noisy scores are equal up to those bits, where inverting the cumulated distribution flips at the edge of every one of
its thousands of unlikely tokens. Filters apply as in vLLM: temperature, then min-p, then top-k
(all tokens as likely as the k-th stay), then top-p (the last token that reaches the mass stays).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from rank_scheduler.messages import TokenLogprobs
from rank_scheduler.plan import Int32Array

NUM_CANDIDATES = 512
"""Most likely tokens that are sorted for the filters; rows that keep more of them sort the whole vocabulary."""

GROUP_SIZE = 256
"""Tokens are drawn in two stages, a group of ids and a token of it, so that a row needs few random numbers."""

NON_FINITE = "the model's logits are not finite (overflow, or damaged weights): if it persists, set dtype to float32"

NOTHING_ALLOWED = (
    "its grammar, min_tokens, allowed_token_ids and bad_words leave no token: relax the grammar, lower min_tokens, or "
    "allow more tokens"
)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters per row; every array has shape [rows]."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]
    """Index in the sequence of the token to sample: how many tokens come before it."""
    num_logprobs: npt.NDArray[np.int64]
    """-1: none asked."""


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: Int32Array
    """Shape [rows]; -1 for rows in `failed`."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


def sample(logits: torch.Tensor, rows: SamplingRows, wished: torch.Tensor | None = None) -> Sampled:
    """Pick one token per row of `logits` [rows, vocab_size], float32.

    `wished`: the same as requests want them changed, -inf where a token may not be picked. Logprobs are those of
    `logits`.
    """
    # One pass: a sum is finite only if every term is.
    finite = torch.isfinite(logits.sum(dim=-1)).cpu().numpy()
    failed = {int(row): NON_FINITE for row in np.flatnonzero(~finite)}
    usable = finite
    if wished is None:
        best = logits.argmax(dim=-1)
    else:
        highest, best = wished.max(dim=-1)
        allowed = (highest > float("-inf")).cpu().numpy()
        failed |= {int(row): NOTHING_ALLOWED for row in np.flatnonzero(finite & ~allowed)}
        usable = finite & allowed
    tokens = best.cpu().numpy().astype(np.int32)
    random = np.flatnonzero(usable & (rows.temperature > 0))
    if len(random):
        tokens[random] = _sample_random(_take(logits if wished is None else wished, random), rows, random)
    tokens[~usable] = -1
    asked = np.flatnonzero(usable & (rows.num_logprobs >= 0))
    logprobs = _logprobs(_take(logits, asked), tokens[asked], rows.num_logprobs[asked]) if len(asked) else []
    return Sampled(tokens, {int(row): entry for row, entry in zip(asked, logprobs, strict=True)}, failed)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.float64]:
    """Numbers in (0, 1), shape [rows, count]: SplitMix64 finalizers over seed, then position, then index."""
    keys = _mix(_mix(seeds + _GOLDEN) + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    mixed = _mix(keys[:, None] + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64))
    return ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _sample_random(logits: torch.Tensor, rows: SamplingRows, which: npt.NDArray[np.intp]) -> Int32Array:
    """Tokens of the rows `which`, whose temperature is above 0; `logits` has these rows only."""
    device = logits.device
    num_groups = -(-logits.shape[1] // GROUP_SIZE)
    noise = -np.log(-np.log(uniforms(rows.seeds[which], rows.positions[which], num_groups + GROUP_SIZE)))
    gumbel = torch.from_numpy(noise).to(device)
    temperature = torch.from_numpy(rows.temperature[which]).to(device)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    tokens = np.empty(len(which), np.int32)
    filtered = (rows.top_k[which] > 0) | (rows.top_p[which] < 1) | (rows.min_p[which] > 0)

    plain = np.flatnonzero(~filtered)
    if len(plain):
        tokens[plain] = _draw(_take(scaled, plain), _take(gumbel, plain)).cpu().numpy()
    pending = np.flatnonzero(filtered)
    for num_candidates in (min(NUM_CANDIDATES, logits.shape[1]), logits.shape[1]):
        if not len(pending):
            break
        chosen, exact = _sample_filtered(
            _take(scaled, pending), _take(gumbel, pending), rows, which[pending], num_candidates
        )
        tokens[pending[exact]] = chosen[exact]
        pending = pending[~exact]
    return tokens


def _sample_filtered(
    scaled: torch.Tensor,
    gumbel: torch.Tensor,
    rows: SamplingRows,
    which: npt.NDArray[np.intp],
    num_candidates: int,
) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
    """Tokens out of the `num_candidates` most likely, and whether they suffice for each row."""
    device = scaled.device
    top_k = torch.from_numpy(rows.top_k[which]).to(device)[:, None]
    top_p = torch.from_numpy(rows.top_p[which].astype(np.float64)).to(device)[:, None]
    min_p = torch.from_numpy(rows.min_p[which]).to(device)[:, None]
    everything = num_candidates == scaled.shape[1]

    # Most likely first, equals by id: what is kept must not depend on how the kernel orders equals.
    ids = scaled.topk(num_candidates, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)

    kept = (values >= min_p.log()) & (values > float("-inf"))
    last_of_k = torch.where(top_k > 0, top_k, scaled.shape[1]).clamp(max=num_candidates) - 1
    kept &= values >= values.gather(1, last_of_k)
    weights = torch.where(kept, values.double().exp(), 0.0)
    mass = weights.sum(dim=-1, keepdim=True)
    alone = (top_k == 0) & (min_p == 0)
    if alone.any():
        # Top-p without another filter: the mass is the whole vocabulary's, which the candidates may not cover.
        mass = torch.where(alone, scaled.exp().sum(dim=-1, keepdim=True, dtype=torch.float64), mass)
    before = weights.cumsum(dim=-1) - weights
    kept &= (before < top_p * mass) | (before == 0)
    # A kept token as unlikely as the last candidate may have equals, or successors, that are no candidates.
    exact = everything | ~(kept & (values == values[:, -1:])).any(dim=-1)

    nothing = torch.full_like(scaled, float("-inf"))
    chosen = _draw(nothing.scatter(1, ids, torch.where(kept, values, float("-inf"))), gumbel)
    return chosen.cpu().numpy().astype(np.int32), exact.cpu().numpy()


def _draw(scaled: torch.Tensor, gumbel: torch.Tensor) -> torch.Tensor:
    """A token id per row, with probabilities in proportion to exp(scaled); -inf is never drawn.

    `gumbel`, shape [rows, groups + GROUP_SIZE], has the standard Gumbel noise of both stages. The largest of
    log weight + noise is distributed like the weights, for the groups' sums as for the tokens within one.
    """
    rows, vocab_size = scaled.shape
    num_groups = gumbel.shape[1] - GROUP_SIZE
    padded = F.pad(scaled, (0, num_groups * GROUP_SIZE - vocab_size), value=float("-inf"))
    groups = padded.view(rows, num_groups, GROUP_SIZE)
    group = (groups.logsumexp(dim=-1) + gumbel[:, :num_groups]).argmax(dim=-1)
    members = groups[torch.arange(rows, device=scaled.device), group]
    return group * GROUP_SIZE + (members + gumbel[:, num_groups:]).argmax(dim=-1)


def _logprobs(logits: torch.Tensor, tokens: Int32Array, num_logprobs: npt.NDArray[np.int64]) -> list[TokenLogprobs]:
    every = torch.log_softmax(logits, dim=-1)
    chosen = every.gather(1, torch.from_numpy(tokens.astype(np.int64)).to(logits.device)[:, None])[:, 0].tolist()
    top = every.topk(min(int(num_logprobs.max()), logits.shape[1]), dim=-1)
    top_ids, top_values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprobs(chosen[row], tuple(top_ids[row][:count]), tuple(top_values[row][:count]))
        for row, count in enumerate(num_logprobs.tolist())
    ]


def _take(rows: torch.Tensor, which: npt.NDArray[np.intp]) -> torch.Tensor:
    """`rows[which]`, without a copy if that is all of them."""
    return rows if len(which) == len(rows) else rows[torch.from_numpy(which).to(rows.device)]
