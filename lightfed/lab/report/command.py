"""`lightfed report`: the page of one run, or a comparison of several."""

import argparse
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lightfed.lab.drawing.files import FORMATS, TABLES, listed
from lightfed.lab.report.page import build, print_summary
from lightfed.lab.results.run import Run, read
from lightfed.lab.results.text import counted
from lightfed.utils.errors import OneLineParser, UserError, require
from lightfed.utils.record import version_of

METRICS = "metrics.csv"
OF_COMPARISONS = ("output", "group", "target", "pivot", "columns", "std")  # options, by name


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed report`."""
    asked = _parser().parse_args(argv)
    runs: list[Run] = []
    skipped: list[str] = []
    if len(asked.runs) == 1 and not asked.compare:
        runs = [read(asked.runs[0])]
    else:
        listed: list[Path] = []
        for named in asked.runs:  # a run, or a folder of runs
            below = [] if (named / METRICS).is_file() else sorted(named.glob(f"*/{METRICS}"))
            listed += [path.parent for path in below] or [named]
        for folder in listed:
            fix = "name the folder of a run"
            require(folder.exists(), "report", f"there is no folder {folder}", fix)
            try:
                if folder.name != "index.html" and not (folder / "comparison.html").is_file():
                    run = read(folder)
                    run.check()
                    runs.append(run)
            except UserError as error:
                skipped.append(f"skipped {folder}: {error.found}")
    if len(runs) == 1 and not asked.compare:
        for name in OF_COMPARISONS:
            fix = "leave it out, or name two or more runs"
            unused = getattr(asked, name) == _parser().get_default(name)
            require(unused, f"--{name}", "given for the page of one run", fix)
        print(*skipped, sep="\n", end="\n" * bool(skipped))
        build(runs[0].folder, formats=asked.format, tables=asked.table)
        print_summary(runs[0].folder)
        return 0
    found = "; ".join([f"a comparison of {len(runs)} run{'s' * (not runs)}", *skipped])
    require(len(runs) > 1, "report", found, "name two or more runs")
    from lightfed.lab.report.comparison import compare

    skipped += versions_of(runs)
    options = {name: getattr(asked, name) for name in OF_COMPARISONS}
    compare(runs, formats=asked.format, tables=asked.table, notes=skipped, **options)
    return 0


def versions_of(runs: Sequence[Run]) -> list[str]:
    """A line that names the versions of lightfed that wrote these runs, if there are several."""
    found = Counter(version_of(run.environment) for run in runs)
    if len(found) < 2:
        return []
    named = [f"{version}: {counted(number, 'run')}" for version, number in found.most_common(4)]
    more = [f"and {len(found) - len(named)} more"] if len(found) > len(named) else []
    return [f"written by several versions: {', '.join([*named, *more])}"]


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="lightfed report",
        description="Make the page of a run folder, or compare several of them.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run folder; two or more are compared")
    below = "compare; a folder that is not a run means all runs directly below it"
    add("--compare", action="store_true", help=below)
    place = "where to write a comparison (default: comparison, beside the runs)"
    add("--output", type=Path, metavar="FOLDER", help=place)
    rows = "runs that differ only in the seed share a row (the default); --no-group: a row a run"
    add("--group", action=argparse.BooleanOptionalAction, default=True, help=rows)
    goal = "in 0..1; adds the rounds, bytes and FLOPs until all seeds reached it"
    add("--target", type=float, metavar="ACCURACY", help=goal)
    wide = "a row for each method, a column for each value of a setting, such as partition"
    add("--pivot", metavar="SETTING", help=wide)
    chosen = "of metrics.csv, for the table instead of the usual ones: personal/accuracy,train_loss"
    add("--columns", type=lambda text: text.split(","), default=(), metavar="A,B", help=chosen)
    add("--std", action="store_true", help="sample deviations over seeds instead of intervals")
    for flag, kinds, what in (
        ("--format", FORMATS, "also write each figure as a file"),
        ("--table", tuple(TABLES), "also write each table as a file; csv: all clients as well"),
    ):
        words = ",".join(kinds)
        add(flag, type=partial(listed, kinds), default=(), metavar=words, help=what)
    return parser
