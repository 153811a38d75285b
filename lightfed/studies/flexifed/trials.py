"""Experiments with FlexiFed's strategies: which strategy, what was set, what each version came to.

FlexiFed (Wang et al., WWW 2023) has clients with up to four versions of one family of models, such
as VGG-11, -13, -16 and -19, a cohort each. What was set is read from config.yaml, the cohorts from
environment.json. All figures are of the clients' own models on their own test samples.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightfed.results.groups import Course, Group
from lightfed.results.runfiles import natural_order, whole_number
from lightfed.results.settings import options

ALONE, BASELINE = "Standalone", "Clustered-FL"
STRATEGIES = {
    "Standalone": ALONE,
    "ClusteredFL": BASELINE,
    "BasicCommon": "Basic-Common",
    "ClusteredCommon": "Clustered-Common",
    "MaxCommon": "Max-Common",
}
PLACES = {name: place for place, name in enumerate(STRATEGIES.values())}  # in the paper's tables
VERSIONS, CLIENTS, SHARES = "versions", "clients", "shares"
VERSION_SETTINGS = ("depth", "layers", "variant")
# options that a trial tells elsewhere: strategy, clients, data, and what its version sets
TOLD = re.compile(
    r"model\.clients\.(?!0\.model\.init_args\.)|(model\.algorithm|data\.dataset)\.class_path$"
    r"|model\.clients\.0\.model\.init_args\.(input_shape\b|(depth|layers|variant)$)"
)
UNSPOKEN = re.compile(
    r"^(trainer|model\.clients\.0\.model|model\.algorithm|model|data)\.|\b(init_args|class_path)\b"
)


@dataclass(frozen=True, eq=False)
class Trial:
    """One experiment, whose runs differ in the seed alone.

    Attributes:
        group: its runs.
        strategy: as the paper calls it.
        data: as the runs name it.
        family: the class of the clients' models.
        cohorts: the cohort of each version, in natural order of the versions.
        options: what was set beside the strategy, the clients and their versions among it.
    """

    group: Group
    strategy: str
    data: str
    family: str
    cohorts: Mapping[str, str]
    options: Mapping[str, str]

    def score(self, metric: str, version: str | None = None) -> tuple[float, float]:
        """The final value: mean and sample deviation over the seeds; None: over all clients."""
        return self.group.score(self._column(metric, version))

    def course(self, metric: str, version: str | None = None) -> Course:
        return self.group.course(self._column(metric, version))

    def _column(self, metric: str, version: str | None) -> str:
        """Of metrics.csv; a run with a single cohort has no column for it."""
        if version is None or [version] == list(self.cohorts):
            return f"personal/{metric}"
        return f"personal/{metric}/{self.cohorts.get(version, '')}"


def trial_of(group: Group) -> Trial | None:
    """None for another algorithm, or where the files do not tell the cohorts.

    The files of the group's first run speak for all: they differ in the seed alone.
    """
    run = group.runs[0]
    told = run.settings
    strategy = STRATEGIES.get(run.algorithm)
    stated = run.environment.get("cohorts")
    counts = {n: whole_number(c) for n, c in stated.items()} if isinstance(stated, dict) else {}
    models = [told.get(f"model.clients.{i}.model.class_path", "") for i in range(len(counts))]
    if strategy is None or not counts or not all(counts.values()) or not all(models):
        return None
    versions = _versions(told, list(counts))
    clients = {version: counts[cohort] or 0 for version, cohort in versions.items()}
    return Trial(
        group=group,
        strategy=strategy,
        data=run.data,
        family=" + ".join(dict.fromkeys(model.rsplit(".", 1)[-1] for model in models)),
        cohorts=versions,
        options=_federation(clients) | _options(told),
    )


def _versions(told: Mapping[str, str], cohorts: list[str]) -> dict[str, str]:
    """The cohort of each version; the cohorts' names are the versions where no setting tells."""
    names = []
    for place, cohort in enumerate(cohorts):
        keys = [f"model.clients.{place}.model.init_args.{name}" for name in VERSION_SETTINGS]
        names.append(next((told[key] for key in keys if key in told), cohort))
    if len(set(names)) < len(names):
        names = cohorts
    paired = zip(names, cohorts, strict=True)
    return dict(sorted(paired, key=lambda pair: natural_order(pair[0])))


def _federation(clients: Mapping[str, int]) -> dict[str, str]:
    counts = list(clients.values())
    even = max(counts) - min(counts) <= 1  # as even as they can be divided
    shares = [str(count // math.gcd(*counts)) for count in counts]
    return {
        VERSIONS: " ".join(clients),
        CLIENTS: str(sum(counts)),
        SHARES: "even" if even else ":".join(shares),
    }


def _options(told: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for key, value in options(told, but=TOLD).items():
        words = UNSPOKEN.sub("", key).replace("max_epochs", "rounds").split(".")
        name = " ".join(word for word in words if word)
        found[name] = value.rsplit(".", 1)[-1] if key.endswith("class_path") else value
    return found
