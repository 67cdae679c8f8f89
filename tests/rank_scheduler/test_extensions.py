"""The extension modules against their Python twins; how they are built, found, and done without."""

from __future__ import annotations

import gc
import hashlib
import inspect
import os
import random
import shutil
import subprocess
import sys
import tracemalloc
import weakref
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import build_extensions
from kv_transfer import extension
from rank_scheduler import block_pool
from rank_scheduler.prefix_chain import pack, unpack
from rank_scheduler.prefix_hash import ROOT_HASH, hash_rows_in_python, hash_run_in_python

ROOT = Path(__file__).resolve().parents[2]
MISSING = extension.why_missing()
needs_extensions = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING.values()))


def outcome(call):
    """What a call returns, or what it raises."""
    try:
        return call()
    except (ValueError, TypeError) as error:
        return type(error), str(error)


def hash_of(number):
    """No two begin alike."""
    return b"%08d" % number * 4


class Twins:
    """A pool of each kind; every operation is done to both, and must come to the same."""

    NUM_BLOCKS, NUM_GROUPS = 24, 2

    def __init__(self, pool_class, seed):
        self.random = random.Random(seed)
        self.events = ([], [])
        self.watched_group = seed % self.NUM_GROUPS
        self.told = set()
        """What is findable in the watched group, by the changes alone."""
        classes = (block_pool.BlockPool, pool_class)
        self.pools = [
            make(
                self.NUM_BLOCKS, self.NUM_GROUPS, events=events, records_changes=True, watched_group=self.watched_group
            )
            for make, events in zip(classes, self.events, strict=True)
        ]
        self.held = []

    def do(self, name, *arguments):
        expected, got = (outcome(lambda pool=pool: getattr(pool, name)(*arguments)) for pool in self.pools)
        assert got == expected, f"{name}{arguments}: {got} instead of {expected}"
        return expected

    def some_blocks(self, wrong=0.05):
        """Mostly of one holder, as a list, a tuple or a row; now and then something else."""
        if self.random.random() < wrong:
            blocks = [self.random.randint(-1, self.NUM_BLOCKS) for _ in range(self.random.randint(0, 4))]
        else:
            blocks = list(self.random.choice(self.held)) if self.held else []
        kind = self.random.choice((list, tuple, lambda numbers: np.array(numbers, np.int32)))
        return kind(blocks)

    def some_hashes(self, count):
        return [hash_of(self.random.randint(0, 30)) for _ in range(count)]

    def step(self):
        act = self.random.choice(
            (self.take, self.take, self.allocate, self.touch, self.release, self.cache, self.cache, self.forget)
        )
        act()
        self.look()

    def take(self):
        hits = self.do("lookup", self.some_hashes(self.random.randint(0, 3)), self.random.randint(0, 1))
        num_columns = self.random.randint(0, 6)
        taken = []
        for pool in self.pools:
            row = np.zeros(num_columns, np.int32)
            taken.append((outcome(lambda pool=pool, row=row: pool.take(hits, row)), row.tolist()))
        assert taken[0] == taken[1]
        if taken[0] == (None, taken[0][1]) and num_columns:
            self.held.append(taken[0][1])

    def allocate(self):
        blocks = self.do("allocate", self.random.randint(-1, 4))
        if isinstance(blocks, list) and blocks:
            self.held.append(blocks)

    def touch(self):
        blocks = self.some_blocks()
        if self.do("touch", blocks) is None and len(blocks):
            self.held.append([int(block) for block in blocks])

    def release(self):
        if self.held:
            self.do("release", self.held.pop(self.random.randrange(len(self.held))))

    def cache(self):
        blocks = self.some_blocks()
        hashes = self.some_hashes(max(0, len(blocks) + self.random.choice((0, 0, 0, 1))))
        self.do("cache_all", blocks, hashes, self.random.randint(0, 1))

    def forget(self):
        self.do("forget", self.random.randint(-1, self.NUM_BLOCKS))
        if self.random.random() < 0.02:
            self.do("clear")

    def look(self):
        for name in ("num_unheld", "num_sole_references"):
            self.do(name, self.some_blocks())
        self.do("lookup", self.some_hashes(3), self.random.randint(-1, 2))
        for name in ("num_references", "is_cached"):
            self.do(name, self.random.randint(-1, self.NUM_BLOCKS))

    def compare(self):
        """All that can be seen of them."""
        python, c = self.pools
        held = [block for blocks in self.held for block in blocks]
        for pool in self.pools:
            pool.check_integrity(held)
        assert c.free_blocks() == python.free_blocks()
        for name in ("num_free_blocks", "num_usable_blocks", "version"):
            assert getattr(c, name) == getattr(python, name)
        assert self.events[0] == self.events[1]
        changes, others = ([set(unpack(keys)) for keys in pool.take_changes()] for pool in self.pools)
        assert changes == others
        stored, removed = changes
        assert not stored & removed
        self.told = self.told - removed | stored
        assert sorted(c.findable()) == sorted(python.findable())
        found = [one for one in map(hash_of, range(31)) if python.find(one, self.watched_group) is not None]
        assert sorted(found) == sorted(c.findable())
        assert self.told == set(unpack(pack(found)))
        for number in range(31):
            for group in range(self.NUM_GROUPS):
                self.do("find", hash_of(number), group)


