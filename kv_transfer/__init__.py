"""KV between ranks, between a rank and a store, and the authenticated framed connections that all control traffic uses.

- `wire` (pure) and `connection` (asyncio): frames and the handshake; used by routers, ranks and the control actor.
- `connector`: the contract between a rank's scheduler and model runner and a KV connector's two halves, of which the
  scheduler half is pure. `config` names a connector, `registry` finds it.
- `pull_connector`: prefill and decode on different ranks. `ticket`, `leases` and `pull_scheduler` decide, and are
  pure; `pull_worker` is the edge, with `pull_server` for the leases of this rank and `pull_loads` for those of others.
- `shared_storage_connector`, `offload_connector`, `redis_connector`: KV of full blocks by prefix hash in a store;
  `store_scheduler` and `store_worker` are what they share. `multi_connector` combines several.
- `transport`: what moves blocks from one rank's pool (`memory`) into another's. `transports` knows them by name and
  chooses the lane; `shm_transport`, `tcp_transport` and `inproc_transport` need nothing, `agent_transport` runs NIXL,
  UCX or Mooncake in a process of its own.
"""
