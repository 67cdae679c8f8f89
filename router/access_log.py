"""A line of JSON for each request that has ended, on the logger `serried.access`, and the file that takes them.

A line is made once per request, at its end; nothing is done per token.
"""

from __future__ import annotations

import logging
import logging.handlers
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

LOGGER_NAME = "serried.access"
_encode = msgspec.json.Encoder().encode


class AccessLog:
    """Silent unless somebody listens to its logger."""

    def __init__(self) -> None:
        self._logger = logging.getLogger(LOGGER_NAME)

    @property
    def is_on(self) -> bool:
        return self._logger.isEnabledFor(logging.INFO) and self._logger.hasHandlers()

    def write(self, fields: dict[str, Any], duration_s: float) -> None:
        """`fields`: of one request that ended now and took so long."""
        arrived_at = datetime.fromtimestamp(datetime.now(UTC).timestamp() - duration_s, UTC)
        line = {"time": arrived_at.isoformat(timespec="milliseconds"), **fields, "end_s": round(duration_s, 6)}
        self._logger.info("%s", _encode(line).decode())


def write_to_file(path: Path) -> None:
    """From now on, until the process ends; the file may be moved away and is begun anew then.

    Several processes may write to one file: a line is one write to its end. Raises OSError.
    """
    handler = logging.handlers.WatchedFileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger(LOGGER_NAME)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
