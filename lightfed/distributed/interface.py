"""The network interfaces on which ranks listen."""

import fcntl
import logging
import os
import socket
import struct
from contextlib import suppress
from functools import cache
from ipaddress import ip_address

# From <linux/sockios.h>: asks for the address of an interface.
_SIOCGIFADDR = 0x8915

log = logging.getLogger(__name__)


@cache
def interface_of(name: str, *, nodes: int) -> str:
    """Return the address of the interface that a name resolves to on this node.

    Args:
        name: The name or address by which other nodes reach this one.
        nodes: The number of nodes of the run.

    Returns:
        The address. "" stands for all interfaces, if the address is unknown: no interface of this
        node has it, because addresses are translated on the way. Or there are several nodes, and
        the name resolves to 127.0.1.1 from this node's /etc/hosts only.

    Raises:
        OSError: The name cannot be resolved.
    """
    for family, kind, _, _, socket_address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
        address = str(socket_address[0])
        is_loopback = ip_address(address).is_loopback
        if nodes > 1 and is_loopback and address != name:
            # Other nodes cannot reach it.
            continue
        # Only the address of an interface of this node can be bound.
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(socket_address)
            return address
    log.warning("%s is not an interface here that other nodes can reach: listening on all", name)
    return ""


def listen(address: str, port: int = 0, *, backlog: int) -> socket.socket:
    """Return a socket that listens on an address.

    Args:
        address: The address, from `interface_of`; "" for all interfaces.
        port: The port; 0 for any that is free.
        backlog: The number of callers that can wait.

    Raises:
        OSError: The port is taken.
    """
    on_both_protocols = address == "" and socket.has_dualstack_ipv6()
    is_ipv6 = on_both_protocols or ":" in address
    return socket.create_server(
        (address, port),
        family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=backlog,
        dualstack_ipv6=on_both_protocols,
    )


def sockets_on(address: str) -> None:
    """Let gloo and NCCL listen only on the interface of an address, or else on the loopback.

    By default they take the interface of the host's name. What a user has chosen for them stays.

    Args:
        address: An IPv4 address.
    """
    names = [name for _, name in socket.if_nameindex()]
    chosen = names[0]  # the loopback
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            # An interface without an IPv4 address answers with an error.
            with suppress(OSError):
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    chosen = name
    os.environ.setdefault("GLOO_SOCKET_IFNAME", chosen)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={chosen}")
