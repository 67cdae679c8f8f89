"""NIXL over UCX in an agent: one-sided reads between prepared descriptor lists.

Its progress thread spins, so it is off, and the agent polls while it reads or is read from. A posted read cannot be
cancelled (releasing its handle or dropping the peer does not stop late writes), and when one fails, NIXL does not tell
whether all of its parts have ended; such reads are finished without a fence.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kv_transfer.agent_library import AgentError, ClientLost, Finished, LibraryAgent, Pool
from kv_transfer.transport import BlockIds, FailureReason


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    agent: bytes
    pool_address: int
    block_size_bytes: int


class _Remote:
    """A peer's agent: links to it share what NIXL knows of it."""

    def __init__(self, name: str, blocks: Any) -> None:
        self.name = name
        self.blocks = blocks
        self.links: set[int] = set()


class NixlAgent(LibraryAgent):
    name = "nixl"
    needs_target_poll = True

    def __init__(self, pool: Pool, host: str, ask: Callable[[int, bytes], None]) -> None:
        from nixl_cu12 import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._nixl: Any = nixl_agent(uuid.uuid4().hex, config)
        if "UCX" not in self._nixl.backends:
            raise RuntimeError("NIXL has no UCX plugin here")
        size = pool.num_blocks * pool.block_size_bytes
        regions = [(pool.address, size, 0, ""), (pool.scratch_address, pool.block_size_bytes, 0, "")]
        self._nixl.register_memory(regions, "DRAM")
        self._local = self._nixl.prep_xfer_dlist(
            "NIXL_INIT_AGENT",
            np.concatenate(
                [
                    _rows(pool.address, pool.block_size_bytes, pool.num_blocks),
                    _rows(pool.scratch_address, pool.block_size_bytes, 1),
                ]
            ),
            "DRAM",
        )
        self.metadata = msgspec.msgpack.encode(
            _Metadata(self._nixl.get_agent_metadata(), pool.address, pool.block_size_bytes)
        )
        self._remotes: dict[str, _Remote] = {}
        self._links: dict[int, _Remote] = {}
        self._reads: dict[int, Any] = {}
        """Handles of posted transfers."""
        self._finished: list[Finished | ClientLost] = []
        """Told by the next `poll`."""

    def add_link(self, link_id: int, metadata: bytes, num_blocks: int) -> None:
        described = msgspec.msgpack.decode(metadata, type=_Metadata)
        try:
            name = self._nixl.add_remote_agent(described.agent)
            name = name.decode() if isinstance(name, bytes) else name
            remote = self._remotes.get(name)
            if remote is None:
                rows = _rows(described.pool_address, described.block_size_bytes, num_blocks)
                remote = self._remotes[name] = _Remote(name, self._nixl.prep_xfer_dlist(name, rows, "DRAM"))
        except Exception as error:  # NIXL's own exceptions have no common base
            raise AgentError(FailureReason.NO_ROUTE, f"NIXL refused the peer: {error!r}") from error
        remote.links.add(link_id)
        self._links[link_id] = remote

    def remove_link(self, link_id: int) -> None:
        remote = self._links.pop(link_id, None)
        if remote is None:
            return
        remote.links.discard(link_id)
        if remote.links:
            return
        del self._remotes[remote.name]
        try:
            remote.blocks.release()
            self._nixl.remove_remote_agent(remote.name)
        except Exception as error:  # reads under way, or the peer is dead already: NIXL keeps what it needs
            print(f"nixl agent: peer {remote.name} was not removed cleanly: {error!r}", flush=True)

    def begin_read(self, read_id: int, link_id: int, remote_blocks: BlockIds, local_blocks: BlockIds) -> None:
        remote = self._links[link_id]
        try:
            handle = self._nixl.make_prepped_xfer("READ", self._local, local_blocks, remote.blocks, remote_blocks)
        except Exception as error:
            self._finished.append(Finished(read_id, _reason(error), f"NIXL refused the read: {error!r}"))
            return
        self._reads[read_id] = handle
        self._check(read_id, self._nixl.transfer)

    def cancel_read(self, read_id: int) -> None:
        pass

    def poll(self) -> list[Finished | ClientLost]:
        # Also what lets the library serve others.
        self._nixl.get_new_notifs()
        for read_id in list(self._reads):
            self._check(read_id, self._nixl.check_xfer_state)
        finished, self._finished = self._finished, []
        return finished

    def _check(self, read_id: int, ask: Any) -> None:
        handle = self._reads[read_id]
        try:
            state = ask(handle)
        except Exception as error:
            self._finished.append(Finished(read_id, _reason(error), repr(error), is_fenced=False))
        else:
            if state == "PROC":
                return
            if state == "DONE":
                handle.release()
                self._finished.append(Finished(read_id))
            else:
                self._finished.append(
                    Finished(read_id, FailureReason.BACKEND, f"NIXL ended the read as {state}", is_fenced=False)
                )
        del self._reads[read_id]


def _rows(address: int, block_size_bytes: int, num_blocks: int) -> npt.NDArray[np.uint64]:
    """Blocks that lie one behind the other, as one row: address, length, device, stride, count."""
    return np.array([[address, block_size_bytes, 0, block_size_bytes, num_blocks]], np.uint64)


def _reason(error: Exception) -> FailureReason:
    is_lost = "RemoteDisconnect" in type(error).__name__
    return FailureReason.PEER_LOST if is_lost else FailureReason.BACKEND
