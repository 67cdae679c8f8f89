"""Why a request was refused or dropped: one enum, also the metric label, and the OpenAI error body made from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec


class Cause(StrEnum):
    """Why a request has no answer, or no whole one. Whether a rank had it already is its flow's to say."""

    # The caller has to change the request.
    INVALID_REQUEST = "invalid_request"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    INVALID_API_KEY = "invalid_api_key"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TIMEOUT = "body_timeout"
    HEADERS_TOO_LARGE = "headers_too_large"
    URL_TOO_LONG = "url_too_long"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    # The same request may succeed later.
    IDEMPOTENCY_IN_PROGRESS = "in_progress"
    MAX_NUM_QUEUED_REQS = "max_num_queued_reqs"
    MAX_NUM_QUEUED_TOKENS = "max_num_queued_tokens"
    ADMISSION_UNAVAILABLE = "admission_unavailable"
    NO_RANK_AVAILABLE = "no_rank_available"
    SHUTTING_DOWN = "shutting_down"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    # It went wrong on the way.
    RANK_LOST = "rank_lost"
    RANK_ERROR = "rank_error"
    CLIENT_GONE = "client_gone"
    CANCELLED = "cancelled"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    type: str
    retry_after_s: float | None = None
    """What to tell the caller when nothing better was measured."""


_ANSWERS = {
    Cause.INVALID_REQUEST: _Answer(400, "invalid_request_error"),
    Cause.NOT_FOUND: _Answer(404, "invalid_request_error"),
    Cause.METHOD_NOT_ALLOWED: _Answer(405, "invalid_request_error"),
    Cause.INVALID_API_KEY: _Answer(401, "authentication_error"),
    Cause.BODY_TOO_LARGE: _Answer(413, "invalid_request_error"),
    Cause.BODY_TIMEOUT: _Answer(408, "timeout_error"),
    Cause.HEADERS_TOO_LARGE: _Answer(431, "invalid_request_error"),
    Cause.URL_TOO_LONG: _Answer(414, "invalid_request_error"),
    Cause.MODEL_NOT_FOUND: _Answer(404, "invalid_request_error"),
    Cause.CONTEXT_LENGTH_EXCEEDED: _Answer(400, "invalid_request_error"),
    Cause.IDEMPOTENCY_KEY_REUSED: _Answer(422, "invalid_request_error"),
    Cause.IDEMPOTENCY_IN_PROGRESS: _Answer(409, "conflict_error", 1),
    Cause.MAX_NUM_QUEUED_REQS: _Answer(503, "overloaded_error", 1),
    Cause.MAX_NUM_QUEUED_TOKENS: _Answer(503, "overloaded_error", 1),
    Cause.ADMISSION_UNAVAILABLE: _Answer(503, "service_unavailable_error", 2),
    Cause.NO_RANK_AVAILABLE: _Answer(503, "service_unavailable_error", 5),
    Cause.SHUTTING_DOWN: _Answer(503, "service_unavailable_error", 10),
    Cause.DEADLINE_EXCEEDED: _Answer(504, "timeout_error"),
    Cause.RANK_LOST: _Answer(502, "server_error", 1),
    Cause.RANK_ERROR: _Answer(500, "server_error"),
    Cause.CLIENT_GONE: _Answer(499, "client_closed_request"),
    Cause.CANCELLED: _Answer(499, "request_cancelled"),
    Cause.INTERNAL_ERROR: _Answer(500, "server_error"),
}


class ApiError(Exception):
    """A refusal or a drop, on its way to the caller.

    `message` names the field, the value and the limit or remedy; `param` is the request field at fault, if any.
    """

    def __init__(
        self,
        cause: Cause,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        retry_token: str | None = None,
    ) -> None:
        super().__init__(cause, message, param, retry_after_s, retry_token)
        self.cause = cause
        self.message = message
        self.param = param
        self._retry_after_s = retry_after_s
        self._retry_token = retry_token

    @property
    def status(self) -> int:
        return _ANSWERS[self.cause].status

    @property
    def retry_after_s(self) -> float | None:
        return self._retry_after_s if self._retry_after_s is not None else _ANSWERS[self.cause].retry_after_s

    def __str__(self) -> str:
        return f"{self.cause}: {self.message}"

    def body(self) -> bytes:
        """`{"error": {message, type, param, code}}`."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": _ANSWERS[self.cause].type,
            "param": self.param,
            "code": str(self.cause),
        }
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, and exactly as `retry-after-ms`, where the same request may succeed later.

        Clients that would try again of their own accord are told where that is of no use.
        """
        if self.cause is Cause.DEADLINE_EXCEEDED:
            return {"x-should-retry": "false"}
        if self.cause is Cause.INVALID_API_KEY:
            return {"www-authenticate": "Bearer"}
        retry_after_s = self.retry_after_s
        if retry_after_s is None:
            return {}
        headers = {
            "retry-after": str(max(1, math.ceil(retry_after_s))),
            "retry-after-ms": str(max(1, math.ceil(retry_after_s * 1000))),
        }
        if self._retry_token is not None:
            headers["x-serried-retry-token"] = self._retry_token
        return headers


class CountedError(Exception):
    """An internal error, its `__cause__`, of a request that is already counted: to be logged and answered only."""


def invalid(message: str, param: str | None = None) -> ApiError:
    """The caller has to change the request."""
    return ApiError(Cause.INVALID_REQUEST, message, param)


def deadline_exceeded(deadline_s: float) -> ApiError:
    """Counted from the request's arrival."""
    return ApiError(
        Cause.DEADLINE_EXCEEDED,
        f"x-request-deadline-ms: the request was not done within its {deadline_s * 1000:.0f} ms; give it more "
        "time, or send it when there is less load",
    )
