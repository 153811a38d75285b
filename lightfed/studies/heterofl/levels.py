"""Federations of levels, whose clients have models of different widths, and their results.

A level is a width of the model; HeteroFL (Diao et al., ICLR 2021) calls the rates 1, 1/2, 1/4, 1/8
and 1/16 a to e. A combination of levels is called a, a-e, a-b-c, or a2-b8 if the levels have
unequal shares. The size of a federation is the mean number of parameters of its clients' models.
Parameter counts are read from environment.json, widths and other settings from config.yaml.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightfed.results.groups import Experiment, Group, Study, grouped, studied
from lightfed.results.run import Run, whole_number
from lightfed.results.settings import options, variants

LETTERS = "abcde"
UNEVEN = 0.05  # of the clients: rounding error of a level's share that still counts as equal
UNSPOKEN = re.compile(r"^model\.((clients\.0\.model|algorithm)\.init_args\.)?")
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
        place = -math.log2(self.rate)
        known = place.is_integer() and place < len(LETTERS)
        return LETTERS[int(place)] if known else f"{self.rate:g}"


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
    def even(self) -> bool:
        """Whether the levels have equal shares, up to rounding to whole clients."""
        counts = [level.clients for level in self.levels]
        spread = max(counts) - min(counts)
        return spread < len(counts) and spread <= UNEVEN * self.clients

    @property
    def combination(self) -> str:
        """`a-e` for equal shares, else shares in tenths, or in smallest numbers: `a2-b8`."""
        if self.even:
            return "-".join(self.names)
        counts = [level.clients for level in self.levels]
        tenths = all(10 * count % self.clients == 0 for count in counts)
        unit = self.clients / 10 if tenths else math.gcd(*counts)
        shares = zip(self.names, counts, strict=True)
        return "-".join(f"{name}{count / unit:.0f}" for name, count in shares)

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
        others = [name for name in self.levels if name not in tuple(LETTERS)]
        every = (*LETTERS, *others)
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
    models = {settings.get(f"{key}.model.class_path", "") for key in _client_group_keys(settings)}
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


def _client_group_keys(settings: Mapping[str, str]) -> list[str]:
    return list(
        dict.fromkeys(
            key[0] for name in settings if (key := re.match(r"model\.clients\.\d+", name))
        )
    )


def _levels(run: Run, settings: Mapping[str, str]) -> tuple[Level, ...]:
    """The levels of a run, combining client groups of one width; empty if unknown."""
    stated = run.environment.get("parameters")
    parameters = list(stated.values()) if isinstance(stated, Mapping) else []
    keys = _client_group_keys(settings)
    if not keys or len(keys) != len(parameters):
        return ()
    clients: Counter[float] = Counter()
    sizes: dict[float, int] = {}
    for key, count in zip(keys, parameters, strict=True):
        rate, size = _rate(settings, key), whole_number(count)
        members = settings.get(f"{key}.count", "")
        if not rate or not size or not members.isdecimal():
            return ()
        clients[rate] += int(members)
        sizes[rate] = size
    return tuple(Level(rate, clients[rate], sizes[rate]) for rate in sorted(sizes, reverse=True))


def _rate(settings: Mapping[str, str], client_group: str) -> float | None:
    """The width of a group: its `rate` or `level`, 1 without both; None if invalid."""
    rate, level = (settings.get(f"{client_group}.{key}", "null") for key in ("rate", "level"))
    if rate == "null":
        return 0.5 ** LETTERS.index(level) if level in tuple(LETTERS) else 1.0
    try:
        return float(rate) if 0 < float(rate) <= 1 else None
    except ValueError:
        return None


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
