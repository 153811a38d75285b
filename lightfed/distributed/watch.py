"""Detects dead ranks at once, over connections that are separate from the process group.

A collective waits for a dead rank until it times out, and a rank that is training sessions is in no
collective. So every rank holds a TCP connection to rank 0, and a thread waits on it. The kernel
closes the connection however the process dies. Keep-alive probes notice a lost node within half a
minute. A rank that leaves on purpose sends a goodbye first: an end of file without one is a death.
Then one rank prints which rank died, and all of them exit. A crash would repeat, so the run ends.
After a lost node the run may continue elsewhere: the rank that prints arranges that first.

Each message is one line of JSON. `left` and `failed` are goodbyes. `lost` means that a collective
failed; rank 0 answers with `end`. A `signal` that asks one rank to stop is forwarded to all, which
otherwise would finish all of their sessions first. A rank that is stopped keeps its connection: the
collective that waits for it times out.
"""

import errno
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NoReturn

from lightfed.distributed.peers import Peer, Peers, State

GRACE = 5.0  # seconds for ranks to exit by themselves, or to explain a failed collective
_FLUSH = 5.0  # seconds for printed output to be read
_LONGEST = 500  # characters of an error message to forward
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_ENDS = "the run ends, and --ckpt_path last continues from its last checkpoint"


class Watch:
    """This rank's end of the connections, and the thread that waits on them.

    `peers` are all ranks in order, `links` connections by the rank at the other end: on rank 0 to
    all others, else to rank 0. `kill` and `node_lost` are as in `liveness.start`.
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
        self._rank, self._links, self._kill = rank, links, kill
        self._peers = Peers(rank, peers)
        self.signal = False
        self._gone = False  # this rank has said goodbye: it exits by itself, even if others die
        self._deadline: float | None = None
        self._ending = threading.Lock()
        self._unread = dict.fromkeys(links, b"")
        threading.Thread(target=self._wait, name="lightfed-watch", daemon=True).start()

    def goodbye(self, state: State, said: str) -> None:
        """Inform the others before this rank ends; only the first goodbye counts."""
        if not self._gone:
            self._gone = True
            self._send(state, said)
            for link in self._links.values():
                with suppress(OSError):
                    link.shutdown(socket.SHUT_WR)

    def lost(self, what: str, said: str) -> None:
        """Report why a collective failed, and end this process.

        Returns only if this rank has said goodbye. `said` is torch's message.
        """
        if self._gone:
            return
        said = f"{what} failed ({said})"
        if self._rank:
            self._send("lost", said)
            time.sleep(2 * GRACE)  # rank 0 knows why, and ends this process
            reports = self._peers.reports_rank_0()
            self._end(f"{self._peers[0]} does not answer; {said}" if reports else None)
        self._receive(self._peers[0], "lost", said)
        time.sleep(GRACE)
        self._end(self._peers.reason())

    def forget(self) -> None:
        """Close the connections without a goodbye."""
        for link in self._links.values():
            link.close()

    def spread_signal(self) -> None:
        """Forward the signal that asks this rank to stop to the others; once."""
        if not self.signal:
            self.signal = True
            self._send("signal")

    def _send(self, state: str, said: str = "") -> None:
        line = json.dumps({"state": state, "said": said[:_LONGEST]}).encode() + b"\n"
        for link in self._links.values():
            with suppress(OSError):  # of one that has gone
                link.sendall(line)

    def _wait(self) -> None:
        selector = selectors.DefaultSelector()
        for rank, link in self._links.items():
            selector.register(link, selectors.EVENT_READ, rank)
        while selector.get_map() or self._deadline is not None:
            ends = None if self._deadline is None else max(0, self._deadline - time.monotonic())
            for key, _ in selector.select(ends):
                if not self._read(key.data):
                    selector.unregister(key.fileobj)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._deadline = None
                if not self._gone:
                    self._end(None if self._rank else self._peers.reason())
        self.forget()

    def _read(self, rank: int) -> bool:
        """Read a peer's messages; False at the end of the file."""
        peer = self._peers[rank]
        data, silent = b"", False
        try:
            data = self._links[rank].recv(4096)
        except OSError as error:  # a reset, or no answer to keep-alive probes
            silent = error.errno in _NO_ANSWER
        if not data and peer.state not in ("left", "failed") and not self._gone:
            self._lose(peer, silent=silent)
        *lines, self._unread[rank] = (self._unread[rank] + data).split(b"\n")
        for line in lines:
            self._receive(peer, **json.loads(line))
        return bool(data)

    def _receive(self, peer: Peer, state: State | Literal["end", "signal"], said: str) -> None:
        if state == "end":
            if not self._gone:
                self._end(None)
            return
        if state == "signal":
            if not self.signal and self._rank == 0:
                self._send("signal", said)
            self.signal = True
            return
        self._peers.receive(peer, state, said)
        if state != "left" and self._deadline is None:
            self._deadline = time.monotonic() + GRACE

    def _lose(self, peer: Peer, *, silent: bool) -> NoReturn:
        """End: a peer died without a goodbye or, if `silent`, was lost with its node."""
        reports = peer.rank > 0 or self._peers.reports_rank_0()
        if not silent:
            self._end(f"{peer} died" if reports else None)
        if not reports:
            time.sleep(2 * GRACE)  # a rank that ends may end the job before it is requeued
            self._end(None)
        self._end(f"{peer} is lost with its node (no answer)", self.node_lost)

    def _end(self, reason: str | None, go_on: Callable[[], str] = str) -> NoReturn:
        """End this process, regardless of its other threads; some ranks have nothing to say."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is ending the process
        outcome = ""
        with suppress(Exception):  # the ranks end even if requeueing fails
            outcome = go_on()
        late = threading.Timer(_FLUSH, os._exit, (1,))  # printing may block
        late.daemon = True
        late.start()
        if self._rank == 0:
            self._send("end")
        if reason is not None:
            print(f"lightfed: error: {reason}; {outcome or _ENDS}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self._kill()
        os._exit(1)
