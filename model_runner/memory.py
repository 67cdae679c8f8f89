"""How large the KV pool may be: weights, pool and workspace against the memory that is free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from model_runner.model_config import ModelConfig
from rank_scheduler.config import CacheConfig, SchedulerConfig

GIB = 1 << 30
DEFAULT_POOL_SIZE_BYTES = 2 * GIB
DEFAULT_POOL_SHARE = 0.3
"""Of the rank's memory, for its pool unless the configuration says otherwise."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    block_size_bytes: int
    weights_size_bytes: int
    workspace_size_bytes: int

    @property
    def pool_size_bytes(self) -> int:
        return self.num_blocks * self.block_size_bytes


def plan_memory(
    config: ModelConfig,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    *,
    max_model_len: int,
    dtype_size_bytes: int,
    available_bytes: int,
    budget_bytes: int | None = None,
    mirror_available_bytes: int | None = None,
) -> MemoryPlan:
    """Blocks for the pool. `budget_bytes`: this rank's part of the memory, None: all of `available_bytes`.

    `mirror_available_bytes`: what is free for the pool's mirror in host memory, None: it needs none.

    The pool's size follows from the budget, not from what happens to be free, so that a rank that replaces another
    is like it. Raises ValueError, naming the fields to change, if weights, pool and workspace do not fit into the
    budget and into what is free now, or the mirror does not fit.
    """
    block_bytes = (
        2 * config.num_hidden_layers * cache.block_size * config.num_key_value_heads * config.head_dim
    ) * dtype_size_bytes
    weights_bytes = config.num_held_parameters * dtype_size_bytes
    workspace_bytes = _workspace_size_bytes(config, scheduler, max_model_len, dtype_size_bytes)
    budget_bytes = available_bytes if budget_bytes is None else budget_bytes
    # One sequence of the full length, and the null block.
    needed_blocks = -(-max_model_len // cache.block_size) + 1

    if cache.num_blocks is not None:
        num_blocks, wanted = cache.num_blocks, "num_blocks"
    elif cache.memory_gib is not None:
        num_blocks, wanted = int(cache.memory_gib * GIB) // block_bytes, "memory_gib"
        if num_blocks < 2:
            raise ValueError(
                f"memory_gib ({cache.memory_gib}) holds {num_blocks} blocks of {_gib(block_bytes)}, and the pool "
                f"needs at least 2: raise memory_gib to {2 * block_bytes / GIB:.3g} or lower block_size "
                f"({cache.block_size})"
            )
    else:
        default_bytes = min(DEFAULT_POOL_SIZE_BYTES, int(budget_bytes * DEFAULT_POOL_SHARE))
        num_blocks, wanted = max(default_bytes // block_bytes, needed_blocks, 2), "max_model_len"
    plan = MemoryPlan(num_blocks, block_bytes, weights_bytes, workspace_bytes)
    total = plan.weights_size_bytes + plan.pool_size_bytes + plan.workspace_size_bytes
    if total > min(budget_bytes, available_bytes):
        raise ValueError(
            f"the model does not fit: weights {_gib(plan.weights_size_bytes)}, KV pool {_gib(plan.pool_size_bytes)} "
            f"({num_blocks} blocks) and workspace {_gib(plan.workspace_size_bytes)} make {_gib(total)}, and "
            f"{_gib(min(budget_bytes, available_bytes))} are there (this rank's part {_gib(budget_bytes)}, free now "
            f"{_gib(available_bytes)}): lower {wanted} "
            f"({_value(cache, wanted, max_model_len)}), max_num_batched_tokens ({scheduler.max_num_batched_tokens}) "
            f"or max_num_seqs ({scheduler.max_num_seqs}), or free memory"
        )
    if mirror_available_bytes is not None:
        _check_mirror(plan, cache, mirror_available_bytes)
    return plan


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: what the system has free, less if its control group has a limit."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_file, usage_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (root / limit_file).read_text().strip()
            usage = int((root / usage_file).read_text())
        except OSError:
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - usage))
    return available


def _workspace_size_bytes(
    config: ModelConfig, scheduler: SchedulerConfig, max_model_len: int, dtype_size_bytes: int
) -> int:
    """An upper estimate of what one step allocates besides weights and pool."""
    tokens = scheduler.max_num_batched_tokens
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    per_token = 4 * config.hidden_size + 3 * heads * config.head_dim + 4 * config.intermediate_size
    activations = tokens * per_token * dtype_size_bytes
    # Index arrays of all layers (K and V), a chunk's mask, and K and V gathered from the pool.
    indices = tokens * config.num_hidden_layers * 2 * 8
    chunk = max_model_len * (tokens + 2 * config.num_key_value_heads * config.head_dim) * dtype_size_bytes
    # Logits in float32, restricted by masks, their copies while filters run (float64), per sampled position.
    sampled = min(scheduler.max_num_seqs * (1 + scheduler.num_speculative_tokens), tokens)
    logits = sampled * config.vocab_size * 32
    return activations + indices + chunk + logits


def _check_mirror(plan: MemoryPlan, cache: CacheConfig, available_bytes: int) -> None:
    if plan.pool_size_bytes <= available_bytes:
        return
    lower = f"num_blocks ({plan.num_blocks}) to {available_bytes // plan.block_size_bytes}"
    if cache.memory_gib is not None:
        lower = f"memory_gib ({cache.memory_gib}) to {available_bytes / GIB:.3g}"
    raise ValueError(
        "the mirror of the KV pool in host memory, which the KV connector needs, does not fit: it has the pool's size, "
        f"{_gib(plan.pool_size_bytes)}, and {_gib(available_bytes)} are free on the host: set {lower} or less, leave "
        "kv_transfer.kv_connector out, or free host memory"
    )


def _value(cache: CacheConfig, field: str, max_model_len: int) -> int | float | None:
    values = {"num_blocks": cache.num_blocks, "memory_gib": cache.memory_gib, "max_model_len": max_model_len}
    return values[field]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
