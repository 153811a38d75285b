"""A rank whose link to another one gives an error instead of an answer, without torch.

`python -m tests.distributed.no_answer RANK PEER NODES ERRNO OUTCOME`; an `OUTCOME`
of "!" is an exception.
"""

import os
import socket
import sys
import threading
import time

from typing_extensions import override

from lightfed.distributed.watch import Peer, Watch


class Silent(socket.socket):
    """The kernel's last word on a connection."""

    error: int

    @override
    def recv(self, size: int, flags: int = 0) -> bytes:
        raise OSError(self.error, os.strerror(self.error))


def main() -> None:
    rank, peer, error = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    nodes, outcome = sys.argv[3], sys.argv[5]
    time.sleep = lambda seconds: print("waits", flush=True)  # type: ignore[assignment]
    ours, theirs = socket.socketpair()
    link = Silent(fileno=ours.detach())
    link.error = error
    theirs.sendall(b"x")  # there is something to read

    def node_lost() -> str:
        os.write(1, b"asked\n")
        if outcome == "!":
            raise ValueError(outcome)
        return outcome

    peers = [Peer(number, node, 100 + number) for number, node in enumerate(nodes)]
    Watch(rank, peers, {peer: link}, lambda: os.write(1, b"kills\n"), node_lost)  # type: ignore[arg-type]
    threading.Event().wait()


if __name__ == "__main__":
    main()
