"""Who sends a request, and what its headers ask of the router; checked by the HTTP surface."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """Of one request."""

    tenant: str = ""
    """Whom its share of the queue is counted for: the API key's tenant, else the body's `user`, else nobody's."""
    account: str = ""
    """Whose requests it may join and cancel: those of the same API key, or of its tenant; without keys, anybody's."""
    weight: float = 1.0
    """Of the tenant's share against others'."""
    arrived_at: float | None = None
    """When its headers were read, by the event loop's clock; None: now."""
    deadline_s: float | None = None
    """From `x-request-deadline-ms`: worth nothing so long after its arrival; None: it may take any time."""
    session_id: str | None = None
    """From `x-session-id`: requests of one session go to one rank, as long as it lives."""
    rank_id: str | None = None
    """From `x-serried-rank`: this rank or none."""
    retry_token: str | None = None
    """From `x-serried-retry-token`: what an earlier refusal of it gave; of a retry without one, its alias."""
    retry_alias: str | None = None
    """What a refusal of it is found by if it comes without a token."""


ANYBODY = Caller()
