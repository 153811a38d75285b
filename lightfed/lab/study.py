"""`lightfed study NAME|FILE`: a table of methods on equal terms, and whether its claims hold.

docs/studies.md explains the keys of a study's file. `--markdown` prints a page of docs/studies.
"""

import argparse
import hashlib
import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from pandas import DataFrame

from lightfed.cli.commands import CONFIGURATIONS
from lightfed.cli.config_files import check_file
from lightfed.cli.shipped import PREFIX, ROOT, studies
from lightfed.lab.case_numbers import case_numbers, commits_of, study_numbers
from lightfed.lab.compare import add_files, beside, searched, seeds
from lightfed.lab.contest import (
    Held,
    Method,
    Needed,
    Submitted,
    Way,
    hold,
)
from lightfed.lab.drawing.files import markdown
from lightfed.lab.drawing.marks import file_name
from lightfed.lab.grid import VALIDATION_SHARE, Grid
from lightfed.lab.report.comparison import Files, show
from lightfed.lab.report.figures import seeds_note
from lightfed.lab.results import holm, text
from lightfed.lab.results.claims import Claim, Question, answered
from lightfed.lab.results.groups import Group, final_text
from lightfed.lab.results.paired import mean_and_std, t_half_width
from lightfed.lab.results.run import ENERGY, Run
from lightfed.lab.results.verdicts import (
    UNTIL,
    Target,
    costs_of,
    finals_of,
    goal_of,
    value_text,
)
from lightfed.lab.search_options import grid_of, seed_list
from lightfed.lab.sweep import add_execution, check_json
from lightfed.utils.errors import OneLineParser, UserError
from lightfed.utils.json_output import print_json

STUDIES = ROOT / "studies"

# `{word}` in a value of a study stands for what a case or a method says under that word.
_WORD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Study:
    """What the file of a study says; docs/studies.md explains each key.

    Attributes:
        path: The file.
        title: What is compared, for the head of a page.
        common: The configuration that all methods share: its keys, or a name of it.
        methods: By name, each method's own values of keys, and words.
        seeds: The seeds of the compared runs.
        metric: The column of metrics.csv by which rates are searched, and which is the verdict's.
        columns: Columns of metrics.csv, in the table.
        seconds: CPU time of a run, a mean; None if nobody has measured it.
        cases: By name, values of keys and words for all methods. A contest is held for each case.
        target: A column of metrics.csv and the value to reach, at most one.
        tune: Values or a range by key, of which every method gets the best.
        tune_seed: The seeds of that search.
        trials: How many trials are drawn from ranges.
        trials_seed: The seed of these draws.
        stop_early: Whether hopeless trials are stopped; None for those that are drawn.
        validation: The part of its training samples that a client keeps for that search. With 0 the
            values are chosen on test samples.
        claims: Each has `better`, `than` and `metric`: two methods and a column.
        theirs: A paper's own figures, by method and column.
        differ: Keys in which methods may differ, though they decide what is measured.
    """

    path: Path
    title: str
    common: Mapping[str, Any] | str
    methods: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int]
    metric: str
    columns: Sequence[str]
    seconds: float | None = None
    cases: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    target: Mapping[str, float] = field(default_factory=dict)
    tune: Mapping[str, Sequence[Any] | str] = field(default_factory=dict)
    tune_seed: Sequence[int] = (100,)
    trials: int | None = None
    trials_seed: int | None = None
    stop_early: bool | None = None
    validation: float = VALIDATION_SHARE
    claims: Sequence[Mapping[str, str]] = ()
    theirs: Mapping[str, Any] = field(default_factory=dict)
    differ: Sequence[str] = ()

    @property
    def goal(self) -> Target | None:
        """The column and the value to reach, if the study has a target."""
        return next(iter(self.target.items()), None)

    @property
    def grid(self) -> Grid | None:
        """The search that every method gets alike; None without one."""
        values = []
        for key, tried in self.tune.items():
            listed = tried if isinstance(tried, str) else ",".join(map(str, tried))
            values.append(f"{key}={listed}")
        return grid_of(
            values,
            self.tune_seed,
            self.validation,
            trials=self.trials,
            trials_seed=self.trials_seed,
            stop_early=self.stop_early,
            file=self.path.name,
        )

    @property
    def size(self) -> int:
        """How many runs the study has, those of the search included."""
        points = 0 if self.grid is None else len(self.grid.points)
        runs_of_a_method = len(self.seeds) + points * len(self.tune_seed)
        return len(self.cases) * len(self.methods) * runs_of_a_method

    @property
    def number_of_claims(self) -> int:
        """How many claims the study makes in all of its cases."""
        return len(self.cases) * len(self.claims)

    def in_case(self, case: str) -> "Study":
        """The study with the words of a case in its metric, its columns and its claims."""
        words = _words_of(self.cases[case])
        return replace(
            self,
            metric=_filled(self.metric, words, self.path),
            columns=_filled(self.columns, words, self.path),
            claims=_filled(self.claims, words, self.path),
        )


