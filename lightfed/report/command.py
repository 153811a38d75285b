"""`lightfed report`: the page of one run, or a comparison of several."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from typing_extensions import override

from lightfed.drawing.files import FORMATS, TABLES
from lightfed.report.page import build, print_summary
from lightfed.results.run import Run, read
from lightfed.utils.errors import UserError, require


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed report`."""
    asked = _parser().parse_args(argv)
    skipped: list[str] = []
    if len(asked.runs) == 1 and not asked.compare:
        runs = [read(asked.runs[0])]
    else:
        runs, skipped = readable_runs([run for folder in asked.runs for run in _runs_in(folder)])
    if len(runs) == 1 and not asked.compare:
        print(*skipped, sep="\n", end="\n" * bool(skipped))
        build(runs[0].folder, formats=asked.format, tables=asked.table)
        print_summary(runs[0].folder)
        return 0
    found = "; ".join([f"a comparison of {len(runs)} run{'s' * (not runs)}", *skipped])
    require(len(runs) > 1, "report", found, "name two or more runs")
    from lightfed.report.comparison import compare

    compare(
        runs,
        output=asked.output,
        group=asked.group,
        target=asked.target,
        formats=asked.format,
        tables=asked.table,
        notes=skipped,
    )
    return 0


def readable_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs among some folders, and a line for each that is no run and no output of reports."""
    runs, skipped = [], []
    for folder in folders:
        require(folder.exists(), "report", f"there is no folder {folder}", "name the one of a run")
        try:
            if folder.name != "index.html" and not (folder / "comparison.html").is_file():
                runs.append(read(folder))
        except UserError as error:
            skipped.append(f"skipped {folder}: {error.found}")
    return runs, skipped


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lightfed report",
        description="Make the page of a run folder, or compare several of them.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run folder; two or more are compared")
    below = "compare; a folder that is not a run means all runs directly below it"
    add("--compare", action="store_true", help=below)
    place = "where to write a comparison (default: comparison, beside the runs)"
    add("--output", type=Path, metavar="FOLDER", help=place)
    add(
        "--group",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare experiments: runs that differ only in the seed share a row, mean and 95 %% "
        "interval (the default); --no-group: a row a run",
    )
    add(
        "--target",
        type=float,
        metavar="ACCURACY",
        help="in 0..1; adds the rounds, bytes and FLOPs until all seeds reached it, and is that of "
        "FlexiFed's strategies (default: what Clustered-FL reached), and of clouds and methods "
        "compared with pFedMoE (default: what all of them reached)",
    )
    for flag, kinds, what in (
        ("--format", FORMATS, "also write each figure as a file; may be repeated"),
        ("--table", tuple(TABLES), "also write each table as a file; csv: all clients as well"),
    ):
        add(flag, action="append", choices=kinds, default=[], help=what)
    return parser


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, as every command does."""

    @override
    def error(self, message: str) -> NoReturn:
        raise UserError("report", message, "see lightfed report --help")


def _runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs directly below it."""
    below = [] if (folder / "metrics.csv").is_file() else folder.glob("*/metrics.csv")
    return sorted(path.parent for path in below) or [folder]