def run_twins(pool_class, seed, num_steps):
    twins = Twins(pool_class, seed)
    for at in range(num_steps):
        twins.step()
        if at % 20 == 0:
            twins.compare()
    assert twins.events[0], "nothing was ever evicted"


def run_hashes(twin, seed, num_rounds):
    """Digests of all lengths, and of blocks, against hashlib and the Python twin."""
    rng = np.random.default_rng(seed)
    for length in range(num_rounds):
        data = rng.bytes(length)
        assert twin.sha256(data) == twin.sha256_portably(data) == hashlib.sha256(data).digest()
        block_size = 1 + length % 40
        tokens = rng.integers(-(2**31), 2**31, length, np.int32)
        assert twin.hash_run(ROOT_HASH, tokens, block_size) == hash_run_in_python(ROOT_HASH, tokens, block_size)
        rows = tokens[: length // block_size * block_size].reshape(-1, block_size)
        parents = [rng.bytes(32) for _ in rows]
        assert twin.hash_rows(parents, rows) == hash_rows_in_python(parents, rows)


@needs_extensions
@pytest.mark.parametrize("seed", range(5))
def test_both_pools_decide_alike(seed):
    run_twins(import_module("rank_scheduler._block_pool").BlockPool, seed, 3_000)


@needs_extensions
def test_both_pools_have_the_same_methods():
    twins = (block_pool.BlockPool, import_module("rank_scheduler._block_pool").BlockPool)
    python, c = ({name for name in dir(twin) if not name.startswith("_")} for twin in twins)
    assert c - {"version"} == python
    for name in python:
        if callable(getattr(twins[0], name)):
            expected, got = (list(inspect.signature(getattr(twin, name)).parameters) for twin in twins)
            assert got == expected, name


@needs_extensions
def test_digests_are_those_of_hashlib():
    run_hashes(import_module("rank_scheduler._prefix_hash"), 0, 400)


@needs_extensions
def test_hashing_refuses_what_is_no_row_of_tokens():
    twin = import_module("rank_scheduler._prefix_hash")
    tokens = np.arange(32, dtype=np.int32)
    for error, call in (
        (TypeError, lambda: twin.hash_run(ROOT_HASH, tokens.astype(np.int64), 4)),
        (TypeError, lambda: twin.hash_run(ROOT_HASH, tokens.astype(np.float32), 4)),
        (TypeError, lambda: twin.hash_run(ROOT_HASH, tokens.reshape(8, 4), 4)),
        (TypeError, lambda: twin.hash_run(ROOT_HASH, [1, 2, 3, 4], 4)),
        (TypeError, lambda: twin.hash_run("root", tokens, 4)),
        (ValueError, lambda: twin.hash_run(b"root", tokens, 4)),
        (ValueError, lambda: twin.hash_run(ROOT_HASH, tokens, 0)),
        (ValueError, lambda: twin.hash_run(ROOT_HASH, tokens[::2], 4)),
        (TypeError, lambda: twin.hash_rows([ROOT_HASH] * 8, tokens)),
        (TypeError, lambda: twin.hash_rows(ROOT_HASH, tokens.reshape(8, 4))),
        (ValueError, lambda: twin.hash_rows([ROOT_HASH] * 7, tokens.reshape(8, 4))),
        (ValueError, lambda: twin.hash_rows([ROOT_HASH] * 7 + [None], tokens.reshape(8, 4))),
        (TypeError, lambda: twin.sha256("text")),
    ):
        with pytest.raises(error):
            call()


@needs_extensions
def test_the_pool_refuses_hashes_and_rows_of_other_types():
    pool = import_module("rank_scheduler._block_pool").BlockPool(9)
    blocks = pool.allocate(2)
    for error, call in (
        (TypeError, lambda: pool.cache(blocks[0], "h")),
        (TypeError, lambda: pool.cache_all(blocks, [b"h", None])),
        (TypeError, lambda: pool.lookup(["h"])),
        (TypeError, lambda: pool.lookup(7)),
        (TypeError, lambda: pool.find(None)),
        (TypeError, lambda: pool.take(blocks, [0, 0, 0])),
        (TypeError, lambda: pool.take(blocks, np.zeros(3, np.int64))),
        (TypeError, lambda: pool.take(blocks, np.zeros((1, 3), np.int32))),
        (ValueError, lambda: pool.take(blocks, np.zeros(6, np.int32)[::2])),
        (TypeError, lambda: pool.take(blocks)),
        (TypeError, lambda: pool.release(np.zeros(3, np.float32))),
        (TypeError, lambda: type(pool)(9, events=())),
        (ValueError, lambda: type(pool)(9, records_changes=True, watched_group=1)),
        (TypeError, lambda: type(pool)("9")),
    ):
        with pytest.raises(error):
            call()
        pool.check_integrity(blocks)


@needs_extensions
@pytest.mark.parametrize("huge", [2**31, 2**63, -(2**63) - 1, 2**70, -(2**70)])
def test_both_pools_refuse_numbers_of_any_size_alike(huge):
    for pool_class in (block_pool.BlockPool, import_module("rank_scheduler._block_pool").BlockPool):
        pool = pool_class(9)
        for call in (
            lambda pool: pool.allocate(huge),
            lambda pool: pool.touch([huge]),
            lambda pool: pool.cache(huge, b"h"),
            lambda pool: pool.cache(1, b"h", huge),
            lambda pool: pool.cache_all([1], [b"h"], huge),
            lambda pool: pool.find(b"h", huge),
            lambda pool: pool.lookup([b"h"], huge),
            lambda pool: pool.num_references(huge),
        ):
            with pytest.raises(ValueError, match=r"there is no (block|group)|blocks asked for"):
                call(pool)
        pool.check_integrity([])


@needs_extensions
def test_a_long_life_loses_no_memory():
    twin = import_module("rank_scheduler._block_pool")
    hashes = [bytes([number]) * 32 for number in range(64)]
    before = list(map(sys.getrefcount, hashes))
    tokens, hash_run = np.arange(64, dtype=np.int32), import_module("rank_scheduler._prefix_hash").hash_run
    pool = twin.BlockPool(33, records_changes=True)

    def live(pool, num_turns):
        row = np.empty(8, np.int32)
        for turn in range(num_turns):
            mine = [hashes[(turn + step) % 64] for step in range(8)]
            found = pool.lookup(mine)
            pool.take(found, row)
            pool.cache_all(row[len(found) :], mine[len(found) :])
            pool.release(row)
            for wrong in ([99], [1, "two"], row):
                outcome(lambda wrong=wrong: pool.release(wrong))
            outcome(lambda: pool.take([0], row))
            hash_run(hashes[0], tokens, 4)
            pool.findable()
            pool.take_changes()

    live(pool, 1_000)
    gc.collect()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        live(pool, 12_000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - start < 4_096
    finally:
        tracemalloc.stop()
    del pool
    assert list(map(sys.getrefcount, hashes)) == before


@needs_extensions
def test_a_cycle_through_the_events_is_collected():
    class Events(list):
        pass

    events = Events()
    events.append(import_module("rank_scheduler._block_pool").BlockPool(4, events=events))
    watched = weakref.ref(events)
    del events
    gc.collect()
    assert watched() is None


# ---- building and loading ----


def package_of(path: Path, name: str) -> Path:
    """A package with the sources of all extensions, to be built there."""
    package = path / name
    package.mkdir()
    (package / "__init__.py").touch()
    for source in build_extensions.SOURCES:
        shutil.copy(ROOT / source, package)
    return package


def build_or_skip(package: Path, flags: tuple[str, ...] = ()) -> None:
    for source in sorted(package.glob("*.c")):
        try:
            build_extensions.build(source.relative_to(package.parent), flags, root=package.parent)
        except build_extensions.BuildError as error:
            pytest.skip(str(error))


def test_one_that_was_built_from_another_source_is_not_used(tmp_path, monkeypatch):
    package = package_of(tmp_path, "built_and_changed")
    build_or_skip(package, ("-O0",))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(extension.OFF_VARIABLE, raising=False)
    assert extension.load("built_and_changed._prefix_hash").sha256(b"") == hashlib.sha256(b"").digest()
    with (package / "_prefix_hash.c").open("a") as source:
        source.write("/* changed */\n")
    with pytest.raises(extension.ExtensionMissingError, match=r"was not built from the present _prefix_hash\.c"):
        extension.load("built_and_changed._prefix_hash")
    assert not list(package.glob("*.tmp"))


def test_one_without_its_source_is_not_used(tmp_path, monkeypatch):
    """As where a packager has left the sources out."""
    package = package_of(tmp_path, "built_and_stripped")
    build_or_skip(package, ("-O0",))
    for source in package.glob("*.c"):
        source.unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(extension.OFF_VARIABLE, raising=False)
    with pytest.raises(extension.ExtensionMissingError, match=r"cannot be compared with its source.*install again"):
        extension.load("built_and_stripped._prefix_hash")


def test_the_variable_turns_extensions_off(monkeypatch):
    monkeypatch.setenv(extension.OFF_VARIABLE, "1")
    assert extension.why_missing() == dict.fromkeys(extension.NAMES, f"{extension.OFF_VARIABLE} is set")
    program = (
        "from kv_transfer import block_moves; "
        "from rank_scheduler import block_pool, prefix_hash; "
        "assert block_moves.send is block_moves.send_in_python; "
        "assert block_pool.make_block_pool is block_pool.BlockPool; "
        "assert prefix_hash.hash_run is prefix_hash.hash_run_in_python"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_one_that_is_missing_is_named():
    with pytest.raises(extension.ExtensionMissingError, match=r"rank_scheduler\._nothing.*install again"):
        extension.load("rank_scheduler._nothing")


def test_without_a_compiler_nothing_is_built_and_it_is_said(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    assert build_extensions.build_all() == []
    said = capsys.readouterr().err
    assert all(f"{source} is not compiled" in said for source in build_extensions.SOURCES)
    assert "there is no C compiler" in said


def test_a_compiler_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    package = package_of(tmp_path, "failing")
    monkeypatch.setenv("CC", "false")
    with pytest.raises(build_extensions.BuildError, match="failed"):
        build_extensions.build(Path("failing/_block_pool.c"), root=tmp_path)
    assert sorted(path.suffix for path in package.iterdir()) == [".c"] * len(build_extensions.SOURCES) + [".py"]


def test_sanitizers_find_nothing(tmp_path):
    """The same comparisons with bounds, lifetimes and undefined behaviour watched."""
    compiler = shutil.which("gcc")
    library = (
        compiler
        and subprocess.run(
            [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    if not library or not Path(library).is_absolute():
        pytest.skip("gcc with libasan is not installed")
    package = package_of(tmp_path, "sanitized")
    build_or_skip(package, ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"))
    program = (
        "from tests.kv_transfer.test_block_moves import in_c, run_moves\n"
        "from tests.rank_scheduler.test_extensions import run_hashes, run_twins\n"
        "from sanitized import _block_moves, _block_pool, _prefix_hash\n"
        "run_twins(_block_pool.BlockPool, 9, 1500)\n"
        "run_hashes(_prefix_hash, 9, 150)\n"
        "run_moves(in_c(_block_moves), 9, 30)\n"
        "print('clean')\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path))),
        "PYTHONMALLOC": "malloc",
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "clean\n", done.stderr[-4000:]
