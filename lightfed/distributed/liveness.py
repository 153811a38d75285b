"""The watch of this process (`watch.py`): from when the ranks meet until they leave."""

import os
import socket
from collections.abc import Callable

from lightfed.distributed.connections import Group, connect
from lightfed.distributed.peers import Peer, State
from lightfed.distributed.watch import Watch
from lightfed.utils.errors import Interrupted, UserError, of_users_code

_current: Watch | None = None


def start(
    ranks: Group,
    address: str,
    interface: str,
    kill: Callable[[], None],
    node_lost: Callable[[], str],
) -> None:
    """Watch the ranks from now until they leave; all ranks call this together.

    A single rank is not watched. `address` is that of rank 0 for the others, `interface` that on
    which it listens. `kill` ends the child processes that are still running. `node_lost` arranges
    for the run to continue without a lost node and returns a clause that says so, or ""; the rank
    that prints calls it. If an earlier run already watches the ranks, it is replaced. A
    UserError if a rank cannot reach rank 0.
    """
    global _current
    if _current is not None:
        _current.node_lost = node_lost
    if ranks.world == 1 or _current is not None:
        return
    links = connect(ranks, address, interface)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    peers = ranks.gather([Peer(ranks.rank, host, os.getpid())])
    _current = Watch(ranks.rank, peers, links, kill, node_lost)


def spread_signal() -> None:
    """Forward a signal that asks this rank to stop to the other ranks."""
    if _current is not None:
        _current.spread_signal()


def signalled() -> bool:
    """Whether this rank knows of a signal that asks any rank to stop."""
    return _current is not None and _current.signal


def forget_signal() -> None:
    """Clear a past signal that all ranks already know about."""
    if _current is not None:
        _current.signal = False


def leave() -> None:
    """Announce that this rank ends normally."""
    _goodbye("left")


def fail(error: BaseException) -> None:
    """Announce that this rank ends with an error, or after all ranks have saved their state.

    The others are ended too, unless they exit by themselves within GRACE seconds.
    """
    if isinstance(error, Interrupted):
        leave()
        return
    error = of_users_code(error) or error
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    _goodbye("failed", _one_line(f"{kind}{error}"))


def lost(what: str, error: Exception) -> None:
    """End this process after a failed collective if the ranks are watched; see Watch.lost."""
    if _current is not None:
        _current.lost(what, _one_line(str(error)))


def _goodbye(state: State, said: str = "") -> None:
    global _current
    if _current is not None:
        _current.goodbye(state, said)
        _current = None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _forget() -> None:
    """Drop the watch in a forked child, which must neither hold connections nor send goodbyes."""
    global _current
    if _current is not None:
        _current.forget()
        _current = None


os.register_at_fork(after_in_child=_forget)
