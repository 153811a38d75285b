"""Federations of levels: whose clients have models of different widths, and what came out of them.

A level is a width of the model; HeteroFL (Diao et al., ICLR 2021) calls the rates 1, 1/2, 1/4, 1/8
and 1/16 a to e. A combination of levels is called a, a-e, a-b-c, or a2-b8 where the levels have
unequal shares. The size of a federation is the number of parameters of its clients' models, on
average over all clients: of a-b its share of a times the size of a, and so on. The counts are those
of environment.json, widths and everything else that was set are read from config.yaml.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightfed.results.groups import Group, grouped, usual_metric
from lightfed.results.runfiles import RunFiles, whole_number
from lightfed.results.settings import options
from lightfed.results.variants import difference, usual

LETTERS = "abcde"
UNEVEN = 0.05  # of the clients: what a division without remainder may leave to one level
MODEL = "model.clients.0.model."
PREFIXES = (f"{MODEL}init_args.", "model.algorithm.init_args.", "model.")
# what a combination and its data set; all other options of the model are a variant
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
        """The letter of the rate, or the rate where it has none."""
        place = -math.log2(self.rate)
        known = place.is_integer() and place < len(LETTERS)
        return LETTERS[int(place)] if known else f"{self.rate:g}"


@dataclass(frozen=True, eq=False)
class Mixture:
    """One experiment, whose runs differ in the seed alone.

    Attributes:
        group: its runs.
        levels: the widest first.
        algorithm: as the runs name it; `data` likewise, and `model`, the class of the clients'.
        split: how the data was divided.
        dynamic: whether clients draw their level anew for every round.
        options: settings of model and algorithm by their last names.
        variant: in which options it differs from most others that it is drawn with, as `norm gn`.
    """

    group: Group
    levels: tuple[Level, ...]
    algorithm: str
    data: str
    model: str
    split: str
    dynamic: bool
    options: Mapping[str, str] = field(repr=False)
    variant: str = ""

    @property
    def clients(self) -> int:
        return sum(level.clients for level in self.levels)

    @property
    def size(self) -> float:
        """Parameters of a client's model, on average over the clients."""
        return sum(level.clients * level.parameters for level in self.levels) / self.clients

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.levels)

    @property
    def even(self) -> bool:
        """Whether the levels have equal shares, but for clients that cannot be divided."""
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
        """The final value of a column of metrics.csv: mean and sample deviation over the seeds."""
        return self.group.score(column)


@dataclass(frozen=True)
class Family:
    """All experiments with one data set and one model: what shares a picture.

    Attributes:
        metric: what is drawn, without `global/` or `personal/`.
        mixtures: in the order in which their runs were named.
    """

    data: str
    model: str
    metric: str
    mixtures: tuple[Mixture, ...]

    @property
    def name(self) -> str:
        return f"{self.data}, {self.model}"

    @property
    def splits(self) -> tuple[str, ...]:
        """The divisions of the data, IID before the others."""
        found = dict.fromkeys(mixture.split for mixture in self.mixtures)
        return tuple(sorted(found, key=lambda split: split != "IID"))

    @property
    def levels(self) -> tuple[str, ...]:
        """All levels that occur, the widest first."""
        found = {level.name: level.rate for mixture in self.mixtures for level in mixture.levels}
        return tuple(sorted(found, key=lambda name: -found[name]))

    def place(self, level: str) -> int:
        """The colour of a level: a letter has the same in all families, other rates follow."""
        others = [name for name in self.levels if name not in tuple(LETTERS)]
        every = (*LETTERS, *others)
        return every.index(level)

    @property
    def algorithm(self) -> str:
        """That of most federations of several levels, or of all if there are none; not named."""
        mixed = [m.algorithm for m in self.mixtures if len(m.levels) > 1]
        every = mixed or [m.algorithm for m in self.mixtures]
        return Counter(every).most_common(1)[0][0]

    @property
    def largest(self) -> Level:
        """The largest model: all sizes are told relative to it."""
        every = [level for mixture in self.mixtures for level in mixture.levels]
        return max(every, key=lambda level: level.parameters)


