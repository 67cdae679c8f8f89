"""What a request's headers ask of the router, checked before its body is read.

Headers that mean nothing here are the client's own business; those that do are refused where they cannot be kept,
since nobody sends them by chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from router.api_keys import ApiKey
from router.caller import Caller
from router.errors import ApiError, invalid

Headers = Iterable[tuple[bytes, bytes]]
"""Names in lower case, as ASGI has them."""

MAX_NAME_CHARACTERS = 256
"""Of a session, of a rank, of a token to retry with."""
MAX_DEADLINE_MS = 10**9
_NUMBER = re.compile(rb"\d{1,12}(\.\d{1,6})?")
_PRINTABLE = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_NAME_CHARACTERS)

DEADLINE = "x-request-deadline-ms"
SESSION_ID = "x-session-id"
RANK_ID = "x-serried-rank"
RETRY_TOKEN = "x-serried-retry-token"


def caller(headers: Headers, *, arrived_at: float, api_key: ApiKey | None = None) -> Caller:
    """The caller of a generation. Raises ApiError."""
    given = list(headers)
    return Caller(
        tenant="" if api_key is None else api_key.tenant,
        account="" if api_key is None else api_key.account,
        arrived_at=arrived_at,
        deadline_s=_deadline_s(single(given, DEADLINE)),
        session_id=name(given, SESSION_ID),
        rank_id=name(given, RANK_ID),
        retry_token=name(given, RETRY_TOKEN),
    )


def single(headers: Headers, header: str) -> bytes | None:
    """The header's value, None if it is not there. Raises ApiError if it is there twice."""
    values = [value for key, value in headers if key == header.encode()]
    if len(values) > 1:
        raise invalid(f"{header}: is given {len(values)} times; give it once", header)
    return values[0] if values else None


def name(headers: Headers, header: str) -> str | None:
    """The same, of a header that holds a name: printable ASCII without spaces, of bounded length."""
    value = single(headers, header)
    if value is not None and not _PRINTABLE.fullmatch(value):
        raise _refused(header, value, f"give 1 to {MAX_NAME_CHARACTERS} printable ASCII characters without spaces")
    return None if value is None else value.decode("ascii")


def _deadline_s(value: bytes | None) -> float | None:
    if value is None:
        return None
    if not _NUMBER.fullmatch(value) or not 0 < float(value) <= MAX_DEADLINE_MS:
        raise _refused(DEADLINE, value, f"give a number of milliseconds above 0 and up to {MAX_DEADLINE_MS}")
    return float(value) / 1000


def _refused(header: str, value: bytes, remedy: str) -> ApiError:
    shown = value[:100].decode("ascii", "backslashreplace") + ("…" if len(value) > 100 else "")
    return invalid(f"{header}: {shown!r} ({len(value)} bytes) is refused; {remedy}", header)