class HeldCase(NamedTuple):
    """A case whose runs have ended.

    Attributes:
        case: Its name.
        study: The study in this case.
        held: Its runs.
    """

    case: str
    study: Study
    held: Held

    @property
    def questions(self) -> list[Question]:
        """The claims with the runs that decide them."""
        group_of = {group.name: group for group in self.held.groups}
        questions = []
        for claim in self.study.claims:
            better = group_of[claim["better"]]
            than = group_of[claim["than"]]
            questions.append(Question(better, than, claim["metric"], self.study.goal))
        return questions


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed study`."""
    asked = _parser().parse_args(argv)
    check_json(asked)
    if asked.json and asked.markdown:
        raise UserError("--json", "given beside --markdown", "leave one of them out")
    study = read_study(asked.name)
    way = Way(asked.jobs, asked.slurm, study.seconds)

    cases = list(study.cases)
    if asked.case is not None:
        if asked.case not in study.cases:
            raise UserError("--case", f"no case {asked.case!r}", f"name one of {'; '.join(cases)}")
        cases = [asked.case]

    # All cases before the first is shown, because their claims are corrected together. What was
    # held is shown even if a later case ends the command.
    held_cases: list[HeldCase] = []
    submitted = False
    ending: BaseException | None = None
    for case in cases:
        try:
            held = _held(asked.name, study, case, way)
            held_cases.append(HeldCase(case, study.in_case(case), held))
        except Submitted:
            # The arrays of all cases can wait in the queue at once.
            submitted = True
        except (SystemExit, UserError) as error:
            ending = error
            break

    questions = []
    for held_case in held_cases:
        questions += held_case.questions
    claims = answered(questions, study.number_of_claims)
    correction = holm.said(study.number_of_claims, len(claims))

    remaining = iter(claims)
    parts: list[str] = []
    numbers: list[dict[str, Any]] = []
    runs: list[Run] = []
    for held_case in held_cases:
        claims_of_case = [next(remaining) for _ in held_case.questions]
        if asked.json:
            numbers.append(_case_numbers(held_case, claims_of_case))
        else:
            parts.append(_case(asked, held_case, claims_of_case, correction))
        for group in held_case.held.groups:
            runs += group.runs

    if ending is not None:
        raise ending
    if asked.markdown and not submitted:
        print(page(asked.name, study.title, runs, parts))
    if asked.json:
        print_json(
            study_numbers(
                name=asked.name,
                title=study.title,
                digest=digest(asked.name),
                claims=study.number_of_claims,
                cases=numbers,
                runs=runs,
            )
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    known = ", ".join(sorted(path.stem for path in STUDIES.glob("*.yaml")))
    parser = OneLineParser(
        "lightfed study",
        allow_abbrev=False,
        description="Run the missing runs of a study. Print its table, and whether its claims "
        "hold.",
    )
    named = f"a file, lightfed:NAME of one in the installation, or one of {known}"
    parser.add_argument("name", metavar="NAME", help=named)
    parser.add_argument("--case", metavar="NAME", help="run this case of the study alone")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--markdown", action="store_true", help="print a page for docs/studies")
    what = "print the numbers as JSON, and write no page"
    output.add_argument("--json", action="store_true", help=what)
    add_files(parser)
    add_execution(parser)
    return parser


def _held(name: str, study: Study, case: str, way: Way) -> Held:
    """Run what is missing of a case."""
    in_case = study.in_case(case)
    return hold(
        methods_of(name, study, case),
        study.seeds,
        way,
        grid=study.grid,
        metric=in_case.metric,
        needed=_needed(in_case),
        differ=study.differ,
    )


def _needed(study: Study) -> list[Needed]:
    """The columns without which the study, in one of its cases, cannot answer its questions."""
    file = study.path.name
    needed = [Needed(f"{file}: metric", study.metric)]
    if study.goal is not None:
        needed.append(Needed(f"{file}: target", study.goal[0]))
    for claim in study.claims:
        # A cost until the target follows from the columns of all runs.
        is_cost_to_target = claim["metric"].endswith(UNTIL) and study.goal is not None
        if not is_cost_to_target:
            methods = (claim["better"], claim["than"])
            needed.append(Needed(f"{file}: claims", claim["metric"], methods))
    return needed


def _case(
    asked: argparse.Namespace,
    held_case: HeldCase,
    claims: Sequence[Claim],
    corrected: Sequence[str],
) -> str:
    """Show the contest of a case; return what a page of docs/studies says of it.

    Args:
        asked: The arguments of the command.
        held_case: The case with its runs.
        claims: Its claims.
        corrected: A note on how they are corrected.
    """
    case, study, held = held_case
    table = table_of(held, study.columns, study.theirs, study.goal)
    notes = [*held.differ, *searched(held, study.grid), *corrected]
    if study.goal is not None:
        notes.append(f"target: {goal_of(study.goal)}")

    if not asked.markdown and not asked.json:
        answers = [claim.line for claim in claims]
        folder_name = file_name("study", f"{study.path.stem}-{case}")
        show(
            beside(held, folder_name),
            folder_name,
            held.groups,
            held.metric,
            table,
            [study.title, *notes],
            answers,
            target=study.goal,
            search=held.search,
            files=Files(asked.format, asked.table),
            claims=claims_table(claims),
        )
    return part(case, held, table, claims_table(claims), notes)


def _case_numbers(held_case: HeldCase, claims: Sequence[Claim]) -> dict[str, Any]:
    """Return the contest of a case for a program, as values for JSON.

    Args:
        held_case: The case with its runs.
        claims: Its claims.
    """
    case, study, held = held_case
    return case_numbers(
        held,
        name=case,
        seeds=study.seeds,
        columns=study.columns,
        target=study.goal,
        claims=[claim.values for claim in claims],
        theirs=study.theirs,
    )


# The file.


def path_of(name: str) -> Path:
    """The file of a study: of the installation by its name, or a path.

    Raises:
        UserError: there is no such file.
    """
    shipped = STUDIES / f"{name}.yaml"
    if shipped.is_file():
        return shipped

    path = Path(name)
    if name.startswith(PREFIX):
        path = ROOT / f"{name.removeprefix(PREFIX)}.yaml"
    if not path.is_file():
        found = f"no study {name!r} in the installation, and no such file"
        known = [study.stem for study in sorted(STUDIES.glob("*.yaml"))]
        known += [PREFIX + name for name in studies()]
        raise UserError("study", found, f"name a file, or one of {', '.join(known)}")
    return path


def read_study(name: str) -> Study:
    """Read the file of a study.

    Raises:
        UserError: there is no such file, or it has a mistake.
    """
    path = path_of(name)
    check_file(path, "study")
    try:
        written = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())
        raise UserError("study", f"{path} cannot be read: {what}", "correct its YAML") from error

    keys = {one.name for one in fields(Study)} - {"path"}
    needed = {"title", "common", "methods", "seeds", "metric", "columns"}
    if not isinstance(written, dict):
        raise UserError(path.name, "no keys", f"a study has {', '.join(sorted(needed))}")
    for key in sorted(written.keys() - keys):
        raise UserError(f"{path.name}: {key}", "no such key", f"a study has {', '.join(keys)}")
    for key in sorted(needed - written.keys()):
        raise UserError(f"{path.name}: {key}", "missing", f"a study has {', '.join(needed)}")

    _check_kinds(written, path)
    for key in ("methods", "cases"):
        for one, values in written.get(key, {}).items():
            if not isinstance(values, dict):
                fix = "write keys and their values, or {} for none"
                raise UserError(f"{path.name}: {key}: {one}", f"{values!r}", fix)

    for key, reader in (("seeds", seeds), ("tune_seed", seed_list)):
        if key not in written:
            continue
        try:
            written[key] = reader(str(written[key]))
        except ArgumentTypeError as error:
            raise UserError(f"{path.name}: {key}", str(error), "write such as 0-4") from error

    study = Study(path=path, **written)
    _check_names(study)
    _check_words(study)
    # Made here for its errors: a range that is none is found before anything is run.
    assert study.grid is None or study.grid.values
    return study


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(_is_text(item) for item in value)


def _are_columns(value: Any) -> bool:
    is_word = isinstance(value, str) and _WORD.fullmatch(value) is not None
    return is_word or _are_texts(value)


def _is_target(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= 1 and all(map(_is_number, value.values()))


def _are_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, dict) for item in value.values())


def _are_claims(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for claim in value:
        if not isinstance(claim, dict) or set(claim) != _OF_A_CLAIM:
            return False
        if not all(_is_text(part) for part in claim.values()):
            return False
    return True


_OF_A_CLAIM = {"better", "than", "metric"}

# What a key of a study may hold: its check, and what to write instead of something else.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "title": (_is_text, "write a text"),
    "common": (lambda value: isinstance(value, dict) or _is_text(value), "write keys, or a file"),
    "methods": (
        lambda value: isinstance(value, dict) and len(value) > 0,
        "write the keys of each method below its name",
    ),
    "cases": (
        lambda value: isinstance(value, dict) and len(value) > 0,
        "write the keys of each case below its name, or leave it out",
    ),
    "metric": (_is_text, "write a column of metrics.csv, such as personal/accuracy"),
    "columns": (_are_columns, "write a list of columns of metrics.csv"),
    "seconds": (_is_number, "write the CPU seconds of a run"),
    "target": (_is_target, "write one column and its value, such as personal/accuracy: 0.9"),
    "claims": (_are_claims, "write a list of claims, each with better, than and metric"),
    "theirs": (_are_by_name, "write the columns and figures of each method below its name"),
    "differ": (_are_texts, "write a list of keys"),
    "tune": (
        lambda value: isinstance(value, dict),
        "write keys, each with a list of values or a range such as log(0.01, 1)",
    ),
    "trials": (_is_whole, "write a whole number from 2, such as 12"),
    "trials_seed": (_is_whole, "write a whole number, such as 0"),
    "stop_early": (lambda value: isinstance(value, bool), "write true or false"),
    "validation": (_is_share, "write a share of the training samples, such as 0.1, or 0 for none"),
}


def _check_kinds(written: Mapping[str, Any], path: Path) -> None:
    """Refuse a key that holds something of another kind.

    Raises:
        UserError: One does; the first one is named.
    """
    for key, (fits, fix) in _KINDS.items():
        if key in written and not fits(written[key]):
            raise UserError(f"{path.name}: {key}", json.dumps(written[key], default=str), fix)

    for key, tried in written.get("tune", {}).items():
        if not isinstance(tried, list | str):
            fix = 'write a list of values, or a range in quotes, such as "log(0.01, 1)"'
            raise UserError(f"{path.name}: tune: {key}", f"{tried!r}", fix)


def _check_names(study: Study) -> None:
    """Refuse claims and figures of methods that the study does not have."""
    named = list(study.theirs)
    for claim in study.claims:
        named += [claim["better"], claim["than"]]
    for name in named:
        if name not in study.methods:
            key = f"{study.path.name}: claims"
            raise UserError(key, f"no method {name!r}", "name one of the methods")


def _check_words(study: Study) -> None:
    """Refuse a word of a case or a method that stands nowhere, such as a key without its dots."""
    everything: list[Any] = [study.common, study.methods, study.cases]
    everything += [study.metric, study.columns, study.claims]
    used = {word for value in everything for word in _words_in(value)}

    for values in (*study.cases.values(), *study.methods.values()):
        for word in _words_of(values):
            if word not in used:
                fix = f"write {{{word}}} where it belongs, or a whole key such as model.fraction"
                raise UserError(f"{study.path.name}: {word}", "used nowhere", fix)


# Commands.


def methods_of(name: str, study: Study, case: str) -> list[Method]:
    """The command of each method: the common configuration, the case's values, and its own.

    Raises:
        UserError: a word has no value, or the common configuration is no file.
    """
    of_case = study.cases[case]
    found = []
    for method, own in study.methods.items():
        values = {**of_case, **own}
        words = _words_of(values)
        filled = _filled(study.common, words, study.path)
        for key in [key for key, value in values.items() if value is None and "." in key]:
            is_in_common, filled = _without(filled, key)
            if is_in_common or of_case.get(key) is not None:
                # The key is as if nobody had given it. Any other null is a value, which the run's
                # parser takes or refuses.
                del values[key]

        common = _configuration(filled, study.path)
        run = file_name(path_of(name).stem, f"{case}-{method}")

        command = ["fit", "--config", common, f"--trainer.name={run}"]
        for key, value in values.items():
            if key in words:
                continue
            written = _filled(value, words, study.path)
            written = written if isinstance(written, str) else json.dumps(written)
            command.append(f"--{key}={written}")
        found.append(Method(method, tuple(command)))
    return found


def _without(common: Any, key: str) -> tuple[bool, Any]:
    """Return whether keys have this dotted key, and the keys without it.

    Args:
        common: Keys with keys below them, which are not changed. The name of a file has no key.
        key: The key.
    """
    first, _, below = key.partition(".")
    if not isinstance(common, Mapping) or first not in common:
        return False, common
    if not below:
        return True, {name: value for name, value in common.items() if name != first}
    is_there, rest = _without(common[first], below)
    return is_there, {**common, first: rest}


def _configuration(common: Mapping[str, Any] | str, path: Path) -> str:
    """The common configuration as a word after `--config`; `path` is the study's file."""
    if not isinstance(common, str):
        return json.dumps(common)
    if common.startswith((PREFIX, *CONFIGURATIONS)):
        return common

    file = path.parent / common
    if not file.is_file():
        fix = f"name a file beside {path.name}, or write keys"
        raise UserError(f"{path.name}: common", f"there is no {file}", fix)
    return str(file)


def _words_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The words among the values of a case or a method: keys of a run have a dot."""
    return {key: value for key, value in values.items() if "." not in key}


def _words_in(value: Any) -> Iterator[str]:
    """The words that stand in a value, as `{word}`."""
    if isinstance(value, str):
        yield from _WORD.findall(value)
    elif isinstance(value, Mapping):
        for below in value.values():
            yield from _words_in(below)
    elif isinstance(value, Sequence):
        for below in value:
            yield from _words_in(below)


def _filled(value: Any, words: Mapping[str, Any], path: Path) -> Any:
    """A value with every `{word}` replaced; a text that is one word becomes the word's value.

    Raises:
        UserError: neither the case nor the method says what a word stands for.
    """
    for word in _words_in(value):
        if word not in words:
            fix = f"give {word} a value in each case, or in each method"
            raise UserError(f"{path.name}: {{{word}}}", "no value", fix)

    if isinstance(value, str):
        alone = _WORD.fullmatch(value)
        if alone is not None:
            return words[alone[1]]
        return _WORD.sub(lambda match: str(words[match[1]]), value)
    if isinstance(value, Mapping):
        return {key: _filled(below, words, path) for key, below in value.items()}
    if isinstance(value, Sequence):
        return [_filled(below, words, path) for below in value]
    return value


# Tables.


def table_of(
    held: Held, columns: Sequence[str], theirs: Mapping[str, Any], target: Target | None = None
) -> DataFrame:
    """A row for each method: means with 95 % intervals, beside a paper's, and mean costs."""
    has_theirs = {column for figures in theirs.values() for column in figures}
    rows = []
    for group in held.groups:
        cells = {"method": group.label}
        for column in columns:
            head = text.readable(column)
            if column.endswith(UNTIL) and target is not None:
                head = f"{text.readable(column.removesuffix(UNTIL))} to {goal_of(target)}"
            if column.endswith(UNTIL):
                cells[head] = _until_text(group, column, target)
            else:
                cells[head] = final_text(group, column)

            if column in has_theirs:
                value = theirs.get(group.label, {}).get(column, float("nan"))
                cells[f"{head}, theirs"] = text.metric_text(column, value)

        spent = DataFrame([costs_of(run) for run in group.runs]).mean()
        cells["bytes"] = text.bytes_text(spent["bytes"])
        cells["FLOPs"] = text.flops_text(spent["FLOPs"])
        cells["seconds"] = text.seconds_text(spent["seconds"])
        if math.isfinite(spent[ENERGY]):
            cells["energy"] = text.joules_text(spent[ENERGY])
        rows.append(cells)
    return DataFrame(rows, dtype="str")


def _until_text(group: Group, column: str, target: Target | None) -> str:
    """A mean cost with half its 95 % interval; how many seeds reached the target, if not all."""
    spent = [value for value in finals_of(group, column, target).values() if math.isfinite(value)]
    if len(spent) < len(group.runs):
        return f"reached by {len(spent)} of {len(group.runs)}"

    mean, std = mean_and_std(spent)
    half = t_half_width(std, len(spent))
    if not math.isfinite(half):
        return value_text(column, mean)
    return f"{value_text(column, mean)} +- {value_text(column, half)}"


def claims_table(claims: Sequence[Claim]) -> DataFrame:
    """A row for each claim: whether it holds, and the difference with its interval."""
    heads = ["claim", "", "difference", "corrected p"]
    return DataFrame([claim.cells for claim in claims], columns=heads, dtype="str")


# Pages of docs/studies.


def page(name: str, title: str, runs: Sequence[Run], parts: Sequence[str]) -> str:
    """A page of docs/studies; its first line says where the figures come from."""
    commits = commits_of(runs)
    newest = max((run.folder / "metrics.csv").stat().st_mtime for run in runs)
    made = f"commit {', '.join(commits)}, {date.fromtimestamp(newest)}, digest {digest(name)}"
    head = [f"<!-- study {name}, {made} -->", f"# {text.sentence(title)}"]
    return "\n\n".join([*head, f"`lightfed study {name}`", *parts])


def part(case: str, held: Held, table: DataFrame, claims: DataFrame, notes: Sequence[str]) -> str:
    """What a page says of a case: the table, the claims and the search."""
    paragraphs = []
    if case:
        paragraphs.append(f"## {text.sentence(case)}")
    paragraphs.append(f"{text.sentence(seeds_note(held.groups))}; costs are those of a whole run.")
    for frame in (table, claims):
        if len(frame):
            paragraphs.append(markdown(frame))
    paragraphs += notes
    if len(held.search):
        paragraphs.append(markdown(held.search))
    return "\n\n".join(paragraphs)


def digest(name: str) -> str:
    """A digest of what a study's file says, whatever its comments and its layout."""
    written = yaml.safe_load(path_of(name).read_text("utf-8"))
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()[:12]
