"""Which experiment is better in which metric: as sentences and a csv file.

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
from lightfed.results.groups import Group
from lightfed.results.intervals import Paired, paired, seeds_text
from lightfed.results.outcome import best_of
from lightfed.results.run import Run
from lightfed.results.settings import gathered
from lightfed.results.tables import readable
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
        return best_of(scores, self.metric)

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
    met = gathered(groups.grouped(runs), lambda group: frozenset(groups.data_terms(group).items()))
    return [contest for members in met.values() for contest in _contests(members)]


def verdicts_csv(found: Sequence[Contest]) -> str:
    """A line for each experiment, rival and metric; unknown values are empty."""
    lines = []
    for contest in found:
        for own, rival in itertools.permutations(contest.columns, 2):
            pair = contest.paired(own, rival)
            line = {
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
            lines.append(line)
    return DataFrame(lines).to_csv(index=False)


def _contests(members: Sequence[Group]) -> list[Contest]:
    metric = groups.usual_metric(members)
    name = readable(metric)
    stages = {group: stage_columns(group, metric) for group in members}
    found = {f"{kind} {name}": dict.fromkeys(members, f"{kind}/{metric}") for kind in KINDS}
    if any(len(columns) == 2 for columns in stages.values()):
        del found[f"personal {name}"]  # a different stage in different runs
        for stage in (AGGREGATED, TRAINED):
            own = {group: columns[stage] for group, columns in stages.items() if stage in columns}
            found[f"{name} {stage}"] = own
    known = {
        shown: {g: c for g, c in columns.items() if math.isfinite(g.score(c)[0])}
        for shown, columns in found.items()
    }
    condition = members[0].condition
    return [Contest(condition, metric, n, own) for n, own in known.items() if len(own) > 1]
