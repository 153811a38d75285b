"""Detects dead ranks at once, over connections that are separate from the process group.

A collective waits for a dead rank until it times out, and a rank that is training sessions is in no
collective. So every rank holds a TCP connection to rank 0, and a thread waits on it. The kernel
closes the connection however the process dies. A rank that leaves on purpose sends a goodbye first:
an end of file without one is a death. Then one rank prints which rank died, and all of them exit. A
crash would repeat, so the run ends.

Each message is one line of JSON. `left` and `failed` are goodbyes. By `end` rank 0 ends the others.
A rank that is stopped or lost with its node keeps its connection, but sends no `beat` any more: it
is named after SILENCE seconds. It may go on. If it does not, the collective that waits for it times
out, and the ranks that wait end.
"""

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from lightfed.distributed.connections import connect
from lightfed.utils.errors import Interrupted, UserError, of_users_code

GRACE = 5.0  # seconds for ranks to exit by themselves
BEAT = 5.0  # seconds between two signs of life of a rank
SILENCE = 45.0  # seconds without one, after which a rank is named
_FLUSH = 5.0  # seconds for printed output to be read
_LONGEST = 500  # characters of an error message to forward
_ENDS = "the run ends, and --ckpt_path last continues from its last checkpoint"


Goodbye = Literal["left", "failed"]


@dataclass(frozen=True)
class Peer:
    """A rank."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


class Watch:
    """This rank's end of the connections, and the thread that waits on them.

    `peers` are all ranks in order, `links` connections by the rank at the other end: on rank 0 to
    all others, else to rank 0. `kill` is as in `start`.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        links: Mapping[int, socket.socket],
        kill: Callable[[], None],
    ) -> None:
        self._rank, self._peers, self._links, self._kill = rank, peers, links, kill
        self._gone = False  # this rank has said goodbye: it exits by itself, even if others die
        self._said_goodbye: set[int] = set()  # other ranks
        self._ending = threading.Lock()
        self._sending = threading.Lock()  # lines of two threads must not mix
        self._heard = dict.fromkeys(links, time.monotonic())
        self._silent: set[int] = set()  # ranks that have been named
        self._unread = dict.fromkeys(links, b"")
        threading.Thread(target=self._wait, name="lightfed-watch", daemon=True).start()

    def goodbye(self, state: Goodbye, said: str) -> None:
        """Inform the others before this rank ends; only the first goodbye counts."""
        if not self._gone:
            self._gone = True
            self._send(state, said)
            for link in self._links.values():
                with suppress(OSError):
                    link.shutdown(socket.SHUT_WR)

    def lost(self, said: str) -> None:
        """End this process after a failed collective; returns only after a goodbye.

        The thread may end it before, with a better reason. The ranks' teardown would wait for a
        stopped one once more.
        """
        if not self._gone:
            time.sleep((2.0 if self._rank else 1.5) * GRACE)
            self._end(f"{self._peers[self._rank]}: {said}")

    def forget(self) -> None:
        """Close the connections without a goodbye."""
        for link in self._links.values():
            link.close()

    def _send(self, state: str, said: str = "") -> None:
        line = json.dumps({"state": state, "said": said[:_LONGEST]}).encode() + b"\n"
        with self._sending:
            for rank, link in self._links.items():
                if state == "beat" and rank in self._silent:
                    continue  # it reads nothing: the line would wait for room
                with suppress(OSError):  # of one that has gone
                    link.sendall(line)

    def _wait(self) -> None:
        selector = selectors.DefaultSelector()
        for rank, link in self._links.items():
            selector.register(link, selectors.EVENT_READ, rank)
        beaten = time.monotonic()
        while selector.get_map():
            for key, _ in selector.select(BEAT):
                if not self._read(key.data):
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            # A process that was itself stopped hears of the others first.
            late = now - beaten > 2 * BEAT
            if late:
                self._heard = dict.fromkeys(self._heard, now)
            if now - beaten >= BEAT or late:
                beaten = now
                self._beat(now)
        self.forget()

    def _beat(self, now: float) -> None:
        """Say that this rank lives, and name those that have been silent for long."""
        if self._gone:
            return
        self._send("beat")
        for rank, heard in self._heard.items():
            if now - heard < SILENCE or rank in self._silent or rank in self._said_goodbye:
                continue
            self._silent.add(rank)
            if rank > 0 or self._reports_rank_0():
                self._say(f"{self._peers[rank]} is silent for {SILENCE:g} s: the run waits for it")

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it
            print(f"lightfed: {text}", file=sys.stderr, flush=True)

    def _read(self, rank: int) -> bool:
        """Read a peer's messages; False at the end of the file."""
        data = b""
        with suppress(OSError):  # a reset
            data = self._links[rank].recv(4096)
        self._heard[rank] = time.monotonic()
        if data and rank in self._silent:
            self._silent.discard(rank)
            if rank > 0 or self._reports_rank_0():
                self._say(f"{self._peers[rank]} is back")
        if not data and rank not in self._said_goodbye and not self._gone:
            reports = rank > 0 or self._reports_rank_0()
            self._end(f"{self._peers[rank]} died" if reports else None)
        *lines, self._unread[rank] = (self._unread[rank] + data).split(b"\n")
        for line in lines:
            self._receive(self._peers[rank], **json.loads(line))
        return bool(data)

    def _receive(self, peer: Peer, state: Goodbye | Literal["end", "beat"], said: str) -> None:
        if state == "beat":
            return
        if state == "end":
            if not self._gone:
                self._end(None)
        else:
            self._said_goodbye.add(peer.rank)
            if state == "failed":
                reason = None if self._rank else f"{peer} ended with an error ({said})"
                late = threading.Timer(GRACE, lambda: self._gone or self._end(reason))
                late.daemon = True
                late.start()

    def _reports_rank_0(self) -> bool:
        """Whether this rank reports the loss of rank 0: the first one on another node, if any."""
        first, *others = self._peers
        elsewhere = [peer for peer in others if peer.host != first.host]
        return self._rank == (elsewhere or others)[0].rank

    def _end(self, reason: str | None) -> NoReturn:
        """End this process, regardless of its other threads; some ranks have nothing to say."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is ending the process
        late = threading.Timer(_FLUSH, os._exit, (1,))  # printing may block
        late.daemon = True
        late.start()
        if self._rank == 0:
            self._send("end")
        if reason is not None:
            print(f"lightfed: error: {reason}; {_ENDS}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self._kill()
        os._exit(1)


_current: Watch | None = None  # of this process, from when the ranks meet until they leave


def start(
    ranks: Any,
    address: str,
    interface: str,
    kill: Callable[[], None],
) -> None:
    """Watch the ranks from now until they leave; all ranks call this together.

    A single rank is not watched. `address` is that of rank 0 for the others, `interface` that on
    which it listens. `kill` ends the child processes that are still running. If an earlier run
    already watches the ranks, nothing changes. A UserError if a rank cannot reach rank 0.
    """
    global _current
    if ranks.world == 1 or _current is not None:
        return
    links = connect(ranks, address, interface)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    peers = ranks.gather([Peer(ranks.rank, host, os.getpid())])
    _current = Watch(ranks.rank, peers, links, kill)


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
        _current.lost(_one_line(f"{what} failed ({error})"))


def _goodbye(state: Goodbye, said: str = "") -> None:
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
