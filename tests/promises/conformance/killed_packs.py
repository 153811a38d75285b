"""Packs of fixed size on several numbers of ranks, also killed within a pack and resumed."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightfed.algorithms.heterofl import HeteroFL
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Dirichlet
from lightfed.local.pack_session import PackResult
from lightfed.models.networks.cnn import Conv
from lightfed.testing.case import Case, ReadDigits, read_digits
from lightfed.testing.digest import fit
from lightfed.testing.ranks import start_job, wait
from tests.promises.conformance import killer

CLIENTS, ROUNDS = 100, 2
SIZES = (3, 32)


def data() -> FederatedDataModule:
    """About 14 samples a client, of sizes that differ; the last batches are small."""
    return FederatedDataModule(
        ReadDigits(), Dirichlet(alpha=1.0), batch_size=8, eval_batch_size=100, last_batch="join"
    )


CASE = Case(
    HeteroFL, partial(Conv, hidden=(8, 12)), "ade", data=data, clients=CLIENTS,
    federation={"fraction": 1.0, "evaluate": ("personal",)},
)  # fmt: skip


def whole(case: Case, folder: Path, ranks: int) -> dict[str, str]:
    """The digest of a run that is started, or resumed, and comes to its end."""
    folder.mkdir(exist_ok=True)
    assert wait(killer.start(case, folder, ranks, rounds=ROUNDS))
    return dict(json.loads((folder / "digest.json").read_text()))


def at_every_step(act: Callable[[int], None]) -> None:
    """Call a function with the number of this rank's steps of packs, at each of them."""
    note, steps = PackResult.note, 0

    def counting(self: PackResult, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        act(steps)
        return note(self, *args)

    PackResult.note = counting  # type: ignore[method-assign,assignment]


def steps_of_a_round(case: Case, folder: Path, ranks: int) -> int:
    """Steps of packs in the first round of the rank that has the fewest."""
    folder.mkdir()

    def work(rank: int) -> None:
        at_every_step(lambda steps: (folder / f"{rank}.txt").write_text(str(steps)) and None)
        fit(case, folder, rounds=1, ranks=ranks)

    assert wait(start_job(ranks, work))
    return min(int(file.read_text()) for file in folder.glob("*.txt"))


def killed(case: Case, folder: Path, ranks: int, later: int) -> dict[str, str]:
    """The digest of a run that is killed in its second round and resumed on other ranks."""
    folder.mkdir()
    steps = steps_of_a_round(case, folder / "count", ranks)

    def die(step: int) -> None:
        if step == steps + max(1, steps // 2):
            os.killpg(0, signal.SIGKILL)  # no signal that it could handle

    assert not wait(killer.start(case, folder, ranks, lambda: at_every_step(die), ROUNDS))
    return whole(case, folder, later)


def main(folder: Path) -> None:
    """Write the digests of all runs, by the size of packs."""
    for split in ("train", "test"):
        read_digits(split)
    found: dict[int, dict[str, dict[str, str]]] = {}
    for size in SIZES:
        case = replace(CASE, federation=CASE.federation | {"side_by_side": size})
        place = folder / str(size)
        place.mkdir()
        found[size] = {f"{n} ranks": whole(case, place / str(n), n) for n in (1, 2, 4)}
        for ranks, later in ((2, 1), (1, 4)):
            name = f"killed on {ranks}, resumed on {later}"
            found[size][name] = killed(case, place / name, ranks, later)
    (folder / "digests.json").write_text(json.dumps(found))
