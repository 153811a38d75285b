"""Detects dead ranks at once, over connections that are separate from the process group.

A collective waits for a dead rank until it times out, and a rank that is training sessions is in no
collective. So every rank holds a TCP connection to rank 0, and a thread waits on it. The kernel
closes the connection however the process dies. A rank that leaves on purpose sends a goodbye first:
an end of file without one is a death. Then one rank prints which rank died, and all of them exit. A
crash would repeat, so the run ends.

Each message is one line of JSON. `left` and `failed` are goodbyes. With `end`, rank 0 ends the
others. A rank that is stopped, or lost with its node, keeps its connection but sends no `beat` any
more. It is named after SILENCE seconds, and can still go on. If it does not, the collective that
waits for it times out, and the ranks that wait end.
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
_SECONDS_TO_PRINT = 5.0  # for a reader to take what is printed last
_LONGEST_MESSAGE = 500  # characters of an error that are sent to the others

Goodbye = Literal["left", "failed"]


@dataclass(frozen=True)
class Peer:
    """A rank, as the user can find it.

    Attributes:
        rank: Its number.
        host: The name of its node.
        pid: The number of its process on that node.
    """

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


class Watch:
    """This rank's end of the connections, and the thread that waits on them.

    Args:
        rank: The number of this rank.
        peers: All ranks, in order.
        links: The connections by the rank at the other end. Rank 0 has one to every other rank,
            and the others have one to rank 0.
        kill: Ends the child processes that are still running.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        links: Mapping[int, socket.socket],
        kill: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._links = links
        self._kill = kill

        # Whether this rank has said goodbye. Then it exits by itself, even if others die.
        self._is_leaving = False

        # The other ranks that have said goodbye.
        self._said_goodbye: set[int] = set()

        # Held from when a thread begins to end the process.
        self._ending = threading.Lock()

        # Lines of two threads must not mix.
        self._sending = threading.Lock()

        # When each rank was heard last, and which of them have been named for their silence.
        self._last_heard = dict.fromkeys(links, time.monotonic())
        self._silent: set[int] = set()

        # The beginning of a line whose end has not arrived.
        self._unread = dict.fromkeys(links, b"")

        threading.Thread(target=self._wait, name="lightfed-watch", daemon=True).start()

    def goodbye(self, state: Goodbye, said: str) -> None:
        """Tell the others that this rank ends; only the first goodbye counts.

        Args:
            state: Whether it ends normally.
            said: The error, if any.
        """
        if self._is_leaving:
            return
        self._is_leaving = True
        self._send(state, said)
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)

    def lost(self, said: str) -> None:
        """End this process after a failed collective; return only if it has said goodbye.

        The others could not be torn down: that would wait once more for a rank that is stopped.
        """
        if self._is_leaving:
            return

        # The thread may end the process meanwhile, with a better reason: which rank died. The other
        # ranks give rank 0 the time to end them.
        time.sleep((1.5 if self._rank == 0 else 2.0) * GRACE)
        self._end(f"{self._peers[self._rank]}: {said}")

    def forget(self) -> None:
        """Close the connections without a goodbye."""
        for link in self._links.values():
            link.close()

    def _send(self, state: str, said: str = "") -> None:
        """Send a message to the other end of every connection."""
        message = {"state": state, "said": said[:_LONGEST_MESSAGE]}
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            for rank, link in self._links.items():
                if state == "beat" and rank in self._silent:
                    # It reads nothing. Once its buffer is full, this thread would wait for it.
                    continue
                with suppress(OSError):  # it has gone
                    link.sendall(line)

    def _wait(self) -> None:
        """Read messages and send beats until all connections are closed."""
        selector = selectors.DefaultSelector()
        for rank, link in self._links.items():
            selector.register(link, selectors.EVENT_READ, rank)

        last_beat = time.monotonic()
        while selector.get_map():
            for key, _ in selector.select(BEAT):
                is_open = self._read(key.data)
                if not is_open:
                    selector.unregister(key.fileobj)

            now = time.monotonic()
            if now - last_beat > 2 * BEAT:
                # This process was itself stopped. It has to hear of the others before it may say
                # that they are silent.
                self._last_heard = dict.fromkeys(self._last_heard, now)
            if now - last_beat >= BEAT:
                last_beat = now
                self._beat(now)
        self.forget()

    def _beat(self, now: float) -> None:
        """Say that this rank lives, and name those that have been silent for long."""
        if self._is_leaving:
            return

        self._send("beat")
        for rank, last_heard in self._last_heard.items():
            is_known = rank in self._silent or rank in self._said_goodbye
            if is_known or now - last_heard < SILENCE:
                continue
            self._silent.add(rank)
            if self._reports(rank):
                peer = self._peers[rank]
                self._say(f"{peer} has been silent for {SILENCE:g} s: the run waits for it")

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it
            print(f"lightfed: {text}", file=sys.stderr, flush=True)

    def _read(self, rank: int) -> bool:
        """Read a rank's messages; return whether its connection is still open."""
        data = b""
        with suppress(OSError):  # the connection was reset
            data = self._links[rank].recv(4096)
        self._last_heard[rank] = time.monotonic()

        if data and rank in self._silent:
            self._silent.discard(rank)
            if self._reports(rank):
                self._say(f"{self._peers[rank]} is back")

        # The end of the connection without a goodbye.
        if not data and rank not in self._said_goodbye and not self._is_leaving:
            self._end(f"{self._peers[rank]} died" if self._reports(rank) else None)

        *lines, self._unread[rank] = (self._unread[rank] + data).split(b"\n")
        for line in lines:
            self._receive(self._peers[rank], **json.loads(line))
        return bool(data)

    def _receive(self, peer: Peer, state: Goodbye | Literal["end", "beat"], said: str) -> None:
        """Act on a message of another rank."""
        if state == "beat":
            return

        if state == "end":
            if not self._is_leaving:
                self._end(None)
            return

        self._said_goodbye.add(peer.rank)
        if state == "failed":
            # All ranks may fail for the same reason, and then exit by themselves.
            reason = f"{peer} ended with an error ({said})" if self._rank == 0 else None
            timer = threading.Timer(GRACE, lambda: self._is_leaving or self._end(reason))
            timer.daemon = True
            timer.start()

    def _reports(self, rank: int) -> bool:
        """Return whether this rank tells the user about the loss of another one.

        Only rank 0 is connected to several, and it reports them. Its own loss is reported by one of
        the others: the first on another node, if there is one, because its node may be lost.
        """
        if rank > 0:
            return True
        first, *others = self._peers
        on_other_nodes = [peer for peer in others if peer.host != first.host]
        reporter = on_other_nodes[0] if on_other_nodes else others[0]
        return self._rank == reporter.rank

    def _end(self, reason: str | None) -> NoReturn:
        """End this process, whatever its other threads do.

        Args:
            reason: What to tell the user; None if another rank does.
        """
        if not self._ending.acquire(blocking=False):
            # Another thread is ending the process.
            threading.Event().wait()

        # Printing can block, if nobody reads.
        timer = threading.Timer(_SECONDS_TO_PRINT, os._exit, (1,))
        timer.daemon = True
        timer.start()

        if self._rank == 0:
            self._send("end")
        if reason is not None:
            print(
                f"lightfed: error: {reason}; the run ends, "
                "and --ckpt_path last continues from its last checkpoint",
                file=sys.stderr,
            )
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self._kill()
        os._exit(1)


