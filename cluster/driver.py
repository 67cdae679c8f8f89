"""The process that starts Ray, or joins one that runs, and the cluster on it; waits; ends in order what it started.

A child of the supervisor (`launcher.py`): it reads one `DriverRequest` from its standard input, whose end means that
the supervisor is gone; SIGTERM means stop. It lives in a session of its own, so that a terminal's Ctrl-C reaches
neither it nor what Ray starts. Run as `python -m cluster.driver`, in the environment of `environment.run_environment`.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import io
import json
import os
import secrets
import shlex
import shutil
import signal
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from cluster.config import ClusterConfig
from cluster.control_actor import ControlActor, FailedStart
from cluster.existing_ray import ExistingRay
from cluster.node_plan import Node, demands, missing
from cluster.own_ray import OwnRay
from cluster.processes import RUN_ID_VARIABLE, kill_run
from cluster.progress import Progress
from cluster.ray_host import RayHost
from cluster.start_errors import HaProxyError, StartError, last_line

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_NO_HA_PROXY = 75

RUN_FILE = "run.json"
# For loading weights from a slow disk; what fails earlier is reported at once.
START_TIMEOUT_S = 600.0
# Ranks and routers are up by then; what remains is that the proxy hears of the routers.
HTTP_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.3
# Asking Serve costs it and this process tens of milliseconds, which the ranks could use for their own start.
STATUS_INTERVAL_S = 2.0
CALL_TIMEOUT_S = 30.0
# Of an orderly end, whatever hangs: streams, Serve and Ray share it, in this order, each leaving the next its part.
SHUTDOWN_TIMEOUT_S = 7.0
SERVE_SHUTDOWN_TIMEOUT_S = 3.5
RAY_SHUTDOWN_TIMEOUT_S = 2.0
# Nothing can be killed there to be done in time, so Serve is given more of it.
EXISTING_SHUTDOWN_TIMEOUT_S = 20.0
EXISTING_SERVE_SHUTDOWN_TIMEOUT_S = 15.0


def shutdown_timeout_s(config: ClusterConfig) -> float:
    """How long the driver takes for an orderly end, at most."""
    return SHUTDOWN_TIMEOUT_S if config.ray.is_own else EXISTING_SHUTDOWN_TIMEOUT_S


class DriverRequest(BaseModel):
    """What the supervisor asks for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: ClusterConfig
    run_dir: Path
    ha_proxy: bool
    elapsed_s: float
    """Seconds since the user's command, for the progress lines."""


class _Stopped(Exception):
    """SIGTERM or the end of the supervisor, while starting."""


@dataclass(frozen=True, slots=True)
class _Model:
    path: Path
    name: str
    max_model_len: int


