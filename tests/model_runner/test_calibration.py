from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from model_runner.calibration import best_rate, calibrate, measure_bytes_per_s, measure_flops_per_s
from model_runner.llama import expected_tensors
from model_runner.model_config import read_model_config
from model_runner.torch_runner import TorchRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from tests.model_runner.test_memory import SMOLLM2

CPU = torch.device("cpu")


class Work:
    """Moves its own clock by what each run takes."""

    def __init__(self, *durations: float) -> None:
        self.now = 50.0
        self.num_runs = 0
        self._durations = itertools.chain(durations, itertools.repeat(durations[-1]))

    def run(self) -> None:
        self.num_runs += 1
        self.now += next(self._durations)

    def clock(self) -> float:
        return self.now


def test_the_quickest_run_counts_but_not_the_first() -> None:
    work = Work(0.125, 0.5, 0.25, 0.5)
    assert best_rate(work.run, 100, 1.0, work.clock) == 400
    assert work.num_runs == 4


def test_one_run_that_takes_too_long_is_enough() -> None:
    work = Work(8.0)
    assert best_rate(work.run, 100, 1.0, work.clock) == 12.5
    assert work.num_runs == 2


def test_the_shape_is_the_models() -> None:
    model = calibrate(SMOLLM2, torch.float32, CPU)
    assert (model.num_layer_weights, model.num_head_weights) == (106_168_320, 28_311_552)
    assert (model.num_layers, model.num_attention_heads, model.head_dim) == (30, 9, 64)
    assert (model.weight_dtype_size_bytes, model.kv_size_bytes_per_token) == (4, 2 * 30 * 3 * 64 * 4)


def test_a_processor_multiplies_and_reads_and_is_asked_once() -> None:
    model = calibrate(SMOLLM2, torch.float32, CPU)
    # Between a slow core that others use too and a hundred of the quickest.
    assert 1e8 < model.peak_flops_per_s < 1e14
    assert 1e8 < model.peak_bytes_per_s < 1e13
    assert calibrate(SMOLLM2, torch.float32, CPU) == model


def test_widths_of_a_large_model_are_bounded() -> None:
    assert math.isfinite(measure_flops_per_s(65_536, 1 << 20, torch.float32, CPU, torch.get_num_threads()))


def test_a_loaded_runner_tells_its_model_and_its_machine(tiny_dir: Path) -> None:
    runner = TorchRunner(tiny_dir, scheduler=SchedulerConfig(max_num_seqs=2), cache=CacheConfig(num_blocks=4))
    performance = runner.load().performance
    runner.close()
    assert performance is not None
    assert (performance.num_layers, performance.num_attention_heads, performance.head_dim) == (3, 6, 16)
    held = sum(math.prod(shape) for shape in expected_tensors(read_model_config(tiny_dir)).values() if len(shape) == 2)
    assert performance.num_layer_weights + 2 * performance.num_head_weights == held


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_reads_quicker_than_it_could_from_its_host() -> None:
    cuda = torch.device("cuda")
    assert measure_bytes_per_s(cuda, 1) > 64e9
    assert measure_flops_per_s(4096, 4096, torch.float16, cuda, 1) > 1e12
