"""A process that serves a pool of recognisable blocks over one transport, until its standard input ends.

    python -m tests.kv_transfer.transport_peer '{"transport": "tcp", "num_blocks": 8, "block_size_bytes": 4096, ...}'

Writes its endpoint as one line of hexadecimal MessagePack, or `unavailable: ` and why.
"""

from __future__ import annotations

import json
import sys

import msgspec
import numpy as np

from kv_transfer.memory import KvMemory
from kv_transfer.transport import KvTransport, TransferError
from kv_transfer.transports import make_transport

HOST = "127.0.0.1"
CLOSE_TIMEOUT_S = 10.0


def expected_words(blocks: np.ndarray, seed: int) -> np.ndarray:
    """The 32-bit word that fills each block of a peer's pool."""
    return (blocks.astype(np.uint32) * np.uint32(2654435761)) ^ np.uint32(seed)


def fill(memory: KvMemory, seed: int) -> None:
    memory.blocks.view(np.uint32)[:] = expected_words(np.arange(memory.num_blocks), seed)[:, None]


def make(transport: str, secret: bytes, port: int = 0) -> KvTransport:
    if port:
        from kv_transfer.tcp_transport import TcpTransport

        return TcpTransport(secret, port)
    return make_transport(transport, secret)


def main() -> None:
    settings = json.loads(sys.argv[1])
    memory = KvMemory(settings["num_blocks"], settings["block_size_bytes"])
    fill(memory, settings["seed"])
    try:
        transport = make(settings["transport"], settings["secret"].encode(), settings["port"])
        endpoint = transport.start(memory, HOST)
    except TransferError as error:
        print(f"unavailable: {error.message}", flush=True)
        return
    print(msgspec.msgpack.encode(endpoint).hex(), flush=True)
    sys.stdin.read()
    transport.close(CLOSE_TIMEOUT_S)
    memory.close()


if __name__ == "__main__":
    main()
