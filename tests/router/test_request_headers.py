"""What may stand in the headers that the router reads, and what is said about the rest."""

from __future__ import annotations

import pytest

from router import request_headers
from router.api_keys import ApiKey
from router.errors import ApiError, Cause


def test_what_headers_ask_for() -> None:
    caller = request_headers.caller(
        [
            (b"host", b"x"),
            (b"x-request-deadline-ms", b"1500.5"),
            (b"x-session-id", b"s-1"),
            (b"x-serried-rank", b"mixed/0"),
            (b"x-serried-retry-token", b"abc="),
        ],
        arrived_at=3.0,
        api_key=ApiKey(name="k", sha256="0" * 64, tenant="t"),
    )
    assert (caller.arrived_at, caller.deadline_s, caller.tenant, caller.account) == (3.0, 1.5005, "t", "tenant:t")
    assert (caller.session_id, caller.rank_id, caller.retry_token) == ("s-1", "mixed/0", "abc=")


def test_without_headers_nothing_is_asked_for() -> None:
    caller = request_headers.caller([(b"x-other", b"1"), (b"X-Session-Id", b"not as ASGI has names")], arrived_at=0.0)
    assert (caller.deadline_s, caller.session_id, caller.rank_id, caller.retry_token) == (None, None, None, None)


@pytest.mark.parametrize(
    "value",
    [b"", b"0", b"0.0", b"-5", b"+5", b"1e3", b"nan", b"inf", b"5 ms", b"1_000", b"1000000001", b"9" * 400, b"\xff",
     "٣".encode(), b"1.", b".5"],
)  # fmt: skip
def test_deadlines_that_are_none(value: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        request_headers.caller([(b"x-request-deadline-ms", value)], arrived_at=0.0)
    assert caught.value.cause is Cause.INVALID_REQUEST
    assert caught.value.param == "x-request-deadline-ms"
    assert "milliseconds above 0 and up to 1000000000" in caught.value.message
    assert f"({len(value)} bytes)" in caught.value.message
    assert len(caught.value.message) < 700


@pytest.mark.parametrize("header", ["x-session-id", "x-serried-rank", "x-serried-retry-token"])
@pytest.mark.parametrize("value", [b"", b"with space", b"tab\there", b"\x00", "é".encode(), b"x" * 257])
def test_names_that_are_none(header: str, value: bytes) -> None:
    with pytest.raises(ApiError, match="printable ASCII") as caught:
        request_headers.caller([(header.encode(), value)], arrived_at=0.0)
    assert caught.value.param == header


@pytest.mark.parametrize("header", ["x-request-deadline-ms", "x-session-id", "x-serried-rank", "x-serried-retry-token"])
def test_a_header_is_given_once(header: str) -> None:
    with pytest.raises(ApiError, match="2 times; give it once"):
        request_headers.caller([(header.encode(), b"5")] * 2, arrived_at=0.0)
