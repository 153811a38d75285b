"""Which experiment is better in which metric: as sentences, tables and a csv file.

Experiments are compared if they have the same data set, partition and number of clients. Metrics
are compared if they mean the same: a client after aggregation is never compared with one that has
just trained, whatever their columns in metrics.csv are called.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from pandas import DataFrame
from rich.console import Console

from lightfed.drawing.markup import parts
from lightfed.drawing.summary import print_line
from lightfed.results.groups import Group, final_text, grouped, synthetic_note, usual_metric
from lightfed.results.intervals import CHOSEN, INTERVAL, Paired, paired, seeds_text
from lightfed.results.outcome import best_of
from lightfed.results.run import Run
from lightfed.results.settings import gathered, options, variants
from lightfed.results.tables import readable, text_table
from lightfed.results.units import NOTHING, is_share
from lightfed.studies.flexifed.stages import AGGREGATED, TRAINED, stage_columns

KINDS = ("global", "local", "personal")
NO_TERM = re.compile(r"(?!data\.(dataset|partition)\b)")
NOTE = (
    "Means with their 95 % t interval over the seeds. Each experiment is compared with the best of "
    "the others; a positive difference is in its favour. The interval of a difference is that of "
    f"a paired t-test over the seeds that both have. {CHOSEN}"
)
CSV_COLUMNS = (
    *("data", "metric", "method", "rival", "rival_metric", "n", "seeds", "missing"),
    *("difference", "low", "high", "verdict"),
)


@dataclass(frozen=True)
class Contest:
    """One metric in which experiments are compared.

    `data` says how its partition differs from that of most contests. `metric` has no kind
    (`personal/`); `name` is shown. `columns` are those of metrics.csv by experiment, in the order
    of their runs.
    """

    data: str
    metric: str
    name: str
    columns: Mapping[Group, str]

    @property
    def title(self) -> str:
        return f"{self.data}: {self.name}{synthetic_note(self.columns)}"

    def score(self, group: Group) -> tuple[float, float]:
        """The final value: mean and sample deviation over the seeds."""
        return group.score(self.columns[group])

    def best_other(self, group: Group | None) -> Group:
        """The experiment with the best mean among all others."""
        return best_of({g: self.score(g)[0] for g in self.columns if g != group}, self.metric)

    def paired(self, own: Group, rival: Group) -> Paired:
        return paired(own, rival, self.metric, (self.columns[own], self.columns[rival]))

    def verdict(self) -> str:
        """Compares the best experiment with the next best, in a sentence."""
        best = self.best_other(None)
        rival = self.best_other(best)
        text = self.paired(best, rival).sentence(best.label, rival.label, role="the next best")
        return f"{best.label} {text}."

    def table(self) -> DataFrame:
        """A row per experiment, against the best of the others."""
        return text_table([self._row(group) for group in self.columns])

    def _row(self, group: Group) -> dict[str, str]:
        rival = self.best_other(group)
        found = self.paired(group, rival)
        unit = "points" if is_share(self.metric) else readable(self.metric)
        seeds = (found.seeds_label, found.lacking(group.label, rival.label))
        return {
            "experiment": group.label,
            self.name: final_text(group, self.columns[group]),
            "against": rival.label,
            f"difference, {unit}": found.gain if found.seeds else NOTHING,
            INTERVAL: found.interval or NOTHING,
            "seeds": ", ".join(text for text in seeds if text),
            "verdict": found.verdict,
        }


def contests(runs: Sequence[Run]) -> list[Contest]:
    """All metrics that at least two experiments have."""
    every = gathered(grouped(runs), _meeting)
    met = {key: groups for key, groups in every.items() if len(groups) > 1}
    names = variants([_terms(groups[0]) for groups in met.values()], [data for data, _ in met])
    return [
        contest
        for ((data, _), groups), variant in zip(met.items(), names, strict=True)
        for contest in _contests(f"{data}; {variant}" if variant else data, groups)
    ]


def verdicts_csv(found: Sequence[Contest]) -> str:
    """A line for each experiment, rival and metric; unknown values are empty."""
    lines = []
    for contest in found:
        for pair in itertools.combinations(contest.columns, 2):
            lines += [_line(contest, own, rival) for own, rival in (pair, pair[::-1])]
    return pd.DataFrame(lines, columns=pd.Index(CSV_COLUMNS)).to_csv(index=False)


def verdicts_markup(found: Sequence[Contest]) -> list[str]:
    """For the page of a comparison."""
    part, made = parts(), []
    for contest in found:
        made += [
            part.heading(f"{contest.title}, seed by seed"),
            part.paragraph(contest.verdict(), "lead"),
            part.table(contest.table()),
        ]
    return [*made, part.paragraph(NOTE, "small")] if made else []


def _line(contest: Contest, own: Group, rival: Group) -> tuple[object, ...]:
    """A line of the csv file."""
    result = contest.paired(own, rival)
    seeds = (len(result.seeds), seeds_text(result.seeds), result.lacking(own.name, rival.name))
    names = (contest.data, contest.columns[own], own.name, rival.name, contest.columns[rival])
    return (*names, *seeds, result.difference, result.low, result.high, result.verdict)


def _meeting(group: Group) -> tuple[str, frozenset[tuple[str, str]]]:
    """What two experiments must have in common to be compared."""
    return group.runs[0].data, frozenset(_terms(group).items())


def _terms(group: Group) -> dict[str, str]:
    """The number of clients and the settings of the data set and its partition."""
    run = group.runs[0]
    division = options(run.settings, but=NO_TERM)
    return {"clients": str(run.num_clients)} | division


def _contests(data: str, groups: Sequence[Group]) -> list[Contest]:
    metric = usual_metric(groups)
    stages = {group: stage_columns(group, metric) for group in groups}
    found: dict[str, dict[Group, str]] = {}
    for kind in KINDS:
        found[f"{kind} {readable(metric)}"] = dict.fromkeys(groups, f"{kind}/{metric}")
    if any(len(columns) == 2 for columns in stages.values()):
        del found[f"personal {readable(metric)}"]  # a different stage in different runs
        for stage in (AGGREGATED, TRAINED):
            own = {group: columns[stage] for group, columns in stages.items() if stage in columns}
            found[f"{readable(metric)} {stage}"] = own
    every = [
        Contest(data, metric, name, {g: c for g, c in own.items() if math.isfinite(g.score(c)[0])})
        for name, own in found.items()
    ]
    return [contest for contest in every if len(contest.columns) > 1]


def print_verdicts(console: Console, found: Sequence[Contest]) -> None:
    for contest in found:
        print_line(console, f"{contest.title}: {contest.verdict()}")
    if found:
        print_line(console, CHOSEN)
