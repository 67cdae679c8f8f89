"""A rank's transports: made and started together, and how they reach a peer (`kv_transfer.transports` chooses)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import cast

from kv_transfer.memory import KvMemory
from kv_transfer.transport import Endpoint, FailureReason, KvTransport, Peer, PushTransport, TransferError
from kv_transfer.transports import AUTO, Lane, choose_lanes, connect_lane, make_transport, transports_to_start

_log = logging.getLogger(__name__)


class Lanes:
    """May be used from any thread. With `auto`, a transport that does not work here is left out."""

    def __init__(self, configured: str, transports: Mapping[str, KvTransport]) -> None:
        self._configured = configured
        self._transports = dict(transports)
        self._own: dict[str, Endpoint] = {}

    @classmethod
    def make(cls, configured: str, secret: bytes) -> Lanes:
        """Raises ValueError if what is configured cannot be had here."""
        transports: dict[str, KvTransport] = {}
        for name in transports_to_start(configured):
            try:
                transports[name] = make_transport(name, secret)
            except TransferError as error:
                if configured != AUTO:
                    raise ValueError(f"transport is {name!r}: {error.message}") from error
                _left_out(name, error)
        return cls(configured, transports)

    def push_transport(self) -> PushTransport:
        """The only one, which can push."""
        (transport,) = self._transports.values()
        assert transport.caps.can_push
        return cast(PushTransport, transport)

    @property
    def endpoints(self) -> list[Endpoint]:
        """What peers are told."""
        return list(self._own.values())

    def start(self, memory: KvMemory, host: str) -> None:
        """Serve `memory`. Raises TransferError if nothing works here."""
        failures = []
        for name, transport in list(self._transports.items()):
            try:
                self._own[name] = transport.start(memory, host)
            except TransferError as error:
                del self._transports[name]
                transport.close(0.0)
                failures.append(f"{name}: {error.message}")
                _left_out(name, error)
        if not self._transports:
            raise TransferError(FailureReason.BACKEND, "; ".join(failures) or "there is no transport")

    def connect(self, endpoints: Sequence[Endpoint], timeout_s: float) -> tuple[KvTransport, Peer, Lane]:
        """To the peer with these endpoints. Blocks. Raises TransferError."""
        lanes = choose_lanes(self._own, endpoints, self._configured)
        if not lanes:
            theirs = ", ".join(endpoint.transport for endpoint in endpoints) or "none"
            raise TransferError(
                FailureReason.NO_ROUTE,
                f"transport is {self._configured!r} here ({', '.join(self._own)}), {theirs} there",
            )
        return connect_lane(self._transports, lanes, timeout_s)

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for transport in self._transports.values():
            transport.close(max(deadline - time.monotonic(), 0.0))


def _left_out(name: str, error: TransferError) -> None:
    _log.warning("KV transport %s does not work here and is left out: %s", name, error.message)
