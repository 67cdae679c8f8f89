"""A peer of the TCP transport, as its client has it: connections for pulls, and connections for receives.

They are apart because a receive holds its connection until the peer has pushed the last block, which may take as long
as a prompt takes to compute: pulls must not wait for that.
"""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.memory import KvMemory
from kv_transfer.pulls import Pull, Pulls
from kv_transfer.tcp_connections import Connections, Dialer
from kv_transfer.tcp_line import Job
from kv_transfer.tcp_requests import IDS, PullRequest, PushRequest, TcpAddress, encode_request
from kv_transfer.transport import BlockIds, Endpoint, FailureReason

MAX_CONNECTIONS_PER_PEER = 2
"""Of pulls."""
MAX_RECEIVES_PER_PEER = 64
"""At a time; further ones wait for their turn."""
# Of many receives at once few connections are kept: each is a thread of the peer's too, and counts against what the
# peer takes from everybody.
MAX_IDLE_RECEIVERS = 2


class TcpPeer:
    def __init__(
        self,
        endpoint: Endpoint,
        address: TcpAddress,
        secret: bytes,
        memory: KvMemory,
        pulls: Pulls,
        start_thread: Callable[[Callable[[], None]], None],
    ) -> None:
        self.endpoint = endpoint
        self._all_pulls = pulls
        self._dialer = dialer = Dialer(endpoint, address, secret, memory.block_size_bytes)
        most = MAX_CONNECTIONS_PER_PEER
        self._pulls = Connections(dialer, memory, pulls, start_thread, most=most, most_idle=most)
        most = MAX_RECEIVES_PER_PEER
        self._receives = Connections(dialer, memory, pulls, start_thread, most=most, most_idle=MAX_IDLE_RECEIVERS)

    @property
    def connections(self) -> tuple[Connections, Connections]:
        return self._pulls, self._receives

    def connect(self, deadline: float) -> None:
        """Open the first connection. Raises TransferError."""
        sock = self._dialer.make_socket()
        try:
            self._dialer.open(sock, deadline)
            self._pulls.add(sock)
        except BaseException:
            sock.close()
            raise

    def pull(self, pull: Pull, remote_blocks: BlockIds, local_blocks: BlockIds) -> None:
        request = PullRequest(remote_blocks.astype(IDS, copy=False).tobytes(), pull.timeout_s)
        self._pulls.submit(Job(pull, encode_request(request), local_blocks))

    def receive(self, pull: Pull, local_blocks: BlockIds, on_grant: Callable[[int], None]) -> None:
        request = PushRequest(len(local_blocks), pull.timeout_s)
        self._receives.submit(Job(pull, encode_request(request), local_blocks, on_grant))

    def close(self) -> None:
        self._pulls.close()
        self._receives.close()
        self._all_pulls.stop_all(self, FailureReason.PEER_LOST, "the peer was closed")
