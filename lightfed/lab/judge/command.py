"""`lightfed judge MODULE.Class --against FedAvg`: is a new method better than a known one?

The new method passes a part of the conformance kit, or gets no verdict. Then both are trained on
small federations that come with lightfed, on equal terms: rates are searched for each alike, on
validation samples, and seeds are added until the answer is known (`lab.until`). Runs are kept, so
that a rival is trained once for all its challengers.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightfed.cli.shipped import path_of as shipped_path
from lightfed.lab import compare
from lightfed.lab.compare import add_files, grid_of, searched, seed_list
from lightfed.lab.contest import Entered, Grid, Method, Needed, Way, enter
from lightfed.lab.drawing.files import write_file
from lightfed.lab.judge.budget import ENDED, Budget, limited
from lightfed.lab.report.comparison import Files
from lightfed.lab.results.holm import ERROR
from lightfed.lab.results.sequential import Design
from lightfed.lab.sweep import PositiveInt
from lightfed.lab.until import DECIDED, Ended, described, design_of, looks_at
from lightfed.utils.errors import OneLineParser, UserError
from lightfed.utils.json_output import json_text

if TYPE_CHECKING:
    from lightfed.lab.judge import page
    from lightfed.lab.judge.contender import Contender

ROOT = Path("runs/judge")

# What is searched for each method, and on which seed, by default.
TUNED = ("model.optimizer.lr=0.03,0.1,0.3,1",)
TUNE_SEEDS = (100,)

# CPU seconds on one core of a server of 2022, for what is said before anything is run: what the
# command itself uses, for its imports and its page, and the kit.
_OVERHEAD = 20.0
_CONFORMITY = 5.0


class Ground(NamedTuple):
    """A federation on which methods are held against each other.

    Attributes:
        config: The name of its configuration.
        seconds: The CPU time of a run, until one has been measured.
        files: The folder of its data below a root that the user names; empty if none is needed.
    """

    config: str
    seconds: float
    files: str = ""


GROUNDS = {
    "digits": Ground("judge/digits", 1.5),
    "fashion": Ground("judge/fashion", 5.0, "FashionMNIST/raw"),
}


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed judge`."""
    asked = _parser().parse_args(argv)
    budget = Budget(60.0 * asked.minutes)
    grounds = _grounds(asked.on, asked.root)
    tuned = asked.tune or TUNED
    grid = grid_of(tuned, asked.tune_seed)
    assert grid is not None, "something is searched"
    design, seeds = _design(asked, len(grounds))
    _check_budget(asked.minutes, grounds, grid, design)

    with limited(budget, asked.jobs):
        try:
            return _judge(asked, grounds, grid, design, seeds, budget)
        except SystemExit as ended:
            if ended.code == ENDED:
                raise _too_few(asked.minutes) from ended
            raise


def _judge(
    asked: argparse.Namespace,
    grounds: Sequence[str],
    grid: Grid,
    design: Design,
    seeds: Sequence[int],
    budget: Budget,
) -> int:
    """Judge a candidate whose options are in order; return the status."""
    # Here, because it takes the seconds of an import of torch, and a mistake in the options none.
    from lightfed.lab.judge import page
    from lightfed.lab.judge.contender import contender, names_of

    _say(_plan_text(asked.minutes, grounds, grid, design))
    candidate = contender(asked.method, "judge")
    rival = contender(asked.against, "--against")
    if candidate.path == rival.path:
        raise UserError("--against", "the method that is judged", "name another one")
    contenders = [rival, candidate]
    names = names_of(contenders)
    place = asked.output or ROOT / f"{candidate.name}-against-{rival.name}"
    page_of = partial(
        page.Judgement, candidate=candidate, rival=rival, names=names, minutes=asked.minutes
    )

    _conform(asked, candidate, budget, page_of, place)

    judged: list[page.OnGround] = []
    for ground in grounds:
        methods = _methods(ground, contenders, names, asked.root)
        ended = _compare(asked, methods, grid, design, seeds, budget, GROUNDS[ground].seconds)
        judged.append(page.OnGround(ground, methods, ended))

    judgement = page_of(judged=judged, spent=budget.spent / 60, fault=None)
    numbers = json_text(judgement.numbers) + "\n"
    write_file(place / "judge.json", numbers.encode())
    notes = [*searched(judged[0].ended.held, grid), *described(design)]
    judgement.write(place, notes, Files(asked.format, asked.table), prints=not asked.json)
    if asked.json:
        print(numbers, end="")
    return 0


# Before anything is run.


