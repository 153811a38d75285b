"""Compares methods for clients with different models: their gains and costs.

pFedMoE (Yi et al. 2024, https://arxiv.org/abs/2402.01350) is compared with seven methods in one
protocol: the same data, partition, models and work, with a learning rate for each method. The paper
divides them into three kinds, by how clients learn from each other, and gives a method's gain over
the best of all and over the best of its kind.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from lightfed.results.groups import Experiment, Group, Study, grouped, runs_of, usual_metric
from lightfed.results.intervals import Paired, paired
from lightfed.results.outcome import best_of, costs_to, reached_by_all
from lightfed.results.run import Run
from lightfed.results.settings import gathered, options, variants
from lightfed.results.units import direction

OURS = "pFedMoE"
DISTILLATION, MIXING, MUTUAL = "distillation", "model mixing", "mutual learning"
# by class: name in the paper and kind in its section 2.1. The section compares it with FedAPEN,
# so pFedMoE has the kind of methods with private models and a small shared one
METHODS: dict[str, tuple[str, str]] = {
    "PFedMoE": (OURS, MUTUAL),
    "FML": ("FML", MUTUAL),
    "FedKD": ("FedKD", MUTUAL),
    "FedAPEN": ("FedAPEN", MUTUAL),
    "FD": ("FD", DISTILLATION),
    "FedProto": ("FedProto", DISTILLATION),
    "LGFedAvg": ("LG-FedAvg", MIXING),
    "Standalone": ("Standalone", ""),
}
ORDER = [name for name, _ in METHODS.values()]
# options of which a protocol may hold several; a learning rate is chosen for each method
FREE = re.compile(r"model\.(algorithm(\.|$)|clients\.\d+\.name$|optimizer\.init_args\.lr$)")
# arguments of pFedMoE that the paper does not have: a run with another value is an ablation
PARTS = {"gate": "paper", "federate": "true"}


@dataclass(frozen=True)
class Cost:
    """Rounds, bytes and FLOPs of all clients until a metric first reached a target.

    `rounds` is the mean over the seeds; NaN unless all reached it.
    """

    rounds: float
    bytes: float
    flops: float


@dataclass(frozen=True, eq=False)
class Method(Experiment):
    """One experiment; its options are the protocol, its name and kind those of the paper.

    The label is the name, with that of its runs if a protocol has two of one method.
    """

    name: str
    label: str
    kind: str

    @property
    def place(self) -> int:
        """Of its colour: that of the method, unless a protocol has two of one method."""
        return self.group.method_place if self.label == self.name else self.group.place

    def score(self, metric: str) -> tuple[float, float]:
        """The last value of the metric: mean and sample deviation over the seeds."""
        return self.group.score(f"personal/{metric}")

    def cost(self, metric: str, target: float) -> Cost:
        """The costs until the metric, mean over the clients, reached a target."""
        return Cost(*costs_to(target, self.group.runs, f"personal/{metric}"))


class Protocol(Study[Method]):
    """Methods under the same conditions, in the order of METHODS: pFedMoE and at least one other.

    Its name is that of the data, with the options in which it differs from most others with it.
    """

    @property
    def data(self) -> str:
        return self.members[0].data

    @property
    def column(self) -> str:
        """The column of metrics.csv."""
        return f"personal/{self.metric}"

    @property
    def runs(self) -> list[Run]:
        return runs_of(self.members)

    @property
    def ours(self) -> Method:
        return next(method for method in self.members if method.name == OURS)

    def best_other(self, method: Method, *, kind: str | None = None) -> Method | None:
        """The experiment with the best final mean of other methods, of a kind if one is given."""
        scores = {
            other: score
            for other in self.members
            if other.name != method.name
            and kind in (None, other.kind)
            and math.isfinite(score := other.score(self.metric)[0])
        }
        return best_of(scores, self.metric) if scores else None

    def gain(self, method: Method, other: Method) -> Paired:
        """By how much a method beats another, seed by seed."""
        return paired(method.group, other.group, self.metric, (self.column, self.column))

    def is_best(self, method: Method) -> bool:
        """Whether it has the best final mean of all members, other variants of it included."""
        scores = {other: other.score(self.metric)[0] for other in self.members}
        known = {other: score for other, score in scores.items() if math.isfinite(score)}
        return len(known) > 1 and best_of(known, self.metric) is method

    def target(self, asked: float | None) -> float:
        """The target given, else the best value that all methods reached with every seed."""
        return reached_by_all(self.runs, self.column) if asked is None else asked

    def differences(self) -> pd.Series[float]:
        """By `seed` and `client`: how much pFedMoE's last evaluation beats the best baseline's.

        Clients of different seeds have different data. Empty if clients were not evaluated
        individually.
        """
        baseline = self.best_other(self.ours) or self.ours
        own, other = (_evaluated(method, self.metric) for method in (self.ours, baseline))
        return direction(self.metric) * (own - other).dropna()


def protocols(runs: Sequence[Run]) -> list[Protocol]:
    """The protocols with pFedMoE and at least one other method."""
    methods = [method for group in grouped(runs) if (method := _method(group))]
    every = gathered(methods, lambda m: (m.data, frozenset(m.options.items()))).values()
    complete = [own for own in every if OURS in (names := {m.name for m in own}) and len(names) > 1]
    ordered = [_distinguished(own) for own in complete]
    found = variants([own[0].options for own in ordered], [own[0].data for own in ordered])
    return [
        Protocol("; ".join(filter(None, (own[0].data, variant))), usual_metric(own), tuple(own))
        for own, variant in zip(ordered, found, strict=True)
    ]


def _method(group: Group) -> Method | None:
    """The experiment of a group; None for other algorithms or without a configuration."""
    run = group.runs[0]
    name, kind = METHODS.get(run.algorithm, ("", ""))
    if not name or run.config is None:
        return None
    found = options(run.settings, but=FREE)
    return Method(group, found, name, name, kind)


def _distinguished(found: Sequence[Method]) -> list[Method]:
    """In the order of METHODS, a complete method before its ablations.

    If a method occurs twice, labels have the names of its runs.
    """
    times = Counter(method.name for method in found)
    ordered = sorted(found, key=lambda method: (ORDER.index(method.name), _is_part(method)))
    return [
        replace(m, label=f"{m.name} ({m.group.name})") if times[m.name] > 1 else m for m in ordered
    ]


def _is_part(method: Method) -> bool:
    settings = method.group.runs[0].settings
    return any(
        settings.get(f"model.algorithm.init_args.{key}", whole) != whole
        for key, whole in PARTS.items()
    )


def _evaluated(method: Method, metric: str) -> pd.Series[float]:
    """The last evaluation by `seed` and `client`."""
    runs = [run for run in method.group.runs if metric in run.client_metrics]
    known = {run.seed: run.evaluation[metric].replace(np.inf, np.nan) for run in runs}
    return pd.concat(known or {0: pd.Series(dtype=float)}, names=["seed", "client"])
