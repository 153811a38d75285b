"""`lightfed report`: the page of one run, or a comparison of several."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lightfed.drawing.summary import print_summary
from lightfed.report.page import build
from lightfed.utils.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed report`.

    Raises:
        UserError: a folder cannot be read or written, or an argument does not fit.
    """
    asked = _parser().parse_args(argv)
    if not (asked.compare or len(asked.runs) > 1):
        _refuse_idle_flags(asked)
        build(asked.runs[0])
        print_summary(asked.runs[0])
        return 0
    from lightfed.report.comparison import compare

    runs = [run for folder in asked.runs for run in _runs_in(folder)]
    compare(runs, output=asked.output, group=asked.group, target=asked.target)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lightfed report",
        description="Make the pictures and the page of a run folder, or compare several of them.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run folder; two or more are compared"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare; a folder that is not a run means all runs directly below it",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write a comparison (default: the folder that holds all the runs)",
    )
    parser.add_argument(
        "--group",
        action="store_true",
        help="compare experiments: runs that differ only in the seed share a line, mean +- std",
    )
    parser.add_argument(
        "--target",
        type=float,
        metavar="ACCURACY",
        help="in 0..1; measures how soon FlexiFed's strategies reach it (default: what "
        "Clustered-FL reached in the end), and clouds and methods compared with pFedMoE (default: "
        "what all of them reached)",
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, as every command does."""

    def error(self, message: str) -> NoReturn:
        raise UserError("report", message, "see lightfed report --help")


def _refuse_idle_flags(asked: argparse.Namespace) -> None:
    flags = {
        "--output": asked.output is not None,
        "--group": asked.group,
        "--target": asked.target is not None,
    }
    for flag, given in flags.items():
        if given:
            raise UserError(flag, "nothing to compare with one run", "give two runs or drop it")


def _runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs directly below it."""
    if (folder / "metrics.csv").is_file() or not folder.is_dir():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/metrics.csv")) or [folder]
