"""Connects every rank to rank 0, over TCP and separately from the process group."""

import hmac
import secrets
import socket
import time
from contextlib import suppress
from typing import Any

from lightfed.distributed.interface import listen
from lightfed.utils.errors import UserError

_MEET = 60.0  # seconds for all ranks to connect
_HELLO = 5.0  # seconds for a caller to name its rank
_TOKEN = 16  # bytes
_REACH = "name an address that all nodes reach, with its ports open between them"


def connect(ranks: Any, address: str, interface: str) -> dict[int, socket.socket]:
    """Connections by the rank at the other end: on rank 0 to all others, else to rank 0.

    All ranks, `collectives.Ranks`, call this together. `address` is that of rank 0 for the others,
    `interface` that on which it listens. A UserError if a rank cannot reach rank 0.
    """
    listener = listen(interface, backlog=ranks.world) if ranks.rank == 0 else None
    port = listener.getsockname()[1] if listener else 0
    token, port = ranks.broadcast((secrets.token_bytes(_TOKEN), port))
    if listener:
        links = _accept(listener, ranks.world, token)
    else:
        links = {0: _call(address, port, token, ranks.rank)}
    for link in links.values():
        link.settimeout(None)
    return links


def _accept(listener: socket.socket, world: int, token: bytes) -> dict[int, socket.socket]:
    """The connections of all other ranks; callers without the token are rejected."""
    links: dict[int, socket.socket] = {}
    limit = time.monotonic() + _MEET
    with listener:
        while len(links) < world - 1:
            listener.settimeout(max(0.001, limit - time.monotonic()))
            try:
                link, _ = listener.accept()
            except TimeoutError as error:
                absent = sorted(set(range(1, world)) - set(links))
                found = f"ranks {absent} do not reach rank 0 at port {listener.getsockname()[1]}"
                raise UserError("MASTER_ADDR", found, _REACH) from error
            rank = _caller(link, token)
            if rank is None:
                link.close()
            else:
                links[rank] = link
    return links


def _caller(link: socket.socket, token: bytes) -> int | None:
    """The rank at the other end; None if its token is wrong."""
    link.settimeout(_HELLO)
    hello = b""
    with suppress(OSError):
        while len(hello) < _TOKEN + 4 and (more := link.recv(_TOKEN + 4 - len(hello))):
            hello += more
    if not hmac.compare_digest(hello[:_TOKEN], token):
        return None
    return int.from_bytes(hello[_TOKEN:], "big")


def _call(address: str, port: int, token: bytes, rank: int) -> socket.socket:
    try:
        link = socket.create_connection((address, port), timeout=_MEET)
        link.sendall(token + rank.to_bytes(4, "big"))
    except OSError as error:
        found = f"rank {rank} does not reach rank 0 at {address}:{port} ({error})"
        raise UserError("MASTER_ADDR", found, _REACH) from error
    return link
