"""How a client that obeys `Retry-After`, but sends no token back, is known again: by who it is and what it asks for.

The `openai` client sends the same body again, with `x-stainless-retry-count` above 0. Its refusal was booked under a
digest of both, keyed with the cluster's secret, so that nobody can take another's place by choosing bodies, and any
router finds it. Among equal requests of one caller, whichever comes first takes the earliest place: they are alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from router.caller import Caller

Headers = Iterable[tuple[bytes, bytes]]
RETRY_COUNT = b"x-stainless-retry-count"
_PERSON = b"retry alias"


def with_retry_alias(caller: Caller, headers: Headers, body: bytes, secret: bytes) -> Caller:
    """`caller` with what a refusal is booked under; of a retry that has no token, this is its token as well.

    `headers`: names in lower case. `body`: as it came.
    """
    digest = hashlib.blake2b(key=secret[:64], digest_size=16, person=_PERSON)
    for name in (caller.tenant.encode(), caller.account.encode()):
        digest.update(len(name).to_bytes(4, "little") + name)
    digest.update(body)
    alias = digest.hexdigest()
    is_retry = any(name == RETRY_COUNT and value.isdigit() and int(value) > 0 for name, value in headers)
    token = caller.retry_token if caller.retry_token is not None or not is_retry else alias
    return replace(caller, retry_token=token, retry_alias=alias)
