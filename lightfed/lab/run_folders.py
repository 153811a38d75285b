"""The run folders that the words of a command name."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightfed.lab.results.run import Run, read
from lightfed.lab.results.text import counted
from lightfed.utils.errors import UserError

METRICS = "metrics.csv"
OF_THE_LAB = ("index.html", "comparison.html")  # a list of runs, and a page of a comparison


class RunFolders(NamedTuple):
    """What was read.

    Attributes:
        runs: Two or more runs.
        skipped: A line for each folder or file that is not a run.
    """

    runs: list[Run]
    skipped: list[str]


def read_runs(named: Sequence[Path]) -> RunFolders:
    """Read runs, and all runs directly below a folder that is not one.

    Raises:
        UserError: One of the folders does not exist, or fewer than two are runs.
    """
    runs: list[Run] = []
    skipped: list[str] = []
    for folder in _listed(named):
        if not folder.exists():
            raise UserError("compare", f"there is no folder {folder}", "name the folder of a run")
        # `runs/*` also matches the pages beside the runs.
        if folder.name == OF_THE_LAB[0] or (folder / OF_THE_LAB[1]).is_file():
            continue
        try:
            run = read(folder)
            run.check()
            runs.append(run)
        except UserError as error:
            skipped.append(f"skipped {folder}: {error.found}")

    if len(runs) < 2:
        found = "; ".join([f"a comparison of {counted(len(runs), 'run')}", *skipped])
        raise UserError("compare", found, "name two or more runs")
    return RunFolders(runs, skipped)


def _listed(named: Sequence[Path]) -> list[Path]:
    """The folders, with those of its runs in place of one that only holds runs."""
    folders: list[Path] = []
    for path in named:
        below = []
        if not (path / METRICS).is_file():
            below = [metrics.parent for metrics in sorted(path.glob(f"*/{METRICS}"))]
        folders += below or [path]
    return folders
