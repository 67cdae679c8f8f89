"""Connections to a Redis server whose calls end in time, and whether the server is to be tried at all.

A call that has taken its time has its connection closed under it, by another thread: the client's own timeouts are for
each single wait, and bytes that trickle in would renew them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kv_transfer.backoff import Backoff
from kv_transfer.block_store import StoreFailure, StoreReason
from kv_transfer.deadlines import Deadlines

_log = logging.getLogger(__name__)

RETRY_S = (0.2, 30.0)
"""How long something that has failed is left alone, from the first time to the most."""

T = TypeVar("T")


class RedisServer:
    """Whether the server is to be tried now. May be used from any thread."""

    def __init__(self, url: str) -> None:
        self._name = url.rpartition("@")[2]
        self._lock = threading.Lock()
        self._backoff = Backoff(*RETRY_S)

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


class RedisLine:
    """One connection; calls from several threads come one after another."""

    def __init__(self, server: RedisServer, url: str, timeout_s: float, deadlines: Deadlines) -> None:
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
                if isinstance(error, redis.exceptions.TimeoutError) or time.monotonic() - began_at >= self._timeout_s:
                    reason = StoreReason.TIMEOUT
                elif isinstance(error, redis.exceptions.ConnectionError):
                    reason = StoreReason.UNAVAILABLE
                else:
                    reason = StoreReason.ERROR
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
