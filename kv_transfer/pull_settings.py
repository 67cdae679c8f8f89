"""The settings of a `PullConnector`: `kv_connector_extra_config`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kv_transfer.connector_settings import ConnectorSettings

PUSH_TRANSPORT = "tcp"
"""The one whose caps say that it can push."""


class PullSettings(ConnectorSettings):
    """What may be set, and how long things may take."""

    transport: Literal["auto", "inproc", "shm", "tcp", "nixl", "ucx", "mooncake"] = Field(
        default="auto", description="What moves the blocks. auto: the first that works of inproc, shm, nixl and tcp."
    )
    mode: Literal["pull", "push"] = Field(
        default="pull",
        description="pull: the rank that needs blocks asks for them whenever more are ready. push: it says once where "
        "they go, and the prefill rank sends them as its chunks are done; over tcp only. The same on all ranks.",
    )
    lease_s: float = Field(
        default=30.0, gt=0, description="How long a prefill rank keeps blocks that nobody asks for any more."
    )
    heartbeat_interval_s: float | None = Field(
        default=None, gt=0, description="How often a lease is extended while its request waits. None: lease_s / 6."
    )
    connect_timeout_s: float = Field(default=5.0, gt=0, description="To reach a peer, and for each answer of its.")
    pull_timeout_s: float = Field(default=10.0, gt=0, description="For the blocks of a request, besides their size.")
    min_bytes_per_s: float = Field(
        default=50e6, gt=0, description="Each byte to move adds the inverse of this to pull_timeout_s."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mode == "push" and self.transport not in ("auto", PUSH_TRANSPORT):
            raise ValueError(
                f"mode is 'push' and transport {self.transport!r}: only over {PUSH_TRANSPORT!r} can the rank that owns "
                f"the blocks keep a late write out of them; set transport to 'auto' or {PUSH_TRANSPORT!r}, or mode to "
                "'pull'"
            )
        if self.heartbeat_s * 2 > self.lease_s:
            raise ValueError(
                f"heartbeat_interval_s is {self.heartbeat_s:g} and lease_s {self.lease_s:g}: one lost heartbeat would "
                f"end a lease; set it to {self.lease_s / 2:g} or less"
            )
        return self

    @property
    def pushes(self) -> bool:
        return self.mode == "push"

    @property
    def lanes(self) -> str:
        """The transports to start, as `kv_transfer.transports` names them."""
        return PUSH_TRANSPORT if self.pushes else self.transport

    @property
    def heartbeat_s(self) -> float:
        return self.lease_s / 6 if self.heartbeat_interval_s is None else self.heartbeat_interval_s

    def pull_s(self, num_bytes: int) -> float:
        """How long blocks of so many bytes may take."""
        return self.pull_timeout_s + num_bytes / self.min_bytes_per_s
