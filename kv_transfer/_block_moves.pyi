"""See `kv_transfer.block_moves`, which has the same in Python."""

import socket

from kv_transfer.block_moves import Pool
from kv_transfer.transport import BlockIds

SOURCE_HASH: str

def copy(source: Pool, source_blocks: BlockIds, target: Pool, target_blocks: BlockIds, /) -> None: ...
def send(sock: socket.socket, header: bytes, pool: Pool, blocks: BlockIds, deadline: float, /) -> None: ...
def receive(sock: socket.socket, header: bytearray, pool: Pool, blocks: BlockIds, /) -> None: ...
