"""`lightfed study NAME|FILE`: a table of methods on equal terms, and whether its claims hold.

docs/studies.md has the keys of configs/studies/NAME.yaml. `--markdown` prints docs/studies/NAME.md.
"""

import hashlib
import json
import math
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pandas import DataFrame

from lightfed.cli.shipped import ROOT
from lightfed.lab.compare import add_files, beside, grid_of, searched, seed_list, seeds
from lightfed.lab.contest import Held, Method, Way, hold
from lightfed.lab.drawing.files import markdown
from lightfed.lab.drawing.marks import file_name
from lightfed.lab.report.comparison import Files, show
from lightfed.lab.report.figures import seeds_note
from lightfed.lab.results import text
from lightfed.lab.results.groups import Group, final_text
from lightfed.lab.results.paired import mean_and_std, t_half_width
from lightfed.lab.results.run import Run
from lightfed.lab.results.verdicts import (
    UNTIL,
    Target,
    answer_of,
    costs_of,
    finals_of,
    gain_text,
    goal_of,
    value_text,
)
from lightfed.lab.sweep import add_execution
from lightfed.utils.errors import OneLineParser, UserError, require

STUDIES = ROOT / "studies"
_KEYS = (
    "title common methods cases target tune tune_seed seeds metric columns claims theirs seconds"
    " differ"
)
_HOLDS = {"better": "holds", "worse": "the opposite is shown", "not shown": "not shown"}


def main(argv: Sequence[str]) -> int:
    """Run the sub-command; `argv` holds the words after `lightfed study`."""
    known = ", ".join(sorted(path.stem for path in STUDIES.glob("*.yaml")))
    about = "Run what is missing of a study, and print its table and whether its claims hold."
    parser = OneLineParser("lightfed study", allow_abbrev=False, description=about)
    parser.add_argument("name", metavar="NAME", help=f"a file, or one of {known}")
    parser.add_argument("--markdown", action="store_true", help="print a page for docs/studies")
    add_files(parser)
    add_execution(parser)
    asked = parser.parse_args(argv)
    study = read_study(asked.name)
    way = Way(asked.jobs, asked.slurm, study["seconds"])
    tune = [f"{key}={','.join(map(str, values))}" for key, values in study["tune"].items()]
    grid = grid_of(tune, study["tune_seed"])
    target, parts = next(iter(study["target"].items()), None), list[str]()
    runs: list[Run] = []
    for case in study["cases"]:
        held = hold(
            methods_of(asked.name, study, case),
            study["seeds"],
            way,
            grid=grid,
            metric=study["metric"],
            differ=study["differ"],
        )
        table = table_of(held, study["columns"], study["theirs"], target)
        claims = claims_of(held.groups, study["claims"], target)
        said = [*held.differ, *searched(held, grid)]
        if target is not None:
            said.append(f"target: {goal_of(target)}")
        parts.append(part(case, held, table, claims, said))
        if not asked.markdown:
            answers = ["{}: {}, {}".format(*cells) for cells in claims.itertuples(index=False)]
            named = file_name("study", f"{path_of(asked.name).stem}-{case}")
            files = Files(asked.format, asked.table)
            said = [study["title"], *said]
            show(
                beside(held, named),
                named,
                held.groups,
                held.metric,
                table,
                said,
                answers,
                target=target,
                search=held.search,
                files=files,
            )
        runs += [run for group in held.groups for run in group.runs]
    if asked.markdown:
        print(page(asked.name, study["title"], runs, parts))
    return 0


def read_study(name: str) -> dict[str, Any]:
    """The keys of a study, with the defaults of those that it leaves out; a UserError if wrong."""
    path = path_of(name)
    known = ", ".join(sorted(p.stem for p in STUDIES.glob("*.yaml")))
    found = f"no study {name!r} in the installation, and no such file"
    require(path.is_file(), "study", found, f"name a file, or one of {known}")
    study: dict[str, Any] = {"tune": {}, "tune_seed": 100, "claims": [], "theirs": {}, "differ": []}
    study |= {"cases": {"": {}}, "target": {}}
    study |= yaml.safe_load(path.read_text("utf-8"))
    for key in {*study} ^ {*_KEYS.split()}:
        found = "no such key" if key in study else "missing"
        raise UserError(f"{path.name}: {key}", found, f"a study has {_KEYS}")
    named = [name for claim in study["claims"] for name in (claim["better"], claim["than"])]
    for other in {*named, *study["theirs"]} - {*study["methods"]}:
        raise UserError(f"{path.name}: claims", f"no method {other!r}", "name one of the methods")
    for key, of in (("seeds", seeds), ("tune_seed", seed_list)):
        try:
            study[key] = of(str(study[key]))
        except ArgumentTypeError as error:
            raise UserError(f"{path.name}: {key}", str(error), "write such as 0-4") from error
    return study


