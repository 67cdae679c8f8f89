"""A router as Serve sees it: the ingress deployment, whose FastAPI application HAProxy talks to directly."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.config import ClusterConfig
from cluster.control_client import ControlClient
from cluster.own_http import OwnHttpServer
from cluster.router_settings import router_settings
from cluster.serve_grpc import keep_on_loopback
from model_runner.embedded import resolve_model
from router.access_log import write_to_file
from router.http_api import build_app
from router.service import RouterService

logger = logging.getLogger(__name__)


@serve.ingress()
class RouterReplica:
    """Serve deployment class."""

    # Serve awaits the constructor.
    async def __init__(  # type: ignore[misc]
        self,
        config: ClusterConfig,
        model_path: str | None,
        model_name: str,
        max_model_len: int,
        secret: bytes,
        pools: list[Any],
    ) -> None:
        """`model_path`: on this node, None: the embedded model. `pools` are Serve's handles of the rank deployments:
        binding them makes both one application."""
        if config.ray.is_own:
            keep_on_loopback()
        control = ControlClient()
        try:
            if config.router.access_log is not None:
                write_to_file(Path(config.router.access_log))
            model_dir = await asyncio.to_thread(resolve_model, model_path, logger.info)
            self._service = RouterService(
                router_settings(config, model_dir=model_dir, model_name=model_name, max_model_len=max_model_len)
            )
        except Exception as error:
            await control.report_failed_start("router", error)
            raise
        name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        await self._service.start(control.address, secret, name)
        router = config.router
        if router.http_server == "own":
            try:
                self._server = OwnHttpServer(
                    build_app(self._service),
                    host=router.host,
                    port=router.port,
                    cert_file=router.tls_cert_file,
                    key_file=router.tls_key_file,
                )
                await self._server.start()
            except Exception as error:
                await control.report_failed_start("router", error)
                raise

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self._service)

    async def __del__(self) -> None:
        # Serve calls and awaits this when it stops the replica, also after a constructor that failed.
        service = self.__dict__.get("_service")
        if service is not None:
            await service.stop()
        server = self.__dict__.get("_server")
        if server is not None:
            await server.stop()
