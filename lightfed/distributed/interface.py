"""Which interface of its node rank 0 listens on."""

import logging
import socket
from contextlib import suppress
from functools import cache
from ipaddress import ip_address

log = logging.getLogger(__name__)


@cache
def interface_of(name: str, *, nodes: int) -> str:
    """The address of the interface at which this node is reached by `name`.

    Args:
        name: of this node, or an address, as the other ranks know it.
        nodes: of the run.

    Returns:
        "", for all interfaces, where it cannot be told: the name is of no interface here (the
        addresses are translated on the way), or where nodes are several only this node's own word
        for itself, 127.0.1.1 of its /etc/hosts.

    Raises:
        OSError: there is no such name.
    """
    for family, kind, _, _, place in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
        address = str(place[0])
        if nodes > 1 and address != name and ip_address(address).is_loopback:
            continue
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(place)
            return address
    log.warning("%s is at no interface here that other nodes reach: listening on all", name)
    return ""


def listen(address: str, port: int = 0, *, backlog: int) -> socket.socket:
    """A socket that listens at an address of `interface_of`.

    Raises:
        OSError: the port is taken.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=backlog)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)
