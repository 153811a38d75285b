"""`lightfed report`: the page of a run."""

import argparse
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lightfed.lab.drawing.files import FORMATS, TABLES, listed
from lightfed.lab.report.page import build, numbers, print_summary
from lightfed.lab.results.run import read
from lightfed.utils.errors import OneLineParser, UserError
from lightfed.utils.json_output import print_json

# The error about several folders names so many of them.
MOST_SHOWN = 2


def main(argv: Sequence[str]) -> int:
    """Run `lightfed report`.

    Args:
        argv: The words after `lightfed report`.

    Returns:
        The exit status.

    Raises:
        UserError: The folder is not a run, or there are several.
    """
    options = _parser().parse_args(argv)
    if len(options.run) > 1:
        command = f"lightfed compare {shlex.join(map(str, options.run[:MOST_SHOWN]))}"
        if len(options.run) > MOST_SHOWN:
            command += " ..."
        raise UserError(
            key="report",
            found=f"{len(options.run)} folders, but a page shows one run",
            fix=f"compare them: {command}",
        )

    folder = read(options.run[0]).folder
    build(folder, formats=options.format, tables=options.table)
    if options.json:
        print_json(numbers(read(folder)))
    else:
        print_summary(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="lightfed report", description="Make the page of a run folder.")
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--format",
        type=partial(listed, FORMATS),
        default=(),
        metavar=",".join(FORMATS),
        help="also write each figure as a file of these formats",
    )
    parser.add_argument(
        "--table",
        type=partial(listed, tuple(TABLES)),
        default=(),
        metavar=",".join(TABLES),
        help="also write each table as a file of these formats",
    )
    parser.add_argument("--json", action="store_true", help="print the final values as JSON")
    return parser
