"""KV blocks in a Redis server: a `BlockStore`.

A block is one value with a time to live: its checksum (CRC-32 over key and content, so that it covers what the block
is as well), then its content. Reads, writes and look-ups have a connection each, go in batches of a bounded size,
and end in time: a call that has taken `timeout_s` has its connection closed under it, also if bytes still trickle in.

After a failure the server is left alone for a while, longer each time it fails again, and then one call tries: nobody
waits for a server that is down, and one that comes back is not overrun. A server that has no more memory, or refuses
to write for another reason, is still read from.
"""

from __future__ import annotations

import logging
import struct
import time
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import redis

from kv_transfer.backoff import Backoff
from kv_transfer.block_store import BlockArray, StoreFailure, StoreOutcome, StoreReason, block_key
from kv_transfer.deadlines import Deadlines
from kv_transfer.geometry import Geometry
from kv_transfer.lookup_board import LookupBoard
from kv_transfer.redis_line import RETRY_S, RedisLine, RedisServer

_log = logging.getLogger(__name__)

_SUM = struct.Struct("<I")
_BYTES_PER_CALL = 4 << 20
_NUM_KEYS_PER_LOOKUP = 256


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
        self._server = RedisServer(url)
        self._reading = RedisLine(self._server, url, timeout_s, deadlines)
        self._writing = RedisLine(self._server, url, timeout_s, deadlines)
        self._asking = RedisLine(self._server, url, timeout_s, deadlines)
        self._refusal = Backoff(*RETRY_S)
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
                self._index.miss_all()
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
            self._index.miss_all()
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
            self._index.miss_all()
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
