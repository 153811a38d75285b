"""Methods for clients with models of their own, side by side: who gains how much, and at what cost.

pFedMoE (Yi et al. 2024, https://arxiv.org/abs/2402.01350) is compared with seven methods in one
protocol: equal data, division, models and work, at learning rates of their own. The paper divides
them into three kinds, by how clients learn from each other, and gives a method's gain over the best
of all and of its own kind.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightfed.results.groups import Experiment, Group, Study, grouped, runs_of, usual_metric
from lightfed.results.intervals import Paired, paired
from lightfed.results.outcome import reached_by_all, traffic, when_reached
from lightfed.results.runfiles import Floats, RunFiles
from lightfed.results.settings import options
from lightfed.results.units import direction
from lightfed.results.variants import gathered, variants

OURS = "pFedMoE"
DISTILLATION, MIXING, MUTUAL = "distillation", "model mixing", "mutual learning"
# by class: as the paper calls it and, of its section 2.1, the kind; that of pFedMoE is the one of
# private models and a small shared one, with the last of which, FedAPEN, the section compares it
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
PLACES = {name: place for place, (name, _) in enumerate(METHODS.values())}
# options of which a protocol may hold several; a learning rate is chosen for each method
FREE = re.compile(r"model\.(algorithm(\.|$)|clients\.\d+\.name$|optimizer\.init_args\.lr$)")
# arguments of pFedMoE that the paper does not have: a run with another value is a part of it
PARTS = {"gate": "paper", "federate": "true"}
UNSPOKEN = re.compile(r"^(trainer|model|data)\.|\b(init_args|class_path)\b")


@dataclass(frozen=True)
class Cost:
    """What it took until a metric was first measured to be as good as a target.

    Attributes:
        rounds: mean over the seeds; NaN unless all got there.
        bytes: up and down, of all clients.
        flops: of all clients.
    """

    rounds: float
    bytes: float
    flops: float


@dataclass(frozen=True, eq=False)
class Method(Experiment):
    """One experiment; its options are the protocol.

    Attributes:
        name: as the paper calls it.
        label: the name, with that of its runs where a protocol has two of one method.
        kind: distillation, model mixing, mutual learning, or none.
    """

    name: str
    label: str
    kind: str

    def score(self, metric: str) -> tuple[float, float]:
        """The final value: mean and sample deviation over the seeds."""
        return self.group.score(f"personal/{metric}")

    def cost(self, metric: str, target: float) -> Cost:
        """Until the metric, mean over the clients, was as good as a target."""
        found = np.array([_cost(run, f"personal/{metric}", target) for run in self.group.runs])
        return Cost(*found.mean(axis=0).tolist())  # NaN where a seed did not get there


class Protocol(Study[Method]):
    """Methods on equal terms, in the order of METHODS: pFedMoE and at least one other.

    Its name is that of the data, and in which options it differs from most protocols with that.
    """

    @property
    def data(self) -> str:
        return self.members[0].data

    @property
    def column(self) -> str:
        """Of metrics.csv."""
        return f"personal/{self.metric}"

    @property
    def runs(self) -> list[RunFiles]:
        return runs_of(self.members)

    @property
    def ours(self) -> Method:
        return next(method for method in self.members if method.name == OURS)

    def best_other(self, method: Method, *, kind: str | None = None) -> Method | None:
        """The experiment with the best final mean among those of other methods; None without any.

        Args:
            method: that is held against it.
            kind: to which it belongs; None: any.
        """
        others = [
            other
            for other in self.members
            if other.name != method.name
            and kind in (None, other.kind)
            and math.isfinite(other.score(self.metric)[0])
        ]
        sign = direction(self.metric)
        return max(others, key=lambda other: sign * other.score(self.metric)[0], default=None)

    def gain(self, method: Method, other: Method) -> Paired:
        """What a method is better by than another, seed by seed."""
        return paired(method.group, other.group, self.metric, (self.column, self.column))

    def is_best(self, method: Method) -> bool:
        """Whether its final mean is as good as that of the best other."""
        other = self.best_other(method)
        if other is None:
            return False
        more = method.score(self.metric)[0] - other.score(self.metric)[0]
        return direction(self.metric) * more >= 0

    def target(self, asked: float | None) -> float:
        """What was asked for, else the best that all methods reached with every seed."""
        return reached_by_all(self.runs, self.column) if asked is None else asked

    def differences(self) -> dict[int, Floats]:
        """By client: what pFedMoE's last evaluation is better by than the best baseline's, (S,).

        Of each seed that both were run with, since clients of different seeds hold different data.
        Empty where clients were not evaluated one by one.
        """
        baseline = self.best_other(self.ours)
        if baseline is None:
            return {}
        sign = direction(self.metric)
        own, other = _by_seed(self.ours, self.metric), _by_seed(baseline, self.metric)
        differences = [
            (client, sign * (own[seed][client] - other[seed][client]))
            for seed in own.keys() & other.keys()
            for client in own[seed].keys() & other[seed].keys()
        ]
        found = gathered(sorted(differences, key=_client), _client)
        return {client: np.array([more for _, more in pairs]) for client, pairs in found.items()}


def protocols(runs: Sequence[RunFiles]) -> list[Protocol]:
    """Where pFedMoE was run and at least one other method on equal terms."""
    methods = [method for group in grouped(runs) if (method := _method(group))]
    every = gathered(methods, lambda m: (m.data, frozenset(m.options.items()))).values()
    complete = [own for own in every if OURS in (names := {m.name for m in own}) and len(names) > 1]
    ordered = [_told_apart(own) for own in complete]
    found = variants([own[0].options for own in ordered], [own[0].data for own in ordered])
    return [
        Protocol("; ".join(filter(None, (own[0].data, variant))), usual_metric(own), tuple(own))
        for own, variant in zip(ordered, found, strict=True)
    ]


def _method(group: Group) -> Method | None:
    """None for another algorithm, or where there is no configuration."""
    run = group.runs[0]
    name, kind = METHODS.get(run.algorithm, ("", ""))
    if not name or run.config is None:
        return None
    found = options(run.settings, but=FREE, unspoken=UNSPOKEN)
    return Method(group, found, name, name, kind)


def _told_apart(found: Sequence[Method]) -> list[Method]:
    """In the order of METHODS, and a whole method before parts of it.

    Two of one method have the names of their runs.
    """
    times = Counter(method.name for method in found)
    ordered = sorted(found, key=lambda method: (PLACES[method.name], _is_part(method)))
    return [
        replace(m, label=f"{m.name} ({m.group.label})") if times[m.name] > 1 else m for m in ordered
    ]


def _is_part(method: Method) -> bool:
    settings = method.group.runs[0].settings
    return any(
        settings.get(f"model.algorithm.init_args.{key}", whole) != whole
        for key, whole in PARTS.items()
    )


def _cost(run: RunFiles, column: str, target: float) -> list[float]:
    """Rounds, bytes and FLOPs."""
    spent = (run.rounds, traffic(run), np.nancumsum(run.series("flops")))
    return [when_reached(target, run.series(column), at, column) for at in spent]


def _by_seed(method: Method, metric: str) -> dict[object, dict[int, float]]:
    """The last evaluation of each client, by the seed of the run."""
    return {
        run.environment.get("seed"): {
            client: value
            for client, value in zip(
                run.evaluation.client.tolist(), run.evaluation.values[metric].tolist(), strict=True
            )
            if math.isfinite(value)
        }
        for run in method.group.runs
        if run.evaluation and metric in run.evaluation.metrics
    }


def _client(pair: tuple[int, float]) -> int:
    return pair[0]
