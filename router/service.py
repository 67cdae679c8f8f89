"""One router's parts put together: what it is told (`RouterSettings`), and what it starts and stops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class RouterSettings(BaseModel):
    """What a router needs to know before it starts; frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_name: str = Field(min_length=1, description="The name that requests ask for.")
    model_dir: Path = Field(description="Directory with tokenizer.json and tokenizer_config.json.")
    max_model_len: int = Field(ge=2, description="Tokens of a prompt and its answer together.")
    expected_num_ranks: int = Field(default=1, ge=1, description="Connected ranks from which on /ready says so.")
    max_body_bytes: int = Field(default=4 << 20, ge=1, description="Size of a request's body.")
    acquire_timeout_s: float = Field(default=2.0, gt=0, description="Wait for the control actor's answer.")
    rank_wait_timeout_s: float = Field(default=5.0, ge=0, description="Wait for a rank when there is none.")
    rank_silence_timeout_s: float = Field(
        default=10.0, gt=0, description="A rank that sends nothing for so long counts as lost; it should every second."
    )


class RouterService:
    """Everything behind one router's HTTP surface. Use from one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings

    async def start(self, control_address: Callable[[], Awaitable[tuple[str, int]]], secret: bytes, name: str) -> None:
        """Connect to the control actor and, as they appear, to all ranks. `name`: unique per process."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End every stream with an error event, then close all connections. Idempotent."""
        raise NotImplementedError
