"""Connections beside the process group, by which ranks learn at once that one of them has died.

A collective waits for a dead rank until it times out, and a rank amid its sessions is in none. So
every rank holds a TCP connection to rank 0, on which a thread waits. The kernel closes it when a
process dies, however it dies, and keep-alive probes notice a node that is gone within half a
minute. Who leaves on purpose says so first: an end of file without a goodbye is a death. Then one
rank says in one line which, and all of them end. A death would come again, and so the run is over;
after a lost node it may go on elsewhere, and that rank sees to it before they end.

Over a connection goes one JSON object a line: `left` and `failed` are goodbyes, `late` and `lost`
say that a collective timed out or broke, and rank 0 answers with `end`. A `signal` that asks one
rank to stop goes to all of them, which else would first finish all of their sessions.
"""

import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

from lightfed.distributed.interface import listen
from lightfed.utils.errors import Interrupted, UserError

GRACE = 5.0  # seconds for what ends by itself, or explains a broken collective, to do so
_MEET = 60.0  # seconds for all connections to come about
_FLUSH = 5.0  # seconds for what is printed to find a reader
_LONGEST = 500  # characters of an error that are passed on
_TOKEN = 16  # bytes
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,  # 30 s in all
    "TCP_USER_TIMEOUT": 30_000,  # ms: there are no probes while something sent is not acknowledged
}
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_ENDS = "the run ends, and --ckpt_path last goes on from its last checkpoint"

State = Literal["running", "left", "failed", "late", "lost"]


