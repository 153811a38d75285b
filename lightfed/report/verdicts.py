"""Which experiment is better in which metric: as sentences and a table.

Experiments are compared if they have the same data set, partition and number of clients. Metrics
are compared if they mean the same: a client after aggregation is never compared with one that has
just trained, whatever their columns in metrics.csv are called.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pandas import DataFrame

from lightfed.results import groups
from lightfed.results.groups import Group, Paired, paired
from lightfed.results.run import Run
from lightfed.results.text import readable, seeds_text
from lightfed.studies.dispfl import AGGREGATED, TRAINED, stage_columns

KINDS = ("global", "local", "personal")


class Contest(NamedTuple):
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
        return f"{self.data}: {self.name}{groups.synthetic_note(self.columns)}"

    def best_other(self, group: Group | None) -> Group:
        """The experiment with the best mean over the seeds among all others."""
        scores = {g: g.score(column)[0] for g, column in self.columns.items() if g != group}
        return groups.best_of(scores, self.metric)

    def paired(self, own: Group, rival: Group) -> Paired:
        return paired(own, rival, self.metric, (self.columns[own], self.columns[rival]))

    def verdicts(self) -> list[str]:
        """A sentence for each experiment against the best of the others; the best comes first."""
        best = self.best_other(None)
        sentences = []
        for own in (best, *(group for group in self.columns if group != best)):
            rival, role = self.best_other(own), "the next best" if own == best else "the best"
            text = self.paired(own, rival).sentence(own.label, rival.label, role=role)
            sentences.append(f"{own.label} {text}.")
        return sentences


def contests(runs: Sequence[Run]) -> list[Contest]:
    """All metrics that at least two experiments on the same data have."""
    found = []
    met = groups.gathered(groups.grouped(runs), lambda group: group.condition)
    for condition, members in met.items():
        metric = groups.usual_metric(members)
        name, stages = readable(metric), {group: stage_columns(group, metric) for group in members}
        columns = {f"{kind} {name}": dict.fromkeys(members, f"{kind}/{metric}") for kind in KINDS}
        if any(len(own) == 2 for own in stages.values()):
            del columns[f"personal {name}"]  # a different stage in different runs
            for stage in (AGGREGATED, TRAINED):
                columns[f"{name} {stage}"] = {g: c[stage] for g, c in stages.items() if stage in c}
        for shown, each in columns.items():
            known = {g: c for g, c in each.items() if math.isfinite(g.score(c)[0])}
            if len(known) > 1:
                found.append(Contest(condition, metric, shown, known))
    return found


def verdicts_table(found: Sequence[Contest]) -> DataFrame:
    """A row for each experiment, rival and metric; unknown values are NaN."""
    rows = []
    for contest in found:
        for own, rival in itertools.permutations(contest.columns, 2):
            pair = contest.paired(own, rival)
            rows.append(
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
    return DataFrame(rows)
