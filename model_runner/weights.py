"""Safetensors files of a checkpoint directory → tensors, checked against what the model expects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

Shape = tuple[int, ...]

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


def load_tensors(
    model_dir: Path, expected: Mapping[str, Shape], ignored: frozenset[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """All tensors of `expected` (name → shape), as `dtype` on the CPU.

    Names in `ignored` may occur in the files and are not read, and so may buffers of rotary frequencies.
    Raises ValueError that names the first missing, unexpected or misshapen tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in _files(model_dir):
        try:
            with safe_open(str(path), framework="pt") as file:
                names = [name for name in file.keys() if not _is_ignored(name, ignored)]  # noqa: SIM118
                unexpected = sorted(set(names) - expected.keys())
                if unexpected:
                    raise ValueError(f"{path} has tensors that its config.json does not imply: {_listed(unexpected)}")
                for name in names:
                    shape = tuple(file.get_slice(name).get_shape())
                    if shape != expected[name]:
                        raise ValueError(f"{path}: {name} has shape {shape}, and config.json implies {expected[name]}")
                    tensors[name] = file.get_tensor(name).to(dtype)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}): the checkpoint is damaged, fetch it again") from error
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ValueError(f"{model_dir} lacks tensors that its config.json implies: {_listed(missing)}")
    return tensors


def checkpoint_fingerprint(model_dir: Path) -> str:
    """Equal for equal checkpoints: of config.json, and of the size and samples of every file of weights.

    Samples, as reading gigabytes twice would double the time that a rank takes to start.
    """
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in _files(model_dir):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(_NUM_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * place // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _files(model_dir: Path) -> list[Path]:
    """The one file, or all that the index of a sharded checkpoint names."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(
            f"{model_dir} has neither {single.name} nor {index.name}: give a checkpoint with safetensors weights"
        )
    weight_map: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [model_dir / name for name in sorted(set(weight_map.values()))]


def _is_ignored(name: str, ignored: frozenset[str]) -> bool:
    return name in ignored or name.endswith(".rotary_emb.inv_freq")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
