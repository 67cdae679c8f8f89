"""A rank's threads and sockets with the real scheduler and the simulated model; the test is its routers and control."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cluster import rank_server
from cluster.rank_loop import MAX_CONSECUTIVE_FAILURES
from cluster.rank_server import RankServer
from kv_transfer.connection import Connection, Listener, connect
from kv_transfer.wire import WireError
from model_runner.simulated import SimulatedRunner, expected_tokens
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.messages import Abort, End, FinishReason, RankLoad, SamplingParams, StepFrame, Submit
from rank_scheduler.plan import StepPlan, StepResult
from router.control_messages import RankRecord, Register, Registered
from router.detokenizer import IncrementalDetokenizer
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


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return path


class Runner(SimulatedRunner):
    """The simulated model; the test may hold its steps up, or let them fail."""

    def __init__(self) -> None:
        super().__init__(scheduler=SCHEDULER, cache=CACHE, max_model_len=256, vocab_size=VOCAB_SIZE)
        self.held = False
        self.num_failures = 0
        """So many of the next steps fail."""
        self.entered = threading.Semaphore(0)
        self.num_closed = 0
        self._permits = threading.Semaphore(0)

    def close(self) -> None:
        self.num_closed += 1

    def execute(self, plan: StepPlan) -> StepResult:
        if self.held:
            self.entered.release()
            assert self._permits.acquire(timeout=TIMEOUT_S), "the test let no step go on"
        if self.num_failures:
            self.num_failures -= 1
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


class Router:
    """A router's connection to the rank. Everything it hears is kept and checked against the protocol."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, End] = {}
        self.firsts: list[int] = []
        self.load = RankLoad()
        self.num_frames = 0
        self.mistakes: list[str] = []
        self._heard = asyncio.Event()
        connection.closed.add_done_callback(lambda _: self._heard.set())
        connection.start(self._on_frame)

    def _on_frame(self, payload: bytes) -> None:
        frame = msgspec.msgpack.decode(payload, type=StepFrame)
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
        self._heard.set()

    def send(self, message: Submit | Abort) -> None:
        assert self.connection.send(msgspec.msgpack.encode(message))

    def submit(self, request_id: int, prompt: list[int] = PROMPT, max_tokens: int = 8, **sampling: Any) -> None:
        params = SamplingParams(seed=0, max_tokens=max_tokens, **sampling)
        self.send(Submit(request_id, np.array(prompt, "<i4").tobytes(), params))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Looks again after each frame."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                assert not self.connection.closed.done(), f"closed: {self.connection.closed.result()}"
                self._heard.clear()
                await self._heard.wait()

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

    def __init__(self, tokenizer_path: Path) -> None:
        self.runner = Runner()
        self.control = Control()
        self.routers: list[Router] = []
        self.record: RankRecord | None = None
        self.server = RankServer(
            self.runner,
            self.runner.load(),
            config=SCHEDULER,
            cache=CACHE,
            pool="mixed",
            secret=SECRET,
            control_address=self.control.address,
            advertise_host=HOST,
            node_id="node",
            tokenizer_path=tokenizer_path,
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
async def running_rank(tokenizer_path: Path) -> AsyncIterator[Rank]:
    """At the end the rank must be healthy and empty."""
    rank = Rank(tokenizer_path)
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


def test_registers_what_it_is(tokenizer_path: Path) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
            record = rank.record
            assert record is not None
            assert (record.rank_id, record.pool, record.host, record.node_id) == ("", "mixed", HOST, "node")
            assert (record.num_blocks, record.block_size) == (128, 4)
            assert (record.max_model_len, record.max_num_seqs) == (256, 8)
            assert rank.server.stats()["rank_id"] == "mixed/3"

    run(test)


def test_tokens_and_one_end(tokenizer_path: Path) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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


def test_many_requests_of_two_routers(tokenizer_path: Path) -> None:
    """The same ids on both connections: each hears of its own only."""

    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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


def test_stop_string(tokenizer_path: Path) -> None:
    decoder = IncrementalDetokenizer(byte_tokenizer())
    tokens = expected_tokens(PROMPT, 100, VOCAB_SIZE)
    texts = [decoder.step([token]) for token in tokens]
    at = next(i for i in range(10, 100) if all(text.isascii() and text.isprintable() for text in texts[i - 2 : i]))
    stop = "".join(texts[at - 2 : at])
    assert len(stop) == 2
    count = next(i for i in range(100) if stop in "".join(texts[:i]))

    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
            router = await rank.router()
            router.submit(1, max_tokens=100, stop=("never in it", stop))
            end = await router.end_of(1)
            assert (end.reason, end.stop_reason) == (FinishReason.STOP, stop)
            assert router.tokens[1] == tokens[:count]

    run(test)


def test_impossible_request_is_refused_alone(tokenizer_path: Path) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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


# ---- aborts and lost routers ----


def test_abort_midway(tokenizer_path: Path) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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
            await rank.settle(lambda: rank.server._loop._inbox.qsize() == 2)
            rank.runner.let_all_go()
            assert (await router.end_of(1)).reason is FinishReason.ABORT
            assert router.tokens[1] == expected_tokens(PROMPT, 4, VOCAB_SIZE)
            assert (await router.end_of(2)).reason is FinishReason.LENGTH
            await router.all_free()

    run(test)


def test_router_is_lost_during_prefill(tokenizer_path: Path) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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


def test_lost_router_leaves_others_alone(tokenizer_path: Path) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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


def test_duplicates_and_aborts_of_strangers_are_ignored(tokenizer_path: Path) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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
        b"\x83\xa4type\xa5abort\xa2id\x01\xa1x" + b"\x91" * 5000 + b"\xc0",
    ],
    ids=range(13),
)
def test_malformed_message_closes_its_connection_only(tokenizer_path: Path, payload: bytes) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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


