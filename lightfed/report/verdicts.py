"""Which experiment is better in which metric: as sentences, tables and a csv file.

Experiments are compared if they have the same data set, partition and number of clients. Metrics
are compared if they mean the same: a client after aggregation is never compared with one that has
just trained, whatever their columns in metrics.csv are called.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from pandas import DataFrame

from lightfed.results.groups import (
    Group,
    data_terms,
    final_heading,
    final_text,
    grouped,
    synthetic_note,
    usual_metric,
)
from lightfed.results.intervals import CHOSEN, INTERVAL, Paired, paired, seeds_text
from lightfed.results.outcome import best_of
from lightfed.results.run import Run
from lightfed.results.settings import gathered
from lightfed.results.tables import readable, text_table
from lightfed.results.units import NOTHING, is_share
from lightfed.studies.dispfl import AGGREGATED, TRAINED, stage_columns

KINDS = ("global", "local", "personal")
NOTE = (
    "Means with their 95 % t interval over the seeds. Each experiment is compared with the best of "
    "the others; a positive difference is in its favour. The interval of a difference is that of "
    f"a paired t-test over the seeds that both have. {CHOSEN}"
)


@dataclass(frozen=True)
class Contest:
    """One metric in which experiments are compared.

    `data` is their condition. `metric` has no kind (`personal/`); `name` is shown. `columns` are
    those of metrics.csv by experiment, in the order of their runs.
    """

    data: str
    metric: str
    name: str
    columns: Mapping[Group, str]

    @property
    def title(self) -> str:
        return f"{self.data}: {self.name}{synthetic_note(self.columns)}"

    def best_other(self, group: Group | None) -> Group:
        """The experiment with the best mean over the seeds among all others."""
        scores = {g: g.score(column)[0] for g, column in self.columns.items() if g != group}
        return best_of(scores, self.metric)

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
        rows = []
        unit = "points" if is_share(self.metric) else readable(self.metric)
        for group, column in self.columns.items():
            rival = self.best_other(group)
            found = self.paired(group, rival)
            seeds = (found.seeds_label, found.lacking(group.label, rival.label))
            rows.append(
                {
                    "experiment": group.label,
                    final_heading(self.name, self.columns): final_text(group, column),
                    "against": rival.label,
                    f"difference, {unit}": found.gain if found.seeds else NOTHING,
                    INTERVAL: found.interval or NOTHING,
                    "seeds": ", ".join(filter(None, seeds)),
                    "verdict": found.verdict,
                }
            )
        return text_table(rows)


def contests(runs: Sequence[Run]) -> list[Contest]:
    """All metrics that at least two experiments on the same data have."""
    met = gathered(grouped(runs), lambda group: frozenset(data_terms(group).items()))
    return [contest for groups in met.values() for contest in _contests(groups)]


def verdicts_csv(found: Sequence[Contest]) -> str:
    """A line for each experiment, rival and metric; unknown values are empty."""
    lines = []
    for contest in found:
        for own, rival in itertools.permutations(contest.columns, 2):
            pair = contest.paired(own, rival)
            lines.append(
                {
                    "data": contest.data,
                    "metric": contest.columns[own],
                    "method": own.name,
                    "rival": rival.name,
                    "rival_metric": contest.columns[rival],
                    "n": len(pair.seeds),
                    "seeds": seeds_text(pair.seeds),
                    "missing": pair.lacking(own.name, rival.name),
                    "difference": pair.difference,
                    "low": pair.low,
                    "high": pair.high,
                    "verdict": pair.verdict,
                }
            )
    return pd.DataFrame(lines).to_csv(index=False)


def _contests(groups: Sequence[Group]) -> list[Contest]:
    metric = usual_metric(groups)
    name = readable(metric)
    stages = {group: stage_columns(group, metric) for group in groups}
    found = {f"{kind} {name}": dict.fromkeys(groups, f"{kind}/{metric}") for kind in KINDS}
    if any(len(columns) == 2 for columns in stages.values()):
        del found[f"personal {name}"]  # a different stage in different runs
        for stage in (AGGREGATED, TRAINED):
            own = {group: columns[stage] for group, columns in stages.items() if stage in columns}
            found[f"{name} {stage}"] = own
    contests = []
    for shown, columns in found.items():
        known = {g: c for g, c in columns.items() if math.isfinite(g.score(c)[0])}
        if len(known) > 1:
            contests.append(Contest(groups[0].condition, metric, shown, known))
    return contests
