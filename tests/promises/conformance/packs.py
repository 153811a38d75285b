"""A table of bits: packs of fixed size on several numbers of ranks, and a kill within a pack.

    python -m tests.promises.conformance.packs [--out FILE]

A federation of 100 clients for each case. The exit status is 1 if bits differ.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.optim import SGD, Adam

from lightfed.algorithms.dispfl import DisPFL
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd import FedBCD
from lightfed.algorithms.heterofl import HeteroFL
from lightfed.algorithms.pfedmoe import PFedMoE
from lightfed.algorithms.shared.aspg import ASPG
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Dirichlet
from lightfed.local.pack_session import PackResult
from lightfed.models.networks.cnn import Conv
from lightfed.models.networks.mlp import MLP
from lightfed.testing.case import Case, ReadDigits, read_digits
from lightfed.testing.digest import digest, fit
from lightfed.testing.ranks import start_job, wait
from lightfed.topology.topology import Ring

CLIENTS, ROUNDS = 100, 2
SIZES: tuple[int | str, ...] = ("off", 3, 32)
RANKS = (1, 2, 4)
Work = Callable[[], None]


def data() -> FederatedDataModule:
    """About 14 samples a client, of sizes that differ; the last batches are small."""
    return FederatedDataModule(
        ReadDigits(), Dirichlet(alpha=1.0), batch_size=8, eval_batch_size=100, last_batch="join"
    )


def case(algorithm: Callable[[], object], **more: object) -> Case:
    federation = {"optimizer": partial(SGD, lr=0.05), "fraction": 1.0, "evaluate": ("personal",)}
    settings = {"data": data, "clients": CLIENTS, "model": mlp} | more
    federation |= settings.pop("federation", {})  # type: ignore[arg-type]
    return Case(algorithm, federation=federation, **settings)  # type: ignore[arg-type]


mlp = partial(MLP, hidden=(24,))
CASES = {
    "fedavg, mlp, adam": case(
        FedAvg, federation={"optimizer": partial(Adam, lr=0.01), "evaluate": ("global", "trained")}
    ),
    "heterofl, conv, bn, one channel": case(
        HeteroFL, model=partial(Conv, hidden=(8, 12)), levels="ade",
        federation={"optimizer": partial(SGD, lr=0.05, momentum=0.9)},
    ),
    "dispfl, mlp": case(partial(DisPFL, Ring(), density=0.5, rounds=ROUNDS)),
    "fedbcd, mlp": case(
        partial(FedBCD, 4, CLIENTS // 4, gamma=0.1, steps=(1, 3)),
        federation={"optimizer": partial(ASPG, lr=0.05)},
    ),
    "pfedmoe, mlp": case(partial(PFedMoE, mlp, gate_units=8)),
}  # fmt: skip


def start(given: Case, folder: Path, ranks: int, before: Work = lambda: None) -> int:
    """Start, or resume, a job whose rank 0 leaves its digest in the folder; its process group."""

    def work(rank: int) -> None:
        before()
        found = digest(*fit(given, folder, rounds=ROUNDS, ckpt_path="last", ranks=ranks))
        if rank == 0:
            (folder / "digest.json").write_text(json.dumps(found))

    return start_job(ranks, work)


def digest_of(given: Case, folder: Path, ranks: int) -> dict[str, str] | None:
    """Of a whole run; None if it failed."""
    folder.mkdir(exist_ok=True)
    ended = wait(start(given, folder, ranks))
    return json.loads((folder / "digest.json").read_text()) if ended else None


def die_within_a_pack(step: int) -> None:
    """Kill the job, without a signal that it could handle, at a step of this rank's packs."""
    note, steps = PackResult.note, 0

    def killing(self: PackResult, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == step:
            os.killpg(0, signal.SIGKILL)
        return note(self, *args)

    PackResult.note = killing  # type: ignore[method-assign,assignment]


def killed(
    given: Case, folder: Path, size: int | str, ranks: int, later: int
) -> dict[str, str] | None:
    """The digest of a run that is killed in its second round and resumed on other ranks."""
    folder.mkdir()
    steps = _steps_of_a_round(given, folder / "count", ranks)
    if wait(start(given, folder, ranks, partial(die_within_a_pack, steps + max(1, steps // 2)))):
        raise RuntimeError(f"a run with packs of {size} survived")
    return digest_of(given, folder, later)


def _steps_of_a_round(given: Case, folder: Path, ranks: int) -> int:
    """Steps of packs in the first round of the rank that has the fewest."""
    folder.mkdir()

    def work(rank: int) -> None:
        note, steps = PackResult.note, 0

        def counting(self: PackResult, *args: Any) -> Any:
            nonlocal steps
            steps += 1
            return note(self, *args)

        PackResult.note = counting  # type: ignore[method-assign,assignment]
        fit(given, folder, rounds=1, ranks=ranks)
        (folder / f"{rank}.txt").write_text(str(steps))

    assert wait(start_job(ranks, work))
    return min(int(file.read_text()) for file in folder.glob("*.txt"))


def verdict(found: dict[str, str] | None, expected: dict[str, str] | None) -> str:
    """Same, or what differs."""
    if found is None or expected is None:
        return "FAILED"
    different = [part for part in expected if found[part] != expected[part]]
    return "DIFFERENT: " + ", ".join(different) if different else "same"


def rows_of(name: str, given: Case, folder: Path) -> list[str]:
    """The table's rows of a case; the bits of one rank are expected."""
    rows = []
    for size in SIZES:
        expected = None
        packed = replace(given, federation=dict(given.federation) | {"side_by_side": size})
        cells = []
        for ranks in RANKS:
            found = digest_of(packed, folder / f"{size}-{ranks}", ranks)
            expected = expected or found
            cells.append(verdict(found, expected))
        for ranks, later in ((2, 1), (1, 4)) if size != "off" else ():
            place = folder / f"{size}-{ranks}-killed"
            cells.append(verdict(killed(packed, place, size, ranks, later), expected))
        cells += ["", ""] if size == "off" else []
        rows.append(f"| {name} | {size} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    options = parser.parse_args(words)
    for split in ("train", "test"):
        read_digits(split)
    ranks = " | ".join(f"{n} rank{'s' * (n > 1)}" for n in RANKS)
    table = [
        f"| case | clients of a pack | {ranks} | killed on 2, resumed on 1 | on 1, on 4 |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(table), flush=True)
    with TemporaryDirectory() as folder:
        for number, name in enumerate(options.cases):
            place = Path(folder) / str(number)
            place.mkdir()
            table += rows_of(name, CASES[name], place)
    if options.out:
        options.out.write_text("\n".join(table) + "\n")
    return int(any("DIFFERENT" in row or "FAILED" in row for row in table))


if __name__ == "__main__":
    sys.exit(main())
