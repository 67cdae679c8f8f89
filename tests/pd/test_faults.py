"""Prefill and decode ranks that die, hang, come back and disagree: right tokens or one clear error, and nothing held.

All tests share one running system, and whoever ends a rank starts another. A request ends with an error where its
only rank is lost: the prefill rank before the handoff, or the decode rank after it. Everything else that can happen
to KV on its way costs time only, since the decode rank computes what it does not get.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections import Counter

import pytest

import router.rank_link
from kv_transfer.tcp_peer import MAX_CONNECTIONS_PER_PEER
from router.errors import Cause
from router.rank_link import RankLink
from router.room import Room
from tests.pd.rig import Lost, answers_of_one_rank, make_prompts, running, token_ids, until

pytestmark = pytest.mark.model

NUM_TOKENS = 4
LEASE_S = 2.0
SILENCE_S = 8.0
MAX_LOADS = 3
MAX_LOADS_PER_STEP = 2
KV_TRANSFER = {
    "kv_connector_extra_config": {
        "transport": "tcp",
        "lease_s": LEASE_S,
        "connect_timeout_s": 2.0,
        "pull_timeout_s": 2.0,
    }
}
SCHEDULER = {
    "max_num_seqs": 4,
    "max_num_inflight_kv_loads": MAX_LOADS,
    "max_async_kv_loads_per_step": MAX_LOADS_PER_STEP,
}
# Each test takes its own, so that none is found in a prefix cache.
PROMPTS = make_prompts(95, seed=3, shortest=18, longest=24)
NUM_IN_BURST = 30
# Nobody knows the answers to these.
OTHERS = make_prompts(20, seed=5, shortest=18, longest=24)


class System:
    """The running system, and a loop for the tests to use it from."""

    def __init__(self, runner, pd):
        self.runner = runner
        self.pd = pd
        self.unused = iter(PROMPTS)

    def prompts(self, count=1):
        return list(itertools.islice(self.unused, count))


@pytest.fixture(scope="module")
def right():
    """Prompt → what one mixed rank generates."""
    (answers,) = answers_of_one_rank(PROMPTS, NUM_TOKENS)
    return {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}


@pytest.fixture(scope="module")
def system():
    shared_memory = set(os.listdir("/dev/shm"))
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        pd = runner.run(
            stack.enter_async_context(
                running(
                    "prefill",
                    "decode",
                    kv_transfer=KV_TRANSFER,
                    scheduler=SCHEDULER,
                    num_blocks=80,
                    rank_silence_timeout_s=SILENCE_S,
                )
            )
        )
        try:
            # What is made once, upon the first use.
            runner.run(pd.complete_all(make_prompts(8, seed=4), 2))
            yield System(runner, pd)
        finally:
            runner.run(stack.aclose())
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("__KMP")} <= shared_memory


@pytest.fixture
def run(system, right):
    """Runs a test's body with the system, and checks afterwards that nothing is held and nothing was lost."""

    def run(body):
        system.runner.run(asyncio.wait_for(checked(system, right, body), 120))

    return run


async def checked(system, right, body):
    pd = system.pd
    await pd.wait_for_links(2)
    before = {rank.pid: await rank.stats() for rank in pd.living}
    await body(pd, system.prompts, right)
    await pd.wait_for_links(2)
    (prompt,) = system.prompts()
    assert await pd.complete(prompt, NUM_TOKENS) == right[tuple(prompt)]
    await pd.wait_until_nothing_is_held()
    for rank in pd.living:
        if (was := before.get(rank.pid)) is not None:
            await no_more_than(rank, was)


async def no_more_than(rank, was):
    """Threads and open files of the rank are what they were, but for connections that are kept for the next pull."""
    most = {name: was[name] + MAX_CONNECTIONS_PER_PEER for name in ("num_threads", "num_fds")}
    await wait_for(rank, lambda now: all(now[name] <= most[name] for name in most), f"at most {most}")


@contextlib.contextmanager
def before_the_decode_rank_hears(what):
    """Call `what` before each request is submitted to a decode rank."""
    submit = RankLink.submit

    def submit_later(link, *args):
        if link.record.role == "decode":
            what()
        return submit(link, *args)

    RankLink.submit = submit_later
    try:
        yield
    finally:
        RankLink.submit = submit


@contextlib.contextmanager
def room_for_all():
    """As where several routers give a rank more than each of them knows."""
    told = router.rank_link.room
    router.rank_link.room = lambda *_: Room.ANYTHING
    try:
        yield
    finally:
        router.rank_link.room = told


