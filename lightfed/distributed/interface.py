"""The network interface on which rank 0 listens."""

import logging
import socket
from contextlib import suppress
from functools import cache
from ipaddress import ip_address

log = logging.getLogger(__name__)


@cache
def interface_of(name: str, *, nodes: int) -> str:
    """The address of the interface that `name` resolves to on this node.

    "" for all interfaces if the address is unknown: `name` matches no interface here (addresses are
    translated on the way), or there are several nodes and it only resolves to 127.0.1.1 from this
    node's /etc/hosts. An OSError if the name cannot be resolved.
    """
    for family, kind, _, _, place in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
        address = str(place[0])
        if nodes > 1 and address != name and ip_address(address).is_loopback:
            continue
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(place)
            return address
    log.warning("%s is no interface here that other nodes can reach: listening on all", name)
    return ""


def listen(address: str, port: int = 0, *, backlog: int) -> socket.socket:
    """A socket listening on an address from `interface_of`; an OSError if taken."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=backlog)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)
