from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model_runner.embedded import embedded_model_dir
from model_runner.torch_runner import TorchRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def write_tiny_checkpoint(directory: Path, architecture: str = "Llama", **fields: Any) -> Path:
    """A random checkpoint as `transformers` writes it."""
    import torch
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, f"{architecture}Config")(**(TINY | fields))
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms start as ones and biases as zeros, which would hide one that is left out.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(directory)
    return directory


def load_runner(model_dir: Path, **options: Any) -> TorchRunner:
    arguments: dict[str, Any] = {
        "scheduler": SchedulerConfig(max_num_seqs=16),
        "cache": CacheConfig(num_blocks=64),
        "dtype": "float32",
        "num_threads": 1,
    }
    runner = TorchRunner(model_dir, **(arguments | options))
    runner.load()
    return runner


@pytest.fixture(scope="session")
def embedded_dir() -> Path:
    return embedded_model_dir(print)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["tiny", pytest.param("embedded", marks=pytest.mark.model)])
def runner(request: pytest.FixtureRequest) -> Iterator[TorchRunner]:
    """A loaded float32 runner with 63 usable blocks of 16; a test frees the slots that it uses."""
    model_dir: Path = request.getfixturevalue(f"{request.param}_dir")
    runner = load_runner(model_dir)
    yield runner
    runner.close()
