"""Prefill and decode ranks as processes of their own, around a router and a control endpoint in the test's process.

Everything is real but Ray: the model, the ranks' threads and sockets, the transports, the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.control import ControlEndpoint
from model_runner.embedded import embedded_model_dir
from model_runner.torch_runner import TorchRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from router.errors import ApiError
from router.protocol import CompletionRequest
from router.service import RouterService, RouterSettings
from router.tokenizer import ChatTokenizer
from tests.engine import Engine

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


@functools.cache
def _text() -> list[int]:
    tokenizer = ChatTokenizer(embedded_model_dir(lambda _: None))
    ids: list[int] = tokenizer.tokenizer.encode(Path("LICENSE").read_text(encoding="utf-8")).ids
    tokenizer.close()
    return ids


def make_prompts(count: int, *, seed: int, shared: int = 0, shortest: int = 20, longest: int = 90) -> list[list[int]]:
    """Pieces of a real text, as token ids; the first `shared` of all are the same."""
    rng, text = random.Random(seed), _text()
    prompts = []
    for _ in range(count):
        length = rng.randint(shortest, longest) - shared
        start = rng.randrange(len(text) - length)
        prompts.append(text[:shared] + text[start : start + length])
    return prompts


def answers_of_one_rank(prompts: Sequence[Sequence[int]], num_tokens: int, **sampling: Any) -> list[list[int]]:
    """What a single mixed rank generates; `sampling` are fields of `SamplingParams`, the seed is the prompt's index."""
    config = SchedulerConfig(**SCHEDULER)
    cache = CacheConfig(num_blocks=NUM_BLOCKS * 2, block_size=BLOCK_SIZE)
    runner = TorchRunner(
        embedded_model_dir(lambda _: None), scheduler=config, cache=cache, dtype="float32", max_model_len=MAX_MODEL_LEN
    )
    engine = Engine(runner, config)
    for index, prompt in enumerate(prompts):
        engine.submit(index, list(prompt), num_tokens, **sampling)
    engine.run()
    runner.close()
    return [engine.tokens[index] for index in range(len(prompts))]


@dataclass
class RankProcess:
    """Questions are answered in order, one at a time."""

    role: str
    process: asyncio.subprocess.Process
    rank_id: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ask(self, question: str) -> Any:
        assert self.process.stdin is not None
        async with self.lock:
            self.process.stdin.write(f"{question}\n".encode())
            return await self.answer()

    async def answer(self) -> Any:
        assert self.process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await self.process.stdout.readline()
        assert line, f"the {self.role} rank has ended"
        return json.loads(line)

    async def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self.ask("stats")
        return answer

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class Lost(Exception):
    """The request ended with an error instead of its answer."""


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

    async def start_rank(self, role: str) -> RankProcess:
        options = {
            "model_dir": str(embedded_model_dir(lambda _: None)),
            "max_model_len": MAX_MODEL_LEN,
            "scheduler": self.scheduler,
            "cache": {"num_blocks": self.num_blocks, "block_size": BLOCK_SIZE},
            "kv_transfer": self.kv_transfer,
            "control_port": self.control_port,
            "secret": SECRET.hex(),
            "role": role,
            "pool": role,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.pd.rank_process",
            json.dumps(options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        rank = RankProcess(role, process)
        self.ranks.append(rank)
        rank.rank_id = await rank.answer()
        return rank

    def rank(self, role: str) -> RankProcess:
        """The youngest of this role."""
        return next(rank for rank in reversed(self.ranks) if rank.role == role)

    async def wait_for_links(self, count: int) -> None:
        await until(lambda: len(self.service.pool.links) == count, 20, f"{count} ranks connected")

    async def complete(self, prompt: Sequence[int], num_tokens: int, **fields: Any) -> list[int]:
        """The generated token ids. Raises Lost."""
        body = {"model": "m", "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        request = CompletionRequest.model_validate(body | fields)
        self.num_requests += 1
        flow = self.service.open_flow(request, f"cmpl-{self.num_requests}")
        tokens: list[int] = []
        error: ApiError | None = None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await flow.begin()
                while not flow.is_finished:
                    for delta in await flow.next():
                        tokens += delta.token_ids
        except ApiError as caught:
            error = caught
            raise Lost(caught.message) from caught
        finally:
            flow.close(error)
        return tokens

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
            for rank in self.ranks:
                if rank.process.returncode is None:
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
        for rank in self.ranks:
            if rank.process.returncode is None:
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

    async def address() -> tuple[str, int]:
        return HOST, port

    system = PdSystem(
        control,
        port,
        service,
        {"kv_connector": "PullConnector"} | (kv_transfer or {}),
        SCHEDULER | (scheduler or {}),
        num_blocks,
    )
    await service.start(address, SECRET, "router-1")
    try:
        await asyncio.gather(*(system.start_rank(role) for role in roles))
        await system.wait_for_links(len(roles))
        yield system
    finally:
        await service.stop()
        for rank in system.ranks:
            await rank.kill()
        await control.stop()
