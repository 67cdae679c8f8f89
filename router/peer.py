"""A connection that is kept: opened, lost and opened again; and what goes wrong with those at its other end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum

from kv_transfer.connection import Connection

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.05


class PeerFault(StrEnum):
    """What went wrong with a peer; also the metric label. Costs a connection at most, never the router's way on."""

    UNREACHABLE = "unreachable"
    """An attempt to connect failed."""
    MALFORMED = "malformed"
    """It sent what is no message; its connection was cut."""
    SILENT = "silent"
    """It was not heard of, or did not answer, in time; its connection was cut."""
    STALE = "stale"
    """It sent a token or an end of a sequence that is not live, or an answer that nobody waits for (any more)."""
    GAP = "gap"
    """A rank left out changes of its prefix cache, and was asked for all that it has."""
    UNEXPECTED = "unexpected"
    """What it sent made the router fail in a way that nobody foresaw; its connection was cut."""


# One decoder may raise all of these: DecodeError and UnicodeDecodeError are ValueErrors, deep nesting is neither.
UNDECODABLE = (ValueError, RecursionError)


async def keep_connected(
    peer: str,
    connect: Callable[[], Awaitable[Connection]],
    use: Callable[[Connection], Awaitable[str]],
    *,
    is_wanted: Callable[[], bool],
    max_backoff_s: float,
    count: Callable[[PeerFault], None],
) -> None:
    """Connect to `peer`, `use` the connection until it ends, and begin anew, as long as it `is_wanted`.

    `use` returns why the connection has ended. Whatever `connect` and `use` raise means another attempt, after a
    pause that grows until a connection has lasted. Trouble is logged when it begins, not with every attempt.
    """
    loop = asyncio.get_running_loop()
    backoff_s, is_in_trouble = MIN_BACKOFF_S, False
    while is_wanted():
        connection: Connection | None = None
        began_at = loop.time()
        failure: Exception | None = None
        try:
            connection = await connect()
            began_at = loop.time()
            if not is_in_trouble:
                logger.info("%s connected", peer)
            reason = await use(connection)
        except Exception as error:
            count(PeerFault.UNREACHABLE if connection is None else PeerFault.UNEXPECTED)
            reason, failure = str(error) or type(error).__name__, error
        finally:
            if connection is not None:
                connection.close("the router ends")
        if not is_wanted():
            logger.info("%s disconnected: %s", peer, reason)
            return
        if connection is not None and loop.time() - began_at > max_backoff_s:
            backoff_s, is_in_trouble = MIN_BACKOFF_S, False
        if not is_in_trouble:
            is_in_trouble = True
            what = "cannot be reached" if connection is None else "disconnected"
            logger.warning("%s %s, trying on: %s", peer, what, reason, exc_info=failure if connection else None)
        await asyncio.sleep(backoff_s)
        backoff_s = min(max_backoff_s, 2 * backoff_s)
