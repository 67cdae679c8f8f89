"""A router as Serve sees it: the ingress deployment, whose FastAPI application HAProxy talks to directly."""

from __future__ import annotations

import os
import uuid
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from cluster.control import CONTROL_NAME, CONTROL_NAMESPACE
from cluster.serve_grpc import keep_on_loopback
from router.http_api import build_app
from router.service import RouterService, RouterSettings


@serve.ingress()
class RouterReplica:
    """Serve deployment class."""

    # Serve awaits the constructor.
    async def __init__(  # type: ignore[misc]
        self, settings: RouterSettings, secret: bytes, pools: list[Any]
    ) -> None:
        """`pools` are Serve's handles of the rank deployments: binding them makes both one application."""
        keep_on_loopback()
        self._control = ray.get_actor(CONTROL_NAME, namespace=CONTROL_NAMESPACE)
        self._service = RouterService(settings)
        name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        await self._service.start(self._control_address, secret, name)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self._service)

    async def _control_address(self) -> tuple[str, int]:
        """Where the control actor listens now; a restarted one listens elsewhere."""
        host, port = await self._control.address.remote()
        return host, port

    async def __del__(self) -> None:
        # Serve calls and awaits this when it stops the replica, also after a constructor that failed.
        service = self.__dict__.get("_service")
        if service is not None:
            await service.stop()
