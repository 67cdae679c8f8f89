"""A rank as Serve sees it: one replica that owns a model runner and the server around it.

Requests do not come through Serve's handles; what Serve does is start it, ask for its health and stop it. It stops one
that leaves (fewer replicas, another version) by its destructor, for which it waits: there the rank drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import ray

from cluster.config import ClusterConfig
from cluster.control_client import ControlClient
from cluster.node_plan import Demand, Node, shares
from cluster.node_survey import node_here
from cluster.rank_server import RankServer
from cluster.serve_grpc import keep_on_loopback
from model_runner.embedded import resolve_model
from rank_scheduler.interface import PauseState

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 2.0


class Rank:
    """Serve deployment class. The constructor returns once the rank is a member of the cluster."""

    # Serve awaits the constructor.
    async def __init__(  # type: ignore[misc]
        self,
        config: ClusterConfig,
        pool: str,
        model_path: str | None,
        demands: dict[str, Demand],
        nodes: dict[str, Node],
        secret: bytes,
    ) -> None:
        """`model_path`: on this node; None: the embedded model. `nodes`: those that the cluster began with, by id."""
        if config.ray.is_own:
            keep_on_loopback()
        self._control = ControlClient()
        self._pool = config.pools[pool]
        try:
            # Loading blocks for seconds to minutes; Serve's own calls to this process go on meanwhile.
            self._server = await asyncio.to_thread(
                self._load_and_start, config, pool, model_path, demands, nodes, secret
            )
        except Exception as error:
            await self._control.report_failed_start(f"rank of pool {pool}", error)
            raise

    def _load_and_start(
        self,
        config: ClusterConfig,
        pool: str,
        model_path: str | None,
        demands: dict[str, Demand],
        nodes: dict[str, Node],
        secret: bytes,
    ) -> RankServer:
        # Whoever deploys this class imports this module, but only a rank needs torch.
        from model_runner.torch_runner import TorchRunner

        if config.scheduler.runner_type != "generate":
            raise ValueError(
                f"scheduler.runner_type {config.scheduler.runner_type!r} is not supported by this rank's model runner, "
                "which generates tokens; set it to 'generate'"
            )
        node_id = ray.get_runtime_context().get_node_id()
        share = shares(config, demands, nodes.get(node_id) or node_here())[pool]
        model_dir = resolve_model(model_path, logger.info)
        runner = TorchRunner(
            model_dir,
            scheduler=config.scheduler,
            cache=config.cache,
            dtype=config.model.dtype,
            device=config.pools[pool].device,
            num_threads=share.num_threads,
            max_model_len=config.model.max_model_len,
            memory_budget_bytes=share.memory_budget_bytes,
            shared_kv=config.kv_transfer.kv_connector is not None,
        )
        server = RankServer(
            runner,
            runner.load(),
            config=config.scheduler,
            cache=config.cache,
            pool=pool,
            secret=secret,
            control_address=self._control.address,
            advertise_host=ray.util.get_node_ip_address(),
            node_id=node_id,
            tokenizer_path=model_dir / "tokenizer.json",
            role=config.pools[pool].role,
            kv_transfer=config.kv_transfer,
        )
        server.start()
        return server

    def check_health(self) -> None:
        """Raises RuntimeError with the reason if the step loop died or makes no progress."""
        self._server.check_health()

    async def check_integrity(self) -> None:
        """Run the scheduler's invariants between two steps; raises AssertionError. For tests and operators."""
        await asyncio.to_thread(self._server.check_integrity)

    async def set_pause(self, state: PauseState) -> None:
        """Pause or go on; returns when every step that was planned before has ended."""
        await asyncio.to_thread(self._server.set_pause, state)

    async def drain(self, rank_id: str, deadline_s: float | None = None) -> bool:
        """Take no new work, if this is the one that is meant: Serve's handles reach all replicas or any of them.

        What still runs after `deadline_s` (None: the pool's) goes on at other ranks. Returns when there is nothing
        left to do (False: not within `drain_limit_s`); the rank stays, for Serve to stop.
        """
        if rank_id != self._server.stats()["rank_id"]:
            return True
        return await self._drain(self._pool.drain_deadline_s if deadline_s is None else deadline_s)

    async def _drain(self, deadline_s: float) -> bool:
        return await asyncio.to_thread(self._server.drain, deadline_s, self._pool.drain_limit_s)

    def stats(self) -> dict[str, Any]:
        """The rank's identity and live figures."""
        return self._server.stats()

    async def __del__(self) -> None:
        # Serve calls and awaits this when it stops the replica, also after a constructor that failed.
        server = self.__dict__.get("_server")
        if server is not None:
            # One that is stopped since it makes no progress has nothing to wait for.
            with contextlib.suppress(RuntimeError):
                server.check_health()
                await self._drain(self._pool.drain_deadline_s)
            await asyncio.to_thread(server.stop, STOP_TIMEOUT_S)