async def wait_for(rank, holds, what, timeout_s=30.0):
    """Until the rank's figures are so."""
    try:
        async with asyncio.timeout(timeout_s):
            while not holds(stats := await rank.stats()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}: {stats}") from None
    return stats


async def halfway(rank, count):
    await wait_for(rank, lambda stats: stats["num_halfway_pulls"] == count, f"{count} pulls halfway through")


async def failures(rank):
    return Counter((await rank.stats())["kv_transfer"]["load_failures"])


async def ended(tasks):
    return await asyncio.gather(*tasks, return_exceptions=True)


def start(pd, prompts, num_tokens=NUM_TOKENS, **fields):
    return [asyncio.create_task(pd.complete(prompt, num_tokens, **fields)) for prompt in prompts]


def of(right, prompts):
    return [right[tuple(prompt)] for prompt in prompts]


# ---- clients that go ----


def test_a_client_that_goes_before_the_pull(run):
    async def body(pd, prompts, right):
        (task,) = tasks = start(pd, prompts())
        with before_the_decode_rank_hears(lambda: task.cancel()):
            assert [type(answer) for answer in await ended(tasks)] == [asyncio.CancelledError]

    run(body)


def test_a_client_that_goes_during_the_pull(run):
    async def body(pd, prompts, right):
        decode = pd.rank("decode")
        await decode.ask("shut")
        (task,) = tasks = start(pd, prompts())
        await halfway(decode, 1)
        task.cancel()
        assert [type(answer) for answer in await ended(tasks)] == [asyncio.CancelledError]
        await wait_for(decode, lambda stats: stats["load"]["num_loads"] == 0, "nobody waits for the load")
        await decode.ask("open")

    run(body)


def test_a_client_that_goes_after_the_pull(run):
    async def body(pd, prompts, right):
        count = 0

        def on_token():
            nonlocal count
            count += 1
            if count == 3:
                task.cancel()

        (prompt,) = prompts()
        task = asyncio.create_task(pd.answer(prompt, max_tokens=50, ignore_eos=True, on_token=on_token))
        assert [type(answer) for answer in await ended([task])] == [asyncio.CancelledError]

    run(body)


# ---- caps and queues ----


def test_loads_keep_within_both_caps(run):
    async def body(pd, prompts, right):
        decode, most, asked = pd.rank("decode"), 0, prompts(NUM_IN_BURST)
        burst = asyncio.gather(*start(pd, asked))
        while not burst.done():
            most = max(most, (await decode.stats())["load"]["num_loads"])
            await asyncio.sleep(0.03)
        assert await burst == of(right, asked)
        assert 0 < most <= MAX_LOADS
        assert 0 < (await decode.stats())["most_loads_of_a_step"] <= MAX_LOADS_PER_STEP

    run(body)


def test_a_lease_that_expires_in_the_decode_ranks_queue(run):
    """Its heartbeats, which cannot come while the rank is stopped, had kept it."""

    async def body(pd, prompts, right):
        prefill, decode = pd.rank("prefill"), pd.rank("decode")
        before = await failures(decode)
        streams = start(pd, OTHERS[:4], 120)
        await wait_for(decode, lambda stats: stats["load"]["num_running"] == 4, "a full decode rank")
        asked = prompts(MAX_LOADS + 2)
        with room_for_all():
            tasks = start(pd, asked)
            stats = await wait_for(
                decode,
                lambda stats: stats["load"]["num_loads"] == MAX_LOADS and stats["load"]["num_waiting"] == MAX_LOADS + 2,
                "two that wait for their loads",
            )
        num_expired = (await prefill.stats())["kv_transfer"]["num_expired_leases"]
        # Longer than a lease, and it has not been lost.
        await wait_for(prefill, lambda stats: stats["kv_transfer"]["num_leases"] == 2, "two leases")
        decode.signal(signal.SIGSTOP)
        try:
            await wait_for(
                prefill, lambda stats: stats["kv_transfer"]["num_expired_leases"] == num_expired + 2, "expired leases"
            )
        finally:
            decode.signal(signal.SIGCONT)
        assert await asyncio.gather(*tasks) == of(right, asked)
        assert [len(answer) for answer in await asyncio.gather(*streams)] == [120] * 4
        assert await failures(decode) - before == {"lease_expired": 2}, stats

    run(body)