class Driver:
    def __init__(self, request: DriverRequest, stop: threading.Event) -> None:
        self._request = request
        self._config = request.config
        self._stop = stop
        self._progress = Progress(
            Console(stderr=False, highlight=False), started_at=time.monotonic() - request.elapsed_s
        )
        self._control: Any = None
        self._ray: RayHost = (
            OwnRay(self._config.router, request.run_dir, request.ha_proxy)
            if self._config.ray.is_own
            else ExistingRay(self._config, self._progress)
        )

    def run(self) -> int:
        """Start, serve until told to stop, shut down. Returns the exit status."""
        status = EXIT_STOPPED
        try:
            self._start()
        except StartError as error:
            self._progress.line(f"cannot start: {error}", style="red")
            status = EXIT_FAILED
        except HaProxyError as error:
            self._progress.line(f"HAProxy: {error}", style="yellow")
            status = EXIT_NO_HA_PROXY
        except _Stopped:
            pass
        else:
            self._stop.wait()
            self._shut_down()
            return status
        if self._ray.outlives_driver:
            self._shut_down()
        return status

    def _start(self) -> None:
        with ThreadPoolExecutor(2, thread_name_prefix="start") as pool:
            # Converting a model, once, takes seconds and needs nothing of Ray; a wrong path shows at once.
            model = pool.submit(self._resolve_model)
            wait([model], timeout=1.0)
            if model.done():
                model.result()
            # Ray's start is mostly waiting for its processes: time enough to import what comes next.
            pool.submit(importlib.import_module, "cluster.application")
            with self._progress.stage("Ray"):
                self._ray.connect()
                # Ray installs a handler of its own, which would end this process without an orderly shutdown.
                signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
            self._check_stop()
            secret = secrets.token_bytes(32)
            with self._progress.stage("control actor and Serve"):
                self._control = self._ray.start_control(
                    ControlActor, self._config.scheduler, secret, self._config.router.num_routers
                )
                serving = pool.submit(self._start_serve)
                self._await_controller(serving)
            served = model.result()
            with self._progress.stage(f"{self._config.num_ranks} ranks and {self._config.router.num_routers} routers"):
                self._deploy(served, secret)
                self._await_members(serving)
        with self._progress.stage("HTTP"):
            url = self._await_http()
        self._announce(served.name, url)

    def _resolve_model(self) -> _Model:
        from model_runner.embedded import EMBEDDED_NAME, resolve_model
        from model_runner.model_config import read_model_config

        settings = self._config.model
        path = settings.path
        file_name = path.stem if path is not None and path.suffix == ".gguf" else path and path.resolve().name
        name = settings.name or file_name or EMBEDDED_NAME
        try:
            with self._progress.stage("model"):
                model_dir = resolve_model(str(path) if path is not None else None, self._progress.line)
                longest = read_model_config(model_dir).max_position_embeddings
        except (ValueError, OSError) as error:
            raise StartError(str(error)) from None
        return _Model(model_dir, name, settings.max_model_len or longest)

    def _start_serve(self) -> None:
        import logging

        from ray import serve  # noqa: F401  (its import sets the level)

        # Serve's own lines would come between ours; what matters in them is asked for below.
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
        self._ray.start_serve()

    def _await_controller(self, serving: Future[None]) -> None:
        """Wait until Serve's controller answers. `serving`, its start, goes on until the proxies are up as well."""
        from ray import serve

        while not serving.done() and not serve.status().proxies:
            self._pause()
        if serving.done():
            serving.result()

    def _deploy(self, model: _Model, secret: bytes) -> None:
        from ray import serve
        from ray.serve.exceptions import RayServeException

        from cluster.application import build
        from cluster.removal import APPLICATION_NAME

        nodes = self._ray.nodes()
        for lacking in self._lacking(nodes, {}):
            self._progress.line(f"{lacking}; waiting until the cluster has more", style="yellow")
        path = self._config.model.path
        # On a machine of our own the ranks need not look it up again; elsewhere each node has its own.
        model_path = str(path.expanduser().absolute()) if path is not None else None
        if self._config.ray.is_own:
            model_path = str(model.path)
        application = build(
            self._config,
            model_path=model_path,
            model_name=model.name,
            max_model_len=model.max_model_len,
            secret=secret,
            nodes=nodes,
            environment=self._ray.environment,
        )
        # Without one, no proxy of Serve's passes anything on to it.
        route_prefix = None if self._config.router.http_server == "own" else "/"
        try:
            serve.run_many(
                [serve.RunTarget(application, name=APPLICATION_NAME, route_prefix=route_prefix)],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )
        except RayServeException as error:
            reason = last_line(error).partition(": ")[2]
            raise StartError(
                f"Serve refuses the application: {reason} Another application that is at `/` has to go, or to get "
                "another route_prefix"
            ) from error

    def _lacking(self, nodes: Sequence[Node], num_ready: Mapping[str, int]) -> list[str]:
        """For which ranks, besides those of each pool that are ready, `nodes` have no room; a sentence a pool."""
        asked = demands(self._config, self._ray.nodes())
        left = {pool: settings.num_ranks - num_ready.get(pool, 0) for pool, settings in self._config.pools.items()}
        return [str(each) for each in missing(asked, left, nodes)]

    def _await_members(self, serving: Future[None]) -> None:
        """Wait until every rank is a member, Serve calls the application running, and its start is over."""
        import ray

        num_ready, state, asked_at = 0, "NOT_STARTED", time.monotonic()
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            snapshot = ray.get(self._control.snapshot.remote(), timeout=CALL_TIMEOUT_S)
            failed: list[FailedStart] = snapshot["failed_starts"]
            for final in (failure for failure in failed if failure.is_final):
                raise StartError(f"a {final.part} cannot start: {final.reason}")
            if len(snapshot["members"]) != num_ready:
                num_ready = len(snapshot["members"])
                self._progress.line(f"ranks ready: {num_ready} of {self._config.num_ranks}")
            if num_ready >= self._config.num_ranks or time.monotonic() > asked_at + STATUS_INTERVAL_S:
                state, asked_at = self._application_state(failed), time.monotonic()
            if serving.done():
                serving.result()
                if state == "RUNNING" and num_ready >= self._config.num_ranks:
                    return
            if time.monotonic() > deadline:
                ready = Counter(member["pool"] for member in snapshot["members"])
                raise StartError(
                    f"after {START_TIMEOUT_S:.0f} s {num_ready} of {self._config.num_ranks} ranks are ready and Serve "
                    f"says {state}" + "".join(f"; {lacking}" for lacking in self._lacking(self._ray.nodes_now(), ready))
                )
            self._pause()

    def _application_state(self, failed: list[FailedStart]) -> str:
        """Serve's word for the application. Raises StartError, with the best reason there is, if it gave up."""
        from ray import serve

        from cluster.removal import APPLICATION_NAME

        application = serve.status().applications.get(APPLICATION_NAME)
        if application is None:
            return "NOT_STARTED"
        if application.status not in ("DEPLOY_FAILED", "UNHEALTHY"):
            return str(application.status.value)
        if failed:
            raise StartError(f"{len(failed)} starts failed, the last one of a {failed[-1].part}: {failed[-1].reason}")
        messages = [f"{name}: {found.message}" for name, found in application.deployments.items() if found.message]
        raise StartError("Serve gave up. " + "\n".join(messages or [application.message]))

    def _await_http(self) -> str:
        """Wait for `/ready` behind the port that was asked for; returns the URL that answers."""
        deadline = time.monotonic() + HTTP_TIMEOUT_S
        last: int | None = None
        while True:
            addresses = self._ray.http_addresses()
            for host, port in addresses:
                has_tls = self._config.router.tls_cert_file is not None
                if (last := _ask_ready(host, port, has_tls)) == 200:
                    return f"{'https' if has_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
            if time.monotonic() > deadline:
                if self._request.ha_proxy:
                    raise HaProxyError(f"no answer to /ready within {HTTP_TIMEOUT_S:.0f} s")
                asked = ", ".join(f"{host}:{port}" for host, port in addresses) or "no address: Serve has no proxy"
                raise StartError(
                    f"/ready did not say ready within {HTTP_TIMEOUT_S:.0f} s on {asked} "
                    f"({'no answer' if last is None else f'status {last}'})"
                    + ("" if self._config.ray.is_own else "; with --host 0.0.0.0 every node's proxy can be reached")
                )
            self._pause()

    def _announce(self, model_name: str, url: str) -> None:
        import ray

        members = ray.get(self._control.snapshot.remote(), timeout=CALL_TIMEOUT_S)["members"]
        run = {
            "url": url,
            "model": model_name,
            "run_id": os.environ[RUN_ID_VARIABLE],
            "ray_address": ray.get_runtime_context().gcs_address,
            "driver_pid": os.getpid(),
            "ha_proxy": self._request.ha_proxy,
            "ranks": {member["rank_id"]: member["pid"] for member in members},
        }
        # The supervisor takes the file's presence for "ready", so it appears at once and whole.
        unfinished = self._request.run_dir / (RUN_FILE + ".new")
        unfinished.write_text(json.dumps(run, indent=2))
        unfinished.rename(self._request.run_dir / RUN_FILE)
        self._progress.line(f"serving on {url}   (Ctrl-C stops)", style="bold green")
        self._progress.line("try it:")
        message = {"role": "user", "content": "Why is the sky blue?"}
        body = shlex.quote(json.dumps({"model": model_name, "stream": True, "messages": [message]}))
        print(f"\n  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {body}\n", flush=True)

    def _shut_down(self) -> None:
        is_own = self._config.ray.is_own
        ends_by = time.monotonic() + shutdown_timeout_s(self._config)
        serve_ends_by = ends_by - RAY_SHUTDOWN_TIMEOUT_S
        serve_takes = SERVE_SHUTDOWN_TIMEOUT_S if is_own else EXISTING_SERVE_SHUTDOWN_TIMEOUT_S
        if self._control is not None:
            what = "Serve, then Ray" if is_own else "what runs on Ray for this"
            self._progress.line(f"stopping: ending streams, then {what}")
            with contextlib.suppress(Exception):
                self._end_streams(serve_ends_by - serve_takes)
        # Ray tells of each actor that ends, on this process's output, as of a failure.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            left = self._ray.shut_down(serve_ends_by, ends_by)
        if left is not None:
            self._progress.line(left, style="yellow")

    def _end_streams(self, deadline: float) -> None:
        """Have the routers end their streams, and wait until no request is left."""
        import ray

        if not ray.get(self._control.begin_shutdown.remote(), timeout=deadline - time.monotonic()):
            return
        while (left := deadline - time.monotonic()) > 0:
            if ray.get(self._control.snapshot.remote(), timeout=left)["counts"]["num_requests"] == 0:
                return
            time.sleep(0.05)

    def _pause(self) -> None:
        self._stop.wait(POLL_INTERVAL_S)
        self._check_stop()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _Stopped


