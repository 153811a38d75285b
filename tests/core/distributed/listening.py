"""Runs of one and two ranks in a network of their own, and where they listen.

`main` writes which addresses are listened on at every
round, and whatever Python has bound, however shortly. Or it writes `impossible`: why there is no
such network.
"""

import ctypes
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from typing_extensions import override

from lightfed.testing.digest import fit
from lightfed.testing.ranks import start_job, wait
from tests.promises.conformance.cases import CASES

NEWUSER, NEWNET = 0x10000000, 0x40000000
RUNS = {"one": (1, None), "local": (2, None), "at the host": (2, "host")}


def isolate() -> str:
    """Give this process a network in which the host has the address that it has; the address."""
    user, host = os.getuid(), socket.gethostbyname(socket.gethostname())
    if ctypes.CDLL(None, use_errno=True).unshare(NEWNET | (NEWUSER if user else 0)):
        raise OSError(ctypes.get_errno(), "no network namespace")
    if user:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    words = ["link set lo up", "link add v0 type veth peer name v1", "link set v0 up"]
    words += ["link set v1 up"] + [f"addr add {host}/24 dev v0"] * (not host.startswith("127."))
    for each in words:
        subprocess.run(["ip", *each.split()], check=True)
    return host


def listening() -> list[str]:
    """The addresses that any process of this network listens on."""
    said = subprocess.check_output(["ss", "-Hltn"], text=True)
    return [line.split()[3].rpartition(":")[0] for line in said.splitlines()]


class Look(Callback):
    """Looks before the first session, and after every round."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @override
    def on_train_start(self, *_: Any) -> None:
        self.seen += listening()

    @override
    def on_train_epoch_end(self, *_: Any) -> None:
        self.seen += listening()


def main(folder: Path) -> None:
    try:
        host = isolate()
    except (OSError, subprocess.CalledProcessError) as error:
        (folder / "impossible").write_text(str(error))
        return
    for name, (ranks, address) in RUNS.items():

        def work(rank: int, name: str = name, ranks: int = ranks, at: str | None = address) -> None:
            look, bound, real = Look(), [], socket.socket.listen
            os.environ.update({"MASTER_ADDR": host} if at else {})

            def listen(self: socket.socket, *rest: int) -> None:
                bound.append(self.getsockname()[0])
                real(self, *rest)

            socket.socket.listen = listen  # type: ignore[method-assign, assignment]
            fit(CASES["fedavg"], folder / name, ranks=ranks, callbacks=[look])
            report = {"seen": look.seen, "bound": bound, "host": host}
            (folder / f"{name}-{rank}.json").write_text(json.dumps(report))

        assert wait(start_job(ranks, work))
