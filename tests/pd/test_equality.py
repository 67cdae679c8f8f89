"""Tokens of prefill and decode on different ranks are those of one mixed rank, over every transport."""

import pytest

from kv_transfer.transport import TransferError
from kv_transfer.transports import make_transport
from tests.pd.rig import SECRET, answers_of_one_rank, in_loop, make_prompts, running

pytestmark = pytest.mark.model

NUM_TOKENS = 6
PROMPTS = make_prompts(60, seed=1) + make_prompts(40, seed=2, shared=40, shortest=41, longest=80)


@pytest.fixture(scope="module")
def greedy():
    return answers_of_one_rank(PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def sampled():
    return answers_of_one_rank(PROMPTS, NUM_TOKENS, temperature=0.9, top_k=20)


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl", "ucx", "mooncake"])
@in_loop(300)
async def test_tokens_are_those_of_one_rank(transport, greedy, sampled):
    try:
        make_transport(transport, SECRET)
    except TransferError as error:
        pytest.skip(f"{transport}: {error}")
    async with running("prefill", "decode", kv_transfer={"kv_connector_extra_config": {"transport": transport}}) as pd:
        assert await pd.complete_all(PROMPTS, NUM_TOKENS) == greedy
        # Now with prefix hits on both ranks.
        assert await pd.complete_all(PROMPTS, NUM_TOKENS) == greedy
        assert await pd.complete_all(PROMPTS, NUM_TOKENS, temperature=0.9, top_k=20) == sampled
        await pd.wait_until_nothing_is_held()
        decode = await pd.rank("decode").stats()
        assert decode["kv_transfer"]["load_failures"] == {}
        assert list(decode["kv_transfer"]["lanes"]) == [transport]
        # Nothing was computed twice.
        assert decode["load"]["num_prompt_tokens"] == 0
