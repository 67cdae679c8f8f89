"""The Ray that serried starts for itself, on this machine: nobody else uses it, and it ends with the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.config import RouterConfig
from cluster.control_actor import CONTROL_NAME, CONTROL_NAMESPACE
from cluster.environment import LOOPBACK, num_cores
from cluster.node_plan import Node
from cluster.ray_host import by
from cluster.start_errors import HaProxyError, StartError, last_line


class OwnRay:
    environment: Mapping[str, str] = {}
    # Whatever is left is killed by the supervisor.
    outlives_driver = False

    def __init__(self, router: RouterConfig, run_dir: Path, ha_proxy: bool) -> None:
        self._router = router
        self._run_dir = run_dir
        self._ha_proxy = ha_proxy

    def connect(self) -> None:
        from cluster.ray_head import start_ray

        start_ray(self._run_dir / "ray", num_cpus=max(2, num_cores()))

    def nodes(self) -> list[Node]:
        import ray

        from model_runner.memory import available_memory_bytes

        node_id = ray.get_runtime_context().get_node_id()
        return [Node(node_id, LOOPBACK, num_cores(), 0, num_cores(), available_memory_bytes())]

    def nodes_now(self) -> list[Node]:
        return self.nodes()

    def start_control(self, actor: Any, *arguments: Any) -> Any:
        import ray

        return (
            ray.remote(actor)
            .options(
                name=CONTROL_NAME,
                namespace=CONTROL_NAMESPACE,
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=1000,
            )
            .remote(*arguments, LOOPBACK)
        )

    def start_serve(self) -> None:
        from ray import serve

        try:
            serve.start(
                proxy_location="Disabled" if self._router.http_server == "own" else None,
                http_options={"host": self._router.host, "port": self._router.port},
                logging_config={"enable_access_log": False},
            )
        except TimeoutError:
            # The controller is up and the proxies are slow; whoever asks for `/ready` has the last word.
            return
        except Exception as error:
            # The controller does start; what fails, in whatever way, is the proxy.
            if self._ha_proxy:
                raise HaProxyError(last_line(error)) from error
            raise StartError(f"Serve's proxy does not start: {last_line(error)}") from error

    def http_addresses(self) -> list[tuple[str, int]]:
        host = self._router.host
        return [(LOOPBACK if host == "0.0.0.0" else host, self._router.port)]

    def shut_down(self, serve_ends_by: float, ends_by: float) -> str | None:
        import ray
        from ray import serve

        by(serve_ends_by, serve.shutdown)
        by(ends_by, ray.shutdown)
        return None
