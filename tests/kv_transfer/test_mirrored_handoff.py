"""From rank to rank where neither computes in the memory that is transferred: what is not brought there is garbage."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.kv_transfer.store_rig import BLOCK_SIZE, ConnectedEngine, expected, making_engines, prompt_of, serve, until

MakeEngine = Callable[..., ConnectedEngine]
NUM_TOKENS = 6


@pytest.fixture
def make() -> Iterator[MakeEngine]:
    with making_engines() as make_any:
        yield make_any


@pytest.mark.parametrize(("prefill_is_mirrored", "decode_is_mirrored"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_answer_is_that_of_one_rank(
    make: MakeEngine, mode: str, async_scheduling: bool, prefill_is_mirrored: bool, decode_is_mirrored: bool
) -> None:
    connector = "PullConnector", {"mode": mode}
    setup = {"async_scheduling": async_scheduling}
    # In chunks, which end within blocks.
    prefill = make(connector, mirrored=prefill_is_mirrored, max_num_batched_tokens=11, setup=setup)
    decode = make(connector, mirrored=decode_is_mirrored, setup=setup)
    # Of the first prompt, a prefix that nobody has handed out: it is in the prefix cache, and not in the mirror.
    serve(prefill, [prompt_of(18)], first_id=100)
    for number, prompt in enumerate([prompt_of(30), prompt_of(33, 3), prompt_of(8 * BLOCK_SIZE, 5)]):
        right = expected(prompt, NUM_TOKENS)
        asked = {"hands_off": True, "kv_transfer_params": {"do_remote_decode": True}}
        prefill.submit(number, prompt, NUM_TOKENS, fields=asked)
        until(lambda number=number: prefill.step() is None and number in prefill.ends, "the prompt is computed")  # type: ignore[misc]
        assert prefill.tokens[number] == right[:1]
        ticket = prefill.ends[number].kv_transfer_params
        fields = {"num_generated": 1, "kv_transfer_params": ticket}
        decode.submit(number, prompt + right[:1], NUM_TOKENS, fields=fields)

        def has_ended(number: int = number) -> bool:
            prefill.step()
            decode.step()
            load = prefill.scheduler.load()
            return number in decode.ends and load.num_free_blocks == load.num_blocks

        until(has_ended, "the request has ended, and its blocks on the other rank are let go")
        assert decode.tokens[number] == right[1:]
    decode.run()
    stats = decode.worker.stats()
    assert (stats.num_loads, stats.load_failures) == (3, {})
    for engine in (prefill, decode):
        engine.assert_nothing_held()
