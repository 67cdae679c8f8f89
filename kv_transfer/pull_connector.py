"""`PullConnector`: prefill and decode on different ranks, where the decode rank reads the prompt's KV.

A request's way: the prefill rank computes the prompt under a lease, and answers with a ticket (`ticket`). The decode
rank, which its router gives the ticket to, takes blocks, reads those that it lacks over a transport (`lanes`), has the
holder confirm that the lease was held all the while (`leases`, which says why no wrong KV can come of it), and goes on
with the next token. While the request queues there, its lease is kept alive.

In push mode the decode rank does not ask for blocks again and again: by the first ticket, which comes when the first
chunk has been computed, it says where all blocks of the prompt go, and the prefill rank sends them as it computes them
(`pull_pushes`). All the rest, and above all the confirmation at the end, is the same.

`pull_scheduler` decides, and is pure. `pull_worker` is the edge: a thread of its own, with `pull_server` for the
leases of this rank and `pull_loads` over `pull_client` for those of others. They speak `kv_messages`.
"""

from __future__ import annotations

import secrets

from kv_transfer.config import KvRole
from kv_transfer.connector import ConnectorContext
from kv_transfer.lanes import Lanes
from kv_transfer.pull_scheduler import PullScheduler
from kv_transfer.pull_settings import PullSettings
from kv_transfer.pull_worker import PullWorker

NAME = "PullConnector"
# Small enough to count on from there, in a JSON number.
_LEASE_ID_BITS = 48


class PullConnector:
    @staticmethod
    def make_scheduler_half(context: ConnectorContext) -> PullScheduler:
        settings = PullSettings.of(context.config)
        return PullScheduler(
            engine_id=context.engine_id,
            host=context.host,
            port=lambda: context.ports.get(NAME),
            geometry=context.geometry,
            produces=context.role is not KvRole.CONSUMER,
            consumes=context.role is not KvRole.PRODUCER,
            first_lease_id=1 + secrets.randbits(_LEASE_ID_BITS),
            pushes=settings.pushes,
            shows_blocks=context.pool_is_mirrored,
        )

    @staticmethod
    def make_worker_half(context: ConnectorContext) -> PullWorker:
        settings = PullSettings.of(context.config)
        return PullWorker(
            context,
            settings,
            Lanes.make(settings.lanes, context.secret),
            lambda port: context.ports.update({NAME: port}),
        )
