"""A router as Serve sees it: the ingress deployment, whose FastAPI application HAProxy talks to directly."""

from __future__ import annotations

import os
import uuid
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.control_client import ControlClient
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
        self._service = RouterService(settings)
        name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        await self._service.start(ControlClient().address, secret, name)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self._service)

    async def __del__(self) -> None:
        # Serve calls and awaits this when it stops the replica, also after a constructor that failed.
        service = self.__dict__.get("_service")
        if service is not None:
            await service.stop()
