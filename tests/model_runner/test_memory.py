from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from model_runner.memory import GIB, MemoryPlan, available_memory_bytes, plan_memory
from model_runner.model_config import ModelConfig
from rank_scheduler.config import CacheConfig, SchedulerConfig

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    qkv_bias=False,
    o_bias=False,
    qk_norm=False,
    tie_word_embeddings=True,
    eos_token_ids=frozenset({2}),
)


def plan(available_gib: float, **options: Any) -> MemoryPlan:
    arguments: dict[str, Any] = {
        "scheduler": SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=32),
        "cache": CacheConfig(),
        "max_model_len": 8192,
        "dtype_size_bytes": 4,
    } | options
    return plan_memory(SMOLLM2, available_bytes=int(available_gib * GIB), **arguments)


def test_default_pool_is_a_bounded_share() -> None:
    assert plan(100).pool_size_bytes == pytest.approx(2 * GIB, rel=0.01)
    assert plan(4).pool_size_bytes == pytest.approx(1.2 * GIB, rel=0.01)
    assert plan(8, budget_bytes=4 * GIB).pool_size_bytes == pytest.approx(1.2 * GIB, rel=0.01)
    # A sequence of the full length fits, and the null block beside it.
    assert plan(1.1).num_blocks == 8192 // 16 + 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_a_rank_that_replaces_another_fits_and_is_like_it(num_ranks: int) -> None:
    """However little the other ranks leave: their parts and its own make up what was free before they started."""
    free = num_ranks * 5 * GIB // 2
    budget = free // num_ranks
    first = plan(free / GIB, budget_bytes=budget)
    others = (num_ranks - 1) * budget
    assert plan((free - others) / GIB, budget_bytes=budget) == first
    assert first.pool_size_bytes == pytest.approx(0.75 * GIB, rel=0.01)


def test_configured_pool() -> None:
    assert plan(100, cache=CacheConfig(num_blocks=7)).num_blocks == 7
    half = plan(100, cache=CacheConfig(memory_gib=0.5))
    assert 0.49 * GIB < half.pool_size_bytes <= 0.5 * GIB
    assert plan(100, dtype_size_bytes=2, cache=CacheConfig(memory_gib=0.5)).num_blocks == 2 * half.num_blocks


@pytest.mark.parametrize(
    ("available_gib", "options", "message"),
    [
        (0.5, {}, r"weights 0\.61 GiB.*lower max_model_len \(8192\), max_num_batched_tokens \(512\)"),
        (2, {"cache": CacheConfig(memory_gib=3)}, r"lower memory_gib \(3\.0\)"),
        (2, {"cache": CacheConfig(num_blocks=9000)}, r"9000 blocks.*lower num_blocks \(9000\)"),
        (2, {"cache": CacheConfig(memory_gib=0.001)}, r"memory_gib \(0\.001\) holds 1 blocks.*raise memory_gib"),
        (9, {"budget_bytes": GIB // 2}, r"0\.50 GiB are there \(this rank's part 0\.50 GiB, free now 9\.00 GiB\)"),
        (9, {"mirror_available_bytes": GIB}, r"mirror .* 2\.00 GiB, and 1\.00 GiB.*num_blocks \(2912\) to 1456 or"),
        (
            9,
            {"cache": CacheConfig(memory_gib=1.5), "mirror_available_bytes": GIB},
            r"1\.50 GiB, and 1\.00 GiB are free on the host: set memory_gib \(1\.5\) to 1 or less, leave kv_transfer",
        ),
        (0.5, {"budget_bytes": 9 * GIB}, r"0\.50 GiB are there \(this rank's part 9\.00 GiB, free now 0\.50 GiB\)"),
    ],
)
def test_refusals_say_what_to_change(available_gib: float, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(available_gib, **options)


def test_a_mirror_takes_nothing_of_the_device() -> None:
    assert plan(100, mirror_available_bytes=2 * GIB) == plan(100)


def test_untied_head_costs_no_more_than_a_tied_one() -> None:
    untied = dataclasses.replace(SMOLLM2, tie_word_embeddings=False)
    assert untied.num_held_parameters == SMOLLM2.num_held_parameters == 134_515_008 - 61 * 576 + 49152 * 576


def test_available_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    4000 kB\n")
    assert available_memory_bytes(tmp_path) == 4000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert available_memory_bytes(tmp_path) == 4000 * 1024
    (group / "memory.max").write_text("50000\n")
    assert available_memory_bytes(tmp_path) == 49000
