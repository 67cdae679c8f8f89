"""A Ray cluster that is running, with several nodes perhaps, and others' actors and Serve applications on it.

serried brings there its Serve application and its control actor, and takes away just these. It starts Serve if nobody
has, and ends it then, unless others have come to use it. There is one serried on a cluster: whoever creates the control
actor, whose name is taken from then on, has it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cluster.config import ClusterConfig
from cluster.control_actor import CONTROL_NAME, CONTROL_NAMESPACE, LEASE_S, RENEWAL_INTERVAL_S
from cluster.environment import LOOPBACK, check_port
from cluster.node_plan import Node
from cluster.node_survey import HA_PROXY_VARIABLE, THROUGHPUT_VARIABLE, NodeFacts, free_nodes, survey
from cluster.progress import Progress
from cluster.ray_host import by
from cluster.removal import APPLICATION_NAME, remove_application
from cluster.start_errors import StartError, last_line

REACH_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 10.0
WILDCARDS = ("0.0.0.0", "::", "")
REPLICA_ENVIRONMENT = {
    # What `run_environment` says of these holds here as well.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # The nodes' HAProxies hear within a second or two that a router leaves; the default, 30, delays the end by as much.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
}


class ExistingRay:
    outlives_driver = True

    def __init__(self, config: ClusterConfig, progress: Progress) -> None:
        assert config.ray.address is not None
        self._config = config
        self._address = config.ray.address
        self._progress = progress
        self._facts: dict[str, NodeFacts] = {}
        self._nodes: list[Node] = []
        self._control: Any = None
        self._started_serve = False
        self._http = (config.router.host, config.router.port)
        self._stopped = threading.Event()
        cache = os.environ.get("SERRIED_CACHE")
        self.environment: Mapping[str, str] = REPLICA_ENVIRONMENT | ({"SERRIED_CACHE": cache} if cache else {})

    def connect(self) -> None:
        self._reach()
        failed: list[BaseException] = []

        def init() -> None:
            import ray

            try:
                ray.init(address=self._address, namespace="serried", log_to_driver=False, logging_level="ERROR")
            except BaseException as error:  # Ray ends processes that cannot connect
                failed.append(error)

        # Ray has no deadline for this.
        if not by(time.monotonic() + CONNECT_TIMEOUT_S, init):
            raise StartError(f"{self._what()} has not let us in within {CONNECT_TIMEOUT_S:.0f} s; see `ray status`")
        if failed:
            raise StartError(self._why_not_connected(failed[0])) from failed[0]
        if (owner := self._owner()) is not None:
            raise StartError(self._taken(owner))
        # Even a task that asks for nothing may hold a CPU for a moment.
        free = free_nodes({})
        self._facts = survey()
        self._nodes = [
            replace(node, num_cores=facts.num_cores, available_bytes=facts.available_bytes)
            for node in free
            if (facts := self._facts.get(node.node_id)) is not None
        ]
        self._report_switches()

    def nodes(self) -> list[Node]:
        return self._nodes

    def nodes_now(self) -> list[Node]:
        return free_nodes(self._facts)

    def start_control(self, actor: Any, *arguments: Any) -> Any:
        import ray

        try:
            control = (
                ray.remote(actor)
                .options(
                    name=CONTROL_NAME,
                    namespace=CONTROL_NAMESPACE,
                    lifetime="detached",
                    num_cpus=0,
                    max_restarts=-1,
                    max_concurrency=1000,
                )
                .remote(*arguments, None, f"serried serve, process {os.getpid()} on {socket.gethostname()}")
            )
        except ValueError as error:
            # Since `connect`, somebody was quicker.
            raise StartError(self._taken(self._owner())) from error
        self._control = control
        threading.Thread(target=self._renew_forever, name="lease", daemon=True).start()
        return control

    def start_serve(self) -> None:
        from ray import serve

        status = serve.status()
        if status.proxies or status.applications:
            self._join_serve(set(status.applications))
            return
        if problem := check_port(*self._http):
            raise StartError(problem)
        self._started_serve = True
        try:
            serve.start(
                proxy_location="Disabled" if self._config.router.http_server == "own" else "EveryNode",
                http_options={"host": self._http[0], "port": self._http[1]},
                logging_config={"enable_access_log": False},
            )
        except TimeoutError:
            # The controller is up and some proxy is slow; whoever asks for `/ready` has the last word.
            return
        except Exception as error:
            raise StartError(f"Serve does not start on this cluster: {last_line(error)}; see `serve status`") from error

    def http_addresses(self) -> list[tuple[str, int]]:
        import ray
        from ray import serve

        own = ray.get_runtime_context().get_node_id()
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        router = self._config.router
        if router.http_server == "own":
            if router.host not in WILDCARDS:
                return [(router.host, router.port)]
            return [(nodes[node_id], router.port) for node_id in sorted(nodes, key=lambda node_id: node_id != own)]
        host, port = self._http
        proxies = serve.status().proxies
        if host not in WILDCARDS:
            return [(host, port)] if proxies else []
        found = [node_id for node_id in proxies if node_id in nodes]
        return [(nodes[node_id], port) for node_id in sorted(found, key=lambda node_id: node_id != own)]

    def shut_down(self, serve_ends_by: float, ends_by: float) -> str | None:
        import ray

        self._stopped.set()
        if self._control is not None:
            is_removed = by(serve_ends_by, lambda: remove_application(self._started_serve))
            by(ends_by, lambda: ray.kill(self._control, no_restart=True))
            if not is_removed:
                # The call still runs: without a connection, Serve would have it start a Ray.
                return "Serve is not done yet, and goes on removing the application by itself"
        by(ends_by, ray.shutdown)
        return None

    def _reach(self) -> None:
        """Raise at once what Ray would find out in minutes."""
        if self._address == "auto":
            return
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S).close()
        except OSError as error:
            raise StartError(
                f"{self._what()} is not reachable ({error.strerror or error}); give the address that `ray start "
                "--head` printed, or leave ray.address and RAY_ADDRESS out for a Ray of our own"
            ) from error

    def _what(self) -> str:
        return f"ray.address: the cluster at {self._address}" if self._address != "auto" else "ray.address: auto: Ray"

    def _why_not_connected(self, error: BaseException) -> str:
        said = " ".join(str(error).split())
        if "ersion mismatch" in said:
            remedy = "run serried with the cluster's versions of Ray and Python"
        elif isinstance(error, ConnectionError):
            remedy = "start Ray on this machine with `ray start`, or give HOST:PORT"
        elif "oken" in said:
            remedy = "give the cluster's token, as `ray start` was given it"
        else:
            remedy = "run serried on a node of that cluster: `ray start --address=HOST:PORT` makes this machine one"
        return f"{self._what()} does not let us in: {said or type(error).__name__}; {remedy}"

    def _owner(self) -> str | None:
        """Whose control actor there is, None if there is none."""
        import ray

        try:
            control = ray.get_actor(CONTROL_NAME, namespace=CONTROL_NAMESPACE)
        except ValueError:
            return None
        with contextlib.suppress(Exception):
            owner: str = ray.get(control.owner.remote(), timeout=CALL_TIMEOUT_S)
            return owner
        return "one that does not answer"

    def _taken(self, owner: str | None) -> str:
        return (
            f"this Ray cluster has a serried already ({owner}), and there can be one; stop it with Ctrl-C where it "
            f"runs. If it is gone, what it left goes within {LEASE_S:.0f} s"
        )

    def _renew_forever(self) -> None:
        while True:
            with contextlib.suppress(Exception):
                self._control.renew.remote(self._started_serve)
            if self._stopped.wait(RENEWAL_INTERVAL_S):
                return

    def _join_serve(self, applications: set[str]) -> None:
        from ray.serve.context import _get_global_client

        if APPLICATION_NAME in applications:
            # Of an earlier run: the control actor is ours now.
            self._progress.line("removing the application that an earlier run left")
            remove_application(stop_serve=False)
        # Serve has no public call for where it listens.
        options = _get_global_client().http_config
        running = (options.host or LOOPBACK, options.port)
        if running != self._http and self._config.router.http_server == "serve":
            self._progress.line(
                f"Serve is running, on {running[0]}:{running[1]}: router.host and router.port have no effect",
                style="yellow",
            )
        self._http = running

    def _report_switches(self) -> None:
        """Serve's processes take these from their node's environment, so they are the cluster's to decide."""
        wanted, nodes = self._config.router.ha_proxy, list(self._facts.values())
        has_ha_proxy = all(HA_PROXY_VARIABLE in facts.serve_switches for facts in nodes)
        remedy = f"set {HA_PROXY_VARIABLE}=1 in the environment of `ray start` on every node"
        if wanted == "on" and not has_ha_proxy:
            raise StartError(f"router.ha_proxy: on, but this cluster's Serve does not use it; {remedy}, or say auto")
        if wanted == "auto" and not has_ha_proxy:
            self._progress.line(f"without HAProxy, through Serve's own, slower proxy: {remedy}", style="yellow")
        if wanted == "off" and has_ha_proxy:
            self._progress.line("router.ha_proxy: off has no effect: this cluster's Serve uses HAProxy", style="yellow")
        if not all(THROUGHPUT_VARIABLE in facts.serve_switches for facts in nodes):
            self._progress.line(f"streams cost less with {THROUGHPUT_VARIABLE}=1 set there as well")
