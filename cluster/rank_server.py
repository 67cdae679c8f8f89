"""A rank's edge: its TCP endpoint for routers, its registration with the control actor, and its threads.

Two threads: `rank-io` runs an asyncio loop with all sockets, `rank-steps` (`RankLoop`) decides and computes (with
async scheduling a third, `rank-executor`, computes). What routers say goes from the first to the second through the
loop's inbox, messages to them come back encoded, one wake-up per step. Grammars are compiled on threads of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from cluster.draining import Draining
from cluster.grammar_matcher import Vocabulary
from cluster.kv_connector import make_connector
from cluster.rank_loop import (
    Aborted,
    Announced,
    Asked,
    Extended,
    GrammarCompiled,
    HandedOff,
    IdlenessAsked,
    IntegrityCheck,
    Kept,
    OwnerLost,
    PauseRequested,
    PrefixesAsked,
    RankLoop,
    StatsDue,
    Submitted,
)
from cluster.structured_output import GrammarCompiler
from kv_transfer.config import KVTransferConfig
from kv_transfer.connection import Connection, Listener, connect
from kv_transfer.extension import why_missing
from kv_transfer.wire import WireError
from model_runner.runner import Capacity, ModelRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.interface import PauseState, SchedulerSetup
from rank_scheduler.messages import (
    Abort,
    Explain,
    Extend,
    HandOff,
    Keep,
    KvTransferLoad,
    LeavingHeard,
    Prefetch,
    RankToRouter,
    RouterToRank,
    StepFrame,
    Submit,
    WatchPrefixes,
)
from rank_scheduler.structured_output import GrammarMatcher
from router.control_link import ControlAddress
from router.control_messages import ControlToRank, PoolRole, RankRecord, Register, Registered
from router.detokenizer import IncrementalDetokenizer

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
REGISTRATION_TIMEOUT_S = 30.0
# One question to the control actor; then the rank asks anew, wherever the actor may be by then.
CONTROL_TIMEOUT_S = 10.0
RECONNECT_DELAY_S = 0.5
# Longer than any sane step on a slow processor; a step that takes this long is stuck.
STALL_TIMEOUT_S = 120.0
# Within it, a drain that has come to its limit says so.
DRAIN_OVERTIME_S = 1.0


class RankServer:
    """One rank between `start` and `stop`. Methods may be called from any thread."""

    def __init__(
        self,
        runner: ModelRunner,
        capacity: Capacity,
        *,
        config: SchedulerConfig,
        cache: CacheConfig,
        pool: str,
        secret: bytes,
        control_address: ControlAddress,
        advertise_host: str,
        node_id: str,
        tokenizer_path: Path,
        role: PoolRole = PoolRole.MIXED,
        kv_transfer: KVTransferConfig | None = None,
    ) -> None:
        """`runner` is loaded already, and has answered with `capacity`; `stop` closes it.

        Raises ValueError, with the remedy, if `config` does not fit the model.
        """
        config.check(capacity.max_model_len, capacity.is_encoder_decoder)
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
        kv_transfer = kv_transfer or KVTransferConfig()
        boot_id = kv_transfer.new_engine_id()
        connector = make_connector(kv_transfer, role, boot_id, advertise_host, secret, capacity)
        self._connector_worker = connector.worker if connector is not None else None
        setup = SchedulerSetup(
            max_model_len=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
            eos_token_ids=capacity.eos_token_ids,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            kv_groups=capacity.kv_groups,
            is_encoder_decoder=capacity.is_encoder_decoder,
            # Every runner takes plans ahead of results: it appends sampled tokens to its batch itself.
            record_prefix_changes=cache.enable_prefix_caching,
            async_scheduling=config.resolve_async_scheduling(supported=True, device=capacity.device),
            performance=capacity.performance,
            connector=connector.scheduler if connector is not None else None,
            kv_load_failure_policy=kv_transfer.kv_load_failure_policy,
            make_text_decoder=lambda: IncrementalDetokenizer(tokenizer),
        )
        scheduler = config.make_scheduler(setup)
        missing = why_missing()
        if missing:
            reasons = "; ".join(missing.values())
            logger.warning("extension modules are missing, so the scheduler takes longer: %s", reasons)
        self._grammar_compiler = self._make_grammar_compiler(tokenizer_path, capacity)
        self._runner = runner
        self._loop = RankLoop(
            scheduler,
            runner,
            self._send,
            self._crashed,
            grammar_compiler=self._grammar_compiler,
            connector_worker=self._connector_worker,
        )
        self._listener = Listener(secret, self._accept)
        self._secret = secret
        self._control_address = control_address
        self._host = advertise_host
        self._record = RankRecord(
            rank_id="",
            pool=pool,
            boot_id=boot_id,
            host=advertise_host,
            port=0,
            pid=os.getpid(),
            node_id=node_id,
            max_model_len=capacity.max_model_len,
            max_num_seqs=config.active_seqs_limit,
            max_num_inflight_kv_loads=(config.max_num_inflight_kv_loads or 0) if role is PoolRole.DECODE else 0,
            max_num_batched_tokens=config.num_scheduled_tokens_limit,
            long_prefill_token_threshold=config.long_prefill_token_threshold if config.enable_chunked_prefill else 0,
            short_prefill_tokens=config.short_prefill_tokens,
            num_blocks=capacity.num_blocks - 1,
            block_size=capacity.block_size,
            role=role,
            block_size_bytes=capacity.block_size_bytes,
        )
        self._connections: dict[int, Connection] = {}
        self._draining = Draining(self._connections, lambda is_idle: self._loop.post(IdlenessAsked(is_idle)))
        self._next_owner = 0
        self._io = asyncio.new_event_loop()
        self._io_thread = threading.Thread(target=self._run_io, name="rank-io", daemon=True)
        self._registered: Future[str] = Future()
        self._registration_obstacle = "the control actor has not answered yet"
        self._stop_requested = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RouterToRank)
        self._num_malformed = 0

    def _make_grammar_compiler(self, tokenizer_path: Path, capacity: Capacity) -> GrammarCompiler | None:
        """None where the tokenizer is of no use for it: then only requests with a grammar are refused."""
        try:
            vocabulary = Vocabulary(tokenizer_path, capacity.vocab_size, capacity.eos_token_ids)
        except ValueError as error:
            logger.warning("requests with a grammar will be refused: %s", error)
            return None
        return GrammarCompiler(vocabulary, self._compiled)

    # ---- any thread ----

    def start(self) -> str:
        """Start the threads and register; returns the rank id.

        Raises TimeoutError with what kept it from registering, or what ended a thread; the rank is stopped then.
        """
        if self._connector_worker is not None:
            self._connector_worker.start(self._runner.kv_memory(), self._loop.post)
        self._loop.start()
        self._io_thread.start()
        try:
            return self._registered.result(REGISTRATION_TIMEOUT_S)
        except TimeoutError:
            self.stop()
            raise TimeoutError(
                f"not registered within {REGISTRATION_TIMEOUT_S:g} s: {self._registration_obstacle}"
            ) from None
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close connections (routers treat what still runs as lost with the rank), end all threads, free the model.

        Idempotent.
        """
        self._call_io(self._stop_requested.set)
        self._io_thread.join(timeout_s)
        has_ended = self._loop.stop(timeout_s)
        if self._connector_worker is not None:
            self._connector_worker.close(timeout_s)
        if has_ended:
            self._runner.close()
        else:
            logger.warning("the step loop has not ended within %.1f s", timeout_s)
        if self._grammar_compiler is not None:
            self._grammar_compiler.close()

    def check_health(self) -> None:
        """Raises RuntimeError, with the reason, if this rank makes no progress. Never waits for the step loop."""
        if self._loop.crash is not None:
            raise RuntimeError(f"the step loop ended: {self._loop.crash}")
        if not self._io_thread.is_alive():
            raise RuntimeError("the I/O thread ended")
        stalled = self._loop.stalled_for()
        if stalled > STALL_TIMEOUT_S:
            raise RuntimeError(f"the current step has taken {stalled:.0f} s, the limit is {STALL_TIMEOUT_S:.0f} s")

    def check_integrity(self, timeout_s: float = 30.0) -> None:
        """Run the scheduler's invariants between two of its calls. Raises AssertionError with what is wrong.

        Raises RuntimeError if the step loop has ended, TimeoutError if the current step takes too long.
        """
        done: Future[None] = Future()
        self._loop.post(IntegrityCheck(done))
        done.result(timeout_s)

    def set_pause(self, state: PauseState, timeout_s: float = 30.0) -> None:
        """Pause or go on; returns when every step that was planned before has ended. Raises as `check_integrity`."""
        done: Future[None] = Future()
        self._loop.post(PauseRequested(state, done))
        done.result(timeout_s)

    def drain(self, moves_in_s: float, limit_s: float) -> bool:
        """Take no new work from now on; returns when there is nothing left to do here, or after `limit_s` (False).

        What still runs after `moves_in_s` goes on at other ranks, as far as there are any. Blocks that others are
        still to read count as something to do, as long as any router is there. May be called again, with other times.
        """
        draining = self._draining.drain(moves_in_s, limit_s)
        try:
            drained = asyncio.run_coroutine_threadsafe(draining, self._io)
        except RuntimeError:  # the event loop is closed: nobody is served any more
            draining.close()
            return True
        try:
            has_drained = drained.result(limit_s + DRAIN_OVERTIME_S)
        except (TimeoutError, CancelledError):  # it has ended meanwhile
            has_drained = False
        logger.info("rank %s %s", self._record.rank_id, "is empty" if has_drained else "still has something to do")
        return has_drained

    def stats(self) -> dict[str, Any]:
        """Identity and live figures, for operators: `load` since the start, `latest_interval` of about a second."""
        return {
            **msgspec.to_builtins(self._record),
            "is_leaving": self._draining.is_leaving,
            "num_connections": len(self._connections),
            "num_malformed_messages": self._num_malformed,
            "num_ignored_messages": self._loop.num_ignored_messages,
            "num_refused_connections": self._listener.num_refused,
            "load": msgspec.structs.asdict(self._loop.load),
            "latest_interval": dataclasses.asdict(self._loop.stats),
            "kv_transfer": dataclasses.asdict(self._connector_worker.stats()) if self._connector_worker else None,
        }

    # ---- the compiler's threads ----

    def _compiled(
        self, owner: int, request_id: int, matcher: GrammarMatcher | None, error: str, is_request_fault: bool
    ) -> None:
        self._loop.post(GrammarCompiled(owner, request_id, matcher, error, is_request_fault))

    # ---- the loop's thread ----

    def _send(self, messages: Mapping[int, RankToRouter]) -> None:
        payloads = [(owner, self._encoder.encode(message)) for owner, message in messages.items()]
        self._call_io(self._deliver, payloads)

    def _crashed(self, reason: str) -> None:
        logger.error("rank %s gives up: %s", self._record.rank_id, reason)
        self._call_io(self._give_up, RuntimeError(f"the step loop ended: {reason}"))

    def _call_io(self, callback: Callable[..., None], *args: object) -> None:
        """Run `callback` on the I/O thread, if that has not ended: then there is nobody left to send to."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._io.call_soon_threadsafe(callback, *args)

    # ---- I/O thread ----

    def _run_io(self) -> None:
        asyncio.set_event_loop(self._io)
        try:
            self._io.run_until_complete(self._serve())
            self._give_up(RuntimeError("the rank was stopped"))
        except Exception as error:
            logger.exception("rank I/O ended")
            self._give_up(error)
        finally:
            self._io.close()

    def _give_up(self, error: Exception) -> None:
        """End the I/O thread; whoever waits in `start` hears why."""
        if not self._registered.done():
            self._registered.set_exception(error)
        self._stop_requested.set()

    async def _serve(self) -> None:
        port = await self._listener.start(self._host)
        self._record = msgspec.structs.replace(self._record, port=port)
        stopped = asyncio.create_task(self._stop_requested.wait())
        background = [asyncio.create_task(self._stay_registered()), asyncio.create_task(self._beat())]
        try:
            await asyncio.wait([stopped, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in background:
                if task.done():
                    task.result()  # raises: neither ever returns
        finally:
            stopped.cancel()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, self._draining.close(), return_exceptions=True)
            await self._listener.close()

    def _accept(self, connection: Connection) -> None:
        assert connection.peer is not None
        if connection.peer.role != "router":
            self._num_malformed += 1
            connection.abort(f"a rank serves routers, not the role {connection.peer.role!r}")
            return
        owner = self._next_owner
        self._next_owner += 1
        self._connections[owner] = connection
        connection.closed.add_done_callback(lambda _: self._lost(owner))
        self._draining.greet(connection)
        connection.start(lambda payload: self._take(owner, connection, payload))

    def _lost(self, owner: int) -> None:
        del self._connections[owner]
        self._draining.lost(owner)
        self._loop.post(OwnerLost(owner))

    def _take(self, owner: int, connection: Connection, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            self._num_malformed += 1
            connection.abort(f"malformed message: {error}")
            return
        match message:
            case Submit():
                self._loop.post(Submitted(owner, message))
            case Extend():
                self._loop.post(Extended(owner, message))
            case Prefetch():
                self._loop.post(Announced(owner, message))
            case Abort():
                self._loop.post(Aborted(owner, message.id))
            case HandOff():
                self._loop.post(HandedOff(owner, message.id))
            case Keep():
                self._loop.post(Kept(owner, message.ids))
            case LeavingHeard():
                self._draining.heard(owner)
            case Explain():
                self._loop.post(Asked(owner, message))
            case WatchPrefixes():
                self._loop.post(PrefixesAsked(owner))

    def _deliver(self, payloads: list[tuple[int, bytes]]) -> None:
        for owner, payload in payloads:
            connection = self._connections.get(owner)
            if connection is not None:
                connection.send(payload)

    async def _beat(self) -> None:
        """Live figures to every router once a second: idle ranks stay visible, dead ones become so."""
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            self._loop.post(StatsDue())
            payload = self._encoder.encode(StepFrame(load=self._loop.load, kv_transfer=self._kv_transfer_load()))
            for connection in list(self._connections.values()):
                connection.send(payload)

    def _kv_transfer_load(self) -> KvTransferLoad | None:
        if self._connector_worker is None:
            return None
        stats = self._connector_worker.stats()
        return KvTransferLoad(**{name: getattr(stats, name) for name in KvTransferLoad.__struct_fields__})

    async def _stay_registered(self) -> None:
        """Be a member as long as this rank lives: register, and again whenever the control actor was away."""
        while True:
            try:
                await self._register()
            except Exception as error:  # whatever finding the actor may raise: a rank that stops trying is lost
                self._registration_obstacle = f"{type(error).__name__}: {error}"
                logger.warning("cannot register with the control actor, trying again: %s", self._registration_obstacle)
            await asyncio.sleep(RECONNECT_DELAY_S)

    async def _register(self) -> None:
        """Register and hold the connection; returns when it closes."""
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            host, port = await self._control_address()
        connection = await connect(host, port, secret=self._secret, role="rank", name=self._record.boot_id)
        answer: asyncio.Future[bytes] = self._io.create_future()
        connection.start(lambda payload: None if answer.done() else answer.set_result(payload))
        try:
            connection.send(self._encoder.encode(Register(self._record)))
            ends: set[asyncio.Future[Any]] = {answer, connection.closed}
            await asyncio.wait(ends, timeout=CONTROL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise WireError("the control actor did not answer the registration")
            registered: Registered = msgspec.msgpack.decode(answer.result(), type=ControlToRank)
            self._record = msgspec.structs.replace(self._record, rank_id=registered.rank_id)
            logger.info("registered as rank %s", registered.rank_id)
            if not self._registered.done():
                self._registered.set_result(registered.rank_id)
            logger.warning("control connection closed: %s", await connection.closed)
        finally:
            connection.abort("rank reconnects")
