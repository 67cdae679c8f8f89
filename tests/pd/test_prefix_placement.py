"""Where a prompt is computed depends on who has its prefix: with prefill and decode ranks, and with mixed ones."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from router.prefix_index import PromptPrefix
from tests.pd.rig import PdSystem, RankProcess, in_loop, make_prompts, running, until

pytestmark = pytest.mark.model

NUM_TOKENS = 4
MIN_TOKENS = 32
LONG, OTHER = make_prompts(2, seed=5, shortest=150, longest=160)
PREFIX = PromptPrefix(struct.pack(f"<{len(LONG)}i", *LONG), "")


async def load(rank: RankProcess) -> dict[str, Any]:
    return dict((await rank.stats())["load"])


async def until_known(pd: PdSystem, rank: RankProcess, num_tokens: int) -> None:
    """Until the router knows that this rank has so many tokens of LONG."""
    pool = pd.service.pool

    def is_known() -> bool:
        (link,) = (link for link in pool.links if link.record.rank_id == rank.rank_id)
        return pool.num_uncached_tokens(PREFIX, link) == len(LONG) - num_tokens

    await until(is_known, 10, f"{num_tokens} tokens known to be on {rank.rank_id}")


@in_loop(120)
async def test_a_prompt_that_is_mostly_cached_is_computed_by_the_decode_rank() -> None:
    async with running("prefill", "decode", remote_prefill_min_tokens=MIN_TOKENS) as pd:
        prefill, decode = pd.rank("prefill"), pd.rank("decode")
        first = await pd.complete(LONG, NUM_TOKENS)
        before = await load(decode)
        assert before["num_prompt_tokens"] == 0
        await until_known(pd, decode, len(LONG) // 16 * 16)
        num_prefill_steps = (await load(prefill))["num_steps"]
        assert await pd.complete(LONG, NUM_TOKENS) == first
        # A turn of a conversation: all that was said, and a few words more.
        follow_up = [*LONG, *first, *OTHER[:10]]
        assert len(await pd.complete(follow_up, NUM_TOKENS)) == NUM_TOKENS
        assert (await load(prefill))["num_steps"] == num_prefill_steps
        after = await load(decode)
        assert 0 < after["num_prompt_tokens"] < 2 * MIN_TOKENS
        # Much that is new is the prefill rank's again, and so is another tenant's.
        await pd.complete([*LONG[:32], *OTHER], NUM_TOKENS)
        await pd.complete(LONG, NUM_TOKENS, cache_salt="another")
        assert (await load(prefill))["num_steps"] > num_prefill_steps
        assert (await load(decode))["num_prompt_tokens"] == after["num_prompt_tokens"]
        await pd.wait_until_nothing_is_held()


@in_loop(120)
async def test_of_two_mixed_ranks_the_one_that_has_the_prefix_goes_on() -> None:
    async with running("mixed", "mixed", remote_prefill_min_tokens=None) as pd:
        await pd.complete(LONG, NUM_TOKENS)
        computed = [(await load(rank))["num_prompt_tokens"] for rank in pd.ranks]
        assert sorted(computed) == [0, len(LONG)]
        holder, other = pd.ranks if computed[0] else reversed(pd.ranks)
        await until_known(pd, holder, len(LONG) // 16 * 16)
        for turn in range(4):
            await pd.complete([*LONG, *OTHER[turn : turn + 8]], NUM_TOKENS)
        assert (await load(other))["num_prompt_tokens"] == 0
        assert (await load(holder))["num_prompt_tokens"] < len(LONG) + 4 * MIN_TOKENS
