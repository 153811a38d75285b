"""Federations of levels, whose clients have models of different widths, and their results.

A level is a width of the model, see `results.mixtures`. The size of a federation is the mean number
of parameters of its clients' models. Parameter counts are read from environment.json, widths
and other settings from config.yaml.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightfed.results.groups import Experiment, Group, Study, grouped, studied
from lightfed.results.mixtures import (
    client_group_keys,
    combination,
    even,
    level_counts,
    level_name,
    rate_of,
)
from lightfed.results.run import Run, whole_number
from lightfed.results.settings import options, variants
from lightfed.utils.keys import LEVELS

UNSPOKEN = re.compile(r"^model\.clients\.0\.model\.")
# options of the combination and its data set; all other options of the model form the variant
NO_VARIANT = re.compile(
    r"trainer\.|data\.|model\.(clients\.(?!0\.model\.)"
    r"|clients\.0\.model\.(class_path$|init_args\.(rate$|num_classes$|input_shape))"
    r"|algorithm\.(class_path$|init_args\.(assignment$|level_weights)))"
)


@dataclass(frozen=True)
class Level:
    """The clients of one width, and the parameters of their model."""

    rate: float
    clients: int
    parameters: int

    @property
    def name(self) -> str:
        """The letter of the rate, or the rate itself."""
        return level_name(self.rate)


@dataclass(frozen=True, eq=False)
class Mixture(Experiment):
    """One experiment; its options are settings of model and algorithm by their last names.

    Attributes:
        levels: the widest first.
        model: the class of the clients' models.
        split: how the data was partitioned.
        dynamic: whether clients draw a new level in every round.
        variant: options in which it differs from most others of its picture, such as `norm gn`.
    """

    levels: tuple[Level, ...]
    model: str
    split: str
    dynamic: bool
    variant: str = ""

    @property
    def clients(self) -> int:
        return sum(level.clients for level in self.levels)

    @property
    def size(self) -> float:
        """Parameters of a client's model, mean over the clients."""
        return sum(level.clients * level.parameters for level in self.levels) / self.clients

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.levels)

    @property
    def counts(self) -> dict[float, int]:
        """Clients by rate."""
        return {level.rate: level.clients for level in self.levels}

    @property
    def even(self) -> bool:
        return even(self.counts)

    @property
    def combination(self) -> str:
        return combination(self.counts)

    def score(self, column: str) -> tuple[float, float]:
        """The last value in a column of metrics.csv: mean and sample deviation over the seeds."""
        return self.group.score(column)


class Family(Study[Mixture]):
    """All experiments with one data set and one model, in the order of their runs."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The divisions of the data, IID before the others."""
        found = dict.fromkeys(mixture.split for mixture in self.members)
        return tuple(sorted(found, key=lambda split: split != "IID"))

    @property
    def levels(self) -> tuple[str, ...]:
        """All levels, the widest first."""
        found = {level.name: level.rate for mixture in self.members for level in mixture.levels}
        return tuple(sorted(found, key=lambda name: -found[name]))

    def place(self, level: str) -> int:
        """The colour of a level: letters have the same in all families, other rates follow."""
        others = [name for name in self.levels if name not in LEVELS]
        every = (*LEVELS, *others)
        return every.index(level)

    @property
    def algorithm(self) -> str:
        """The most common algorithm, of mixtures if there are any; labels leave it out."""
        mixed = [m.algorithm for m in self.members if len(m.levels) > 1]
        every = mixed or [m.algorithm for m in self.members]
        return Counter(every).most_common(1)[0][0]

    @property
    def largest(self) -> Level:
        """The largest model: all sizes are given relative to it."""
        every = [level for mixture in self.members for level in mixture.levels]
        return max(every, key=lambda level: level.parameters)


def families(runs: Sequence[Run]) -> list[Family]:
    """The families with models of at least two widths."""
    found = [mixture for group in grouped(runs) if (mixture := _mixture(group))]
    every = [
        Family(study.name, study.metric, _variants(study.members))
        for study in studied(found, lambda mixture: f"{mixture.data}, {mixture.model}")
    ]
    return [family for family in every if len(family.levels) > 1]


def _mixture(group: Group) -> Mixture | None:
    """The experiment of a group; None without widths or parameters, or with different models."""
    run = group.runs[0]
    settings = run.settings
    levels = _levels(run, settings)
    models = {settings.get(f"{key}.model.class_path", "") for key in client_group_keys(settings)}
    if not levels or len(models) != 1:
        return None
    return Mixture(
        group=group,
        options=options(settings, but=NO_VARIANT, unspoken=UNSPOKEN),
        levels=levels,
        model=models.pop().rsplit(".", 1)[-1],
        split=_split(run, settings),
        dynamic=settings.get("model.algorithm.init_args.assignment") == "dynamic",
    )


def _levels(run: Run, settings: Mapping[str, str]) -> tuple[Level, ...]:
    """The levels of a run, combining client groups of one width; empty if unknown."""
    stated = run.environment.get("parameters")
    parameters = list(stated.values()) if isinstance(stated, Mapping) else []
    keys, counts = client_group_keys(settings), level_counts(settings)
    sizes = [whole_number(size) for size in parameters]
    if not counts or len(keys) != len(sizes) or not all(sizes):
        return ()
    by_rate = {rate_of(settings, key): size for key, size in zip(keys, sizes, strict=True)}
    return tuple(Level(rate, count, by_rate[rate] or 0) for rate, count in counts.items())


def _split(run: Run, settings: Mapping[str, str]) -> str:
    """`IID`, or the partition scheme."""
    chosen = settings.get("data.partition.class_path", "").rsplit(".", 1)[-1]
    scheme = str(run.partition.meta.get("scheme", chosen)) if run.partition else chosen
    return "IID" if scheme in ("Iid", "Iid()") else scheme or "partition unknown"


def _variants(mixtures: Sequence[Mixture]) -> tuple[Mixture, ...]:
    """The same mixtures, each with how it differs from most of its algorithm and split."""
    alike = [(mixture.algorithm, mixture.split) for mixture in mixtures]
    found = variants([mixture.options for mixture in mixtures], alike)
    return tuple(replace(m, variant=variant) for m, variant in zip(mixtures, found, strict=True))
