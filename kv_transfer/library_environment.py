"""How the libraries are configured in an agent: by variables, before they are loaded. What is set already stays."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from kv_transfer.transports import has_rdma

_SIOCGIFADDR = 0x8915


def configure(host: str) -> None:
    """For an agent that is reached at `host`.

    Libraries log what is wrong only. `UCX_TLS` stays UCX's choice, which always has a lane that notices a peer's
    death (tcp, RDMA) beside those of one host (cma): a list without such a lane is refused by NIXL. Without
    `UCX_NET_DEVICES` a TCP lane is opened on every interface of the host; with RDMA devices UCX knows better than we
    do which are near.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    # A crash is to end the process at once: its rank starts another.
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
    device = _interface(host)
    if device is not None and (device == "lo" or not has_rdma()):
        os.environ.setdefault("UCX_NET_DEVICES", device)


def _interface(host: str) -> str | None:
    """The interface that has the address; None for what is not an IPv4 address of this host."""
    try:
        wanted = socket.gethostbyname(host)
    except OSError:
        return None
    if wanted.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == wanted:
                return name
    return None