class Group(Protocol):
    """The ranks of a run, as far as they are needed to connect them."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def broadcast(self, obj: Any) -> Any: ...
    def gather(self, objects: list[Any]) -> list[Any]: ...


@dataclass
class Peer:
    """A rank, and what is known of it.

    Attributes:
        said: the error it `failed` with, what others were too `late` for, or how it was `lost`.
    """

    rank: int
    host: str
    pid: int
    state: State = "running"
    said: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


class Watch:
    """This rank's end of the connections, and the thread that waits on them.

    Args:
        rank: this one.
        peers: all ranks, in order.
        links: connections, by the rank at the other end: to all others on rank 0, else to rank 0.
        kill: ends processes that this one has started, as far as they are still there.
        node_lost: sees to it that the run goes on without a lost node, and says what becomes of it;
            "" where nothing does.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        links: Mapping[int, socket.socket],
        kill: Callable[[], None],
        node_lost: Callable[[], str],
    ) -> None:
        self.node_lost = node_lost
        self._rank, self._peers, self._links, self._kill = rank, peers, links, kill
        self.signal = False
        self._gone = False  # this rank has said goodbye: it ends by itself, whoever dies now
        self._order: list[Peer] = []  # as they were heard of
        self._deadline: float | None = None
        self._ending = threading.Lock()
        self._heard = dict.fromkeys(links, b"")
        threading.Thread(target=self._wait, name="lightfed-watch", daemon=True).start()

    def goodbye(self, state: State, said: str) -> None:
        """What the others need to know before this rank ends; only the first one counts."""
        if not self._gone:
            self._gone = True
            self._tell(state, said)
            for link in self._links.values():
                with suppress(OSError):
                    link.shutdown(socket.SHUT_WR)

    def lost(self, what: str, said: str, missing: Sequence[int]) -> None:
        """A collective broke: say which rank is why, and end this process.

        Returns only where this rank has said goodbye.

        Args:
            what: the ranks did together.
            said: by torch.
            missing: ranks that are known not to have come.
        """
        if self._gone:
            return
        late = bool(missing) or "timed out" in said.lower()
        state: State = "late" if late else "lost"
        said = what if late else f"{what} failed ({said})"
        if self._rank:
            self._tell(state, said)
            time.sleep(2 * GRACE)  # rank 0 knows why, and ends this process
            self._end(self._of_rank_0(what))
        for peer in self._peers:
            if missing and peer.rank not in missing and peer.state == "running":
                peer.state = "late"
        self._hear(self._peers[0], state, said)
        time.sleep(GRACE)
        self._end(self._reason())

    def forget(self) -> None:
        """Let go of the connections, without a word to the other end."""
        for link in self._links.values():
            link.close()

    def spread_signal(self) -> None:
        """Tell the others that a signal asks this rank to stop; once."""
        if not self.signal:
            self.signal = True
            self._tell("signal")

    def _tell(self, state: str, said: str = "") -> None:
        line = json.dumps({"state": state, "said": said[:_LONGEST]}).encode() + b"\n"
        for link in self._links.values():
            with suppress(OSError):  # of one that has gone
                link.sendall(line)

    # The thread.

    def _wait(self) -> None:
        selector = selectors.DefaultSelector()
        for rank, link in self._links.items():
            selector.register(link, selectors.EVENT_READ, rank)
        while selector.get_map() or self._deadline is not None:
            left = None if self._deadline is None else max(0, self._deadline - time.monotonic())
            for key, _ in selector.select(left):
                if not self._read(key.data):
                    selector.unregister(key.fileobj)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._deadline = None
                if not self._gone:
                    self._end(None if self._rank else self._reason())
        self.forget()

    def _read(self, rank: int) -> bool:
        """Take in what a peer says; False at the end of the file."""
        peer = self._peers[rank]
        data, silent = b"", False
        try:
            data = self._links[rank].recv(4096)
        except OSError as error:  # a reset, or no answer to keep-alive probes
            silent = error.errno in _NO_ANSWER
        if not data and peer.state not in ("left", "failed") and not self._gone:
            self._lose(peer, silent=silent)
        *lines, self._heard[rank] = (self._heard[rank] + data).split(b"\n")
        for line in lines:
            self._hear(peer, **json.loads(line))
        return bool(data)

    def _hear(self, peer: Peer, state: State | Literal["end", "signal"], said: str) -> None:
        if state == "end":
            if not self._gone:
                self._end(None)
            return
        if state == "signal":
            if not self.signal and self._rank == 0:
                self._tell("signal", said)
            self.signal = True
            return
        peer.state, peer.said = state, said
        self._order.append(peer)
        if state != "left" and self._deadline is None:
            self._deadline = time.monotonic() + GRACE

    def _lose(self, peer: Peer, *, silent: bool) -> NoReturn:
        """End: a peer is gone without a goodbye, or `silent`, with its node."""
        speaks = peer.rank > 0 or self._speaks()
        if not silent:
            self._end(f"{peer} died" if speaks else None)
        if not speaks:
            time.sleep(2 * GRACE)  # a rank that ends may end the job before it is requeued
            self._end(None)
        self._end(f"{peer} is gone with its node (no answer)", self.node_lost)

    # Words.

    def _speaks(self) -> bool:
        """Whether this rank is the one to tell of rank 0: the first on another node, if any is."""
        others = self._peers[1:]
        elsewhere = [peer for peer in others if peer.host != self._peers[0].host]
        return self._rank == (elsewhere or others)[0].rank

    def _reason(self) -> str:
        """Rank 0's account of a run that cannot go on."""
        failed = [peer for peer in self._order if peer.state == "failed"]
        if failed:
            return f"{failed[0]} ended with an error ({failed[0].said})"
        if left := [peer for peer in self._peers if peer.state == "left"]:
            return f"{_names(left)} ended before the others"
        late = [peer for peer in self._order if peer.state == "late"]
        silent = [peer for peer in self._peers if peer.state == "running"]
        if late:
            who = f"{_names(silent)} did" if silent else "ranks waited for each other, and did"
            return f"{who} not come to {late[0].said}"
        return f"{self._order[0]}: {self._order[0].said}"

    def _of_rank_0(self, what: str) -> str | None:
        if not self._speaks():
            return None
        ended = self._peers[0].state != "running"
        return f"{self._peers[0]} " + (
            "ended before the others" if ended else f"did not come to {what}"
        )

    def _end(self, reason: str | None, go_on: Callable[[], str] = str) -> NoReturn:
        """End this process, whatever its other threads are in the midst of.

        Args:
            reason: to be told; None on ranks that are silent.
            go_on: see `node_lost`.
        """
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is at it
        outcome = ""
        with suppress(Exception):  # the ranks end, whatever goes wrong with what comes after
            outcome = go_on()
        late = threading.Timer(_FLUSH, os._exit, (1,))  # printing may wait for a reader
        late.daemon = True
        late.start()
        if self._rank == 0:
            self._tell("end")
        if reason is not None:
            print(f"lightfed: error: {reason}; {outcome or _ENDS}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self._kill()
        os._exit(1)


def _names(peers: Sequence[Peer]) -> str:
    return ", ".join(map(str, peers))


# The watch of this process.

_current: Watch | None = None


def start(
    ranks: Group,
    address: str,
    interface: str,
    kill: Callable[[], None],
    node_lost: Callable[[], str],
) -> None:
    """Watch over the ranks, from now until they leave; all ranks call this together.

    Args:
        ranks: of a process group; nothing happens to a single one.
        address: at which rank 0 is reached.
        interface: of its node that it listens on.
        kill: ends processes that this one has started, as far as they are still there.
        node_lost: sees to it that the run goes on without a lost node, and says what becomes of it,
            or "": called by the rank that speaks. Where ranks are watched already, by an earlier
            run of theirs, this one counts from now on.

    Raises:
        UserError: a rank does not reach rank 0.
    """
    global _current
    if _current is not None:
        _current.node_lost = node_lost
    if ranks.world == 1 or _current is not None:
        return
    listener = listen(interface, backlog=ranks.world) if ranks.rank == 0 else None
    port = listener.getsockname()[1] if listener else 0
    token, port = ranks.broadcast((secrets.token_bytes(_TOKEN), port))
    if listener:
        links = _accept(listener, ranks.world, token)
    else:
        links = {0: _connect(address, port, token, ranks.rank)}
    for link in links.values():
        _probe(link)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    peers = ranks.gather([Peer(ranks.rank, host, os.getpid())])
    _current = Watch(ranks.rank, peers, links, kill, node_lost)


def spread_signal() -> None:
    """Tell the other ranks that a signal asks this one to stop."""
    if _current is not None:
        _current.spread_signal()


def signalled() -> bool:
    """Whether a signal asks a rank to stop, as far as is known here."""
    return _current is not None and _current.signal


def forget_signal() -> None:
    """One of the past, which all ranks have come to know of by other ways."""
    if _current is not None:
        _current.signal = False


def leave() -> None:
    """Say that this rank ends as it should."""
    _goodbye("left")


def fail(error: BaseException) -> None:
    """Say that this rank ends with an error, or with a state that all ranks have saved.

    The others end too, unless they do so by themselves within the seconds of GRACE.
    """
    if isinstance(error, Interrupted):
        leave()
        return
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    _goodbye("failed", _one_line(f"{kind}{error}"))


def lost(what: str, error: Exception, missing: Sequence[int]) -> None:
    """End this process after a broken collective, where the ranks are watched; see Watch.lost."""
    if _current is not None:
        _current.lost(what, _one_line(str(error)), missing)


def _goodbye(state: State, said: str = "") -> None:
    global _current
    if _current is not None:
        _current.goodbye(state, said)
        _current = None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _forget() -> None:
    """In a forked child, which must not hold the connections, nor speak for the rank."""
    global _current
    if _current is not None:
        _current.forget()
        _current = None


os.register_at_fork(after_in_child=_forget)


# Connections.


def _probe(link: socket.socket) -> None:
    """Wait for the other end without limit, but not for one whose node is gone."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _accept(listener: socket.socket, world: int, token: bytes) -> dict[int, socket.socket]:
    """The connections of all others; whoever does not know the token is turned away."""
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
    """The rank at the other end; None for a stranger."""
    link.settimeout(GRACE)
    hello = b""
    with suppress(OSError):
        while len(hello) < _TOKEN + 4 and (more := link.recv(_TOKEN + 4 - len(hello))):
            hello += more
    if not hmac.compare_digest(hello[:_TOKEN], token):
        return None
    return int.from_bytes(hello[_TOKEN:], "big")


def _connect(address: str, port: int, token: bytes, rank: int) -> socket.socket:
    try:
        link = socket.create_connection((address, port), timeout=_MEET)
        link.sendall(token + rank.to_bytes(4, "big"))
    except OSError as error:
        found = f"rank {rank} does not reach rank 0 at {address}:{port} ({error})"
        raise UserError("MASTER_ADDR", found, _REACH) from error
    return link


_REACH = "name an address that all nodes reach, with its ports open between them"
