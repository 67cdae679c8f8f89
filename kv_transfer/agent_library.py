"""What an agent asks of the transfer library that it hosts: one class for each library, all with this interface.

Everything is called from the agent's only thread. No method may wait for a peer if the library leaves a choice: where
one blocks all the same, the rank kills the agent when its patience ends.
"""

from __future__ import annotations

import importlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kv_transfer.transport import BlockIds, FailureReason

LIBRARIES = {
    "nixl": "kv_transfer.nixl_agent:NixlAgent",
    "ucx": "kv_transfer.ucx_agent:UcxAgent",
    "mooncake": "kv_transfer.mooncake_agent:MooncakeAgent",
}


class AgentError(Exception):
    """The library refused one peer; `reason` says of which kind."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message


class AgentBroken(Exception):
    """The library is in a state that only a new process gets out of."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A read is over. Not fenced: the library failed it, and does not tell whether all of its writes have ended."""

    read_id: int
    reason: FailureReason | None = None
    message: str = ""
    is_fenced: bool = True


class Pool:
    """The rank's pool as the agent maps it, and one block more, `scratch`, that reads may write into at any time."""

    def __init__(self, fd: int, num_blocks: int, block_size_bytes: int) -> None:
        """Maps the memory file `fd`, which stays the caller's. Raises OSError or ValueError if it is too short."""
        self.num_blocks = num_blocks
        self.block_size_bytes = block_size_bytes
        self.blocks: npt.NDArray[np.uint8] = np.frombuffer(
            mmap.mmap(fd, num_blocks * block_size_bytes), np.uint8
        ).reshape(num_blocks, block_size_bytes)
        self.scratch: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, block_size_bytes), np.uint8)

    @property
    def scratch_id(self) -> int:
        return self.num_blocks

    @property
    def address(self) -> int:
        return int(self.blocks.ctypes.data)

    @property
    def scratch_address(self) -> int:
        return int(self.scratch.ctypes.data)


@dataclass(frozen=True, slots=True)
class ClientLost:
    """The library cannot reach a client any more."""

    client_id: int
    message: str


class LibraryAgent(ABC):
    """The library's state in this process. A link is a peer to read from, a client one that reads from us."""

    name: ClassVar[str]
    needs_target_poll: ClassVar[bool]
    """Somebody else's read from our pool gets on only if we `poll`."""

    metadata: bytes
    """What the agents of peers need to reach this one; travels over authenticated connections only."""

    @abstractmethod
    def __init__(self, pool: Pool, host: str, ask: Callable[[int, bytes], None]) -> None:
        """`ask(link_id, request)` has `serve` called at the peer's. Raises what the library raises."""

    @abstractmethod
    def add_link(self, link_id: int, metadata: bytes, num_blocks: int) -> None:
        """Raises AgentError if the peer cannot be reached, AgentBroken."""

    @abstractmethod
    def remove_link(self, link_id: int) -> None:
        """Called once, after its last read has been finished."""

    def has_leftovers(self, link_id: int) -> bool:
        """Of reads that are over something is still under way: wait a little before the link is removed."""
        return False

    @abstractmethod
    def begin_read(self, read_id: int, link_id: int, remote_blocks: BlockIds, local_blocks: BlockIds) -> None:
        """Start to copy, pairwise; ids are in range, local ones may be the pool's `scratch_id`, at least one.

        Failures are told by `poll`.
        """

    @abstractmethod
    def cancel_read(self, read_id: int) -> None:
        """Write no more than what cannot be stopped. `poll` finishes the read, when nothing is written any more."""

    @abstractmethod
    def poll(self) -> list[Finished | ClientLost]:
        """Let the library work, for reads and for clients. Never blocks. Raises AgentBroken."""

    @property
    def is_busy(self) -> bool:
        """`poll` has something to wait for besides reads that were not told as finished."""
        return False

    def serve(self, client_id: int, metadata: bytes, request: bytes) -> None:  # noqa: B027 - libraries that read do not
        """What a client's half has asked for. Raises AgentError if it makes no sense."""

    def forget_client(self, client_id: int) -> None:  # noqa: B027
        """The client is gone, and so are its reads."""


def load_library(name: str) -> type[LibraryAgent]:
    """One of LIBRARIES. Nothing of the library itself is imported before its class is called."""
    module, kind = LIBRARIES[name].split(":")
    loaded: type[LibraryAgent] = getattr(importlib.import_module(module), kind)
    return loaded
