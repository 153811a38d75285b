"""FlexiFed's studies: strategies compared in each setting, and how soon they reach a target.

Experiments belong to one study if they have the same data set and family of models. Those that
differ only in the strategy are one setting: a row of the paper's Table 1, or a variation of it with
other clients, versions, a limit on common layers, or other options.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightfed.results.columns import natural_order
from lightfed.results.groups import grouped, usual_metric
from lightfed.results.outcome import best_of, when_reached
from lightfed.results.run import Run
from lightfed.results.settings import difference, gathered, usual
from lightfed.studies.flexifed.trials import ALONE, BASELINE, PLACES, Trial, trial_of

LIMIT, START, NO_LIMIT = "max_common_layers", "initial", "null"
# what only one strategy has; named wherever it is set to anything else
PLAIN = {LIMIT: NO_LIMIT, "share_classifier": "false", "weights": "uniform"}


@dataclass(frozen=True)
class Topic:
    """What the experiments of a study have in common: data, class of the models, metric.

    The metric is the one shown, without `personal/`. `versions` are those of the family in all
    given runs, in natural order: V1, V2 and so on.
    """

    data: str
    family: str
    metric: str
    versions: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.data}, {self.family}"


@dataclass(frozen=True)
class Pace:
    """How soon a strategy reached a target; NaN if it did not.

    `rounds` is the first in which the mean over the seeds reached it, `speed` rounds of
    Clustered-FL over these.
    """

    rounds: float
    speed: float


@dataclass(frozen=True)
class Setting:
    """Experiments that differ only in the strategy, by strategy in the paper's order.

    `variant` has the options in which it differs from most of the study. `baseline` is Clustered-FL
    with the same options, except those that only Max-Common has.
    """

    topic: Topic
    variant: str
    trials: Mapping[str, Trial]
    baseline: Trial | None

    @property
    def name(self) -> str:
        return f"{self.topic.name}; {self.variant}" if self.variant else self.topic.name

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions that at least one strategy has."""
        having = {version for trial in self.trials.values() for version in trial.client_groups}
        return tuple(version for version in self.topic.versions if version in having)

    def best(self, version: str | None) -> set[str]:
        """The strategies with the best final value; none if fewer than two have one."""
        scores = {n: trial.score(self.topic.metric, version)[0] for n, trial in self.trials.items()}
        known = {name: score for name, score in scores.items() if math.isfinite(score)}
        if len(known) < 2:
            return set()
        top = known[best_of(known, self.topic.metric)]
        return {name for name, score in known.items() if score == top}

    def target(self, asked: float | None) -> float:
        """The target given, else the final value of Clustered-FL; NaN without it."""
        if asked is not None:
            return asked
        if self.baseline is None:
            return math.nan
        reached = self.baseline.course(self.topic.metric)["mean"]
        return float(reached.iloc[-1]) if len(reached) else math.nan

    def pace(self, strategy: str, asked: float | None) -> Pace:
        target, metric = self.target(asked), self.topic.metric

        def rounds(trial: Trial) -> float:
            course = trial.course(metric)
            return when_reached(target, course["mean"], course.index.to_series(), metric)

        own = rounds(self.trials[strategy])
        return Pace(own, rounds(self.baseline) / own if self.baseline else math.nan)


@dataclass(frozen=True)
class Study:
    """All experiments with one data set and one family of models, in the order of their runs.

    `usual` is the most frequent value of each option; the setting that has all of these comes
    first.
    """

    topic: Topic
    trials: tuple[Trial, ...]
    usual: Mapping[str, str]
    settings: tuple[Setting, ...]


def studies(runs: Sequence[Run]) -> list[Study]:
    """The studies of strategies; a data set with only Standalone is not a study."""
    trials = [trial for group in grouped(runs) if (trial := trial_of(group))]
    versions = {
        family: tuple(sorted({v for trial in own for v in trial.client_groups}, key=natural_order))
        for family, own in gathered(trials, lambda trial: trial.family).items()
    }
    return [
        _study(Topic(data, family, usual_metric(own), versions[family]), own)
        for (data, family), own in gathered(trials, lambda t: (t.data, t.family)).items()
        if any(trial.strategy != ALONE for trial in own)
    ]


def _study(topic: Topic, trials: Sequence[Trial]) -> Study:
    complete = _completed(trials)
    most = usual([trial.options for trial in complete]) | PLAIN
    return Study(topic, complete, most, _settings(topic, complete, most))


def _completed(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Fill in options that a strategy lacks, as most of the others set them.

    Otherwise Standalone, which has none, would not share a setting with any strategy.
    """
    starts = Counter(t.options[START] for t in trials if START in t.options).most_common(1)
    lent = PLAIN | ({START: starts[0][0]} if starts else {})
    # its own options first, unchanged
    return tuple(replace(t, options={**t.options, **lent, **t.options}) for t in trials)


def _settings(
    topic: Topic, trials: Sequence[Trial], most: Mapping[str, str]
) -> tuple[Setting, ...]:
    """Group trials with the same options.

    Two trials of one strategy that differ only in other settings, such as devices, are separated.
    """
    rows: dict[tuple[frozenset[tuple[str, str]], int], dict[str, Trial]] = {}
    for trial in trials:
        key, again = frozenset(trial.options.items()), 0
        while trial.strategy in rows.get((key, again), ()):
            again += 1
        rows.setdefault((key, again), {})[trial.strategy] = trial
    found = []
    for (_, again), row in rows.items():
        options = next(iter(row.values())).options
        parts = (difference(options, most), f"#{again + 1}" if again else "")
        ordered = {name: row[name] for name in sorted(row, key=PLACES.__getitem__)}
        baseline = row.get(BASELINE) or _baseline(options, trials)
        variant = " ".join(part for part in parts if part)
        found.append(Setting(topic, variant, ordered, baseline))
    return tuple(sorted(found, key=lambda setting: bool(setting.variant)))


def _baseline(options: Mapping[str, str], trials: Sequence[Trial]) -> Trial | None:
    own = {**options, **PLAIN}
    return next((t for t in trials if t.strategy == BASELINE and t.options == own), None)