def families(runs: Sequence[RunFiles]) -> list[Family]:
    """What can be drawn of sizes: families in which there are models of two widths or more."""
    found = [mixture for group in grouped(runs) if (mixture := _mixture(group))]
    members: dict[tuple[str, str], list[Mixture]] = {}
    for mixture in found:
        members.setdefault((mixture.data, mixture.model), []).append(mixture)
    every = [
        Family(data, model, usual_metric(m.group for m in mixtures), _variants(mixtures))
        for (data, model), mixtures in members.items()
    ]
    return [family for family in every if len(family.levels) > 1]


def _mixture(group: Group) -> Mixture | None:
    """None for runs that do not tell their widths or parameters, or whose clients' models differ.

    The files of a group's first run speak for all: they differ in the seed alone.
    """
    run = group.runs[0]
    told = run.settings
    levels = _levels(run, told)
    models = {told.get(f"{key}.model.class_path", "") for key in _cohort_keys(told)}
    if not levels or len(models) != 1:
        return None
    return Mixture(
        group=group,
        levels=levels,
        algorithm=run.algorithm,
        data=run.data,
        model=models.pop().rsplit(".", 1)[-1],
        split=_split(run, told),
        dynamic=told.get("model.algorithm.init_args.assignment") == "dynamic",
        options=_options(told),
    )


def _cohort_keys(told: Mapping[str, str]) -> list[str]:
    return list(
        dict.fromkeys(key[0] for name in told if (key := re.match(r"model\.clients\.\d+", name)))
    )


def _levels(run: RunFiles, told: Mapping[str, str]) -> tuple[Level, ...]:
    """The levels of a run, cohorts of one width together; none where a file does not tell."""
    stated = run.environment.get("parameters")
    parameters = list(stated.values()) if isinstance(stated, Mapping) else []
    keys = _cohort_keys(told)
    if not keys or len(keys) != len(parameters):
        return ()
    clients: Counter[float] = Counter()
    sizes: dict[float, int] = {}
    for key, count in zip(keys, parameters, strict=True):
        rate, size = _rate(told, key), whole_number(count)
        members = told.get(f"{key}.count", "")
        if not rate or not size or not members.isdecimal():
            return ()
        clients[rate] += int(members)
        sizes[rate] = size
    return tuple(Level(rate, clients[rate], sizes[rate]) for rate in sorted(sizes, reverse=True))


def _rate(told: Mapping[str, str], cohort: str) -> float | None:
    """The width of a cohort: its `rate` or `level`, 1 without both; None where that is none."""
    rate, level = (told.get(f"{cohort}.{key}", "null") for key in ("rate", "level"))
    if rate == "null":
        return 0.5 ** LETTERS.index(level) if level in tuple(LETTERS) else 1.0
    try:
        return float(rate) if 0 < float(rate) <= 1 else None
    except ValueError:
        return None


def _split(run: RunFiles, told: Mapping[str, str]) -> str:
    """`IID`, or the scheme that divided the data."""
    chosen = told.get("data.partition.class_path", "").rsplit(".", 1)[-1]
    scheme = str(run.split.meta.get("scheme", chosen)) if run.split else chosen
    return "IID" if scheme in ("Iid", "Iid()") else scheme or "division not known"


def _options(told: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for key, value in options(told, but=NO_VARIANT).items():
        prefix = next(prefix for prefix in PREFIXES if key.startswith(prefix))
        found[key.removeprefix(prefix).replace(".", " ")] = value
    return found


def _variants(mixtures: Sequence[Mixture]) -> tuple[Mixture, ...]:
    """The same mixtures, each told how it differs from most of its algorithm and split."""
    alike: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for mixture in mixtures:
        alike.setdefault((mixture.algorithm, mixture.split), []).append(mixture.options)
    most = {key: usual(found) for key, found in alike.items()}
    return tuple(
        replace(
            mixture, variant=difference(mixture.options, most[mixture.algorithm, mixture.split])
        )
        for mixture in mixtures
    )
