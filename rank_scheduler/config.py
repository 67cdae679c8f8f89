"""A scheduler's configuration: frozen, unknown keys refused, every refusal names field, value and remedy."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SchedulerConfig(BaseModel):
    """Limits of one rank's scheduler, and of the cluster's queue. Names follow the field's reference engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_batched_tokens: int = Field(
        default=512, ge=1, description="Token budget of one step, prompt chunks and decode tokens together."
    )
    max_num_seqs: int = Field(default=64, ge=1, description="Sequences that run at the same time on one rank.")
    max_num_queued_reqs: int | None = Field(
        default=None,
        ge=0,
        description="Requests in the whole cluster, waiting and running; one more is refused with 503. None: no limit.",
    )
    max_num_queued_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Prompt tokens of requests in the whole cluster that have no first token yet. None: no limit.",
    )
    max_head_bypasses: int = Field(
        default=8,
        ge=0,
        description="How often later requests that fit may pass the first waiting one that does not; 0: never.",
    )

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs "
                f"({self.max_num_seqs}): a step could not give one token to every running sequence; "
                "raise max_num_batched_tokens or lower max_num_seqs"
            )
        return self


class CacheConfig(BaseModel):
    """One rank's KV cache."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = Field(default=16, ge=1, le=256, description="Token positions per KV block.")
    num_blocks: int | None = Field(
        default=None, ge=2, description="Blocks in the pool, the null block included. None: from memory_gib."
    )
    memory_gib: float | None = Field(
        default=None, gt=0, description="Memory of the pool per rank. None: a share of what is free."
    )
    enable_prefix_caching: bool = Field(default=True, description="Reuse KV of equal prompt prefixes.")