def _grounds(words: Sequence[str], root: Path | None) -> list[str]:
    """Return the names of the grounds, each once.

    Raises:
        UserError: There is none of that name, or its files are not there.
    """
    names = list(dict.fromkeys(words))
    for name in names:
        if name not in GROUNDS:
            raise UserError("--on", f"no data set {name!r}", f"name {' or '.join(GROUNDS)}")

    needs_root = [name for name in names if GROUNDS[name].files]
    if root is not None and not needs_root:
        found = f"given, and {' and '.join(names)} needs no files"
        raise UserError("--root", found, "leave it out")
    for name in needs_root:
        folder = GROUNDS[name].files
        fix = f"name the folder that holds {folder}, with --root"
        if root is None:
            raise UserError("--on", f"{name} reads files, and --root is not given", fix)
        if not (root / folder).is_dir():
            raise UserError("--root", f"there is no {root / folder}", fix)
    return names


def _design(asked: argparse.Namespace, comparisons: int) -> tuple[Design, list[int]]:
    """Return the looks and the seeds of each comparison; all together have the usual error."""
    planned = design_of(DECIDED, asked.most, None, asked.seeds)
    assert planned is not None, "it is asked for"
    design, seeds = planned
    return replace(design, level=ERROR / comparisons), seeds


def _costs(grounds: Sequence[str], grid: Grid, seeds: int, methods: int) -> float:
    """Return what is expected for the search and so many seeds, in CPU seconds."""
    runs = methods * (len(grid.points) * len(grid.seeds) + seeds)
    per_run = sum(GROUNDS[ground].seconds for ground in grounds)
    return _OVERHEAD + _CONFORMITY + runs * per_run


def _check_budget(minutes: float, grounds: Sequence[str], grid: Grid, design: Design) -> None:
    """Refuse a budget that does not last until the first look, even if the rival's runs are there.

    Raises:
        UserError: It does not.
    """
    least = _costs(grounds, grid, design.looks[0], methods=1)
    if 60 * minutes < least:
        found = f"{minutes:g}, and the first look needs about {least / 60:.1f}"
        raise UserError("--minutes", found, "give more, or fewer values to --tune")


def _plan_text(minutes: float, grounds: Sequence[str], grid: Grid, design: Design) -> str:
    """Return the budget and what is going to be run, in a line."""
    points = len(grid.points) * len(grid.seeds)
    most = _costs(grounds, grid, design.most, methods=2)
    return (
        f"budget: {minutes:g} CPU minutes; on {' and on '.join(grounds)} a search of {points} runs "
        f"and at most {design.most} seeds for each of two methods, about {most / 60:.1f} CPU "
        "minutes in all, and less where runs are there already or the answer is known early"
    )


def _too_few(minutes: float) -> UserError:
    """Return the error about a budget that has ended before the first look."""
    found = f"{minutes:g}, which ended before the first look"
    return UserError("--minutes", found, "give more: finished runs are kept")


def _say(line: str) -> None:
    """Print a line about what goes on, beside the output for programs."""
    print(line, file=sys.stderr, flush=True)


# Conformance.


def _conform(
    asked: argparse.Namespace,
    candidate: Contender,
    budget: Budget,
    page_of: partial[page.Judgement],
    place: Path,
) -> None:
    """Let the candidate pass the kit, unless it has passed with the same code.

    Raises:
        NotConforming: It does not pass. For programs the object says so, too.
    """
    from lightfed.lab.judge.conformity import NotConforming, check_conformity

    passed = ROOT / ".conforming" / f"{candidate.name}-{candidate.digest}"
    if passed.exists():
        return
    try:
        check_conformity(candidate, ROOT / ".logs" / f"{candidate.name}-conformance.log")
    except NotConforming as fault:
        if not budget.left:
            # What has failed may be what the budget has ended.
            raise _too_few(asked.minutes) from fault
        judgement = page_of(judged=[], spent=budget.spent / 60, fault=fault.found)
        numbers = json_text(judgement.numbers) + "\n"
        write_file(place / "judge.json", numbers.encode())
        if asked.json:
            print(numbers, end="")
        raise
    write_file(passed, b"")


# The comparison.


def _methods(
    ground: str, contenders: Sequence[Contender], names: Sequence[str], root: Path | None
) -> list[Method]:
    """Return the command of each method on a ground."""
    config = GROUNDS[ground].config
    methods = []
    for contender, name in zip(contenders, names, strict=True):
        run = f"{ground}-{contender.name}-{contender.digest[:8]}"
        words = ["fit", "--config", str(shipped_path(config)), f"--trainer.name={run}"]
        words += [f"--trainer.default_root_dir={ROOT}", f"--model.algorithm={contender.path}"]
        # A run is shorter than its checkpoints are worth.
        words.append("--trainer.enable_checkpointing=false")
        if GROUNDS[ground].files:
            words.append(f"--data.dataset.init_args.root={root}")
        methods.append(Method(name, tuple(words)))
    return methods


