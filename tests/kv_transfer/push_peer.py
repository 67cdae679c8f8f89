"""A process that pushes blocks of its pool, or receives some, as it is told over its standard input.

Started as `tests.kv_transfer.transport_peer`. Each line that it reads is an order in JSON, each that it writes after
its endpoint what came of one:

    {"push": GRANT, "blocks": [...]}                            →  true or false, or a refusal's text
    {"revoke": GRANT}                                           →  null
    {"receive": ENDPOINT, "num_blocks": N, "timeout_s": S}      →  the grant, and later why it ended
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import numpy as np

from kv_transfer.memory import KvMemory
from kv_transfer.tcp_transport import TcpTransport
from kv_transfer.transport import Endpoint
from tests.kv_transfer.transport_peer import CLOSE_TIMEOUT_S, HOST, fill


def tell(what: object) -> None:
    print(json.dumps(what), flush=True)


def obey(transport: TcpTransport, order: dict[str, Any]) -> None:
    if "push" in order:
        try:
            tell(transport.push(order["push"], np.array(order["blocks"], np.int32)))
        except ValueError as error:
            tell(str(error))
    elif "revoke" in order:
        transport.revoke(order["revoke"])
        tell(None)
    else:
        peer = transport.connect(msgspec.msgpack.decode(bytes.fromhex(order["receive"]), type=Endpoint), 10.0)
        blocks = np.arange(order["num_blocks"], dtype=np.int32)
        transport.receive(peer, blocks, order["timeout_s"], tell, lambda end: tell(end.reason))


def main() -> None:
    settings = json.loads(sys.argv[1])
    memory = KvMemory(settings["num_blocks"], settings["block_size_bytes"])
    fill(memory, settings["seed"])
    transport = TcpTransport(settings["secret"].encode())
    print(msgspec.msgpack.encode(transport.start(memory, HOST)).hex(), flush=True)
    for line in sys.stdin:
        obey(transport, json.loads(line))
    transport.close(CLOSE_TIMEOUT_S)
    memory.close()


if __name__ == "__main__":
    main()