def path_of(name: str) -> Path:
    """The file of a study: of the installation by its name, or a path."""
    shipped = STUDIES / f"{name}.yaml"
    return shipped if shipped.is_file() else Path(name)


def methods_of(name: str, study: Mapping[str, Any], case: str) -> list[Method]:
    """Each method's command: the common configuration, the case's values, and its own."""
    common, found = json.dumps(study["common"]), []
    for method, own in study["methods"].items():
        given = study["cases"][case] | own
        sets = [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in given.items()]
        run = file_name(path_of(name).stem, f"{case}-{method}")
        words = ("fit", "--config", common, f"--trainer.name={run}", *sets)
        found.append(Method(method, words))
    return found


def table_of(
    held: Held, columns: Sequence[str], theirs: Mapping[str, Any], target: Target | None = None
) -> DataFrame:
    """A row for each method: means with 95 % intervals, beside a document's, and mean costs."""
    rows = []
    for group in held.groups:
        cells = {"method": group.label}
        for column in columns:
            head = text.readable(column)
            if column.endswith(UNTIL) and target is not None:
                head = f"{column.removesuffix(UNTIL)} to {goal_of(target)}"
            cells[head] = (
                _until_text(group, column, target)
                if column.endswith(UNTIL)
                else final_text(group, column)
            )
            if any(column in own for own in theirs.values()):
                value = theirs.get(group.label, {}).get(column, float("nan"))
                cells[f"{head}, theirs"] = text.metric_text(column, value)
        spent = DataFrame([costs_of(run) for run in group.runs]).mean()
        cells["bytes"] = text.bytes_text(spent["bytes"])
        cells["FLOPs"] = text.flops_text(spent["FLOPs"])
        cells["seconds"] = text.seconds_text(spent["seconds"])
        rows.append(cells)
    return DataFrame(rows, dtype="str")


def _until_text(group: Group, column: str, target: Target | None) -> str:
    """A mean cost with half its 95 % interval; how many seeds reached the target, if not all."""
    spent = [value for value in finals_of(group, column, target).values() if math.isfinite(value)]
    if len(spent) < len(group.runs):
        return f"reached by {len(spent)} of {len(group.runs)}"
    mean, std = mean_and_std(spent)
    half = t_half_width(std, len(spent))
    return value_text(column, mean) + f" +- {value_text(column, half)}" * math.isfinite(half)


def claims_of(
    groups: Sequence[Group], claims: Sequence[Mapping[str, str]], target: Target | None = None
) -> DataFrame:
    """A row for each claim: whether it holds, and the difference with its interval."""
    by_name, rows = {group.name: group for group in groups}, []
    for claim in claims:
        own, rival, metric = by_name[claim["better"]], by_name[claim["than"]], claim["metric"]
        found, answer = answer_of(rival, own, metric, target)
        said = f"{own.name} is better than {rival.name} in {text.readable(metric)}"
        rows.append((said, _HOLDS[answer], gain_text(found, metric)))
    return DataFrame(rows, columns=["claim", "", "difference"], dtype="str")


def page(name: str, title: str, runs: Sequence[Run], parts: Sequence[str]) -> str:
    """A page of docs/studies; its first line says where the figures come from."""
    commits = sorted({str(run.environment.get("commit", "unknown")) for run in runs})
    newest = max((run.folder / "metrics.csv").stat().st_mtime for run in runs)
    made = f"commit {', '.join(commits)}, {date.fromtimestamp(newest)}, digest {digest(name)}"
    head = [f"<!-- study {name}, {made} -->", f"# {text.sentence(title)}"]
    return "\n\n".join([*head, f"`lightfed study {name}`", *parts])


def part(case: str, held: Held, table: DataFrame, claims: DataFrame, said: Sequence[str]) -> str:
    """What a page says of a case: the table, the claims and the search."""
    terms = f"{text.sentence(seeds_note(held.groups))}; costs are those of a whole run."
    first, second, last = (
        markdown(one) if len(one) else "" for one in (table, claims, held.search)
    )
    head = f"## {text.sentence(case)}" * bool(case)
    return "\n\n".join(filter(None, [head, terms, first, second, *said, last]))


def digest(name: str) -> str:
    """Of what a study's file says, whatever its comments and its layout."""
    said = json.dumps(yaml.safe_load(path_of(name).read_text("utf-8")), sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:12]
