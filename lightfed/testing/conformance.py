"""Checks lightfed's promises: the same bits on any number of ranks, and after a restart."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from lightfed.api.algorithm import Algorithm
from lightfed.data.datamodule import FederatedDataModule
from lightfed.testing.case import CLIENTS, Case, NormNet, images
from lightfed.testing.ranks import in_new_process
from lightfed.testing.worker import Digest, Plan, run

Digests = dict[str, dict[str, Digest]]
"""The digests of each case, by the kind of run and the rank, such as straight-3-of-4."""


def conformance(
    algorithm: Callable[[], Algorithm],
    *,
    model: Callable[[], nn.Module] = NormNet,
    levels: str = "",
    clients: int = CLIENTS,
    data: Callable[[], FederatedDataModule] = images,
    trainer: Mapping[str, Any] | None = None,
    ranks: tuple[int, ...] = (1, 2, 4),
    **federation: Any,
) -> None:
    """Run an algorithm on drawn images on several numbers of ranks, also stopped and resumed.

    Server state, rows and other state of clients, metrics, metrics.csv and clients.csv must have
    the same bits in all runs. A run is stopped during its last round and resumed on another number
    of ranks. They run in another process, so a script calls this under
    `if __name__ == "__main__":`.

    Args:
        algorithm: A class, or a `functools.partial` of one. It is pickled, so a notebook has to
            import it.
        model: Makes a client's network; it is pickled, too. It accepts `rate` if there are levels.
        levels: The levels of the groups' widths, such as "abd"; empty for one group.
        clients: The number of clients.
        data: Makes the data module; it is pickled, too.
        trainer: Arguments of the FederatedTrainer.
        ranks: The numbers of ranks. The others are compared with the first.
        **federation: Arguments of the Federation.

    Raises:
        AssertionError: A run has different bits, which are named, or a run has failed.
    """
    case = Case(
        algorithm,
        model=model,
        levels=levels,
        federation=federation,
        trainer=dict(trainer or {}),
        data=data,
        clients=clients,
    )
    moves = ((ranks[-1], ranks[0]), (ranks[0], ranks[-1]))
    with TemporaryDirectory() as folder:
        # Twice, so that it is stopped on few ranks and on many.
        plan = Plan({"case": case, "again": case}, ranks, moves)
        digests = digests_of(plan, Path(folder))
    for name in plan.cases:
        check(plan, name, digests)


def digests_of(plan: Plan, folder: Path) -> Digests:
    """Run a plan in a separate process, and return what it has written.

    Raises:
        AssertionError: A run has failed.
    """
    in_new_process(run, plan, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def check(plan: Plan, name: str, digests: Digests) -> None:
    """Check that all ranks of all runs of a case have the same bits, resumed or not.

    Raises:
        AssertionError: Names what has different bits.
    """
    expected = digests[f"straight-0-of-{plan.worlds[0]}"][name]

    runs = [("straight", ranks) for ranks in plan.worlds]
    _, ranks_after_stop = plan.move(name)
    runs.append(("resumed", ranks_after_stop))

    for kind, ranks in runs:
        for rank in range(ranks):
            job = f"{kind}-{rank}-of-{ranks}"
            digest = digests[job][name]
            different = [part for part in expected if digest[part] != expected[part]]
            assert not different, f"{name}, {job}: {', '.join(different)} have different bits"
