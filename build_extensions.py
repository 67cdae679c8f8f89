"""Compiles the extension modules beside their sources: at every install (`hatch_build.py`), or by hand.

    python build_extensions.py

builds them for the Python that runs it. They only make things quicker: where there is no C compiler, no Python
headers or an error, nothing is built, the text says why, and the same code in Python does the work.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SOURCES = ("kv_transfer/_block_moves.c", "rank_scheduler/_block_pool.c", "rank_scheduler/_prefix_hash.c")
_FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-missing-field-initializers")


class BuildError(Exception):
    """An extension cannot be built here; the text says why."""


def build_all(flags: tuple[str, ...] = ()) -> list[Path]:
    """Build what can be built, telling on stderr what cannot; returns the modules, relative to the root."""
    built = []
    for source in SOURCES:
        try:
            built.append(build(Path(source), flags))
        except BuildError as error:
            print(f"{source} is not compiled, Python does its work instead: {error}", file=sys.stderr)
    return built


def build(source: Path, flags: tuple[str, ...] = (), root: Path = ROOT) -> Path:
    """Compile one source; both paths are relative to `root`. Raises BuildError."""
    module = source.with_name(source.stem + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
    # Compared when the module is imported, so that one that is older than its source is not used.
    source_hash = hashlib.sha256((root / source).read_bytes()).hexdigest()
    # Not in place: a process that runs may have the old one mapped.
    unfinished = module.with_name(f"{module.name}.{os.getpid()}.tmp")
    command = [
        *_find_compiler(),
        *_FLAGS,
        *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []),
        *flags,
        f'-DSOURCE_HASH="{source_hash}"',
        f"-I{sysconfig.get_path('include')}",
        str(source),
        "-o",
        str(unfinished),
    ]
    try:
        compiled = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if compiled.returncode:
            raise BuildError(f"{shlex.join(command)} failed:\n{compiled.stderr}")
        (root / unfinished).replace(root / module)
    except OSError as error:
        raise BuildError(str(error)) from error
    finally:
        (root / unfinished).unlink(missing_ok=True)
    return module


def _find_compiler() -> list[str]:
    """The one that Python was built with, or any."""
    candidates = [os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]
    for candidate in candidates:
        command = shlex.split(candidate or "")
        if command and shutil.which(command[0]):
            return command
    raise BuildError("there is no C compiler (cc, gcc or clang)")


if __name__ == "__main__":
    for path in build_all():
        print(path)
