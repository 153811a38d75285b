"""Connects every rank to rank 0, over TCP and separately from the process group."""

import hmac
import secrets
import socket
import time
from contextlib import suppress
from typing import Any

from lightfed.distributed.interface import listen
from lightfed.utils.errors import UserError

_SECONDS_TO_MEET = 60.0  # for all ranks to connect
_SECONDS_TO_GREET = 5.0  # for a caller to name its rank

# What a caller sends first: the token of the run, and its rank.
TOKEN_BYTES = 16
RANK_BYTES = 4

_FIX = "name an address that all nodes reach, with its ports open between them"


def connect(ranks: Any, address: str, interface: str) -> dict[int, socket.socket]:
    """Connect every rank to rank 0; all ranks call it together.

    Args:
        ranks: The ranks, as `collectives.Ranks`.
        address: The address by which the others reach rank 0.
        interface: The address on which rank 0 listens.

    Returns:
        The connections by the rank at the other end. Rank 0 has one to every other rank, and the
        others have one to rank 0.

    Raises:
        UserError: A rank cannot reach rank 0.
    """
    listener = None
    port = 0
    if ranks.rank == 0:
        listener = listen(interface, backlog=ranks.world)
        port = listener.getsockname()[1]

    # The token tells the ranks of this run from anything else that finds the port.
    token, port = ranks.broadcast((secrets.token_bytes(TOKEN_BYTES), port))
    if listener is not None:
        links = _accept(listener, ranks.world, token)
    else:
        links = {0: _call(address, port, token, ranks.rank)}

    for link in links.values():
        link.settimeout(None)
    return links


def _accept(listener: socket.socket, world: int, token: bytes) -> dict[int, socket.socket]:
    """Return the connections of all other ranks; callers without the token are rejected."""
    links: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _SECONDS_TO_MEET
    with listener:
        while len(links) < world - 1:
            # A timeout of 0 would mean not to wait at all, and raise another error.
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                link, _ = listener.accept()
            except TimeoutError as error:
                missing = sorted(set(range(1, world)) - set(links))
                port = listener.getsockname()[1]
                found = f"ranks {missing} do not reach rank 0 at port {port}"
                raise UserError("MASTER_ADDR", found, _FIX) from error

            rank = rank_of_caller(link, token)
            if rank is None:
                link.close()
            else:
                links[rank] = link
    return links


def rank_of_caller(link: socket.socket, token: bytes) -> int | None:
    """Return the rank at the other end of a connection; None if its token is wrong."""
    link.settimeout(_SECONDS_TO_GREET)
    greeting = b""
    missing = TOKEN_BYTES + RANK_BYTES
    with suppress(OSError):
        while missing > 0:
            received = link.recv(missing)
            if not received:
                break
            greeting += received
            missing -= len(received)

    if not hmac.compare_digest(greeting[:TOKEN_BYTES], token):
        return None
    return int.from_bytes(greeting[TOKEN_BYTES:], "big")


def _call(address: str, port: int, token: bytes, rank: int) -> socket.socket:
    try:
        link = socket.create_connection((address, port), timeout=_SECONDS_TO_MEET)
        link.sendall(token + rank.to_bytes(RANK_BYTES, "big"))
    except OSError as error:
        found = f"rank {rank} does not reach rank 0 at {address}:{port} ({error})"
        raise UserError("MASTER_ADDR", found, _FIX) from error
    return link
