"""Ranks and a control actor that speak the real protocols over real sockets, around a router that is the real one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
from openai import AsyncOpenAI

from kv_transfer.connection import Connection, Listener
from kv_transfer.params import KvParams
from rank_scheduler.messages import (
    Abort,
    End,
    Explain,
    Explained,
    Explanation,
    FinishReason,
    HandOff,
    Leaving,
    LeavingHeard,
    Prefetch,
    PrefixEvents,
    PrefixSnapshot,
    PromptLogprobs,
    RankLoad,
    RouterToRank,
    StepFrame,
    Submit,
    TimelineEntry,
    TokenLogprobs,
    WatchPrefixes,
)
from rank_scheduler.prefix_chain import ExtraKeys, chain, pack
from rank_scheduler.stop_strings import StopStringMatcher
from router.amounts import NOTHING, Amounts
from router.control_messages import (
    Ask,
    Bounds,
    Inquiry,
    InquiryAnswer,
    Members,
    PoolRole,
    QueueCounts,
    RankRecord,
    Register,
    Registered,
    Report,
    Resume,
    Return,
    RouterToControl,
    ShuttingDown,
    Tightened,
)
from router.detokenizer import IncrementalDetokenizer
from router.http_api import build_app
from router.ledger import Ledger, To
from router.service import RouterService, RouterSettings
from tests.router.small_tokenizer import IM_END, byte_tokenizer, write_model_dir

SECRET = b"a secret of the tests, 32 bytes."
HOST = "127.0.0.1"
MODEL = "small"
TIMEOUT_S = 40.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """An async test, with a deadline."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TIMEOUT_S))

    return run


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Let the loop turn until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass
class Sequence:
    submit: Submit
    tokens: list[int]
    matcher: StopStringMatcher | None
    added_at: float
    connection: Connection
    num_sent: int = 0
    num_tickets: int = 0


