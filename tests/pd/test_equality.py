"""Tokens of prefill and decode on different ranks are those of one mixed rank, over every transport."""

import pytest

from kv_transfer.transport import TransferError
from kv_transfer.transports import make_transport
from tests.pd.rig import SECRET, answers_of_one_rank, in_loop, make_prompts, running

pytestmark = pytest.mark.model

NUM_TOKENS = 4
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.9, "top_k": 20}
# Of two blocks and of three.
PROMPTS = make_prompts(60, seed=1, shortest=17, longest=27) + make_prompts(
    40, seed=2, shared=20, shortest=24, longest=38
)


@pytest.fixture(scope="module")
def answers():
    """Greedy ones, and sampled ones."""
    return answers_of_one_rank(PROMPTS, NUM_TOKENS, GREEDY, SAMPLED)


@pytest.mark.parametrize(
    ("transport", "mode"),
    [("shm", "pull"), ("tcp", "pull"), ("tcp", "push"), ("nixl", "pull"), ("ucx", "pull"), ("mooncake", "pull")],
)
@in_loop(300)
async def test_tokens_are_those_of_one_rank(transport, mode, answers):
    try:
        make_transport(transport, SECRET)
    except TransferError as error:
        pytest.skip(f"{transport}: {error}")
    greedy, sampled = answers
    extra = {"transport": transport, "mode": mode}
    async with running("prefill", "decode", kv_transfer={"kv_connector_extra_config": extra}) as pd:
        assert await pd.complete_all(PROMPTS, NUM_TOKENS) == greedy
        # Now with prefix hits on both ranks.
        assert await pd.complete_all(PROMPTS, NUM_TOKENS) == greedy
        assert await pd.complete_all(PROMPTS, NUM_TOKENS, **SAMPLED) == sampled
        await pd.wait_until_nothing_is_held()
        decode, prefill = await pd.rank("decode").stats(), await pd.rank("prefill").stats()
        assert decode["kv_transfer"]["load_failures"] == {}
        assert list(decode["kv_transfer"]["lanes"]) == [transport]
        assert prefill["kv_transfer"]["num_expired_leases"] == 0
        # Nothing was computed twice.
        assert decode["load"]["num_prompt_tokens"] == 0
        assert prefill["load"]["num_generated_tokens"] == 3 * len(PROMPTS)
