"""`lightfed report`: the page of a run."""

import argparse
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lightfed.lab.drawing.files import FORMATS, TABLES, listed
from lightfed.lab.report.page import build, print_summary
from lightfed.lab.results.run import read
from lightfed.utils.errors import OneLineParser, UserError

SHOWN = 2  # folders in the line that names the other command


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed report`."""
    asked = _parser().parse_args(argv)
    if len(asked.run) > 1:
        named = shlex.join(str(folder) for folder in asked.run[:SHOWN])
        more = " ..." if len(asked.run) > SHOWN else ""
        fix = f"compare them: lightfed compare {named}{more}"
        raise UserError("report", f"{len(asked.run)} folders, and a page is of one run", fix)

    folder = read(asked.run[0]).folder
    build(folder, formats=asked.format, tables=asked.table)
    print_summary(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="lightfed report", description="Make the page of a run folder.")
    add = parser.add_argument
    add("run", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    for flag, kinds, what in (
        ("--format", FORMATS, "also write each figure as a file"),
        ("--table", tuple(TABLES), "also write each table as a file"),
    ):
        words = ",".join(kinds)
        add(flag, type=partial(listed, kinds), default=(), metavar=words, help=what)
    return parser
