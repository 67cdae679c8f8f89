"""KV blocks in a Redis server: a `BlockStore`.

A block is one value with a time to live: its checksum (CRC-32 over key and content, so that it covers what the block
is as well), then its content. Reads, writes and look-ups have a connection each, go in batches of a bounded size,
and end in time: a call that has taken `timeout_s` has its connection closed under it, also if bytes still trickle in.

After a failure the server is left alone for a while, longer each time it fails again, and then one call tries: nobody
waits for a server that is down, and one that comes back is not overrun. A server that has no more memory, or refuses
to write for another reason, is still read from.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kv_transfer.backoff import Backoff
from kv_transfer.block_store import BlockArray, StoreFailure, StoreOutcome, StoreReason, block_key
from kv_transfer.deadlines import Deadlines
from kv_transfer.geometry import Geometry
from kv_transfer.lookup_board import LookupBoard

_log = logging.getLogger(__name__)

_SUM = struct.Struct("<I")
_BYTES_PER_CALL = 4 << 20
_NUM_KEYS_PER_LOOKUP = 256
_RETRY_S = (0.2, 30.0)

T = TypeVar("T")


class RedisStore:
    def __init__(
        self,
        geometry: Geometry,
        index: LookupBoard,
        deadlines: Deadlines,
        *,
        url: str,
        key_prefix: str,
        ttl_s: float,
        timeout_s: float,
    ) -> None:
        """Raises ValueError for a URL that says nothing. Nothing is connected before it is needed."""
        self.is_local = False
        self.num_blocks_per_call = max(1, _BYTES_PER_CALL // geometry.block_size_bytes)
        self._block_size_bytes = geometry.block_size_bytes
        self._fingerprint = geometry.fingerprint()
        self._index = index
        self._prefix = key_prefix.encode() + b":"
        self._ttl_ms = max(int(ttl_s * 1000), 1)
        self._server = _Server(url)
        self._reading = _Line(self._server, url, timeout_s, deadlines)
        self._writing = _Line(self._server, url, timeout_s, deadlines)
        self._asking = _Line(self._server, url, timeout_s, deadlines)
        self._refusal = Backoff(*_RETRY_S)
        """Of writing alone."""
        self._is_closed = False

    def start(self) -> None:
        self._index.start(self.contains, lambda: self._server.would_try())

    @property
    def accepts(self) -> bool:
        return not self._is_closed and self._server.would_try() and self._refusal.would_try(time.monotonic())

    def contains(self, hashes: Sequence[bytes]) -> StoreOutcome:
        found: list[bool] = []
        for first in range(0, len(hashes), _NUM_KEYS_PER_LOOKUP):
            batch = hashes[first : first + _NUM_KEYS_PER_LOOKUP]
            answer = self._asking.call(partial(_exist, keys=[self._key(block_hash) for block_hash in batch]))
            if isinstance(answer, StoreFailure):
                self._note(answer)
                return StoreOutcome(_num_leading(found), answer)
            found += answer
            self._index.miss([h for h, is_there in zip(batch, answer, strict=True) if not is_there])
            if not all(answer):
                break
        count = _num_leading(found)
        self._index.see(hashes[:count])
        return StoreOutcome(count)

    def get(self, hashes: Sequence[bytes], into: BlockArray) -> StoreOutcome:
        keys = [self._key(block_hash) for block_hash in hashes]
        answer = self._reading.call(partial(_read, keys=keys))
        if isinstance(answer, StoreFailure):
            self._note(answer)
            return StoreOutcome(0, answer)
        for count, (key, value) in enumerate(zip(keys, answer, strict=True)):
            failure = None
            content = self._checked(key, value)
            if value is None:
                failure = StoreFailure(StoreReason.MISSING, "a block has expired, or was evicted")
            elif content is None:
                failure = StoreFailure(StoreReason.CORRUPT, "a value is truncated, damaged, or another block")
                # It would be found over and over; should it have been replaced meanwhile, it is computed once more.
                self._reading.call(partial(_pipelined, commands=[("UNLINK", key)]))
            if failure is not None or content is None:
                self._index.miss(hashes[count : count + 1])
                return StoreOutcome(count, failure)
            into[count] = np.frombuffer(content, np.uint8)
        return StoreOutcome(len(keys))

    def put(self, hashes: Sequence[bytes], blocks: BlockArray) -> StoreOutcome:
        if not self._refusal.may_try(time.monotonic()):
            return StoreOutcome(0, StoreFailure(StoreReason.UNAVAILABLE, "the server has refused to write lately"))
        commands: list[tuple[Any, ...]] = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            key, content = self._key(block_hash), block.tobytes()
            value = _SUM.pack(zlib.crc32(content, zlib.crc32(key))) + content
            commands.append(("SET", key, value, "PX", self._ttl_ms))
        answer = self._writing.call(partial(_pipelined, commands=commands))
        if isinstance(answer, StoreFailure):
            self._note(answer)
            return StoreOutcome(0, answer)
        stored = [h for h, reply in zip(hashes, answer, strict=True) if not isinstance(reply, Exception)]
        self._index.see(stored)
        refusal = next((reply for reply in answer if isinstance(reply, Exception)), None)
        if refusal is None:
            self._refusal.succeeded()
            return StoreOutcome(len(stored))
        if self._refusal.failed(time.monotonic()):
            _log.warning("The KV store %s refuses to write, which is tried again later: %s", self._server, refusal)
        is_full = isinstance(refusal, redis.exceptions.OutOfMemoryError) or str(refusal).startswith("OOM")
        reason = StoreReason.FULL if is_full else StoreReason.ERROR
        return StoreOutcome(len(stored), StoreFailure(reason, str(refusal)))

    def maintain(self) -> None:
        """The server keeps house itself."""

    def num_evicted(self) -> int:
        return 0

    def close(self) -> None:
        self._is_closed = True
        for line in (self._reading, self._writing, self._asking):
            line.close()
        self._index.close(1.0)

    def _key(self, block_hash: bytes) -> bytes:
        return self._prefix + block_key(self._fingerprint, block_hash)

    def _checked(self, key: bytes, value: object) -> memoryview | None:
        """The content of a value; None: it is not right."""
        if not isinstance(value, bytes) or len(value) != _SUM.size + self._block_size_bytes:
            return None
        content = memoryview(value)[_SUM.size :]
        return content if _SUM.unpack_from(value)[0] == zlib.crc32(content, zlib.crc32(key)) else None

    def _note(self, failure: StoreFailure) -> None:
        if failure.reason is not StoreReason.UNAVAILABLE:
            self._index.miss_all()


class _Server:
    """Whether the server is to be tried now. May be used from any thread."""

    def __init__(self, url: str) -> None:
        self._name = url.rpartition("@")[2]
        self._lock = threading.Lock()
        self._backoff = Backoff(*_RETRY_S)

    def __str__(self) -> str:
        return self._name

    def would_try(self) -> bool:
        with self._lock:
            return self._backoff.would_try(time.monotonic())

    def may_try(self) -> bool:
        with self._lock:
            return self._backoff.may_try(time.monotonic())

    def failed(self, failure: StoreFailure) -> None:
        with self._lock:
            is_news = self._backoff.failed(time.monotonic())
        if is_news:
            _log.warning("The KV store %s fails, and is tried again later: %s", self, failure.message)

    def succeeded(self) -> None:
        with self._lock:
            is_news = self._backoff.succeeded()
        if is_news:
            _log.info("The KV store %s answers again", self)


class _Line:
    """One connection; calls from several threads come one after another."""

    def __init__(self, server: _Server, url: str, timeout_s: float, deadlines: Deadlines) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._deadlines = deadlines
        self._lock = threading.Lock()
        """Held during a call."""
        self._calls = itertools.count(1)
        self._present_lock = threading.Lock()
        self._present = 0
        """Number of the call under way; 0: none."""
        self._is_closed = False
        try:
            self._client: redis.Redis = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                max_connections=1,
                protocol=2,
                decode_responses=False,
            )
        except ValueError as error:
            raise ValueError(
                f"kv_connector_extra_config.url cannot be used ({error}): it should look like redis://host:6379/0"
            ) from None

    def call(self, ask: Callable[[redis.Redis], T]) -> T | StoreFailure:
        with self._lock:
            if self._is_closed or not self._server.may_try():
                return StoreFailure(StoreReason.UNAVAILABLE, f"{self._server} has failed lately, or is given up")
            number = next(self._calls)
            with self._present_lock:
                self._present = number
            deadline = self._deadlines.call_in(self._timeout_s, lambda: self._break_off(number))
            began_at = time.monotonic()
            try:
                answer = ask(self._client)
            except Exception as error:  # whatever a server answers, and whatever the client makes of it
                took_s = time.monotonic() - began_at
                is_late = isinstance(error, redis.exceptions.TimeoutError) or took_s >= self._timeout_s
                reason = StoreReason.TIMEOUT if is_late else StoreReason.UNAVAILABLE
                if not isinstance(error, redis.exceptions.ConnectionError | redis.exceptions.TimeoutError):
                    reason = StoreReason.TIMEOUT if is_late else StoreReason.ERROR
                failure = StoreFailure(reason, f"{type(error).__name__}: {error}")
                self._client.connection_pool.disconnect(inuse_connections=True)
                if not self._is_closed:
                    self._server.failed(failure)
                return failure
            finally:
                with self._present_lock:
                    self._present = 0
                self._deadlines.call_off(deadline)
            self._server.succeeded()
            return answer

    def _break_off(self, number: int) -> None:
        """The thread that waits in this call finds its connection closed."""
        with self._present_lock:
            if self._present == number:
                self._client.connection_pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        self._is_closed = True
        with self._present_lock:
            self._client.connection_pool.disconnect(inuse_connections=True)


def _pipelined(client: redis.Redis, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The replies, errors among them."""
    pipeline: Any = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def _exist(client: redis.Redis, keys: Sequence[bytes]) -> list[bool]:
    replies = _pipelined(client, [("EXISTS", key) for key in keys])
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return [reply == 1 for reply in replies]


def _read(client: redis.Redis, keys: Sequence[bytes]) -> list[Any]:
    values: Any = client.mget(keys)
    if not isinstance(values, list) or len(values) != len(keys):
        raise redis.exceptions.InvalidResponse(f"{len(keys)} values were asked for, and something else is answered")
    return values


def _num_leading(found: Sequence[bool]) -> int:
    return next((place for place, is_there in enumerate(found) if not is_there), len(found))
