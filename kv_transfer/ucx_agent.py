"""UCX through ucxx in an agent. Its Python interface has no one-sided reads: the peer's agent sends what is asked for.

The client posts a receive into a buffer of its own, asks for as many blocks as fit into it, and scatters them into the
pool when they are there; two such chunks of a read are under way. So the library never writes into the pool, a
cancelled read is over at once, and its last chunks arrive in buffers that nobody looks at. Requests travel over the
agents' own connection: UCX's sockets serve nobody, and carry messages with tags that only the client knows.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kv_transfer.agent_library import AgentBroken, AgentError, ClientLost, Finished, LibraryAgent, Pool
from kv_transfer.transport import BlockIds, FailureReason

# Of blocks packed into one message; a single block may be larger.
CHUNK_BYTES = 4 << 20
MAX_CHUNKS_UNDER_WAY = 2
# Receives that will never complete hold a buffer each.
MAX_STRANDED_CHUNKS = 32


class _Request(msgspec.Struct, frozen=True, array_like=True):
    tag: int
    blocks: bytes


class _Chunk:
    """A receive under way."""

    def __init__(self, tag: int, link_id: int, local_blocks: BlockIds, buffer: npt.NDArray[np.uint8]) -> None:
        self.tag = tag
        self.link_id = link_id
        self.local_blocks = local_blocks
        self.buffer = buffer
        self.receive: Any = None


class _ReadState:
    def __init__(self, link_id: int, chunks: deque[tuple[BlockIds, BlockIds]]) -> None:
        self.link_id = link_id
        self.chunks = chunks
        """(remote, local) blocks that have not been asked for."""
        self.under_way: list[_Chunk] = []


class UcxAgent(LibraryAgent):
    name = "ucx"
    needs_target_poll = True

    def __init__(self, pool: Pool, host: str, ask: Callable[[int, bytes], None]) -> None:
        import ucxx._lib.libucxx as ucx
        from ucxx._lib.arr import Array

        self._ucx: Any = ucx
        self._array: Any = Array
        self._pool = pool
        self._ask = ask
        self._worker: Any = ucx.UCXWorker(ucx.UCXContext(feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP)))
        self._to_self: Any = ucx.UCXEndpoint.create_from_worker_address(self._worker, self._worker.address, False)
        self.metadata = bytes(self._worker.address.tobytes())
        self._next_tag = secrets.randbits(31) << 32
        self._reads: dict[int, _ReadState] = {}
        self._stranded: list[_Chunk] = []
        """Of reads that are over; their buffers must outlive the receives."""
        self._endpoints: dict[int, Any] = {}
        """To clients."""
        self._sends: list[tuple[int, Any, npt.NDArray[np.uint8]]] = []
        """(client, request, its buffer) under way."""
        self._finished: list[Finished | ClientLost] = []
        """Told by the next `poll`."""

    def add_link(self, link_id: int, metadata: bytes, num_blocks: int) -> None:
        pass

    def remove_link(self, link_id: int) -> None:
        """Whatever has not been sent never will be: those receives are completed from here."""
        for chunk in self._stranded:
            if chunk.link_id == link_id:
                self._to_self.tag_send(self._array(np.zeros(1, np.uint8)), self._ucx.UCXXTag(chunk.tag))

    def has_leftovers(self, link_id: int) -> bool:
        return any(chunk.link_id == link_id for chunk in self._stranded)

    def begin_read(self, read_id: int, link_id: int, remote_blocks: BlockIds, local_blocks: BlockIds) -> None:
        n = _num_chunk_blocks(self._pool)
        chunks = deque((remote_blocks[i : i + n], local_blocks[i : i + n]) for i in range(0, len(remote_blocks), n))
        read = self._reads[read_id] = _ReadState(link_id, chunks)
        self._ask_for_more(read)

    def _ask_for_more(self, read: _ReadState) -> None:
        while read.chunks and len(read.under_way) < MAX_CHUNKS_UNDER_WAY:
            remote_blocks, local_blocks = read.chunks.popleft()
            tag = self._next_tag
            self._next_tag += 1
            buffer = np.empty(len(local_blocks) * self._pool.block_size_bytes, np.uint8)
            chunk = _Chunk(tag, read.link_id, local_blocks, buffer)
            # The receive is there before anything is sent: no message of ours ever waits in the library.
            chunk.receive = self._worker.tag_recv(self._array(buffer), self._ucx.UCXXTag(tag))
            read.under_way.append(chunk)
            self._ask(read.link_id, msgspec.msgpack.encode(_Request(tag, remote_blocks.tobytes())))

    def cancel_read(self, read_id: int) -> None:
        self._end(Finished(read_id, FailureReason.TIMEOUT, "cancelled"))

    def _end(self, finished: Finished) -> None:
        read = self._reads.pop(finished.read_id, None)
        if read is not None:
            self._stranded += read.under_way
            self._finished.append(finished)

    def poll(self) -> list[Finished | ClientLost]:
        self._worker.progress()
        for read_id, read in list(self._reads.items()):
            self._check_read(read_id, read)
        self._stranded = [chunk for chunk in self._stranded if not chunk.receive.completed]
        if len(self._stranded) > MAX_STRANDED_CHUNKS:
            raise AgentBroken(f"{len(self._stranded)} messages of peers that are gone neither arrive nor end")
        self._check_sends()
        finished, self._finished = self._finished, []
        return finished

    def _check_read(self, read_id: int, read: _ReadState) -> None:
        for chunk in list(read.under_way):
            if not chunk.receive.completed:
                continue
            read.under_way.remove(chunk)
            try:
                chunk.receive.check_error()
            except self._ucx.UCXError as error:
                self._end(Finished(read_id, FailureReason.PEER_LOST, f"UCX lost a message: {error!r}"))
                return
            blocks = chunk.buffer.reshape(len(chunk.local_blocks), self._pool.block_size_bytes)
            if chunk.local_blocks[0] == self._pool.scratch_id:
                self._pool.scratch[:] = blocks[0]
            else:
                self._pool.blocks[chunk.local_blocks] = blocks
        self._ask_for_more(read)
        if not read.under_way:
            self._end(Finished(read_id))

    @property
    def is_busy(self) -> bool:
        return bool(self._stranded or self._sends)

    def serve(self, client_id: int, metadata: bytes, request: bytes) -> None:
        wanted = msgspec.msgpack.decode(request, type=_Request)
        ids = np.frombuffer(wanted.blocks, np.int32)
        if not len(ids) or ids.min() < 0 or ids.max() >= self._pool.num_blocks:
            raise AgentError(FailureReason.BACKEND, "a client asked for blocks that this pool does not have")
        if len(ids) > _num_chunk_blocks(self._pool):
            raise AgentError(FailureReason.BACKEND, f"a client asked for {len(ids)} blocks in one message")
        buffer = self._pool.blocks[ids].reshape(-1)
        try:
            endpoint = self._endpoints.get(client_id)
            if endpoint is None:
                address = self._ucx.UCXAddress.create_from_buffer(metadata)
                endpoint = self._ucx.UCXEndpoint.create_from_worker_address(self._worker, address, True)
                self._endpoints[client_id] = endpoint
            send = endpoint.tag_send(self._array(buffer), self._ucx.UCXXTag(wanted.tag))
        except self._ucx.UCXError as error:
            raise AgentError(FailureReason.NO_ROUTE, f"UCX does not reach the client: {error!r}") from error
        self._sends.append((client_id, send, buffer))

    def _check_sends(self) -> None:
        under_way = []
        for client_id, send, buffer in self._sends:
            if not send.completed:
                under_way.append((client_id, send, buffer))
                continue
            try:
                send.check_error()
            except self._ucx.UCXError as error:
                if client_id in self._endpoints:
                    self._finished.append(ClientLost(client_id, f"UCX did not send a message: {error!r}"))
        self._sends = under_way

    def forget_client(self, client_id: int) -> None:
        endpoint = self._endpoints.pop(client_id, None)
        if endpoint is not None:
            # Ends its sends too.
            endpoint.close()


def _num_chunk_blocks(pool: Pool) -> int:
    return max(CHUNK_BYTES // pool.block_size_bytes, 1)
