"""KV blocks as files in a directory that ranks share: a `BlockStore`.

    <directory>/<fingerprint of the geometry, 32 digits>/<block hash>.kv

A file appears under its name when it is complete (written beside it, then renamed), and is never changed. So readers
take no locks: a file is there or not, and what a crash has truncated or a disk damaged is told by length and checksums,
deleted, and counted. Which blocks others have written is found out by listing the directory now and then.

The limit holds for the whole directory, all geometries together. Who would exceed it by writing deletes the files that
were written or read longest ago; ranks that do so at the same time may delete a few more than needed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from kv_transfer.backoff import Backoff
from kv_transfer.block_file import BlockFormat
from kv_transfer.block_store import BlockArray, StoreFailure, StoreOutcome, StoreReason
from kv_transfer.geometry import Geometry
from kv_transfer.known_blocks import KnownBlocks
from kv_transfer.open_block import OpenBlock

_log = logging.getLogger(__name__)

_SUFFIX = ".kv"
_UNFINISHED = ".unfinished-"
# A file that has been unfinished for so long was left by a process that is gone.
_UNFINISHED_S = 600.0
_CLOCK_GRAIN_NS = 1_000_000_000
# Listing a large directory takes its time, and is to take a small part of it.
_MOST_OF_THE_TIME = 20
_BYTES_PER_CALL = 8 << 20
_RETRY_S = (1.0, 60.0)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileStore:
    """`put` and `maintain` are called by one thread, the rest by any."""

    is_local = False

    def __init__(self, geometry: Geometry, directory: Path, max_size_bytes: int, index: KnownBlocks) -> None:
        """Raises ValueError if not a single block fits."""
        fingerprint = geometry.fingerprint()
        self._format = BlockFormat(fingerprint, geometry.num_layers, geometry.layer_size_bytes)
        if max_size_bytes < self._format.file_size_bytes:
            raise ValueError(
                f"kv_connector_extra_config.max_size_bytes is {max_size_bytes}, and a block's file has "
                f"{self._format.file_size_bytes} bytes: set it to a multiple"
            )
        self.num_blocks_per_call = max(1, _BYTES_PER_CALL // geometry.block_size_bytes)
        self._num_layers = geometry.num_layers
        self._root = directory
        self._directory = directory / fingerprint[:32]
        self._max_size_bytes = max_size_bytes
        self._index = index
        self._names = itertools.count()
        self._files: OrderedDict[Path, int] = OrderedDict()
        """All files of the store that are known, with their sizes; oldest first. The writing thread's own."""
        self._size_bytes = 0
        self._listed: dict[Path, int] = {}
        """Directories as they were when they were last listed, by time of their last change."""
        self._next_listing_at = 0.0
        self._lock = threading.Lock()
        """Over the fields below."""
        self._writing = Backoff(*_RETRY_S)
        self._num_evicted = 0
        self._num_corrupt = 0

    def start(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe = self._unfinished_path()
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OSError(
                error.errno,
                f"kv_connector_extra_config.shared_storage_path is {str(self._root)!r}, and this process cannot write "
                f"there: {error.strerror}; name a directory that it can",
            ) from error
        self.maintain()

    @property
    def accepts(self) -> bool:
        with self._lock:
            return self._writing.would_try(time.monotonic())

    @property
    def num_corrupt(self) -> int:
        return self._num_corrupt

    def contains(self, hashes: Sequence[bytes]) -> StoreOutcome:
        for count, block_hash in enumerate(hashes):
            if not self._path(block_hash).exists():
                return StoreOutcome(count)
        return StoreOutcome(len(hashes))

    # ---- reading ----

    def open(self, block_hash: bytes) -> OpenBlock | StoreFailure:
        try:
            fd = os.open(self._path(block_hash), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._index.discard(block_hash)
            return StoreFailure(StoreReason.MISSING, "its file is gone")
        except OSError as error:
            return StoreFailure(StoreReason.ERROR, f"its file cannot be opened: {error}")
        problem: str | None = None
        try:
            size = os.fstat(fd).st_size
            if size != self._format.file_size_bytes:
                problem = f"it has {size} of {self._format.file_size_bytes} bytes"
            else:
                checksums = self._format.checksums(os.pread(fd, self._format.head_size_bytes, 0), block_hash)
                if not isinstance(checksums, str):
                    # Who is read is not old; whether that can be noted does not matter.
                    with contextlib.suppress(OSError):
                        os.utime(fd)
                    return OpenBlock(fd, self._format, checksums)
                problem = checksums
        except OSError as error:
            os.close(fd)
            return StoreFailure(StoreReason.ERROR, f"its file cannot be read: {error}")
        os.close(fd)
        self.discard(block_hash, problem)
        return StoreFailure(StoreReason.CORRUPT, problem)

    def discard(self, block_hash: bytes, problem: str) -> None:
        """The file is damaged: nobody is to read it again."""
        path = self._path(block_hash)
        _log.warning("The KV block %s is unusable and is deleted: %s", path, problem)
        with self._lock:
            self._num_corrupt += 1
        self._index.discard(block_hash)
        with contextlib.suppress(OSError):
            path.unlink()

    def get(self, hashes: Sequence[bytes], into: BlockArray) -> StoreOutcome:
        size = self._format.layer_size_bytes
        for count, block_hash in enumerate(hashes):
            opened = self.open(block_hash)
            if isinstance(opened, StoreFailure):
                return StoreOutcome(count, opened)
            try:
                for layer in range(self._num_layers):
                    failure = opened.read_layer(layer, into[count, layer * size : (layer + 1) * size])
                    if failure is not None:
                        if failure.reason is StoreReason.CORRUPT:
                            self.discard(block_hash, failure.message)
                        return StoreOutcome(count, failure)
            finally:
                opened.close()
        return StoreOutcome(len(hashes))

    # ---- writing: one thread ----

    def put(self, hashes: Sequence[bytes], blocks: BlockArray) -> StoreOutcome:
        with self._lock:
            if not self._writing.may_try(time.monotonic()):
                return StoreOutcome(0, StoreFailure(StoreReason.UNAVAILABLE, "writing has failed lately"))
        num_stored = 0
        # The beginning of a prefix is what all the rest needs: it is to be the newest.
        for block_hash, block in zip(reversed(hashes), blocks[::-1], strict=True):
            path = self._path(block_hash)
            if path.exists():
                self._index.add(block_hash)
                continue
            unfinished = self._unfinished_path()
            try:
                self._make_room(self._format.file_size_bytes)
                with unfinished.open("wb") as file:
                    file.write(self._format.head(block_hash, block.data))
                    file.write(block.data)
                unfinished.rename(path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    unfinished.unlink()
                return StoreOutcome(num_stored, self._note_failure(error))
            self._note(path, self._format.file_size_bytes)
            self._index.add(block_hash)
            num_stored += 1
        with self._lock:
            self._writing.succeeded()
        return StoreOutcome(num_stored)

    def maintain(self) -> None:
        """Find out what others have written and deleted."""
        began_at = time.monotonic()
        if began_at < self._next_listing_at:
            return
        try:
            changed = {path: path.stat().st_mtime_ns for path in self._root.iterdir() if path.is_dir()}
            if changed == self._listed:
                return
            # A change within the clock's grain after this would not show.
            settled = time.time_ns() - _CLOCK_GRAIN_NS
            files: list[tuple[int, int, Path]] = []
            for directory in changed:
                files += self._list(directory)
        except OSError as error:
            _log.warning("The KV store %s cannot be listed: %s", self._root, error)
            return
        files.sort()
        self._files = OrderedDict((path, size) for _, size, path in files)
        self._size_bytes = sum(self._files.values())
        self._index.replace(
            block_hash
            for path in self._files
            if path.parent == self._directory and (block_hash := _hash_of(path)) is not None
        )
        self._listed = {path: at for path, at in changed.items() if at < settled}
        self._next_listing_at = time.monotonic() + _MOST_OF_THE_TIME * (time.monotonic() - began_at)
        with contextlib.suppress(OSError):
            self._make_room(0)

    def num_evicted(self) -> int:
        return self._num_evicted

    def close(self) -> None:
        """Nothing is open between calls."""

    # ---- inside ----

    def _list(self, directory: Path) -> list[tuple[int, int, Path]]:
        """(time of the last use, size, path) of every file; what was left unfinished is deleted."""
        found = []
        with os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    if entry.name.endswith(_SUFFIX):
                        found.append((status.st_mtime_ns, status.st_size, directory / entry.name))
                    elif entry.name.startswith(_UNFINISHED) and status.st_mtime < time.time() - _UNFINISHED_S:
                        os.unlink(entry.path)
        return found

    def _make_room(self, size_bytes: int) -> None:
        """Delete the oldest files until so much more fits."""
        while self._files and self._size_bytes + size_bytes > self._max_size_bytes:
            path, size = self._files.popitem(last=False)
            self._size_bytes -= size
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                with self._lock:
                    self._num_evicted += 1
            if path.parent == self._directory and (block_hash := _hash_of(path)) is not None:
                self._index.discard(block_hash)

    def _note(self, path: Path, size: int) -> None:
        self._size_bytes += size - self._files.pop(path, 0)
        self._files[path] = size

    def _note_failure(self, error: OSError) -> StoreFailure:
        with self._lock:
            is_news = self._writing.failed(time.monotonic())
        if is_news:
            _log.warning("KV blocks cannot be written to %s, which is tried again later: %s", self._directory, error)
        reason = StoreReason.FULL if error.errno in _FULL else StoreReason.ERROR
        return StoreFailure(reason, str(error))

    def _path(self, block_hash: bytes) -> Path:
        return self._directory / f"{block_hash.hex()}{_SUFFIX}"

    def _unfinished_path(self) -> Path:
        return self._directory / f"{_UNFINISHED}{os.getpid()}-{id(self)}-{next(self._names)}"


def _hash_of(path: Path) -> bytes | None:
    """Which block a file's name names; None: it is not one of ours."""
    try:
        block_hash = bytes.fromhex(path.stem)
    except ValueError:
        return None
    return block_hash if len(block_hash) == 32 else None
