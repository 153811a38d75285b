"""`lightfed compare`: is B better than A, by how much, and at what cost?

A and B are configurations, of which missing runs are run, or folders of runs that are there. The
answer is about one metric, chosen before the runs or the same for all; the other rows of the table
have their intervals, each by itself. Of several configurations each is compared with the first.
"""

import argparse
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from lightfed.cli.shipped import PREFIX, with_paths
from lightfed.lab.contest import Grid, Held, Method, Needed, Way, hold
from lightfed.lab.drawing.files import FORMATS, TABLES, listed
from lightfed.lab.pair_claims import pair_claims
from lightfed.lab.report import comparison
from lightfed.lab.report.comparison import Files
from lightfed.lab.results import text
from lightfed.lab.results.groups import common_parent, runs_of
from lightfed.lab.results.verdicts import Target, difference_table, goal_of, rows_of, verdict
from lightfed.lab.run_folders import read_runs
from lightfed.lab.search_options import (
    OPTIONS_OF_A_SEARCH,
    add_search,
    grid_of,
    grid_of_options,
    seed_list,
)
from lightfed.lab.several import several_numbers, show_several, together
from lightfed.lab.sweep import PositiveInt, add_execution, check_json
from lightfed.lab.until import (
    DECIDED,
    Ended,
    described,
    design_of,
    hold_until,
    look_list,
)
from lightfed.utils.errors import OneLineParser, UserError
from lightfed.utils.json_output import print_json

# A study and others read options of a comparison by these names.
__all__ = ["add_files", "beside", "grid_of", "main", "names_of", "searched", "seed_list", "seeds"]

