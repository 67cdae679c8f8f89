"""Why a cluster does not come up, for the one who started it."""

from __future__ import annotations


class StartError(Exception):
    """The cluster did not come up; the message says why and what to do."""


class HaProxyError(Exception):
    """HAProxy was asked for and does not start, or does not answer on the HTTP port."""


def last_line(error: BaseException) -> str:
    """Ray's errors carry the traceback of the other process; its last line says what happened."""
    return str(error).strip().rpartition("\n")[2]