def _ask_ready(host: str, port: int, has_tls: bool) -> int | None:
    """Status of `GET /ready`, None without an answer."""
    # Its certificate is for the name that others know it by.
    connection = (
        http.client.HTTPSConnection(host, port, timeout=2, context=ssl._create_unverified_context())
        if has_tls
        else http.client.HTTPConnection(host, port, timeout=2)
    )
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _watch_supervisor(request: DriverRequest, stop: threading.Event, orphaned: threading.Event) -> None:
    """Blocks until the supervisor is gone; then this process has to clean up after itself, on time."""
    sys.stdin.buffer.read()
    orphaned.set()
    stop.set()
    time.sleep(shutdown_timeout_s(request.config))
    _clean_up(request.run_dir)
    os._exit(EXIT_FAILED)


def _clean_up(run_dir: Path) -> None:
    kill_run(os.environ[RUN_ID_VARIABLE], timeout_s=5.0)
    shutil.rmtree(run_dir, ignore_errors=True)


def main() -> None:
    request = DriverRequest.model_validate_json(sys.stdin.buffer.readline())
    stop, orphaned = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=_watch_supervisor, args=(request, stop, orphaned), name="supervisor", daemon=True).start()
    status = Driver(request, stop).run()
    if orphaned.is_set():
        _clean_up(request.run_dir)
    # Not sys.exit: what Ray registered to run at exit may wait for processes that are gone.
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
