"""What a cluster's configuration says about KV between ranks."""

from __future__ import annotations

import uuid
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class KvRole(StrEnum):
    PRODUCER = "kv_producer"
    """Computes prompts and hands their KV out."""
    CONSUMER = "kv_consumer"
    """Takes KV in and generates."""
    BOTH = "kv_both"


class KVTransferConfig(BaseModel):
    """KV between ranks, and between a rank and a store; frozen, unknown keys refused. Names are the reference's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_connector: str | None = Field(
        default=None,
        min_length=1,
        description="PullConnector (prefill/decode between ranks), SharedStorageConnector, OffloadConnector, "
        "RedisConnector, MultiConnector, or the dotted path of a class. None: KV stays where it is computed.",
    )
    kv_role: KvRole | None = Field(
        default=None,
        description="kv_producer, kv_consumer or kv_both. None: from the pool's role (prefill, decode, mixed).",
    )
    kv_connector_extra_config: dict[str, Any] = Field(
        default={}, description="The connector's own settings; each connector refuses keys that it does not know."
    )
    kv_connector_module_path: str | None = Field(
        default=None, min_length=1, description="Module of a class outside of this package; kv_connector names it then."
    )
    kv_load_failure_policy: Literal["recompute", "fail"] = Field(
        default="recompute",
        description="After a failed load: compute what is missing, or end the request with an error.",
    )
    kv_buffer_device: Literal["cpu", "cuda"] | None = Field(
        default=None,
        description="Where transports read and write: cpu, which is host memory, of a pool on a GPU its mirror there. "
        "None: cpu. cuda is refused.",
    )
    kv_ip: str | None = Field(
        default=None, min_length=1, description="Address that peers reach this rank by. None: its node's."
    )
    kv_port: int = Field(default=0, ge=0, le=65535, description="Port of the control plane. 0: any free one.")
    engine_id: str | None = Field(
        default=None, min_length=1, description="Name of the rank among its peers. None: a new one for every process."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kv_connector is None:
            given = [
                name for name, field in type(self).model_fields.items() if getattr(self, name) != field.get_default()
            ]
            if given:
                raise ValueError(
                    f"{given[0]} is {getattr(self, given[0])!r}, and kv_connector is not set: name one, or leave "
                    f"{given[0]} out"
                )
        if self.kv_ip in ("0.0.0.0", "::"):
            raise ValueError(f"kv_ip is {self.kv_ip!r}, which no peer can connect to; give an address of this host")
        return self

    def new_engine_id(self) -> str:
        """The engine id of a process that starts now."""
        return self.engine_id or uuid.uuid4().hex
