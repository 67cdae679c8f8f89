"""How fast this machine multiplies and reads: measured at load, to tell what share of it a step uses."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import torch

from model_runner.linear import Linear
from model_runner.model_config import ModelConfig
from rank_scheduler.performance import PerformanceModel

logger = logging.getLogger(__name__)

_SECONDS_PER_LIMIT = 0.1
_READ_SIZE_BYTES = 128 << 20
"""More than the caches of a few cores hold."""
_MAX_WIDTHS = {"cpu": (2048, 4096), "cuda": (8192, 8192)}
"""Largest matrix (in, out), so that one product of a large model does not take all of the time."""
_NUM_ROWS = {"cpu": 128, "cuda": 4096}
_NUM_PRODUCTS = {"cpu": 1, "cuda": 16}
"""Between two looks at the clock: on CUDA a wait for the device costs as much as a small product."""


def calibrate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> PerformanceModel:
    """The model's shape with this machine's limits, for the threads that torch has now.

    Takes about 0.3 s, and up to 0.6 GiB for a moment: call it before the KV pool is allocated. A process measures
    once per shape and number of threads.
    """
    num_threads = torch.get_num_threads()
    flops_per_s = measure_flops_per_s(config.hidden_size, config.intermediate_size, dtype, device, num_threads)
    bytes_per_s = measure_bytes_per_s(device, num_threads)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    logger.info(
        "measured %.1f GFLOP/s in %s and %.1f GB/s on %s with %d threads",
        flops_per_s / 1e9,
        str(dtype).removeprefix("torch."),
        bytes_per_s / 1e9,
        device,
        num_threads,
    )
    num_head_weights = config.vocab_size * config.hidden_size
    return PerformanceModel(
        num_layer_weights=config.num_held_parameters - 2 * num_head_weights,
        num_head_weights=num_head_weights,
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        weight_dtype_size_bytes=dtype.itemsize,
        kv_size_bytes_per_token=(
            2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
        ),
        peak_flops_per_s=flops_per_s,
        peak_bytes_per_s=bytes_per_s,
    )


@functools.cache
def measure_flops_per_s(
    hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device, num_threads: int
) -> float:
    """Of a linear like the model's gate and up. `num_threads` only tells measurements apart: torch's setting counts."""
    max_in, max_out = _MAX_WIDTHS[device.type]
    width_in, width_out = min(hidden_size, max_in), min(2 * intermediate_size, max_out)
    num_rows, num_products = _NUM_ROWS[device.type], _NUM_PRODUCTS[device.type]
    linear = Linear(torch.full((width_out, width_in), 0.01, dtype=dtype), None, device)
    x = torch.full((num_rows, width_in), 0.01, dtype=dtype, device=device)

    def multiply() -> None:
        for _ in range(num_products):
            linear(x)
        _wait(device)

    with torch.inference_mode():
        return best_rate(multiply, 2 * num_products * num_rows * width_in * width_out, _SECONDS_PER_LIMIT)


@functools.cache
def measure_bytes_per_s(device: torch.device, num_threads: int) -> float:
    """Of a sum over more than the caches hold. `num_threads` as in `measure_flops_per_s`."""
    # Ones: memory that was never written would be read from one page of zeros.
    buffer = torch.ones(_READ_SIZE_BYTES // 4, dtype=torch.float32, device=device)

    def read() -> None:
        buffer.sum()
        _wait(device)

    return best_rate(read, _READ_SIZE_BYTES, _SECONDS_PER_LIMIT)


def best_rate(
    run: Callable[[], None], amount: float, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """`amount` per second in the quickest of the runs that start within `seconds`, after one that is not counted."""
    run()
    shortest = float("inf")
    started = before = clock()
    while before - started < seconds:
        run()
        after = clock()
        shortest, before = min(shortest, after - before), after
    return amount / shortest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
