"""What a router does with tickets of prompts that are still being computed."""

import asyncio
import struct

from router.control_messages import PoolRole
from tests.router.fake_cluster import in_loop, running, until

PREFILL, DECODE = PoolRole.PREFILL, PoolRole.DECODE
PROMPT = list(range(40, 80))
TICKETS = [{"num_tokens": 16, "lease": 1}, {"num_tokens": 32, "lease": 1}]
OPTIONS = {"remote_prefill_min_tokens": 1, "pd_fallback": True}


def prompt_of(prefetch):
    return list(struct.unpack(f"<{len(prefetch.token_ids) // 4}i", prefetch.token_ids))


@in_loop
async def test_the_rank_that_will_go_on_hears_of_each_ticket(tmp_path):
    async with running(tmp_path, roles=[PREFILL, DECODE, DECODE], **OPTIONS) as cluster:
        prefill, *decodes = cluster.ranks
        prefill.tickets, prefill.allowance = TICKETS, 1
        request = asyncio.create_task(cluster.complete(PROMPT, max_tokens=3, cache_salt="s"))
        await until(lambda: any(rank.prefetches for rank in decodes))
        chosen, other = sorted(decodes, key=lambda rank: -len(rank.prefetches))
        # By what it hears later, the other one would be the better place.
        other.cache(PROMPT, "s")
        await until(lambda: cluster.service.pool.prefixes.num_hashes(f"boot-{other.index}") > 0)
        prefill.allow(10)
        answer = (await request).json()
        assert [prompt_of(prefetch) for prefetch in chosen.prefetches] == [PROMPT[:16], PROMPT[:32]]
        assert [prefetch.kv_transfer_params for prefetch in chosen.prefetches] == TICKETS
        assert {prefetch.cache_salt for prefetch in chosen.prefetches} == {"s"}
        assert {prefetch.request_id for prefetch in chosen.prefetches} == {answer["id"]}
        assert not other.prefetches
        assert [submit.kv_transfer_params for submit in chosen.submits] == [{"whole": True}]
        assert not other.submits
        assert answer["choices"][0]["text"] == "Hel"


@in_loop
async def test_the_rank_that_was_to_go_on_is_lost(tmp_path):
    async with running(tmp_path, roles=[PREFILL, DECODE, DECODE], **OPTIONS) as cluster:
        prefill, *decodes = cluster.ranks
        prefill.tickets, prefill.allowance = TICKETS, 1
        request = asyncio.create_task(cluster.complete(PROMPT, max_tokens=3))
        await until(lambda: any(rank.prefetches for rank in decodes))
        chosen, other = sorted(decodes, key=lambda rank: -len(rank.prefetches))
        chosen.kill()
        await until(lambda: len(cluster.service.pool.links) == 2)
        prefill.allow(10)
        assert (await request).json()["choices"][0]["text"] == "Hel"
        assert [prompt_of(prefetch) for prefetch in other.prefetches] == [PROMPT[:32]]
        assert len(other.submits) == 1


@in_loop
async def test_a_ticket_for_what_a_lost_rank_had_generated(tmp_path):
    async with running(tmp_path, reply="Hello, world!", roles=[PREFILL, DECODE, DECODE], **OPTIONS) as cluster:
        prefill, *decodes = cluster.ranks
        for rank in decodes:
            rank.allowance = 8
        request = asyncio.create_task(cluster.complete(PROMPT))
        await until(lambda: any(rank.live and rank.allowance == 0 for rank in decodes))
        victim, other = sorted(decodes, key=lambda rank: rank.allowance)
        prefill.tickets = [{"num_tokens": 32, "lease": 2}, {"num_tokens": 48, "lease": 2}]
        victim.kill()
        other.allow(float("inf"))
        assert (await request).json()["choices"][0]["text"] == "Hello, world!"
        generated = prefill.submits[-1].token_ids[4 * len(PROMPT) :]
        assert len(generated) == 4 * 9
        assert [len(prefetch.token_ids) for prefetch in other.prefetches] == [4 * 32, 4 * 48]
        assert other.prefetches[-1].token_ids[4 * len(PROMPT) :] == generated[: 4 * 8]


@in_loop
async def test_without_another_rank_nothing_is_sent(tmp_path):
    async with running(tmp_path, roles=[PREFILL, DECODE], **OPTIONS) as cluster:
        prefill, decode = cluster.ranks
        prefill.tickets, prefill.allowance = TICKETS, 0
        request = asyncio.create_task(cluster.complete(PROMPT, max_tokens=3))
        await until(lambda: prefill.submits)
        decode.kill()
        await until(lambda: len(cluster.service.pool.links) == 1)
        prefill.allow(20)
        assert (await request).json()["choices"][0]["text"] == "Hel"
        assert not prefill.prefetches


@in_loop
async def test_a_request_that_reads_no_prefix_cache_and_a_ticket_that_says_nothing(tmp_path):
    async with running(tmp_path, roles=[PREFILL, DECODE], **OPTIONS) as cluster:
        prefill, decode = cluster.ranks
        prefill.tickets = TICKETS
        await cluster.complete(PROMPT, max_tokens=3, skip_reading_prefix_cache=True)
        prefill.tickets = [{"num_tokens": "many"}, {}]
        await cluster.complete(PROMPT, max_tokens=3)
        assert len(decode.submits) == 2
        assert not decode.prefetches
