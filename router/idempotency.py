"""Answers by idempotency key: which are on their way, and which are kept for a while, within bounds; pure.

A key is one account's: two may use the same. The same key asks for the same thing, as its request's digest shows.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from router.errors import ApiError, Cause

HEADER = "idempotency-key"
ENTRY_BYTES = 1024
"""What an answer costs besides its bytes."""


class KeyedAnswer(Protocol):
    digest: bytes
    num_bytes: int

    @property
    def is_joinable(self) -> bool: ...


AnyAnswer = TypeVar("AnyAnswer", bound=KeyedAnswer)


def key_id(account: str, key: str) -> str:
    """What a key is known by, also to other routers."""
    name = account.encode()
    return hashlib.sha256(len(name).to_bytes(4, "little") + name + key.encode()).hexdigest()


def request_digest(path: str, body: bytes) -> bytes:
    digest = hashlib.sha256(path.encode() + b"\0")
    digest.update(body)
    return digest.digest()


class KeyedAnswers(Generic[AnyAnswer]):
    """Mutable state: answers under way, those that are kept (oldest end first), and the bytes of these."""

    def __init__(self, ttl_s: float, max_bytes: int) -> None:
        self.num_bytes = 0
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._running: dict[str, AnyAnswer] = {}
        self._kept: OrderedDict[str, tuple[float, AnyAnswer]] = OrderedDict()
        self._claims: set[str] = set()
        """Running ones whose key another router may turn out to own."""

    def find(self, key: str, digest: bytes, now: float) -> AnyAnswer | None:
        """Raises ApiError if the key stands for something else, or its answer cannot be had."""
        self._expire(now)
        kept = self._kept.get(key)
        answer = self._running.get(key) if kept is None else kept[1]
        if answer is None:
            return None
        if answer.digest != digest:
            raise ApiError(
                Cause.IDEMPOTENCY_KEY_REUSED,
                "idempotency-key: was given with another request before; use a new key for each request, and send the "
                "same body with the same key",
                HEADER,
            )
        if not answer.is_joinable:
            raise ApiError(
                Cause.IDEMPOTENCY_IN_PROGRESS,
                f"idempotency-key: its answer is on its way, and with {answer.num_bytes} bytes so far too large to be "
                "given twice; wait for it where it is read",
                HEADER,
            )
        return answer

    def add(self, key: str, answer: AnyAnswer) -> None:
        """One that is on its way. It may be another router's: see `is_owned`."""
        assert key not in self._running, "joining is for find"
        assert key not in self._kept, "joining is for find"
        self._running[key] = answer
        self._claims.add(key)

    def claimed(self, key: str) -> None:
        """No other router owns it."""
        self._claims.discard(key)

    def ended(self, key: str, answer: AnyAnswer, *, is_whole: bool, now: float) -> None:
        """Whole ones are kept; of others, the next request with their key is a new one."""
        if self._running.get(key) is not answer:
            return
        del self._running[key]
        self._claims.discard(key)
        if is_whole:
            self._kept[key] = (now + self._ttl_s, answer)
            self.num_bytes += _size(answer)
        self._expire(now)

    def is_owned(self, key: str, *, against: bool, now: float) -> bool:
        """For another router that wants to begin: whether its answer is here. `against`: where both want to begin at
        the same time, it is this one's."""
        self._expire(now)
        return key in self._kept or (key in self._running and (against or key not in self._claims))

    def check_integrity(self) -> None:
        """Raises AssertionError if the books are wrong."""
        assert self.num_bytes == sum(_size(answer) for _, answer in self._kept.values())
        assert self.num_bytes <= self._max_bytes, "more is kept than may be"
        assert self._claims <= self._running.keys()
        assert not self._running.keys() & self._kept.keys(), "a key is running and kept"

    def _expire(self, now: float) -> None:
        while self._kept:
            key, (expires_at, answer) = next(iter(self._kept.items()))
            if expires_at > now and self.num_bytes <= self._max_bytes:
                return
            del self._kept[key]
            self.num_bytes -= _size(answer)


def _size(answer: KeyedAnswer) -> int:
    return answer.num_bytes + ENTRY_BYTES
