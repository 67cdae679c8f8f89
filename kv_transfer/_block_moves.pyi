"""See `kv_transfer.block_moves` and, for the first, `kv_transfer.block_runs`, which have the same in Python."""

import socket
from typing import Any

import numpy.typing as npt

from kv_transfer.block_moves import Pool
from kv_transfer.transport import BlockIds

SOURCE_HASH: str

def are_blocks(ids: npt.NDArray[Any], num_blocks: int, /) -> bool: ...
def copy(source: Pool, source_blocks: BlockIds, target: Pool, target_blocks: BlockIds, /) -> None: ...
def send(sock: socket.socket, header: bytes, pool: Pool, blocks: BlockIds, deadline: float, /) -> None: ...
def receive(sock: socket.socket, header: bytearray, pool: Pool, blocks: BlockIds, /) -> None: ...
