"""The run folders that the words of a command name."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightfed.lab.results.run import Run, read
from lightfed.lab.results.text import counted
from lightfed.utils.errors import UserError, require

METRICS = "metrics.csv"
OF_THE_LAB = ("index.html", "comparison.html")  # a list of runs, and a page of a comparison


class RunFolders(NamedTuple):
    """What was read.

    Attributes:
        runs: two or more.
        skipped: a line for each folder or file that is not a run.
    """

    runs: list[Run]
    skipped: list[str]


def read_runs(named: Sequence[Path]) -> RunFolders:
    """Read runs, and all runs directly below a folder that is not one.

    Raises:
        UserError: one of the folders does not exist, or fewer than two are runs.
    """
    listed: list[Path] = []
    for path in named:
        below = [] if (path / METRICS).is_file() else sorted(path.glob(f"*/{METRICS}"))
        listed += [metrics.parent for metrics in below] or [path]

    runs: list[Run] = []
    skipped: list[str] = []
    for folder in listed:
        fix = "name the folder of a run"
        require(folder.exists(), "compare", f"there is no folder {folder}", fix)
        # `runs/*` also matches the pages beside the runs.
        if folder.name == OF_THE_LAB[0] or (folder / OF_THE_LAB[1]).is_file():
            continue
        try:
            run = read(folder)
            run.check()
            runs.append(run)
        except UserError as error:
            skipped.append(f"skipped {folder}: {error.found}")

    found = "; ".join([f"a comparison of {counted(len(runs), 'run')}", *skipped])
    require(len(runs) > 1, "compare", found, "name two or more runs")
    return RunFolders(runs, skipped)