def test_a_lease_is_kept_while_no_decode_rank_has_room(run):
    async def body(pd, prompts, right):
        prefill, decode = pd.rank("prefill"), pd.rank("decode")
        before = await failures(decode)
        num_expired = (await prefill.stats())["kv_transfer"]["num_expired_leases"]
        streams = start(pd, OTHERS[:4], 900)
        await wait_for(decode, lambda stats: stats["load"]["num_running"] == 4, "a full decode rank")
        asked = prompts(MAX_LOADS + 2)
        tasks = start(pd, asked)
        await wait_for(decode, lambda stats: stats["load"]["num_waiting"] == MAX_LOADS, "loads beside a full batch")
        await until(lambda: pd.service.pool.dispatcher.num_waiting == 2, 20, "two that wait for room")
        await asyncio.sleep(2 * LEASE_S)
        assert pd.service.pool.dispatcher.num_waiting == 2, "those that run have ended too early"
        for stream in streams:
            stream.cancel()
        assert await asyncio.gather(*tasks) == of(right, asked)
        await ended(streams)
        assert not await failures(decode) - before, "something was computed twice"
        assert (await prefill.stats())["kv_transfer"]["num_expired_leases"] == num_expired

    run(body)


# ---- ranks that hang ----


def test_a_prefill_rank_that_hangs_while_it_is_read(run):
    async def body(pd, prompts, right):
        prefill, decode = pd.rank("prefill"), pd.rank("decode")
        before = await failures(decode)
        await decode.ask("shut")
        asked = prompts(3)
        tasks = start(pd, asked)
        await halfway(decode, 3)
        prefill.signal(signal.SIGSTOP)
        try:
            await decode.ask("open")
            assert await asyncio.gather(*tasks) == of(right, asked)
            assert await failures(decode) - before == {"timeout": 3}
            await until(lambda: len(pd.service.pool.links) == 1, 20, "the router has lost it")
        finally:
            prefill.signal(signal.SIGCONT)

    run(body)


def test_a_decode_rank_that_hangs_while_it_reads(run):
    async def body(pd, prompts, right):
        prefill, decode = pd.rank("prefill"), pd.rank("decode")
        before = await failures(decode)
        num_expired = (await prefill.stats())["kv_transfer"]["num_expired_leases"]
        await decode.ask("shut")
        asked = prompts(2)
        tasks = start(pd, asked)
        await halfway(decode, 2)
        decode.signal(signal.SIGSTOP)
        try:
            await wait_for(
                prefill, lambda stats: stats["kv_transfer"]["num_expired_leases"] == num_expired + 2, "expired leases"
            )
        finally:
            decode.signal(signal.SIGCONT)
        await decode.ask("open")
        assert await asyncio.gather(*tasks) == of(right, asked)
        assert sum((await failures(decode) - before).values()) == 2

    run(body)


def test_a_decode_rank_that_hangs_until_the_router_gives_it_up(run):
    async def body(pd, prompts, right):
        decode = pd.rank("decode")
        await decode.ask("shut")
        asked = prompts(2)
        tasks = start(pd, asked)
        await halfway(decode, 2)
        decode.signal(signal.SIGSTOP)
        try:
            assert await asyncio.gather(*tasks) == of(right, asked)
        finally:
            decode.signal(signal.SIGCONT)
        await decode.ask("open")

    run(body)


# ---- ranks that die ----


def test_a_prefill_rank_that_dies_while_it_is_read(run):
    async def body(pd, prompts, right):
        prefill, decode = pd.rank("prefill"), pd.rank("decode")
        before = await failures(decode)
        await decode.ask("shut")
        asked = prompts(3)
        tasks = start(pd, asked)
        await halfway(decode, 3)
        prefill.kill()
        await decode.ask("open")
        assert await asyncio.gather(*tasks) == of(right, asked)
        assert await failures(decode) - before == {"peer_lost": 3}

        # Nobody is left to compute prompts only: whoever is there does all.
        await pd.wait_for_links(1)
        (alone,) = prompts()
        assert await pd.complete(alone, NUM_TOKENS) == right[tuple(alone)]
        async with pd.another_router(pd_fallback=False, rank_wait_timeout_s=0.2) as router:
            with pytest.raises(Lost, match=r"no rank can take the request .* 0 of them for its prefill part") as lost:
                await pd.answer(alone, service=router, max_tokens=2)
            assert lost.value.cause is Cause.NO_RANK_AVAILABLE

        # One that is of no use for this decode rank.
        other = await pd.start_rank("prefill", block_size=8)
        await pd.wait_for_links(2)
        asked = prompts(2)
        assert await pd.complete_all(asked, NUM_TOKENS) == of(right, asked)
        assert await failures(decode) - before == {"peer_lost": 3, "incompatible": 2}
        await pd.wait_until_nothing_is_held()

        # It dies when it has handed off, and nobody has begun to read.
        (last,) = prompts()
        with before_the_decode_rank_hears(lambda: other.signal(signal.SIGKILL)):
            assert await pd.complete(last, NUM_TOKENS) == right[tuple(last)]
        other.kill()
        await pd.start_rank("prefill")

    run(body)