CONFIGURATIONS = (".yaml", ".yml")
# Options of one kind of comparison, by name; the other kind refuses them.
ONLY_CONFIGURATIONS = (
    "set",
    "set_a",
    "set_b",
    "seeds",
    "tune",
    *OPTIONS_OF_A_SEARCH,
    "jobs",
    "slurm",
    "until",
    "most",
    "looks",
)
ONLY_TWO = ("set_a", "set_b")
ONLY_FOLDERS = ("group", "pivot", "columns", "std")


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed compare`."""
    asked = _parser().parse_intermixed_args(argv)
    check_json(asked)
    if are_folders(asked.what):
        return _of_folders(asked)
    return _of_configurations(asked)


def are_folders(words: Sequence[str]) -> bool:
    """Whether these are run folders, and not two configurations.

    Raises:
        UserError: They are some of both, or a single configuration.
    """
    if any(Path(word).is_dir() for word in words):
        for word in words:
            if Path(word).suffix in CONFIGURATIONS or word.startswith(PREFIX):
                found = f"{word} is a configuration, and others are folders"
                raise UserError("compare", found, "name configurations, or run folders")
        return True

    if len(words) < 2:
        found = text.counted(len(words), "configuration")
        raise UserError("compare", found, "name two or more configurations, or run folders")
    return False


# Run folders.


def _of_folders(asked: argparse.Namespace) -> int:
    """Compare runs that are there."""
    _refuse(asked, ONLY_CONFIGURATIONS, "the runs are there already", "two configurations")
    runs, skipped = read_runs([Path(word) for word in asked.what])
    target = _target(asked.target)
    metric = _metric(asked.metric, target)

    if asked.json:
        found = comparison.numbers(runs, metric=metric, target=target, differ=asked.differ)
        print_json(found)
        return 0
    comparison.compare(
        runs,
        output=asked.output,
        group=asked.group,
        metric=metric,
        target=target,
        formats=asked.format,
        tables=asked.table,
        notes=skipped,
        pivot=asked.pivot,
        columns=asked.columns,
        std=asked.std,
        differ=asked.differ,
    )
    return 0


# Two configurations.


def _of_configurations(asked: argparse.Namespace) -> int:
    """Run what is missing of two or more methods, and compare them."""
    _refuse(asked, ONLY_FOLDERS, "given for configurations", "run folders")
    if len(asked.what) > 2:
        found = f"given for {len(asked.what)} configurations"
        _refuse(asked, ONLY_TWO, found, "two configurations")
    methods = _methods(asked)
    given_target = _target(asked.target)
    grid = grid_of_options(asked)
    way = Way(asked.jobs, asked.slurm)
    metric = _metric(asked.metric, given_target)
    needed = [] if metric is None else [Needed("--metric", metric)]

    claims = len(methods) - 1
    planned = design_of(asked.until, asked.most, asked.looks, asked.seeds, claims=claims)
    ended: list[Ended] = []
    if planned is None:
        held = hold(
            methods,
            seeds("0-4") if asked.seeds is None else asked.seeds,
            way,
            grid=grid,
            metric=metric,
            needed=needed,
            differ=asked.differ,
        )
    else:
        design, chosen_seeds = planned
        ended = hold_until(
            methods, chosen_seeds, design, way, grid=grid, metric=metric, differ=asked.differ
        )
        held = together(ended)

    target = comparison.target_of(given_target, held.metric, runs_of(held.groups))
    commands = [shlex.join(method.words) for method in methods]
    notes = []
    for method, command in zip(methods, commands, strict=True):
        notes.append(f"{method.name}: lightfed {command}")
    if claims > 1:
        if asked.json:
            print_json(several_numbers(held, commands, target, ended))
            return 0
        notes += searched(held, grid)
        place = asked.output or beside(held, "compare")
        show_several(held, place, notes, Files(asked.format, asked.table), target, ended)
        return 0

    a, b = held.groups
    rows = rows_of(a, b, target)
    if asked.json:
        numbers = comparison.pair_numbers(
            a,
            b,
            commands,
            held.metric,
            target,
            rows=rows,
            differ=held.differ,
            search=held.search,
            trials=held.trials,
        )
        for one in ended:
            numbers |= one.numbers
        print_json(numbers)
        return 0

    notes += held.differ
    notes += searched(held, grid)
    if target is not None:
        notes.append(f"target: {goal_of(target)}")
    answer = verdict(a, b, held.metric)
    for one in ended:
        notes += described(one.design)
        answer = one.line
    comparison.show(
        asked.output or beside(held, "compare"),
        "compare",
        held.groups,
        held.metric,
        difference_table(rows, (a.name, b.name)),
        notes,
        [answer],
        target=target,
        search=held.search,
        files=Files(asked.format, asked.table),
        claims=pair_claims(a, b, held.metric, ended[0] if ended else None),
    )
    return 0


def _methods(asked: argparse.Namespace) -> list[Method]:
    """The methods, with the values that are set for all and, of two, for each."""
    own_words = [asked.set_a, asked.set_b]
    own_words += [[] for _ in asked.what[2:]]
    sides = []
    for file, own in zip(asked.what, own_words, strict=True):
        sides.append(("fit", "--config", *with_paths([file]), *_sets([*asked.set, *own])))

    names = names_of(sides, own_words)
    return [Method(name, words) for name, words in zip(names, sides, strict=True)]


def _refuse(asked: argparse.Namespace, names: Sequence[str], found: str, needed: str) -> None:
    """Refuse the options that only the other kind of comparison has.

    Args:
        asked: The arguments of the command.
        names: The options to refuse.
        found: Why they have no meaning here.
        needed: What to compare for them to have one.

    Raises:
        UserError: One of the options is given.
    """
    parser = _parser()
    for name in names:
        if getattr(asked, name) != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise UserError(flag, found, f"leave it out, or name {needed}")


def beside(held: Held, name: str) -> Path:
    """A folder of this name beside the runs of a contest."""
    return common_parent(runs_of(held.groups)) / name


def names_of(sides: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> list[str]:
    """Names of methods for readers: what tells their commands apart.

    These are their algorithms, with their files, the files' folders, or what is set for each alone
    where the algorithms are the same.

    Args:
        sides: The words of their commands.
        own: The `key=value` words of each alone.
    """
    algorithms = [_algorithm(words) for words in sides]
    files = [Path(words[2]).stem for words in sides]
    folders = [Path(words[2]).parent.name for words in sides]
    sets = [", ".join(map(_last_part, words)) for words in own]

    tries = [
        algorithms,
        [f"{algorithm} ({file})" for algorithm, file in zip(algorithms, files, strict=True)],
        [f"{algorithm} ({folder})" for algorithm, folder in zip(algorithms, folders, strict=True)],
        [f"{a} ({s})" if s else a for a, s in zip(algorithms, sets, strict=True)],
    ]
    for names in tries:
        if len(set(names)) == len(names):
            return names
    letters = [chr(ord("A") + place % 26) + "'" * (place // 26) for place in range(len(sides))]
    return [f"{name} {letter}" for name, letter in zip(algorithms, letters, strict=True)]


def _last_part(word: str) -> str:
    """A `key=value` word with the last part of its key: `local_epochs=2`."""
    key, sign, value = word.partition("=")
    return key.rpartition(".")[2] + sign + value


def _algorithm(words: Sequence[str]) -> str:
    """The class of the algorithm that a command names, or else the name of its file."""
    file = Path(words[2])
    named = _algorithm_in(file)
    for word in words:
        for key in ("--model.algorithm=", "--model.algorithm.class_path="):
            if word.startswith(key) and "{" not in word:
                named = word.removeprefix(key)
    return named.rpartition(".")[2] or file.stem


def _algorithm_in(file: Path) -> str:
    """The path of the algorithm's class in a configuration; empty if it cannot be found there."""
    try:
        config = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return ""  # the command itself says what is wrong

    algorithm = None
    if isinstance(config, dict) and isinstance(config.get("model"), dict):
        algorithm = config["model"].get("algorithm")
    if isinstance(algorithm, dict):
        algorithm = algorithm.get("class_path")
    return str(algorithm or "")


def searched(held: Held, grid: Grid | None) -> list[str]:
    """How rates were searched, in sentences; none without a search."""
    return held.search_notes(grid)


# Values of options.


def _sets(given: Sequence[str]) -> list[str]:
    """The words of a command for `key=value` words.

    Raises:
        UserError: A word is no key with a value, or its key is the seed.
    """
    for word in given:
        key, sign, _ = word.partition("=")
        if not key or not sign:
            raise UserError("--set", word, "give key=value, such as model.fraction=0.5")
        if key == "model.seed":
            fix = "give --seeds, which both methods share"
            raise UserError(key, "not the same for both methods", fix)
    return [f"--{word}" for word in given]


def _target(given: str | None) -> float | Target | None:
    """A target as it is given: a value, or a column and its value; None without one.

    Raises:
        UserError: It is neither, or the value is not possible.
    """
    if given is None:
        return None
    with suppress(ValueError):
        return float(given)

    parts = re.fullmatch(r"([^<>=]+)([<>])=([-+.e\d]*\d)", given)
    if parts is not None:
        column = parts[1]
        asks_for_high = parts[2] == ">"
        is_better_high = text.direction(column) > 0
        if asks_for_high == is_better_high:
            with suppress(ValueError):
                value = float(parts[3])
                comparison.check_target(column, value)
                return column, value
    fix = "give x or metric>=x, such as personal/accuracy>=0.9, or <= if low is good"
    raise UserError("--target", given, fix)


def _metric(given: str | None, target: float | Target | None) -> str | None:
    """The metric of the answer: the given one, or else that of the target."""
    if given is None and isinstance(target, tuple):
        return target[0]
    return given


def seeds(words: str) -> list[int]:
    """As `seed_list`, for two or more seeds: one alone gives no interval."""
    found = seed_list(words)
    if len(found) < 2:
        raise argparse.ArgumentTypeError(f"{words!r} has fewer than two seeds: no interval")
    return found


# The parser.


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the options for files of the figures and tables."""
    kinds_and_help = (
        ("--format", FORMATS, "also write each figure as a file"),
        ("--table", tuple(TABLES), "also write each table as a file"),
    )
    for flag, kinds, what in kinds_and_help:
        parser.add_argument(
            flag, type=partial(listed, kinds), default=(), metavar=",".join(kinds), help=what
        )


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        "lightfed compare",
        allow_abbrev=False,
        description="Say which of two methods is better, by how much and at what cost. Give "
        "configurations, whose missing runs are trained, or finished run folders. Of several, each "
        "is compared with the first.",
    )
    add = parser.add_argument
    what = (
        "the baseline and the method to compare with it: two configurations (the same file twice, "
        "with --set-b, for one change), or run folders, or folders that hold runs"
    )
    add("what", nargs="+", metavar="A B ...", help=what)
    add("--metric", metavar="COLUMN", help="answer for this metric (default: the first)")
    goal = (
        "also compare the costs until this is first reached, such as personal/accuracy>=0.9; a "
        "number alone is a value of --metric"
    )
    add("--target", metavar="METRIC>=X", help=goal)
    permitted = "permit A and B to differ in this key, though it decides what is measured"
    add("--differ", action="extend", nargs="+", default=[], metavar="KEY", help=permitted)
    place = "where to write the page (default: compare or comparison, beside the runs)"
    add("--output", type=Path, metavar="FOLDER", help=place)
    add_files(parser)
    add("--json", action="store_true", help="print the comparison as JSON")

    add = parser.add_argument_group("for configurations").add_argument
    for flag, of in (("--set", "A and B"), ("--set-a", "A alone"), ("--set-b", "B alone")):
        about = f"set this key for {of}"
        add(flag, action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=about)
    add("--seeds", type=seeds, help="seeds to compare (default: 0-4)")
    add_search(add)
    stop = "run no more seeds once the answer is known, which is looked at a few times"
    add("--until", choices=[DECIDED], help=stop)
    add("--most", type=PositiveInt, metavar="N", help="seeds at most (default: 20)")
    at = "after so many seeds, fixed in advance (default: of 20, at 5,8,12,16,20)"
    add("--looks", type=look_list, metavar="N,N", help=at)
    add_execution(parser)

    add = parser.add_argument_group("for run folders").add_argument
    rows = "one row for runs that differ only in the seed (the default), or one row per run"
    add("--group", action=argparse.BooleanOptionalAction, default=True, help=rows)
    wide = "one row per method, one column per value of a setting, such as partition"
    add("--pivot", metavar="SETTING", help=wide)
    chosen = "show these columns of metrics.csv, such as personal/accuracy,train_loss"
    add("--columns", type=lambda text: text.split(","), default=(), metavar="A,B", help=chosen)
    add("--std", action="store_true", help="show standard deviations over seeds, not intervals")
    return parser
