"""KV of finished chunks travels while the others are computed: less to fetch at the handoff, and the same tokens."""

import asyncio

import pytest

from tests.pd.rig import BLOCK_SIZE, answers_of_one_rank, in_loop, make_prompts, running

pytestmark = pytest.mark.model

NUM_TOKENS = 4
CHUNKS = {"max_num_batched_tokens": 64}
# Four chunks each. The first two begin alike, with three blocks.
PROMPTS = make_prompts(2, seed=21, shared=50, shortest=200, longest=230) + make_prompts(
    2, seed=22, shortest=200, longest=230
)
SHORT = make_prompts(1, seed=23, shortest=20, longest=30)


@pytest.fixture(scope="module")
def right():
    (answers,) = answers_of_one_rank(PROMPTS + SHORT, NUM_TOKENS)
    return answers


def num_blocks(num_tokens):
    return -(-num_tokens // BLOCK_SIZE)


async def until_prefetched(rank, num_tokens, timeout_s=40.0):
    async with asyncio.timeout(timeout_s):
        while (await rank.stats())["load"]["num_prefetched_tokens"] < num_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@in_loop(300)
async def test_only_the_last_chunk_is_fetched_after_the_handoff(right):
    async with running("prefill", "decode", scheduler=CHUNKS) as pd:
        decode = pd.rank("decode")
        assert await pd.complete(SHORT[0], NUM_TOKENS) == right[-1]
        before = await decode.stats()
        assert before["load"]["num_prefetched_tokens"] == 0  # one chunk
        bytes_per_block = before["kv_transfer"]["num_loaded_bytes"] // num_blocks(len(SHORT[0]))
        assert await pd.complete(PROMPTS[2], NUM_TOKENS) == right[2]
        after = await decode.stats()
        num_prefetched = after["load"]["num_prefetched_tokens"]
        assert 64 <= num_prefetched <= len(PROMPTS[2]) // 64 * 64
        assert after["load"]["num_prefix_hits"] - before["load"]["num_prefix_hits"] == num_prefetched
        # No block came twice.
        num_loaded_bytes = after["kv_transfer"]["num_loaded_bytes"] - before["kv_transfer"]["num_loaded_bytes"]
        assert num_loaded_bytes == num_blocks(len(PROMPTS[2])) * bytes_per_block
        assert await pd.complete_all(PROMPTS, NUM_TOKENS) == right[:-1]
        await pd.wait_until_nothing_is_held()
        after = await decode.stats()
        assert after["load"]["num_prompt_tokens"] == 0
        assert after["kv_transfer"]["load_failures"] == {}
        assert after["num_ignored_messages"] == after["num_malformed_messages"] == 0


@in_loop(300)
async def test_pushed_blocks_come_as_they_are_computed(right):
    """All full blocks come by one early ticket, without being asked for; what is left is at most one block."""
    push = {"kv_connector_extra_config": {"mode": "push"}}
    async with running("prefill", "decode", scheduler=CHUNKS, kv_transfer=push) as pd:
        decode = pd.rank("decode")
        assert await pd.complete(PROMPTS[2], NUM_TOKENS) == right[2]
        stats = await decode.stats()
        assert stats["load"]["num_prefetched_tokens"] == len(PROMPTS[2]) // BLOCK_SIZE * BLOCK_SIZE
        assert await pd.complete_all(PROMPTS, NUM_TOKENS) == right[:-1]
        await pd.wait_until_nothing_is_held()
        stats = await decode.stats()
        assert stats["load"]["num_prompt_tokens"] == 0
        assert stats["kv_transfer"]["load_failures"] == {}
        assert list(stats["kv_transfer"]["lanes"]) == ["tcp"]


@in_loop(300)
async def test_a_prompt_that_is_preempted_while_its_kv_is_read(right):
    scheduler = {**CHUNKS, "policy": "priority", "max_num_seqs": 1}
    async with running("prefill", "decode", scheduler=scheduler, policy="priority") as pd:
        for prompt, answer in zip(PROMPTS[2:], right[2:-1], strict=True):
            prefetched = (await pd.rank("decode").stats())["load"]["num_prefetched_tokens"]
            request = asyncio.create_task(pd.complete(prompt, NUM_TOKENS, priority=1))
            await until_prefetched(pd.rank("decode"), prefetched + 64)
            assert await pd.complete(SHORT[0], NUM_TOKENS) == right[-1]
            assert await request == answer
        assert (await pd.rank("prefill").stats())["load"]["num_preemptions"] > 0
        await pd.wait_until_nothing_is_held()


@in_loop(300)
async def test_ranks_that_die_while_a_prompt_is_read(right):
    kv_transfer = {"kv_connector_extra_config": {"lease_s": 3.0}}
    async with running("prefill", "decode", kv_transfer=kv_transfer, scheduler=CHUNKS) as pd:
        request = asyncio.create_task(pd.complete(PROMPTS[2], NUM_TOKENS))
        await until_prefetched(pd.rank("decode"), 64)
        pd.rank("prefill").kill()
        assert await request == right[2]
        await pd.wait_until_nothing_is_held()
        # What was confirmed before is right, whoever had computed it.
        await pd.start_rank("prefill")
        await pd.wait_for_links(2)
        assert await pd.complete(PROMPTS[2], NUM_TOKENS) == right[2]
        # The rank that was to go on is gone: another does.
        prefetched = (await pd.rank("decode").stats())["load"]["num_prefetched_tokens"]
        request = asyncio.create_task(pd.complete(PROMPTS[3], NUM_TOKENS))
        await until_prefetched(pd.rank("decode"), prefetched + 64)
        pd.rank("decode").kill()
        assert await request == right[3]
        await pd.wait_until_nothing_is_held()


@in_loop(300)
async def test_a_client_that_leaves_while_its_prompt_is_read(right):
    async with running("prefill", "decode", scheduler=CHUNKS) as pd:
        request = asyncio.create_task(pd.complete(PROMPTS[2], NUM_TOKENS))
        await until_prefetched(pd.rank("decode"), 64)
        request.cancel()
        await asyncio.wait([request])
        await pd.wait_until_nothing_is_held()
        assert await pd.complete(PROMPTS[2], NUM_TOKENS) == right[2]
        await pd.wait_until_nothing_is_held()