def test_a_prefill_rank_that_dies_before_the_handoff(run):
    async def body(pd, prompts, right):
        prefill = pd.rank("prefill")
        prefill.signal(signal.SIGSTOP)
        asked = prompts()
        tasks = start(pd, asked)
        (link,) = [link for link in pd.service.pool.links if link.record.role == "prefill"]
        await until(lambda: link.num_live == 1, 5, "the request is there")
        prefill.kill()
        assert await asyncio.gather(*tasks) == of(right, asked)
        await pd.wait_for_links(1)
        await pd.start_rank("prefill")

    run(body)


def test_a_decode_rank_that_dies_while_it_reads(run):
    async def body(pd, prompts, right):
        decode = pd.rank("decode")
        await decode.ask("shut")
        asked = prompts(3)
        tasks = start(pd, asked)
        await halfway(decode, 3)
        decode.kill()
        assert await asyncio.gather(*tasks) == of(right, asked)

        # The prefill rank is left alone.
        await pd.wait_for_links(1)
        (alone,) = prompts()
        assert await pd.complete(alone, NUM_TOKENS) == right[tuple(alone)]
        async with pd.another_router(pd_fallback=False, rank_wait_timeout_s=0.2) as router:
            (unserved,) = prompts()
            with pytest.raises(Lost, match=r"no rank can take the request .* 0 of them for its decode part") as lost:
                await pd.answer(unserved, service=router, max_tokens=2)
            assert lost.value.cause is Cause.NO_RANK_AVAILABLE
        await pd.start_rank("decode")

    run(body)


# ---- what is asked of a request ----


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        pytest.param(5, {"max_tokens": 1}, id="max_tokens=1"),
        pytest.param(6, {"max_tokens": 6, "n": 2, "temperature": 0.9, "top_k": 20, "seed": 5}, id="n=2"),
        pytest.param(7, {"max_tokens": 4, "logprobs": 3}, id="logprobs"),
        pytest.param(8, {"max_tokens": 24, "min_tokens": 3, "stop": [" the", ",", "."]}, id="min_tokens"),
        pytest.param(9, {"max_tokens": 30, "stop": [" the", ",", "."]}, id="stop"),
        pytest.param(10, {"max_tokens": 16, "response_format": JSON}, id="json_schema"),
    ],
)
def test_the_answer_is_that_of_one_rank(run, number, fields):
    async def body(pd, prompts, right):
        prompt, decode = OTHERS[number], pd.rank("decode")
        num_loads = (await decode.stats())["kv_transfer"]["num_loads"]
        answers = await pd.answer(prompt, **fields)
        was_handed_off = (await decode.stats())["kv_transfer"]["num_loads"] > num_loads
        assert was_handed_off == any(len(answer.tokens) > 1 for answer in answers)
        of_one = await alone(pd, prompt, **fields)
        assert answers == of_one
        for answer, other in zip(answers, of_one, strict=True):
            assert [entry.top_ids for entry in answer.logprobs] == [entry.top_ids for entry in other.logprobs]
            logprobs = [entry.logprob for entry in other.logprobs]
            assert [entry.logprob for entry in answer.logprobs] == pytest.approx(logprobs, abs=1e-3)
            assert len(answer.logprobs) == (len(answer.tokens) if "logprobs" in fields else 0)

    run(body)


@pytest.mark.parametrize("place", [0, 1])
def test_a_stop_token_ends_it_on_either_rank(run, place):
    async def body(pd, prompts, right):
        (prompt,) = prompts()
        fields = {"max_tokens": 4, "stop_token_ids": [right[tuple(prompt)][place]]}
        (answer,) = await pd.answer(prompt, **fields)
        assert answer.finish_reason == "stop"
        assert [answer] == await alone(pd, prompt, **fields)

    run(body)


def test_an_end_right_after_the_prompt_hands_nothing_off(run):
    """The model has nothing to add."""

    async def body(pd, prompts, right):
        before = await pd.rank("decode").stats()
        text = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n2+2=4."
        (answer,) = await pd.answer(token_ids(text), max_tokens=5)
        assert (answer.tokens, answer.text, answer.finish_reason) == ([], "", "stop")
        after = await pd.rank("decode").stats()
        assert before["kv_transfer"]["num_loads"] == after["kv_transfer"]["num_loads"]

    run(body)


async def alone(pd, prompt, **fields):
    """What the decode rank answers by itself; the salt keeps it from finding what it has read of this prompt."""
    async with pd.another_router(remote_prefill_min_tokens=None) as router:
        return await pd.answer(prompt, service=router, cache_salt=json.dumps(fields), **fields)
