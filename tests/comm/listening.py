"""Runs of one and two ranks, and which ports their processes listen on.

`python -m tests.comm.listening FOLDER` writes what every rank has seen of itself at every round,
and whatever Python has bound, however shortly.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.testing.digest import fit
from lightfed.testing.ranks import start_job, wait
from tests.conformance.cases import CASES

LISTEN = "0A"  # of /proc/net/tcp


def listening() -> list[str]:
    """Addresses, as /proc writes them, of the sockets of this process that listen."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except FileNotFoundError:  # of the listing itself
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN and f"socket:[{words[9]}]" in own:
                found.append(words[1].split(":")[0])
    return found


class Look(Callback):
    """Looks before the first session, and after every round."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    @override
    def on_train_start(self, *_: Any) -> None:
        self.seen.append(listening())

    @override
    def on_train_epoch_end(self, *_: Any) -> None:
        self.seen.append(listening())


def main() -> None:
    folder = Path(sys.argv[1])
    for ranks in (1, 2):

        def work(rank: int, ranks: int = ranks) -> None:
            look, bound, real = Look(), [], socket.socket.listen

            def listen(self: socket.socket, *rest: int) -> None:
                bound.append(self.getsockname()[0])
                real(self, *rest)

            socket.socket.listen = listen  # type: ignore[method-assign, assignment]
            fit(CASES["fedavg"], folder / str(ranks), ranks=ranks, callbacks=[look])
            report = {"seen": look.seen, "bound": bound}
            (folder / f"{ranks}-{rank}.json").write_text(json.dumps(report))

        assert wait(start_job(ranks, work))


if __name__ == "__main__":
    main()
