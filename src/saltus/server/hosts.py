"""Which names of the server a request may give as its host.

A page of another site can have its own name point to this machine (DNS rebinding). Its browser then sends that name,
and would let the page read the answers.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection
from ipaddress import ip_address

ANY_HOST = "*"
LOCAL_NAMES = ("localhost", "host.docker.internal", "host.containers.internal")  # the last two in containers
ALL_ADDRESSES = ("0.0.0.0", "::", "")  # to listen on all of them


def allowed_hosts(address: str, more: Collection[str] = ()) -> frozenset[str]:
    """The names of a server that listens on `address`, and `more` of them."""
    machine = socket.gethostname()
    names = (machine, f"{machine}.local") if address in ALL_ADDRESSES else (address,)
    return frozenset(name.lower() for name in (*names, *more))


def checked_origins(origins: Collection[str]) -> tuple[str, ...]:
    """Other sites whose pages may use the server. Errors: ValueError for what no browser sends as one."""
    for origin in origins:
        if origin != ANY_HOST and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ValueError(
                f"--allowed-origin is {origin!r}, but must be a scheme and a host, such as https://chat.example, or *"
            )
    return tuple(origins)


def is_allowed(host: str, names: Collection[str]) -> bool:
    """Whether a Host header names the server: by one of `names`, as this machine, or by an address.

    A page whose host is an address was loaded from there, so addresses do no harm. Nor do names of this machine: no
    site has a name in `.localhost` or `.internal`.
    """
    name = host.lower().strip()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name in LOCAL_NAMES or name.endswith(".localhost") or name in names or ANY_HOST in names:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
