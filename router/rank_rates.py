"""How fast a rank is, from the figures of its frames; pure.

Two frames tell what lies between them: steps, prompt tokens, time within steps. Where no prompt was computed, that is
the time of a step. Where prompts were most of the work, it is what their tokens took, a step's usual time aside. Older
work counts less, by halves; a rank that changes its pace is known for it after some hundred steps, or some thousand
prompt tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rank_scheduler.messages import RankLoad

HALF_LIFE_STEPS = 64.0
HALF_LIFE_TOKENS = 4096.0
MIN_PROMPT_TOKENS_PER_STEP = 16
"""Less tells too little of what a prompt token takes."""
LIKE_PEERS = 1.25
"""A rank that is slower or faster by less counts as its peers do: ranks that are alike are to be equals."""
MAX_LAG = 16.0

Column = NDArray[np.float64]
"""A figure of each of some ranks, shape [n]; NaN: it is not known."""


class RankRates:
    """Mutable state: sums of what was measured, older parts of them smaller."""

    __slots__ = ("_last", "_prefill_s", "_prefill_tokens", "_running", "_step_s", "_steps")

    def __init__(self, load: RankLoad) -> None:
        """`load`: its figures at the beginning."""
        self._last = load
        self._steps = self._step_s = self._running = 0.0
        self._prefill_tokens = self._prefill_s = 0.0

    @property
    def step_s(self) -> float | None:
        """Of a step that computes no prompt; None: there was none."""
        return self._step_s / self._steps if self._steps else None

    @property
    def num_running(self) -> float:
        """Sequences in such a step, on average."""
        return self._running / self._steps if self._steps else 0.0

    @property
    def prefill_s_per_token(self) -> float | None:
        """None: no prompts were computed."""
        return self._prefill_s / self._prefill_tokens if self._prefill_tokens else None

    def learn(self, load: RankLoad) -> None:
        """From the next figures."""
        last, self._last = self._last, load
        busy_s, num_steps = load.busy_s - last.busy_s, load.num_steps - last.num_steps
        num_prompt = load.num_prompt_tokens - last.num_prompt_tokens
        if num_steps <= 0 or busy_s <= 0 or num_prompt < 0:
            return
        if num_prompt == 0:
            kept = 0.5 ** (num_steps / HALF_LIFE_STEPS)
            self._steps = kept * self._steps + num_steps
            self._step_s = kept * self._step_s + busy_s
            self._running = kept * self._running + num_steps * last.num_running
        elif num_prompt >= MIN_PROMPT_TOKENS_PER_STEP * num_steps:
            kept = 0.5 ** (num_prompt / HALF_LIFE_TOKENS)
            self._prefill_tokens = kept * self._prefill_tokens + num_prompt
            # Most of such a step goes to its prompts, even where its usual part takes longer than was known.
            usual_s = min(num_steps * (self.step_s or 0.0), busy_s / 2)
            self._prefill_s = kept * self._prefill_s + busy_s - usual_s


def lower_median(values: Column) -> float | None:
    """Of those that are not NaN; None: all are."""
    known = np.sort(values[~np.isnan(values)])
    return float(known[(len(known) - 1) // 2]) if known.size else None


def like_peers(shown: Column, usual: float) -> Column:
    """What each has shown, if that differs from what is usual."""
    differs = (shown > usual * LIKE_PEERS) | (shown < usual / LIKE_PEERS)
    return np.where(differs, shown, usual)


def lags(step_s: Column, num_running: Column) -> Column:
    """How much longer each one's steps take than its peers', 1.0 if that is little.

    One that runs more sequences may take longer, in proportion.
    """
    usual_s, usual_running = lower_median(step_s), lower_median(num_running)
    if not usual_s or usual_running is None:
        return np.ones(len(step_s))
    allowance = np.maximum(num_running / max(usual_running, 1.0), 1.0)
    found = np.nan_to_num(step_s / usual_s / allowance, nan=1.0)
    return np.where(found > LIKE_PEERS, np.minimum(found, MAX_LAG), 1.0)
