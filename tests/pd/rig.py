"""Prefill and decode ranks as processes of their own, around a router and a control endpoint in the test's process.

Everything is real but Ray: the model, the ranks' threads and sockets, the transports, the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

from cluster.control import ControlEndpoint
from model_runner.embedded import embedded_model_dir
from model_runner.torch_runner import TorchRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.messages import TokenLogprobs
from router.choice import Delta
from router.errors import ApiError, Cause
from router.protocol import CompletionRequest, parse
from router.service import RouterService, RouterSettings
from router.tokenizer import ChatTokenizer
from tests.engine import Engine
from tests.pd.rank_process import serve

SECRET = b"a secret of the tests, 32 bytes."
HOST = "127.0.0.1"
MAX_MODEL_LEN = 1024
BLOCK_SIZE = 16
NUM_BLOCKS = 400
SCHEDULER: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 32}
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0


def in_loop(timeout_s: float) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """An async test, with a deadline."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            asyncio.run(asyncio.wait_for(test(*args, **kwargs), timeout_s))

        return run

    return decorate


async def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


def token_ids(text: str) -> list[int]:
    tokenizer = ChatTokenizer(embedded_model_dir(lambda _: None))
    ids: list[int] = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
    tokenizer.close()
    return ids


@functools.cache
def _text() -> list[int]:
    return token_ids(Path("LICENSE").read_text(encoding="utf-8"))


def make_prompts(count: int, *, seed: int, shared: int = 0, shortest: int = 20, longest: int = 90) -> list[list[int]]:
    """Pieces of a real text, as token ids; the first `shared` of all are the same."""
    rng, text = random.Random(seed), _text()
    prompts = []
    for _ in range(count):
        length = rng.randint(shortest, longest) - shared
        start = rng.randrange(len(text) - length)
        prompts.append(text[:shared] + text[start : start + length])
    return prompts


def answers_of_one_rank(
    prompts: Sequence[Sequence[int]], num_tokens: int, *samplings: Mapping[str, Any]
) -> list[list[list[int]]]:
    """What a single mixed rank generates under each of `samplings`, one after the other; without any, greedily.

    They are fields of `SamplingParams`; the seed is the prompt's index.
    """
    config = SchedulerConfig(**SCHEDULER)
    cache = CacheConfig(num_blocks=NUM_BLOCKS * 2, block_size=BLOCK_SIZE)
    runner = TorchRunner(
        embedded_model_dir(lambda _: None),
        scheduler=config,
        cache=cache,
        dtype="float32",
        num_threads=1,
        max_model_len=MAX_MODEL_LEN,
    )
    engine = Engine(runner, config)
    answers = []
    for first, sampling in zip(itertools.count(0, len(prompts)), samplings or [{}]):
        for index, prompt in enumerate(prompts):
            engine.submit(first + index, list(prompt), num_tokens, seed=index, **sampling)
        engine.run()
        answers.append([engine.tokens[first + index] for index in range(len(prompts))])
    runner.close()
    return answers


@functools.cache
def _processes() -> ForkServerContext:
    """Ranks are forked from a process that has imported all they need, which would be most of their start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([serve.__module__])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


@dataclass
class RankProcess:
    """Questions are answered in order, one at a time."""

    role: str
    process: ForkServerProcess
    connection: Connection
    rank_id: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    async def ask(self, question: str) -> Any:
        async with self.lock:
            self.connection.send_bytes(question.encode())
            return await self.answer()

    async def answer(self) -> Any:
        loop, can_read = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.connection.fileno(), can_read.set)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await can_read.wait()
            return json.loads(self.connection.recv_bytes())
        except EOFError:
            raise AssertionError(f"the {self.role} rank has ended") from None
        finally:
            loop.remove_reader(self.connection.fileno())

    async def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self.ask("stats")
        return answer

    async def drain(self, moves_in_s: float, limit_s: float = 60.0) -> bool:
        """Leave as a rank that Serve stops; False if something was left to do at the limit. Its process goes on."""
        drained: bool = await self.ask(f"drain {moves_in_s} {limit_s}")
        return drained

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Lost(Exception):
    """The request ended with an error instead of its answer."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(cause, message)
        self.cause = cause
        self.message = message