def _compare(
    asked: argparse.Namespace,
    methods: Sequence[Method],
    grid: Grid,
    design: Design,
    seeds: Sequence[int],
    budget: Budget,
    seconds: float,
) -> Ended:
    """Search both methods' values, and take looks until the comparison ends or the budget does.

    Args:
        asked: The arguments of the command.
        methods: The rival and the candidate.
        grid: The search.
        design: The looks.
        seeds: The seeds in their order, as many as the last look has.
        budget: What may be used.
        seconds: The CPU time of a run, as long as none has been measured.
    """
    way = Way(asked.jobs, slurm=False)
    needed = [] if asked.metric is None else [Needed("--metric", asked.metric)]
    entered = enter(
        methods, seeds, way, grid=grid, metric=asked.metric, needed=needed, differ=asked.differ
    )

    ended: Ended | None = None
    looks = looks_at(entered, seeds, design, way)
    for n in design.looks:
        missing = _missing(entered, seeds[:n])
        before = budget.spent
        if missing * seconds > budget.left:
            break
        try:
            ended = next(looks)
        except UserError as error:
            if budget.left:
                raise UserError("judge", error.found, error.fix) from error
            break
        except SystemExit as leaving:
            if leaving.code != ENDED:
                raise
            break
        if ended.is_over:
            return ended
        if missing:
            seconds = (budget.spent - before) / missing

    if ended is None:
        raise _too_few(asked.minutes)
    return ended._replace(out_of_budget=True)


def _missing(entered: Entered, seeds: Sequence[int]) -> int:
    """Return how many runs of these seeds are not there yet."""
    missing = 0
    for wanted in entered.winners.values():
        for seed in seeds:
            missing += wanted.at(seed).finished() is None
    return missing


# The parser.


def _minutes(words: str) -> float:
    """A positive number of minutes.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        minutes = float(words)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{words!r} is no number of minutes, such as 10")
    return minutes


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        "lightfed judge",
        allow_abbrev=False,
        description="Say whether a new method is better than a known one: conformance, rates tuned "
        "alike, and as many seeds as the answer takes, on small federations that come with "
        "lightfed.",
    )
    add = parser.add_argument
    what = "the new method: a class of a module in this folder, or of lightfed by its name"
    add("method", metavar="MODULE.Class", help=what)
    rival = "the method to compare it with (default: FedAvg)"
    add("--against", default="FedAvg", metavar="METHOD", help=rival)
    sets = f"data sets (default: digits): {', '.join(GROUNDS)}"
    add("--on", type=lambda words: words.split(","), default=["digits"], metavar="A,B", help=sets)
    files = "the folder of the files of fashion: it holds FashionMNIST/raw"
    add("--root", type=Path, metavar="FOLDER", help=files)
    cpu = "CPU minutes that the command may use (default: 10)"
    add("--minutes", type=_minutes, default=10.0, metavar="N", help=cpu)
    add("--most", type=PositiveInt, metavar="N", help="seeds at most (default: 20)")
    others = "seeds to compare, as many as --most (default: 0, 1, 2, ...)"
    add("--seeds", type=compare.seeds, metavar="SEEDS", help=others)
    alike = f"search these values for both methods alike (default: {shlex.join(TUNED)})"
    add("--tune", action="extend", nargs="+", default=[], metavar="KEY=X,Y", help=alike)
    of_search = "seed of the search, or several, such as 100-102 (default: 100)"
    add("--tune-seed", type=seed_list, default=list(TUNE_SEEDS), metavar="SEEDS", help=of_search)
    add("--metric", metavar="COLUMN", help="answer for this metric (default: the first)")
    permitted = "permit the methods to differ in this key, though it decides what is measured"
    add("--differ", action="extend", nargs="+", default=[], metavar="KEY", help=permitted)
    at_once = "number of runs at the same time (default: 1)"
    add("--jobs", type=PositiveInt, default=1, metavar="N", help=at_once)
    place = f"where to write the page (default: a folder in {ROOT})"
    add("--output", type=Path, metavar="FOLDER", help=place)
    add_files(parser)
    add("--json", action="store_true", help="print the judgement as JSON")
    return parser
