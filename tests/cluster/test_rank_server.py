"""A rank's threads and sockets with the real scheduler and the simulated model; the test is its routers and control.

Where steps matter, a test runs twice: with one step at a time, and with the next one planned while one is computed.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cluster import rank_server
from cluster.rank_loop import MAX_CONSECUTIVE_FAILURES
from cluster.rank_server import RankServer
from kv_transfer.connection import Connection, Listener, connect
from kv_transfer.connector import ConnectorStats
from kv_transfer.extension import OFF_VARIABLE
from kv_transfer.wire import WireError
from model_runner.simulated import SimulatedRunner, expected_tokens
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.interface import PauseState
from rank_scheduler.messages import (
    Abort,
    End,
    Explain,
    Explained,
    Explanation,
    Extend,
    FinishReason,
    Grammar,
    GrammarKind,
    HandOff,
    Leaving,
    LeavingHeard,
    PrefixSnapshot,
    RankLoad,
    RankToRouter,
    RouterToRank,
    SamplingParams,
    Submit,
    WatchPrefixes,
)
from rank_scheduler.plan import StepPlan, StepResult
from rank_scheduler.prefix_chain import pack, unpack
from rank_scheduler.scheduler import Scheduler
from router.control_messages import RankRecord, Register, Registered
from router.detokenizer import IncrementalDetokenizer
from router.prefix_index import PrefixIndex, PromptPrefix
from tests.router.small_tokenizer import byte_tokenizer

HOST = "127.0.0.1"
SECRET = b"the cluster's secret"
TIMEOUT_S = 20.0
SHORT_S = 0.05
VOCAB_SIZE = 256
SCHEDULER = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8)
CACHE = CacheConfig(block_size=4, num_blocks=129)
PROMPT = [7, 30, 200, 4, 5, 91]
# Four steps' worth.
LONG_PROMPT = [i % VOCAB_SIZE for i in range(64)]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert not left, f"threads left over: {left}"
    gc.collect()  # a forgotten socket or loop warns when it goes, and warnings are errors


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_server, "HEARTBEAT_INTERVAL_S", SHORT_S)
    monkeypatch.setattr(rank_server, "RECONNECT_DELAY_S", SHORT_S)


@dataclass(frozen=True)
class Setting:
    """What a rank is made of."""

    tokenizer_path: Path
    scheduler: SchedulerConfig

    @property
    def is_async(self) -> bool:
        return bool(self.scheduler.async_scheduling)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return path


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def setting(request: pytest.FixtureRequest, tokenizer_path: Path) -> Setting:
    return Setting(tokenizer_path, SCHEDULER.model_copy(update={"async_scheduling": request.param}))


class Runner(SimulatedRunner):
    """The simulated model; the test may hold its steps up, or let them fail."""

    def __init__(self, scheduler: SchedulerConfig) -> None:
        super().__init__(scheduler=scheduler, cache=CACHE, max_model_len=256, vocab_size=VOCAB_SIZE)
        self.held = False
        self.num_failures = 0
        """So many of the next steps fail."""
        self.fails: Callable[[int], bool] = lambda step: False
        """Whether the step of this number fails."""
        self.entered = threading.Semaphore(0)
        self.num_closed = 0
        self._permits = threading.Semaphore(0)

    def close(self) -> None:
        self.num_closed += 1

    def execute(self, plan: StepPlan) -> StepResult:
        if self.held:
            self.entered.release()
            assert self._permits.acquire(timeout=TIMEOUT_S), "the test let no step go on"
        if self.num_failures or self.fails(plan.step):
            self.num_failures = max(0, self.num_failures - 1)
            raise RuntimeError("the device fell over")
        return super().execute(plan)

    async def wait_entered(self) -> None:
        """Until one more step has begun, while `held`."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=TIMEOUT_S)

    def let_go(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def let_all_go(self) -> None:
        self.held = False
        self._permits.release(1000)


class Control:
    """The control actor's endpoint, as far as a rank sees it."""

    def __init__(self) -> None:
        self.answers = True
        self.error: Exception | None = None
        """Raised instead of the address."""
        self.num_asked = 0
        self.registrations: asyncio.Queue[RankRecord] = asyncio.Queue()
        self._port = 0
        self._listener: Listener | None = None

    async def address(self) -> tuple[str, int]:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return HOST, self._port

    async def open(self) -> None:
        self._listener = Listener(SECRET, self._accept)
        self._port = await self._listener.start(HOST)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    def _accept(self, connection: Connection) -> None:
        assert connection.peer is not None
        assert connection.peer.role == "rank"

        def register(payload: bytes) -> None:
            self.registrations.put_nowait(msgspec.msgpack.decode(payload, type=Register).record)
            if self.answers:
                connection.send(msgspec.msgpack.encode(Registered("mixed/3")))

        connection.start(register)

    async def registration(self) -> RankRecord:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.registrations.get()


def as_bytes(token_ids: list[int]) -> bytes:
    return np.array(token_ids, "<i4").tobytes()


class Router:
    """A router's connection to the rank. Everything it hears is kept and checked against the protocol."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, End] = {}
        self.turn_ends: list[End] = []
        self.firsts: list[int] = []
        self.answers: dict[int, Explained] = {}
        self.load = RankLoad()
        self.num_frames = 0
        self.mistakes: list[str] = []
        self.prefixes = PrefixIndex()
        self.prefixes.add("rank", CACHE.block_size)
        self.leaving: list[Leaving] = []
        self.num_told = 0
        """Frames and snapshots with prefixes."""
        self._heard = asyncio.Event()
        connection.closed.add_done_callback(lambda _: self._heard.set())
        connection.start(self._on_frame)

    def _on_frame(self, payload: bytes) -> None:
        frame: RankToRouter = msgspec.msgpack.decode(payload, type=RankToRouter)
        self._heard.set()
        if isinstance(frame, Explained):
            if frame.query in self.answers:
                self.mistakes.append(f"query {frame.query} answered twice")
            self.answers[frame.query] = frame
            return
        if isinstance(frame, Leaving):
            self.leaving.append(frame)
            return
        if isinstance(frame, PrefixSnapshot):
            self.num_told += 1
            self.prefixes.take_snapshot("rank", frame)
            return
        if frame.prefixes is not None:
            self.num_told += 1
            if not self.prefixes.take_events("rank", frame.prefixes):
                self.mistakes.append("prefix changes with a gap")
        self.num_frames += 1
        self.load = frame.load
        self.firsts += frame.first_token_ids
        for request_id, token in zip(frame.ids, frame.tokens, strict=True):
            if request_id in self.ends:
                self.mistakes.append(f"token for {request_id} after its end")
            self.tokens[request_id].append(token)
        for end in frame.ends:
            if end.id in self.ends:
                self.mistakes.append(f"{end.id} ended twice")
            self.ends[end.id] = end
        for end in frame.turn_ends:
            if end.id in self.ends:
                self.mistakes.append(f"turn of {end.id} ended after its end")
            self.turn_ends.append(end)

    def send(self, message: RouterToRank) -> None:
        assert self.connection.send(msgspec.msgpack.encode(message))

    def submit(
        self,
        request_id: int,
        prompt: list[int] = PROMPT,
        max_tokens: int = 8,
        *,
        name: str = "",
        stop: tuple[str, ...] = (),
        is_session: bool = False,
        grammar: Grammar | None = None,
    ) -> None:
        params = SamplingParams(seed=0, max_tokens=max_tokens, stop=stop)
        self.send(Submit(request_id, as_bytes(prompt), params, name, grammar=grammar, is_session=is_session))

    async def explain(self, query: int, request_id: str) -> list[Explanation]:
        self.send(Explain(query, request_id))
        await self.until(lambda: query in self.answers)
        return self.answers[query].explanations

    async def until(self, condition: Callable[[], bool]) -> None:
        """Looks again after each frame."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                assert not self.connection.closed.done(), f"closed: {self.connection.closed.result()}"
                self._heard.clear()
                await self._heard.wait()

    async def one_more_end(self) -> None:
        """Until any request ends; one that was just submitted will."""
        seen = len(self.ends)
        await self.until(lambda: len(self.ends) > seen)

    async def end_of(self, request_id: int) -> End:
        await self.until(lambda: request_id in self.ends)
        return self.ends[request_id]

    async def all_free(self) -> None:
        """Until a frame says that the rank holds nothing."""
        await self.until(
            lambda: (
                self.num_frames > 0
                and self.load.num_free_blocks == self.load.num_blocks
                and self.load.num_running + self.load.num_waiting == 0
            )
        )

    async def closed(self) -> str:
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.shield(self.connection.closed)


class Rank:
    """A rank with its surroundings."""

    def __init__(self, setting: Setting) -> None:
        self.runner = Runner(setting.scheduler)
        self.control = Control()
        self.routers: list[Router] = []
        self.record: RankRecord | None = None
        self.server = RankServer(
            self.runner,
            self.runner.load(),
            config=setting.scheduler,
            cache=CACHE,
            pool="mixed",
            secret=SECRET,
            control_address=self.control.address,
            advertise_host=HOST,
            node_id="node",
            tokenizer_path=setting.tokenizer_path,
        )

    async def start(self) -> str:
        rank_id = await asyncio.to_thread(self.server.start)
        self.record = await self.control.registration()
        return rank_id

    async def router(self) -> Router:
        assert self.record is not None
        name = f"r-{len(self.routers)}"
        connection = await connect(self.record.host, self.record.port, secret=SECRET, role="router", name=name)
        router = Router(connection)
        self.routers.append(router)
        return router

    async def check_integrity(self) -> None:
        await asyncio.to_thread(self.server.check_integrity, TIMEOUT_S)

    async def settle(self, condition: Callable[[], bool]) -> None:
        """Until the rank's threads have brought about `condition`, of which they send no word."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def stop(self) -> None:
        self.runner.let_all_go()
        await asyncio.to_thread(self.server.stop)
        await self.control.close()
        for router in self.routers:
            await router.closed()
            assert not router.mistakes


@asynccontextmanager
async def running_rank(setting: Setting) -> AsyncIterator[Rank]:
    """At the end the rank must be healthy and empty."""
    rank = Rank(setting)
    await rank.control.open()
    try:
        assert await rank.start() == "mixed/3"
        yield rank
        await (await rank.router()).all_free()
        await rank.check_integrity()
        rank.server.check_health()
    finally:
        await rank.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


# ---- requests ----


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
def test_says_once_that_extensions_are_missing(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(OFF_VARIABLE, "1")

    async def scenario() -> None:
        async with running_rank(setting):
            pass

    run(scenario)
    assert caplog.text.count(f"so the scheduler takes longer: {OFF_VARIABLE} is set") == 1


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
def test_registers_what_it_is(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            record = rank.record
            assert record is not None
            assert (record.rank_id, record.pool, record.host, record.node_id) == ("", "mixed", HOST, "node")
            assert (record.num_blocks, record.block_size) == (128, 4)
            assert (record.max_model_len, record.max_num_seqs) == (256, 8)
            assert rank.server.stats()["rank_id"] == "mixed/3"

    run(test)


def test_tokens_and_one_end(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            prompts = {1: PROMPT, 2: LONG_PROMPT, 3: [1], 4: PROMPT}
            for request_id, prompt in prompts.items():
                router.submit(request_id, prompt, max_tokens=20)
            for request_id, prompt in prompts.items():
                end = await router.end_of(request_id)
                assert (end.reason, end.message) == (FinishReason.LENGTH, "")
                assert router.tokens[request_id] == expected_tokens(prompt, 20, VOCAB_SIZE)
            assert sorted(router.firsts) == [1, 2, 3, 4]

    run(test)


def test_many_requests_of_two_routers(setting: Setting) -> None:
    """The same ids on both connections: each hears of its own only."""

    async def test() -> None:
        async with running_rank(setting) as rank:
            routers = [await rank.router(), await rank.router()]
            for request_id in range(30):
                for turn, router in enumerate(routers):
                    router.submit(request_id, [turn, request_id, 5], max_tokens=1 + request_id % 7)
            for turn, router in enumerate(routers):
                for request_id in range(30):
                    assert (await router.end_of(request_id)).reason is FinishReason.LENGTH
                    expected = expected_tokens([turn, request_id, 5], 1 + request_id % 7, VOCAB_SIZE)
                    assert router.tokens[request_id] == expected
                assert sorted(router.firsts) == list(range(30))

    run(test)


def test_routers_that_ask_know_what_is_in_the_prefix_cache(setting: Setting) -> None:
    """More prompts than the cache holds; one router listens from the start, one begins midway, one never does."""

    async def test() -> None:
        async with running_rank(setting) as rank:
            first, second, deaf = [await rank.router() for _ in range(3)]
            first.send(WatchPrefixes())
            await first.until(lambda: first.num_told == 1)
            for request_id in range(40):
                if request_id == 20:
                    second.send(WatchPrefixes())
                first.submit(request_id, [request_id, *LONG_PROMPT], max_tokens=3)
            for request_id in range(40):
                await first.end_of(request_id)
            await first.all_free()
            await rank.check_integrity()
            held = set(unpack(pack(rank.server._loop._scheduler.findable_prefixes())))
            for router in (first, second):
                await router.until(lambda router=router: router.prefixes._ranks["rank"].hashes == held)
                router.prefixes.check_integrity()
            latest = PromptPrefix(as_bytes([39, *LONG_PROMPT]), "")
            assert first.prefixes.num_cached_tokens(latest) == {"rank": 64}
            assert first.prefixes.num_cached_tokens(PromptPrefix(as_bytes([0, *LONG_PROMPT]), "")) == {}
            assert deaf.num_told == 0
            # An idle rank has nothing to tell.
            told = first.num_told
            seen = first.num_frames
            await first.until(lambda: first.num_frames > seen)
            assert first.num_told == told

    run(test)


def test_preempted_requests_lose_no_token(setting: Setting) -> None:
    """Five sequences of 136 tokens need 170 blocks, and the pool has 128."""

    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            prompts = {request_id: [request_id, *PROMPT[1:]] for request_id in range(5)}
            for request_id, prompt in prompts.items():
                router.submit(request_id, prompt, max_tokens=130)
            for request_id, prompt in prompts.items():
                assert (await router.end_of(request_id)).reason is FinishReason.LENGTH
                assert router.tokens[request_id] == expected_tokens(prompt, 130, VOCAB_SIZE)
            assert router.load.num_preemptions > 0

    run(test)


def test_stop_string(setting: Setting) -> None:
    decoder = IncrementalDetokenizer(byte_tokenizer())
    tokens = expected_tokens(PROMPT, 100, VOCAB_SIZE)
    texts = [decoder.step([token]) for token in tokens]
    at = next(i for i in range(10, 100) if all(text.isascii() and text.isprintable() for text in texts[i - 2 : i]))
    stop = "".join(texts[at - 2 : at])
    assert len(stop) == 2
    count = next(i for i in range(100) if stop in "".join(texts[:i]))

    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            router.submit(1, max_tokens=100, stop=("never in it", stop))
            end = await router.end_of(1)
            assert (end.reason, end.stop_reason) == (FinishReason.STOP, stop)
            assert router.tokens[1] == tokens[:count]

    run(test)


def test_a_session_goes_on_with_new_input(setting: Setting) -> None:
    """The last token of a turn is no part of the next one's context: its KV was never computed."""

    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            router.submit(1, max_tokens=5, is_session=True)
            await router.until(lambda: len(router.turn_ends) == 1)
            first = expected_tokens(PROMPT, 5, VOCAB_SIZE)
            assert router.tokens[1] == first
            router.send(Extend(1, as_bytes([9, 8, 7]), max_tokens=4))
            await router.until(lambda: len(router.turn_ends) == 2)
            second = expected_tokens([*PROMPT, *first[:-1], 9, 8, 7], 4, VOCAB_SIZE)
            assert router.tokens[1] == first + second
            router.send(Extend(1, is_last=True))
            await router.end_of(1)
            assert [end.reason for end in router.turn_ends] == [FinishReason.LENGTH] * 2

    run(test)


def test_explain_requests_of_another_router(setting: Setting) -> None:
    """During a step, where the loop does not compute it itself."""

    async def test() -> None:
        async with running_rank(setting) as rank:
            router, other = await rank.router(), await rank.router()
            router.submit(99, max_tokens=1, name="cmpl-ended")
            await router.end_of(99)
            rank.runner.held = setting.is_async
            for request_id in range(SCHEDULER.max_num_seqs):
                router.submit(request_id, max_tokens=50, name="cmpl-running")
                if request_id == 0 and setting.is_async:
                    await rank.runner.wait_entered()
            router.submit(50, name="cmpl-waiting")

            queries = iter(range(1_000_000))

            async def explain(name: str, num_sequences: int) -> list[Explanation]:
                """The submits and the questions come over different connections: ask until all have arrived."""
                while True:
                    explanations = await other.explain(next(queries), name)
                    if len(explanations) == num_sequences:
                        return explanations

            (ended,) = await explain("cmpl-ended", 1)
            assert ended.timeline
            assert ended.num_prompt_tokens == len(PROMPT)
            running = await explain("cmpl-running", SCHEDULER.max_num_seqs)
            (waiting,) = await explain("cmpl-waiting", 1)
            assert await other.explain(next(queries), "cmpl-unknown") == []
            if setting.is_async:
                assert {e.state for e in running} | {waiting.state} >= {"running", "waiting"}
                assert waiting.reason
                assert waiting.message
            rank.runner.let_all_go()
            for request_id in [*range(SCHEDULER.max_num_seqs), 50]:
                assert (await router.end_of(request_id)).reason is FinishReason.LENGTH
            assert len(other.answers) == next(queries)
            assert not router.answers

    run(test)


def test_structured_output(setting: Setting) -> None:
    """A grammar that cannot be compiled ends its request only."""

    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            router.submit(1, max_tokens=30, grammar=Grammar(GrammarKind.REGEX, "(ab)*"))
            router.submit(2, grammar=Grammar(GrammarKind.REGEX, "(a"))
            router.submit(3)
            end = await router.end_of(2)
            assert (end.reason, router.tokens[2]) == (FinishReason.ERROR, [])
            assert "regular expression" in end.message
            assert (await router.end_of(1)).reason is FinishReason.LENGTH
            assert byte_tokenizer().decode(router.tokens[1]) == "ab" * 15
            await router.end_of(3)
            assert router.tokens[3] == expected_tokens(PROMPT, 8, VOCAB_SIZE)

    run(test)


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
def test_a_tokenizer_that_grammars_cannot_use_costs_only_grammars(setting: Setting, tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    async def test() -> None:
        async with running_rank(Setting(tmp_path / "tokenizer.json", setting.scheduler)) as rank:
            router = await rank.router()
            router.submit(1, grammar=Grammar(GrammarKind.REGEX, "a+"))
            router.submit(2)
            end = await router.end_of(1)
            assert (end.reason, end.message) == (
                FinishReason.ERROR,
                "this rank has no structured output; send the request without a grammar",
            )
            await router.end_of(2)
            assert router.tokens[2] == expected_tokens(PROMPT, 8, VOCAB_SIZE)

    run(test)


def test_pause_and_go_on(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            router.submit(1, max_tokens=200)
            await router.until(lambda: bool(router.tokens[1]))
            await asyncio.to_thread(rank.server.set_pause, PauseState.PAUSED_ALL, TIMEOUT_S)
            num_steps = rank.server.stats()["load"]["num_steps"]
            router.submit(2)
            await rank.check_integrity()
            await rank.check_integrity()
            assert rank.server.stats()["load"]["num_steps"] == num_steps
            assert not router.ends
            await asyncio.to_thread(rank.server.set_pause, PauseState.UNPAUSED, TIMEOUT_S)
            for request_id, num_tokens in ((1, 200), (2, 8)):
                assert (await router.end_of(request_id)).reason is FinishReason.LENGTH
                assert router.tokens[request_id] == expected_tokens(PROMPT, num_tokens, VOCAB_SIZE)

    run(test)


def test_live_figures(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            router.submit(1)
            await router.end_of(1)
            await rank.settle(lambda: rank.server.stats()["load"]["num_running"] == 0)
            stats = rank.server.stats()
            assert stats["load"]["num_generated_tokens"] == 8
            assert stats["load"]["num_loads"] == 0
            assert 0 <= stats["latest_interval"]["utilisation"] <= 1
            rank.runner.held = True
            router.submit(2, LONG_PROMPT, max_tokens=1)
            for _ in range(3):
                await rank.runner.wait_entered()
                rank.runner.let_go(1)
            await rank.runner.wait_entered()
            if setting.is_async:  # otherwise nothing is taken in during the step
                seen = router.num_frames
                await router.until(lambda: router.num_frames > seen + 1)
            rank.runner.let_all_go()
            await router.end_of(2)

    run(test)


def test_a_configuration_that_does_not_fit_the_model_is_refused(setting: Setting) -> None:
    scheduler = setting.scheduler.model_copy(update={"long_prefill_token_threshold": 257})
    with pytest.raises(ValueError, match=r"long_prefill_token_threshold \(257\) is more than max_model_len \(256\)"):
        Rank(Setting(setting.tokenizer_path, scheduler))


def test_a_scheduler_of_ones_own(setting: Setting) -> None:
    """Given by its dotted path; it sees what the rank was configured with."""
    scheduler = setting.scheduler.model_copy(update={"scheduler_cls": f"{__name__}.OwnScheduler"})

    async def test() -> None:
        async with running_rank(Setting(setting.tokenizer_path, scheduler)) as rank:
            assert isinstance(rank.server._loop._scheduler, OwnScheduler)
            router = await rank.router()
            router.submit(1)
            await router.end_of(1)
            assert router.tokens[1] == expected_tokens(PROMPT, 8, VOCAB_SIZE)

    run(test)


class OwnScheduler(Scheduler):
    pass


def test_impossible_request_is_refused_alone(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            router.submit(1, [0] * 256)
            router.submit(2, [VOCAB_SIZE])
            router.submit(3)
            for request_id, message in [(1, "max_model_len"), (2, "token ids outside")]:
                end = await router.end_of(request_id)
                assert end.reason is FinishReason.ERROR
                assert message in end.message
            assert (await router.end_of(3)).reason is FinishReason.LENGTH

    run(test)


# ---- drains ----


def test_a_rank_that_leaves_is_empty_when_all_have_heard_and_nothing_is_left(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            rank.runner.held = True
            router, other = await rank.router(), await rank.router()
            await router.until(lambda: router.num_frames > 0)
            router.submit(1, max_tokens=4)
            await rank.runner.wait_entered()
            draining = asyncio.create_task(asyncio.to_thread(rank.server.drain, 30.0, TIMEOUT_S))
            for each in (router, other):
                await each.until(lambda each=each: bool(each.leaving))
                assert 29.0 < each.leaving[0].moves_in_s <= 30.0
            late = await rank.router()
            await late.until(lambda: bool(late.leaving))
            # What was on the way is served as well.
            router.submit(2, max_tokens=2)
            router.send(LeavingHeard())
            rank.runner.let_all_go()
            await router.end_of(1)
            await router.end_of(2)
            await router.all_free()
            assert router.tokens[1] == expected_tokens(PROMPT, 4, VOCAB_SIZE)
            # Nobody knows what the others have sent.
            assert not draining.done()
            late.send(LeavingHeard())
            other.connection.abort("gone")
            assert await draining is True
            assert rank.server.stats()["is_leaving"] is True
            rank.routers.remove(other)

    run(test)


def test_a_router_has_a_rank_hand_off_what_it_runs(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            rank.runner.held = True
            router = await rank.router()
            router.submit(1, max_tokens=200)
            for _ in range(3):
                await rank.runner.wait_entered()
                rank.runner.let_go(1)
            await rank.runner.wait_entered()
            await router.until(lambda: len(router.tokens[1]) == 3)
            router.send(HandOff(1))
            router.send(HandOff(7))
            router.send(LeavingHeard())
            await rank.settle(lambda: setting.is_async or rank.server._loop._inbox.qsize() >= 2)
            rank.runner.let_all_go()
            assert (await router.end_of(1)).reason is FinishReason.HANDOFF
            assert await asyncio.to_thread(rank.server.drain, 0.0, TIMEOUT_S) is True

    run(test)


def test_a_drain_ends_at_its_limit_and_with_the_rank(setting: Setting) -> None:
    async def test() -> None:
        rank = Rank(setting)
        await rank.control.open()
        await rank.start()
        router = await rank.router()
        assert await asyncio.to_thread(rank.server.drain, 0.0, 0.1) is False
        draining = asyncio.create_task(asyncio.to_thread(rank.server.drain, 5.0, TIMEOUT_S))
        await router.until(lambda: len(router.leaving) == 2)
        await asyncio.to_thread(rank.server.stop)
        assert await draining is False
        assert await asyncio.to_thread(rank.server.drain, 0.0, TIMEOUT_S) is True
        await rank.stop()

    run(test)


# ---- aborts and lost routers ----


def test_abort_midway(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            rank.runner.held = True
            router = await rank.router()
            router.submit(1, max_tokens=200)
            for _ in range(3):
                await rank.runner.wait_entered()
                rank.runner.let_go(1)
            await rank.runner.wait_entered()
            await router.until(lambda: len(router.tokens[1]) == 3)
            # The fourth step is being computed. The second request says that the abort before it has arrived.
            router.send(Abort(1))
            router.submit(2, max_tokens=1)
            if setting.is_async:  # the loop answers while the step is computed, whose token nobody wants any more
                await router.end_of(1)
            else:
                await rank.settle(lambda: rank.server._loop._inbox.qsize() >= 2)
            rank.runner.let_all_go()
            assert (await router.end_of(1)).reason is FinishReason.ABORT
            assert router.tokens[1] == expected_tokens(PROMPT, 3 if setting.is_async else 4, VOCAB_SIZE)
            assert (await router.end_of(2)).reason is FinishReason.LENGTH
            await router.all_free()

    run(test)


def test_router_is_lost_during_prefill(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            rank.runner.held = True
            router = await rank.router()
            router.submit(1, LONG_PROMPT, max_tokens=100)
            router.submit(2, max_tokens=100)
            await rank.runner.wait_entered()
            router.connection.abort("router dies")
            await rank.settle(lambda: not rank.server.stats()["num_connections"])
            # More steps than two would wait for the test in vain.
            rank.runner.let_go(2)
            await rank.check_integrity()
            other = await rank.router()
            await other.all_free()
            assert other.load.num_steps <= 2
            rank.runner.let_all_go()
            other.submit(1, LONG_PROMPT)
            await other.end_of(1)
            assert other.tokens[1] == expected_tokens(LONG_PROMPT, 8, VOCAB_SIZE)

    run(test)


def test_a_storm_of_aborts(setting: Setting) -> None:
    """Every request is ended once, what is left runs on unharmed, and nothing stays behind."""

    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            chance = random.Random(5)
            for request_id in range(200):
                router.submit(request_id, [request_id % 7, *PROMPT], max_tokens=1 + request_id % 13)
                if chance.random() < 0.7:
                    victim = chance.randrange(max(0, request_id - 20), request_id + 1)
                    router.send(Abort(victim))
                if chance.random() < 0.1:
                    await router.one_more_end()
            for request_id in range(200):
                end = await router.end_of(request_id)
                assert end.reason in (FinishReason.ABORT, FinishReason.LENGTH)
                expected = expected_tokens([request_id % 7, *PROMPT], 1 + request_id % 13, VOCAB_SIZE)
                if end.reason is FinishReason.LENGTH:
                    assert router.tokens[request_id] == expected
                else:
                    assert router.tokens[request_id] == expected[: len(router.tokens[request_id])]
            assert {end.reason for end in router.ends.values()} == {FinishReason.ABORT, FinishReason.LENGTH}

    run(test)


def test_lost_router_leaves_others_alone(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            rank.runner.held = True
            lost, kept = await rank.router(), await rank.router()
            lost.submit(1, max_tokens=100)
            kept.submit(1, max_tokens=100)
            await rank.runner.wait_entered()
            lost.connection.close()
            await rank.settle(lambda: rank.server.stats()["num_connections"] == 1)
            rank.runner.let_all_go()
            assert (await kept.end_of(1)).reason is FinishReason.LENGTH
            assert kept.tokens[1] == expected_tokens(PROMPT, 100, VOCAB_SIZE)

    run(test)


def test_duplicates_and_aborts_of_strangers_are_ignored(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            router, other = await rank.router(), await rank.router()
            router.send(Abort(99))
            router.submit(1, max_tokens=50)
            router.submit(1, LONG_PROMPT, max_tokens=9)
            await router.until(lambda: bool(router.tokens[1]))
            other.send(Abort(1))
            other.submit(2)
            await other.end_of(2)
            assert (await router.end_of(1)).reason is FinishReason.LENGTH
            assert router.tokens[1] == expected_tokens(PROMPT, 50, VOCAB_SIZE)
            router.send(Abort(1))
            router.submit(3)
            await router.end_of(3)
            assert rank.server.stats()["num_ignored_messages"] == 4
            assert router.ends.keys() == {1, 3}
            assert other.ends.keys() == {2}

    run(test)


def submit(request_id: int = 1, **sampling: Any) -> bytes:
    params = SamplingParams(**{"seed": 0, "max_tokens": 1} | sampling)
    return msgspec.msgpack.encode(Submit(request_id, b"\0" * 4, params))


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"not a message",
        msgspec.msgpack.encode({"type": "unknown"}),
        msgspec.msgpack.encode({"type": "submit", "id": 1}),
        msgspec.msgpack.encode({"type": "abort", "id": "one"}),
        msgspec.msgpack.encode(Abort(2**63)),
        submit(2**63),
        submit(-1),
        submit(seed=-1),
        submit(top_k=2**63),
        submit(num_logprobs=2**63),
        msgspec.msgpack.encode(Extend(-1, b"")),
        msgspec.msgpack.encode({"type": "explain", "query": 1}),
        b"\x83\xa4type\xa5abort\xa2id\x01\xa1x" + b"\x91" * 5000 + b"\xc0",
    ],
    ids=range(15),
)
def test_malformed_message_closes_its_connection_only(setting: Setting, payload: bytes) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            bad, good = await rank.router(), await rank.router()
            good.submit(1, max_tokens=100)
            bad.submit(1, LONG_PROMPT, max_tokens=100)
            await bad.until(lambda: bool(bad.tokens[1]))
            bad.connection.send(payload)
            await bad.closed()
            assert (await good.end_of(1)).reason is FinishReason.LENGTH
            assert good.tokens[1] == expected_tokens(PROMPT, 100, VOCAB_SIZE)
            assert rank.server.stats()["num_malformed_messages"] == 1

    run(test)


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
def test_only_routers_are_served(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            assert rank.record is not None
            host, port = rank.record.host, rank.record.port
            stranger = await connect(host, port, secret=SECRET, role="rank", name="another")
            stranger.start(lambda _: None)
            async with asyncio.timeout(TIMEOUT_S):
                await stranger.closed
            with pytest.raises(WireError):
                await connect(host, port, secret=b"wrong", role="router", name="r")
            await rank.settle(lambda: rank.server.stats()["num_refused_connections"] == 1)
            assert rank.server.stats()["num_malformed_messages"] == 1
            assert rank.server.stats()["num_connections"] == 0

    run(test)


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
def test_heartbeats_on_an_idle_connection(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            await router.until(lambda: router.num_frames >= 3)
            assert router.load == RankLoad(num_free_blocks=128, num_blocks=128)

    run(test)


def test_heartbeats_and_health_during_a_long_step(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            rank.runner.held = True
            router.submit(1)
            await rank.runner.wait_entered()
            seen = router.num_frames
            await router.until(lambda: router.num_frames >= seen + 3)
            rank.server.check_health()
            monkeypatch.setattr(rank_server, "STALL_TIMEOUT_S", 0.0)
            with pytest.raises(RuntimeError, match="the current step has taken"):
                rank.server.check_health()
            monkeypatch.setattr(rank_server, "STALL_TIMEOUT_S", TIMEOUT_S)
            rank.runner.let_all_go()
            await router.end_of(1)

    run(test)


class IdleConnector:
    """A worker half that has figures of which routers hear only a part."""

    def stats(self) -> ConnectorStats:
        return ConnectorStats(num_leases=3, num_stored_blocks=5)

    def close(self, timeout_s: float) -> None:
        pass


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
def test_heartbeats_tell_of_the_kv_connector(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            rank.server._connector_worker = IdleConnector()
            router = await rank.router()
            seen = router.num_frames
            await router.until(lambda: router.num_frames >= seen + 2)
            kv_transfer = rank.server._kv_transfer_load()
            assert kv_transfer is not None
            assert kv_transfer.num_leases == 3

    run(test)


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
def test_a_rank_whose_heartbeats_fail_gives_up(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        rank = Rank(setting)
        await rank.control.open()
        await rank.start()
        router = await rank.router()
        monkeypatch.setattr(rank.server, "_kv_transfer_load", lambda: 1 // 0)
        await router.closed()
        await rank.settle(lambda: not rank.server._io_thread.is_alive())
        with pytest.raises(RuntimeError, match="the I/O thread ended"):
            rank.server.check_health()
        await rank.stop()

    run(test)


# ---- registration ----


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
def test_registers_again_when_control_was_away(setting: Setting) -> None:
    """Its requests go on meanwhile. Finding the actor fails in ways of its own before it is back."""

    async def test() -> None:
        async with running_rank(setting) as rank:
            rank.control.error = LookupError("the actor restarts")
            await rank.control.close()
            router = await rank.router()
            router.submit(1)
            await router.end_of(1)
            num_asked = rank.control.num_asked
            await rank.settle(lambda: rank.control.num_asked >= num_asked + 3)
            await rank.control.open()
            rank.control.error = None
            again = await rank.control.registration()
            first = rank.record
            assert first is not None
            assert (again.boot_id, again.port) == (first.boot_id, first.port)
            assert router.connection.send(msgspec.msgpack.encode(Abort(1)))

    run(test)


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
def test_control_that_never_answers(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_server, "REGISTRATION_TIMEOUT_S", 1.0)
    monkeypatch.setattr(rank_server, "CONTROL_TIMEOUT_S", SHORT_S)

    async def test() -> None:
        rank = Rank(setting)
        rank.control.answers = False
        await rank.control.open()
        with pytest.raises(TimeoutError, match=r"not registered within 1 s: WireError: .* did not answer"):
            await rank.start()
        assert rank.control.registrations.qsize() >= 1
        await rank.stop()

    run(test)


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
def test_control_that_is_not_found(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_server, "REGISTRATION_TIMEOUT_S", 0.3)

    async def test() -> None:
        rank = Rank(setting)
        rank.control.error = LookupError("no actor named control")
        with pytest.raises(TimeoutError, match=r"not registered within 0\.3 s: LookupError: no actor named control"):
            await rank.start()
        await rank.stop()

    run(test)


def test_a_crash_before_the_registration_ends_the_start_at_once(setting: Setting) -> None:
    async def test() -> None:
        rank = Rank(setting)
        rank.control.answers = False
        await rank.control.open()
        starting = asyncio.create_task(asyncio.to_thread(rank.server.start))
        rank.record = await rank.control.registration()
        router = await rank.router()
        rank.runner.num_failures = MAX_CONSECUTIVE_FAILURES
        for request_id in range(MAX_CONSECUTIVE_FAILURES):
            router.submit(request_id)
            assert (await router.end_of(request_id)).reason is FinishReason.ERROR
        with pytest.raises(RuntimeError, match="the step loop ended: RuntimeError: the device fell over"):
            await starting
        assert rank.runner.num_closed
        await rank.stop()

    run(test)


@pytest.mark.parametrize("setting", [False], ids=["sync"], indirect=True)
def test_address_that_cannot_be_listened_on(setting: Setting) -> None:
    async def test() -> None:
        rank = Rank(setting)
        rank.server._host = "192.0.2.1"  # reserved for documentation
        with pytest.raises(OSError, match=r"192\.0\.2\.1"):
            await rank.start()
        await rank.stop()

    run(test)


# ---- failing steps, and the end ----


def test_one_failing_step(setting: Setting) -> None:
    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            for request_id in range(2 * MAX_CONSECUTIVE_FAILURES):
                rank.runner.num_failures = 1
                router.submit(2 * request_id)
                end = await router.end_of(2 * request_id)
                assert end.reason is FinishReason.ERROR
                assert end.message == "the model step failed: the device fell over; retry"
                router.submit(2 * request_id + 1)
                assert (await router.end_of(2 * request_id + 1)).reason is FinishReason.LENGTH
                assert router.tokens[2 * request_id + 1] == expected_tokens(PROMPT, 8, VOCAB_SIZE)

    run(test)


def test_failures_amid_other_requests(setting: Setting) -> None:
    """Whatever is in flight when a step fails ends with an error; what comes later, or waits, gets its right tokens."""

    async def test() -> None:
        async with running_rank(setting) as rank:
            router = await rank.router()
            rank.runner.fails = lambda step: step % 7 == 3
            for request_id in range(60):
                router.submit(request_id, [request_id % 5, *PROMPT], max_tokens=1 + request_id % 11)
                if request_id % 9 == 0:
                    await router.one_more_end()
            reasons = set()
            for request_id in range(60):
                end = await router.end_of(request_id)
                reasons.add(end.reason)
                expected = expected_tokens([request_id % 5, *PROMPT], 1 + request_id % 11, VOCAB_SIZE)
                if end.reason is FinishReason.LENGTH:
                    assert router.tokens[request_id] == expected
                else:
                    assert end.message == "the model step failed: the device fell over; retry"
                    assert router.tokens[request_id] == expected[: len(router.tokens[request_id])]
            assert reasons == {FinishReason.LENGTH, FinishReason.ERROR}

    run(test)


def test_rank_gives_up_after_failures_in_a_row(setting: Setting) -> None:
    async def test() -> None:
        rank = Rank(setting)
        await rank.control.open()
        await rank.start()
        router, idle = await rank.router(), await rank.router()
        rank.runner.num_failures = MAX_CONSECUTIVE_FAILURES
        for request_id in range(MAX_CONSECUTIVE_FAILURES):
            router.submit(request_id)
            assert (await router.end_of(request_id)).reason is FinishReason.ERROR
        await router.closed()
        await idle.closed()
        with pytest.raises(RuntimeError, match="the step loop ended: RuntimeError: the device fell over"):
            rank.server.check_health()
        with pytest.raises(RuntimeError, match="the step loop ended: RuntimeError: the device fell over"):
            await rank.check_integrity()
        await rank.stop()

    run(test)


@pytest.mark.parametrize("is_busy", [False, True])
def test_stop_ends_threads_and_connections(setting: Setting, is_busy: bool) -> None:
    async def test() -> None:
        rank = Rank(setting)
        await rank.control.open()
        await rank.start()
        router = await rank.router()
        if is_busy:
            rank.runner.held = True
            router.submit(1, max_tokens=200)
            await rank.runner.wait_entered()
        stopping = asyncio.create_task(asyncio.to_thread(rank.server.stop))
        # The connections close while the step is still being computed; what it brings then has nowhere to go.
        await router.closed()
        assert router.ends == {}
        assert not is_busy or not rank.runner.num_closed
        rank.runner.let_all_go()
        await stopping
        assert rank.runner.num_closed == 1
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rank-")]
        with pytest.raises(RuntimeError, match="the I/O thread ended"):
            rank.server.check_health()
        await rank.stop()

    run(test)