# The watch of this process, from when the ranks meet until they leave.
_current: Watch | None = None


def start(
    ranks: Any,
    address: str,
    interface: str,
    kill: Callable[[], None],
) -> None:
    """Watch the ranks from now until they leave; all ranks call it together.

    A single rank is not watched. If the ranks are watched since an earlier run, nothing changes.

    Args:
        ranks: The ranks, as `collectives.Ranks`.
        address: The address by which the others reach rank 0.
        interface: The address on which rank 0 listens.
        kill: Ends the child processes that are still running.

    Raises:
        UserError: A rank cannot reach rank 0.
    """
    global _current
    if ranks.world == 1 or _current is not None:
        return

    links = connect(ranks, address, interface)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    peers = ranks.gather([Peer(ranks.rank, host, os.getpid())])
    _current = Watch(ranks.rank, peers, links, kill)


def leave() -> None:
    """Tell the other ranks that this one ends normally."""
    _goodbye("left")


def fail(error: BaseException) -> None:
    """Tell the other ranks that this one ends with an error.

    They are ended, too, unless they exit by themselves within GRACE seconds. A run that a signal
    has stopped ends normally: all ranks have saved their state.
    """
    if isinstance(error, Interrupted):
        leave()
        return

    refused = of_users_code(error)
    if refused is None and isinstance(error, UserError):
        refused = error
    text = str(refused) if refused is not None else f"{type(error).__name__}: {error}"
    _goodbye("failed", _one_line(text))


def lost(what: str, error: Exception) -> None:
    """End this process after a failed collective, if the ranks are watched; see `Watch.lost`.

    Args:
        what: The name of the collective.
        error: Its error.
    """
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
    """Drop the watch in a forked child, which must hold no connections and send no goodbyes."""
    global _current
    if _current is not None:
        _current.forget()
        _current = None


os.register_at_fork(after_in_child=_forget)