@dataclass
class Answer:
    """One choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list, compare=False)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_failovers: int = field(default=0, compare=False)

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class PdSystem:
    control: ControlEndpoint
    control_port: int
    service: RouterService
    kv_transfer: dict[str, Any]
    scheduler: dict[str, Any]
    num_blocks: int
    ranks: list[RankProcess] = field(default_factory=list)
    num_requests: int = 0

    async def start_rank(self, role: str, *, block_size: int = BLOCK_SIZE) -> RankProcess:
        options = {
            "model_dir": str(embedded_model_dir(lambda _: None)),
            "max_model_len": MAX_MODEL_LEN,
            "scheduler": self.scheduler,
            "cache": {"num_blocks": self.num_blocks * BLOCK_SIZE // block_size, "block_size": block_size},
            "kv_transfer": self.kv_transfer,
            "control_port": self.control_port,
            "secret": SECRET.hex(),
            "role": role,
            "pool": role,
        }
        ours, theirs = multiprocessing.Pipe()
        process = _processes().Process(target=serve, args=(options, theirs), daemon=True)
        with theirs:
            # It may take the time of all imports.
            await asyncio.to_thread(process.start)
        rank = RankProcess(role, process, ours)
        self.ranks.append(rank)
        rank.rank_id = await rank.answer()
        return rank

    @property
    def living(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.process.is_alive()]

    def rank(self, role: str) -> RankProcess:
        """The youngest of this role."""
        return next(rank for rank in reversed(self.ranks) if rank.role == role)

    async def wait_for_links(self, count: int, service: RouterService | None = None) -> None:
        pool = (service or self.service).pool
        await until(lambda: len(pool.links) == count, 20, f"{count} ranks connected")

    @contextlib.asynccontextmanager
    async def another_router(self, **settings: Any) -> AsyncIterator[RouterService]:
        """Besides the first, with other settings; connected to as many ranks."""
        service = RouterService(self.service.settings.model_copy(update=settings))
        await service.start(self.service_address, SECRET, f"router-{id(service)}")
        try:
            await self.wait_for_links(len(self.service.pool.links), service)
            yield service
        finally:
            await service.stop()

    async def service_address(self) -> tuple[str, int]:
        return HOST, self.control_port

    async def complete(self, prompt: Sequence[int], num_tokens: int, **fields: Any) -> list[int]:
        """The generated token ids. Raises Lost."""
        (choice,) = await self.answer(prompt, max_tokens=num_tokens, ignore_eos=True, **fields)
        return choice.tokens

    async def answer(
        self,
        prompt: Sequence[int],
        *,
        service: RouterService | None = None,
        on_token: Callable[[], None] = lambda: None,
        **fields: Any,
    ) -> list[Answer]:
        """What the choices are, greedily; `fields` are those of the API. `service`: another router. Raises Lost."""
        body = {"model": "m", "prompt": list(prompt), "temperature": 0} | fields
        request = parse(json.dumps(body).encode(), CompletionRequest)
        self.num_requests += 1
        service, request_id = service or self.service, f"cmpl-{self.num_requests}"
        flow = service.open_flow(request, request_id)
        answers = [Answer() for _ in range(request.num_sequences)]
        error: ApiError | None = None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await flow.begin()
                while not flow.is_finished:
                    for delta in await flow.next():
                        answers[delta.index].add(delta)
                        on_token()
        except ApiError as caught:
            error = caught
            raise Lost(caught.cause, caught.message) from caught
        except TimeoutError:
            raise AssertionError(
                f"no answer within {ANSWER_TIMEOUT_S:g} s: {await service.explain(request_id)}"
            ) from None
        finally:
            flow.close(error)
        for answer, choice in zip(answers, flow._sequences.choices, strict=True):
            answer.num_failovers = choice.num_failovers
        return answers

    async def complete_all(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, concurrency: int = 32, **fields: Any
    ) -> list[list[int] | Lost]:
        """All of them, so many at a time; the seed is the prompt's index."""
        gate = asyncio.Semaphore(concurrency)

        async def one(index: int, prompt: Sequence[int]) -> list[int] | Lost:
            async with gate:
                try:
                    return await self.complete(prompt, num_tokens, seed=index, **fields)
                except Lost as lost:
                    return lost

        return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))

    async def wait_until_nothing_is_held(self, timeout_s: float = 15.0) -> None:
        """No request, block, lease or load is left on any rank that lives, and the books agree."""
        seen: list[Any] = []

        async def is_idle() -> bool:
            seen.clear()
            for rank in self.living:
                stats = await rank.stats()
                load, kv = stats["load"], stats["kv_transfer"]
                busy = ("num_running", "num_waiting", "num_deferred", "num_loads")
                seen.append({name: load[name] for name in busy} | {"free": load["num_free_blocks"]})
                if any(load[name] for name in busy) or load["num_free_blocks"] != load["num_blocks"]:
                    return False
                seen.append(kv)
                if kv["num_leases"] or kv["num_quarantined_blocks"]:
                    return False
            return True

        try:
            async with asyncio.timeout(timeout_s):
                while not await is_idle():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not idle within {timeout_s:g} s: {seen}") from None
        for rank in self.living:
            assert await rank.ask("integrity") == "well"
        self.service.check_integrity()


@contextlib.asynccontextmanager
async def running(
    *roles: str,
    kv_transfer: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    num_blocks: int = NUM_BLOCKS,
    **settings: Any,
) -> AsyncIterator[PdSystem]:
    """A router with one rank per role, all connected. `settings` are those of the router."""
    control = ControlEndpoint(SchedulerConfig(), SECRET)
    port = await control.start(HOST)
    service = RouterService(
        RouterSettings(
            **{
                "model_name": "m",
                "model_dir": Path(embedded_model_dir(lambda _: None)),
                "max_model_len": MAX_MODEL_LEN,
                "remote_prefill_min_tokens": 1,
                **settings,
            }
        )
    )

    system = PdSystem(
        control,
        port,
        service,
        {"kv_connector": "PullConnector"} | (kv_transfer or {}),
        SCHEDULER | (scheduler or {}),
        num_blocks,
    )
    await service.start(system.service_address, SECRET, "router-1")
    try:
        await asyncio.gather(*(system.start_rank(role) for role in roles))
        await system.wait_for_links(len(roles))
        yield system
    finally:
        await service.stop()
        for rank in system.ranks:
            rank.kill()
        await control.stop()
