"""The protocol that a rank's loop needs from a model runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.geometry import Geometry
from kv_transfer.memory import KvMemory
from rank_scheduler.interface import KvGroup
from rank_scheduler.performance import PerformanceModel
from rank_scheduler.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a loaded runner can hold: discovered at load, never written back into the configuration."""

    num_blocks: int
    """Blocks in the KV pool, the null block (id 0) included."""
    block_size: int
    """Token positions per block."""
    block_size_bytes: int
    """K and V of all layers of one block."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    backend: str
    kv_groups: tuple[KvGroup, ...] = (KvGroup(),)
    is_encoder_decoder: bool = False
    performance: PerformanceModel | None = None
    """The model's shape with this machine's measured limits."""
    geometry: Geometry | None = None
    """What its KV blocks hold; None where no other rank could use them."""
    is_kv_mirrored: bool = False
    """The runner computes elsewhere than in its `kv_memory` (see `KvMemory.is_mirror`)."""


class KvHooks(Protocol):
    """What the runner calls within a step for a KV connector; see `kv_transfer.connector.WorkerConnector`."""

    def start_load_kv(self, metadata: object) -> None: ...
    def wait_for_layer_load(self, layer: int) -> None: ...
    def save_kv_layer(self, layer: int) -> None: ...


class ModelRunner(Protocol):
    """One rank's model. Not thread-safe: `execute` is called from one thread, one step at a time."""

    kv_hooks: KvHooks | None
    """Set between `load` and the first step; None: there is no connector.

    `start_load_kv` is called for each plan that has `connector_metadata`, when its block copies are done and before
    anything is computed; the other two for every layer of every step.
    """

    def load(self) -> Capacity:
        """Load weights and allocate the KV pool.

        Raises ValueError, with what to change, if the checkpoint is unknown or memory does not suffice.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step (see `rank_scheduler.plan` for the order of effects).

        An exception means that the KV of everything in this plan is undefined.
        """
        ...

    def kv_memory(self) -> KvMemory:
        """The KV pool as bytes, after `load`. Raises RuntimeError if the pool cannot be shared."""
        ...

    def close(self) -> None:
        """Free weights and pool. Idempotent."""
        ...