def test_only_routers_are_served(tokenizer_path: Path) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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


def test_heartbeats_on_an_idle_connection(tokenizer_path: Path) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
            router = await rank.router()
            await router.until(lambda: router.num_frames >= 3)
            assert router.load == RankLoad(num_free_blocks=128, num_blocks=128)

    run(test)


def test_heartbeats_and_health_during_a_long_step(tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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


# ---- registration ----


def test_registers_again_when_control_was_away(tokenizer_path: Path) -> None:
    """Its requests go on meanwhile. Finding the actor fails in ways of its own before it is back."""

    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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


def test_control_that_never_answers(tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_server, "REGISTRATION_TIMEOUT_S", 1.0)
    monkeypatch.setattr(rank_server, "CONTROL_TIMEOUT_S", SHORT_S)

    async def test() -> None:
        rank = Rank(tokenizer_path)
        rank.control.answers = False
        await rank.control.open()
        with pytest.raises(TimeoutError, match=r"not registered within 1 s: WireError: .* did not answer"):
            await rank.start()
        assert rank.control.registrations.qsize() >= 1
        await rank.stop()

    run(test)


def test_control_that_is_not_found(tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_server, "REGISTRATION_TIMEOUT_S", 0.3)

    async def test() -> None:
        rank = Rank(tokenizer_path)
        rank.control.error = LookupError("no actor named control")
        with pytest.raises(TimeoutError, match=r"not registered within 0\.3 s: LookupError: no actor named control"):
            await rank.start()
        await rank.stop()

    run(test)


def test_a_crash_before_the_registration_ends_the_start_at_once(tokenizer_path: Path) -> None:
    async def test() -> None:
        rank = Rank(tokenizer_path)
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


def test_address_that_cannot_be_listened_on(tokenizer_path: Path) -> None:
    async def test() -> None:
        rank = Rank(tokenizer_path)
        rank.server._host = "192.0.2.1"  # reserved for documentation
        with pytest.raises(OSError, match=r"192\.0\.2\.1"):
            await rank.start()
        await rank.stop()

    run(test)


# ---- failing steps, and the end ----


def test_one_failing_step(tokenizer_path: Path) -> None:
    async def test() -> None:
        async with running_rank(tokenizer_path) as rank:
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


def test_rank_gives_up_after_failures_in_a_row(tokenizer_path: Path) -> None:
    async def test() -> None:
        rank = Rank(tokenizer_path)
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
def test_stop_ends_threads_and_connections(tokenizer_path: Path, is_busy: bool) -> None:
    async def test() -> None:
        rank = Rank(tokenizer_path)
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
