"""Which API key a request was sent with. The router knows only their hashes, so that its configuration betrays none."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from router.errors import ApiError, Cause

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""For these no key is asked: what looks after a server (a kubelet, a load balancer, a scraper) has none as a rule, and
they tell how the server is, nothing of what is said with it."""


class ApiKey(BaseModel):
    """One of those that are accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="For people.")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    tenant: str = Field(default="", description="Whose requests these are; empty: whom their body's `user` says.")

    @property
    def account(self) -> str:
        """Whose requests these are among those with keys: several keys of one tenant are one account."""
        return f"tenant:{self.tenant}" if self.tenant else f"key:{self.name}"


class ApiKeys:
    """All that are accepted; none: every request is let in."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    def check(self, path: str, authorization: bytes | None, x_api_key: bytes | None = None) -> ApiKey | None:
        """The key in the header `authorization`, or in `x-api-key`, as Anthropic's clients send it; None where none is
        needed. Raises ApiError.

        How long it takes does not depend on which key it is, nor on how much of one is right.
        """
        if not self._keys or path in OPEN_PATHS:
            return None
        if authorization is None and x_api_key is not None:
            authorization = b"Bearer " + x_api_key
        scheme, _, key = (authorization or b"").partition(b" ")
        presented = hashlib.sha256(key.strip()).hexdigest()
        found: ApiKey | None = None
        for known in self._keys:
            if hmac.compare_digest(presented, known.sha256):
                found = known
        if scheme.lower() != b"bearer":
            said = "is missing" if authorization is None else "has another scheme than Bearer"
            raise _refused(f"{said}; send `Authorization: Bearer KEY`")
        if found is None:
            raise _refused("has a key that is not known here; check it, or ask the operator for one")
        return found


def _refused(what: str) -> ApiError:
    return ApiError(Cause.INVALID_API_KEY, f"authorization: {what}", "authorization")