@dataclass
class FakeRank:
    """Answers every prompt with `reply`, one token per step; `allowance` says how many tokens may still be sent."""

    index: int
    reply: list[int]
    allowance: float = float("inf")
    announces_prefill: bool = True
    submits: list[Submit] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    num_steps: int = 0
    repeats_after: int | None = None
    """Tokens after which a sequence ends as one that repeats itself."""
    explains: list[Explain] = field(default_factory=list)
    num_answers_to_explain: int = 1
    """Copies of each answer; 0 is a rank within a long step."""
    cached: list[bytes] = field(default_factory=list)
    """Hashes in its prefix cache."""
    num_watches: int = 0
    """How often a router has asked for them."""
    answers_watches: bool = True
    prefix_seq: int = 0
    greetings: list[bytes] = field(default_factory=list)
    """What the next connections begin with, in place of a frame."""
    role: PoolRole = PoolRole.MIXED
    max_num_seqs: int = 256
    num_blocks: int = 64
    tickets: list[KvParams] = field(default_factory=list)
    """What it tells of a prompt that it is to hand off, in a step each before its token."""
    prefetches: list[Prefetch] = field(default_factory=list)
    hand_offs: list[int] = field(default_factory=list)
    handed_params: KvParams | None = None
    """With what it hands off when it is asked to."""
    num_heard: int = 0
    """How often a router has said that it knows that this rank leaves."""

    def __post_init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.eos = self.tokenizer.token_to_id(IM_END)
        self.listener = Listener(SECRET, self._on_connection)
        self.live: dict[int, Sequence] = {}
        self.fail_with: str | None = None
        self.sends_logprobs = True
        self._stepper: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()

    async def start(self) -> RankRecord:
        port = await self.listener.start(HOST)
        self._stepper = asyncio.create_task(self._steps())
        rank_id, boot_id = f"{self.role}/{self.index}", f"boot-{self.index}"
        return RankRecord(
            rank_id,
            str(self.role),
            boot_id,
            HOST,
            port,
            1,
            "n",
            512,
            self.max_num_seqs,
            self.num_blocks,
            16,
            role=self.role,
            max_num_batched_tokens=1_000_000,
        )

    async def stop(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
        await self.listener.close()

    def kill(self) -> None:
        """As SIGKILL looks from outside: connections reset, nobody listens any more."""
        if self._stepper is not None:
            self._stepper.cancel()
        if self.listener._server is not None:
            self.listener._server.close()
        for connection in self.connections:
            connection.abort("killed")

    def allow(self, num_tokens: float) -> None:
        self.allowance += num_tokens
        self._moved.set()

    def leave(self, moves_in_s: float) -> None:
        for connection in self.connections:
            connection.send(msgspec.msgpack.encode(Leaving(moves_in_s)))

    def prompt(self, index: int = -1) -> list[int]:
        data = self.submits[index].token_ids
        return list(struct.unpack(f"<{len(data) // 4}i", data))

    def prompt_text(self, index: int = -1) -> str:
        return str(self.tokenizer.decode(self.prompt(index), skip_special_tokens=False))

    def cache(self, token_ids: SequenceOf[int], salt: str = "") -> None:
        """Have this prefix from now on, and say so."""
        data = struct.pack(f"<{len(token_ids)}i", *token_ids)
        hashes = chain(data, 16, ExtraKeys(salt) if salt else None)
        self.cached += hashes
        self.tell_prefixes(stored=hashes)

    def tell_prefixes(self, stored: SequenceOf[bytes] = (), removed: SequenceOf[bytes] = ()) -> None:
        self.prefix_seq += 1
        frame = StepFrame(self.load(), prefixes=PrefixEvents(self.prefix_seq, pack(stored), pack(removed)))
        for connection in self.connections:
            connection.send(msgspec.msgpack.encode(frame))

    def tell_all_prefixes(self, connection: Connection) -> None:
        connection.send(msgspec.msgpack.encode(PrefixSnapshot(self.prefix_seq, pack(self.cached))))

    def load(self) -> RankLoad:
        return RankLoad(
            num_running=len(self.live),
            num_free_blocks=self.num_blocks - 16,
            num_blocks=self.num_blocks,
            num_steps=self.num_steps,
            num_prompt_tokens=7,
            num_deferred=2,
            num_loads=3,
            num_draft_tokens=40,
            num_accepted_tokens=30,
            estimated_flops=5e9,
            estimated_bytes=6e9,
            busy_s=1.5,
        )

    def now(self) -> float:
        """This rank's clock, which began at another time than everybody else's."""
        return asyncio.get_running_loop().time() + 1_000 * (self.index + 1)

    def explained(self, explain: Explain) -> Explained:
        """What it knows of its live sequences: those without a token wait, as many before them as have come earlier."""
        live = list(self.live.values())
        return Explained(
            explain.query,
            self.now(),
            [
                Explanation(
                    "running" if sequence.num_sent else "waiting",
                    [TimelineEntry(sequence.added_at, "QUEUED"), TimelineEntry(self.now(), "ASKED", "by a router")],
                    reason="" if sequence.num_sent else "max_num_seqs",
                    message="" if sequence.num_sent else "all 8 slots run",
                    figures={} if sequence.num_sent else {"max_num_seqs": 8},
                    num_prompt_tokens=len(sequence.submit.token_ids) // 4,
                    num_generated_tokens=sequence.num_sent,
                    position=-1 if sequence.num_sent else position,
                )
                for position, sequence in enumerate(live)
                if sequence.submit.request_id == explain.request_id
            ],
        )

    def _on_connection(self, connection: Connection) -> None:
        self.connections.append(connection)
        connection.closed.add_done_callback(lambda _: self._drop(connection))
        connection.start(functools.partial(self._on_frame, connection))
        connection.send(self.greetings.pop(0) if self.greetings else msgspec.msgpack.encode(StepFrame(self.load())))

    def _drop(self, connection: Connection) -> None:
        """Nobody waits for what came over it."""
        self.live = {number: each for number, each in self.live.items() if each.connection is not connection}

    def _on_frame(self, connection: Connection, payload: bytes) -> None:
        message = msgspec.msgpack.decode(payload, type=RouterToRank)
        if isinstance(message, Abort):
            self.aborts.append(message.id)
            self.live.pop(message.id, None)
            connection.send(msgspec.msgpack.encode(StepFrame(self.load())))
            return
        if isinstance(message, LeavingHeard):
            self.num_heard += 1
            return
        if isinstance(message, HandOff):
            self.hand_offs.append(message.id)
            if self.live.pop(message.id, None) is not None:
                end = End(message.id, FinishReason.HANDOFF, num_cached_tokens=3, kv_transfer_params=self.handed_params)
                connection.send(msgspec.msgpack.encode(StepFrame(self.load(), ends=[end])))
            return
        if isinstance(message, Explain):
            self.explains.append(message)
            for _ in range(self.num_answers_to_explain):
                connection.send(msgspec.msgpack.encode(self.explained(message)))
            return
        if isinstance(message, WatchPrefixes):
            self.num_watches += 1
            if self.answers_watches:
                self.tell_all_prefixes(connection)
            return
        if isinstance(message, Prefetch):
            self.prefetches.append(message)
            return
        assert isinstance(message, Submit)
        self.submits.append(message)
        # Of several routers one at a time has anything here: who submitted last gets the steps' frames.
        self.connections.sort(key=lambda each: each is connection)
        stop = message.sampling.stop
        matcher = StopStringMatcher(stop, IncrementalDetokenizer(self.tokenizer)) if stop else None
        self.live[message.id] = Sequence(message, self.reply[message.num_generated :], matcher, self.now(), connection)
        self._moved.set()

    async def _steps(self) -> None:
        while True:
            while not self.live or self.allowance <= 0:
                self._moved.clear()
                await self._moved.wait()
            self._step()
            await asyncio.sleep(0)

    def _step(self) -> None:
        self.num_steps += 1
        frame = StepFrame(self.load(), [], [], {}, [], [], tickets={})
        for request_id, sequence in list(self.live.items()):
            if self.allowance <= 0:
                break
            self.allowance -= 1
            self._advance(request_id, sequence, frame)
        self.connections[-1].send(msgspec.msgpack.encode(msgspec.structs.replace(frame, load=self.load())))

    def _advance(self, request_id: int, sequence: Sequence, frame: StepFrame) -> None:
        sampling = sequence.submit.sampling
        if self.fail_with is not None:
            self._end(End(request_id, FinishReason.ERROR, message=self.fail_with), frame)
            return
        if sequence.submit.hands_off and sequence.num_tickets < len(self.tickets):
            frame.tickets[request_id] = self.tickets[sequence.num_tickets]
            sequence.num_tickets += 1
            return
        if sequence.num_sent == 0 and self.announces_prefill:
            frame.first_token_ids.append(request_id)
        if sequence.num_sent == 0 and (num_top := sampling.num_prompt_logprobs) is not None:
            top = tuple(range(num_top)), tuple(-0.1 * (i + 1) for i in range(num_top))
            num_tokens = len(sequence.submit.token_ids) // 4
            entries = [TokenLogprobs(-1.0 * i, *top, rank=7) for i in range(1, num_tokens)]
            frame.prompt_logprobs[request_id] = PromptLogprobs(1, entries)
        token = sequence.tokens[sequence.num_sent] if sequence.num_sent < len(sequence.tokens) else self.eos
        sequence.num_sent += 1
        if sampling.num_logprobs is not None:
            top = tuple(range(sampling.num_logprobs))
            frame.logprobs[len(frame.tokens)] = TokenLogprobs(-0.5, top, tuple(-1.0 - i for i in top))
        frame.ids.append(request_id)
        frame.tokens.append(token)
        if token == self.eos and not sampling.ignore_eos:
            self._end(End(request_id, FinishReason.STOP, num_cached_tokens=3), frame)
        elif token in sampling.stop_token_ids:
            self._end(End(request_id, FinishReason.STOP, token, num_cached_tokens=3), frame)
        elif sequence.matcher is not None and (matched := sequence.matcher.push(token)) is not None:
            self._end(End(request_id, FinishReason.STOP, matched), frame)
        elif self.repeats_after == sequence.num_sent:
            self._end(End(request_id, FinishReason.REPETITION), frame)
        elif sequence.submit.num_generated + sequence.num_sent >= sampling.max_tokens:
            self._end(End(request_id, FinishReason.LENGTH), frame)
        elif sequence.submit.hands_off:
            self._end(End(request_id, FinishReason.HANDOFF, kv_transfer_params={"whole": True}), frame)

    def _end(self, end: End, frame: StepFrame) -> None:
        frame.ends.append(end)
        del self.live[end.id]


class FakeControl:
    """A real ledger behind the control actor's endpoint."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.records: list[RankRecord] = []
        self.num_resumes = 0
        self.is_mute = False
        self.port = 0
        self._registrations: asyncio.Queue[RankRecord] = asyncio.Queue()
        self._connections: list[Connection] = []
        self._wake: asyncio.TimerHandle | None = None
        self._listener = Listener(SECRET, self._on_connection)

    async def start(self) -> None:
        self.port = await self._listener.start(HOST, self.port)

    async def stop(self) -> None:
        await self._listener.close()

    async def address(self) -> tuple[str, int]:
        return HOST, self.port

    async def registered(self) -> RankRecord:
        """The next rank that has registered, under the id that it was given."""
        return await self._registrations.get()

    def tell(self, message: Members | ShuttingDown | QueueCounts) -> None:
        self.tell_raw(msgspec.msgpack.encode(message))

    def tell_raw(self, payload: bytes) -> None:
        for connection in self._connections:
            connection.send(payload)

    def _on_connection(self, connection: Connection) -> None:
        assert connection.peer is not None
        if connection.peer.role == "rank":
            connection.start(functools.partial(self._on_registration, connection))
            return
        self._connections.append(connection)
        connection.closed.add_done_callback(lambda _: self._connections.remove(connection))
        connection.start(functools.partial(self._on_frame, connection))
        connection.send(msgspec.msgpack.encode(Members(self.records)))

    def _on_registration(self, connection: Connection, payload: bytes) -> None:
        record = msgspec.structs.replace(msgspec.msgpack.decode(payload, type=Register).record, rank_id="mixed/3")
        connection.send(msgspec.msgpack.encode(Registered(record.rank_id)))
        self._registrations.put_nowait(record)

    def _on_frame(self, connection: Connection, payload: bytes) -> None:
        now = asyncio.get_running_loop().time()
        assert connection.peer is not None
        name = connection.peer.name
        if self.is_mute:
            return
        match msgspec.msgpack.decode(payload, type=RouterToControl):
            case Resume(lent):
                self.num_resumes += 1
                connection.send(msgspec.msgpack.encode(Bounds(self.ledger.limits)))
                self._answer(self.ledger.resume(name, lent, now))
            case Ask() as ask:
                self._answer(self.ledger.ask(name, ask, now))
            case Return(amounts):
                self._answer(self.ledger.returned(name, amounts, now))
            case Tightened(serial):
                self._answer(self.ledger.tightened(name, serial, now))
            case Inquiry(query=query):
                connection.send(msgspec.msgpack.encode(InquiryAnswer(query, False, 0)))
            case Report(taken, drained):
                self.ledger.reported(name, taken, drained, now)

    def _answer(self, messages: list[To]) -> None:
        for name, message in messages:
            for connection in self._connections:
                if connection.peer is not None and connection.peer.name == name:
                    connection.send(msgspec.msgpack.encode(message))
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if (at := self.ledger.wakes_at) is not None:
            loop = asyncio.get_running_loop()
            self._wake = loop.call_at(at, lambda: self._answer(self.ledger.wake(loop.time())))


class QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@dataclass
class Cluster:
    control: FakeControl
    ranks: list[FakeRank]
    service: RouterService
    client: httpx.AsyncClient
    port: int
    server: QuietServer

    @functools.cached_property
    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"http://{HOST}:{self.port}/v1", api_key="none", max_retries=0)

    @property
    def ledger(self) -> Ledger:
        return self.control.ledger

    def counted(self, name: str) -> dict[str, float]:
        """A counter of `/metrics` with one label: label value → count, without those at zero."""
        samples = [sample for metric in self.service.metrics.registry.collect() for sample in metric.samples]
        return {",".join(s.labels.values()): s.value for s in samples if s.name == f"{name}_total" and s.value}

    @property
    def taken(self) -> Amounts:
        """What the router's requests hold; the ledger hears of it a little later."""
        return self.service.control.taken

    @property
    def num_unsent_bytes(self) -> list[int]:
        """What waits for each of the HTTP clients."""
        connections: Any = self.server.server_state.connections
        return [each.transport.get_write_buffer_size() for each in connections]

    def is_idle(self) -> bool:
        return self.taken == NOTHING and self.service.control.num_holdings == self.service.pool.num_live == 0

    async def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path,
    *,
    reply: str | list[int] = "Hello, world!",
    num_ranks: int = 1,
    roles: SequenceOf[PoolRole] = (),
    max_num_queued_reqs: int | None = None,
    max_num_queued_tokens: int | None = None,
    greetings: SequenceOf[bytes] = (),
    max_num_seqs: int = 256,
    num_blocks: int = 64,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """A router with its ranks, one of each of `roles` or `num_ranks` mixed ones, all connected.

    Checks at the end that nothing is held any more.
    """
    tokens = byte_tokenizer().encode(reply).ids if isinstance(reply, str) else reply
    roles = roles or [PoolRole.MIXED] * num_ranks
    ranks = [
        FakeRank(index, tokens, greetings=list(greetings), role=role, max_num_seqs=max_num_seqs, num_blocks=num_blocks)
        for index, role in enumerate(roles)
    ]
    control = FakeControl(Ledger(max_num_queued_reqs, max_num_queued_tokens))
    control.records = [await rank.start() for rank in ranks]
    await control.start()
    service = RouterService(
        RouterSettings(
            **{
                "model_name": MODEL,
                "model_dir": write_model_dir(tmp_path),
                "max_model_len": 256,
                "rank_wait_timeout_s": 0.2,
                **settings,
            }
        )
    )
    await service.start(control.address, SECRET, "router-1")
    server = QuietServer(uvicorn.Config(build_app(service), host=HOST, port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started and service.control.is_connected and len(service.pool.links) == len(ranks))
    port = server.servers[0].sockets[0].getsockname()[1]
    client = httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=TIMEOUT_S, verify=False)
    cluster = Cluster(control, ranks, service, client, port, server)
    try:
        yield cluster
        await until(cluster.is_idle)
        await until(lambda: control.ledger.counts().num_requests == control.ledger.counts().num_tokens == 0)
        service.check_integrity()
        control.ledger.check_integrity()
    finally:
        await client.aclose()
        if "openai" in cluster.__dict__:
            await cluster.openai.close()
        await service.stop()
        server.should_exit = True
        await serving
        for rank in ranks:
            await rank.stop()
        await control.stop()
        for _ in range(5):  # transports say goodbye in callbacks
            await asyncio.sleep(0)
