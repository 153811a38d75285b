"""The network interfaces on which ranks listen."""

import fcntl
import logging
import os
import socket
import struct
from contextlib import suppress
from functools import cache
from ipaddress import ip_address

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the address of an interface
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
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    place = address, port
    return socket.create_server(place, family=family, backlog=backlog, dualstack_ipv6=both)


def sockets_on(address: str) -> None:
    """Have gloo and NCCL listen on the interface of an IPv4 address alone, else on the loopback.

    By default they take the one of the host's name. What a user has chosen for them stays.
    """
    names = [name for _, name in socket.if_nameindex()]
    chosen = names[0]  # the loopback
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with suppress(OSError):  # it has no such address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    chosen = name
    os.environ.setdefault("GLOO_SOCKET_IFNAME", chosen)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={chosen}")
