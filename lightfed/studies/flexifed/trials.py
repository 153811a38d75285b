"""Experiments with FlexiFed's strategies: strategy, settings, and the result of each version.

FlexiFed (Wang et al., WWW 2023) has clients with up to four versions of one family of models, such
as VGG-11, -13, -16 and -19, a client group each. Settings are read from config.yaml, groups from
environment.json. All metrics are of the clients' own models on their own test samples.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pandas import DataFrame

from lightfed.results.columns import natural_order
from lightfed.results.groups import Experiment, Group
from lightfed.results.run import whole_number
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
CLIENT = "model.clients.{}.model"
# options that are stored elsewhere: strategy, clients, data, and settings of the version
STATED = re.compile(
    r"model\.clients\.(?!0\.model\.init_args\.)|(model\.algorithm|data\.dataset)\.class_path$"
    r"|model\.clients\.0\.model\.init_args\.(input_shape\b|(depth|layers|variant)$)"
)
UNSPOKEN = re.compile(r"^model\.clients\.0\.model\.")


@dataclass(frozen=True, eq=False)
class Trial(Experiment):
    """One experiment; its options are all settings except the strategy, in the paper's words.

    `family` is the class of the clients' models. `client_groups` has the group of each version, in
    natural order of the versions.
    """

    strategy: str
    family: str
    client_groups: Mapping[str, str]

    def score(self, metric: str, version: str | None = None) -> tuple[float, float]:
        """The final value of a version (None: all clients): mean and deviation over the seeds."""
        return self.group.score(self.column(metric, version))

    def course(self, metric: str, version: str | None = None) -> DataFrame:
        return self.group.course(self.column(metric, version))

    def column(self, metric: str, version: str | None = None) -> str:
        """The column of metrics.csv; a single client group has no column of its own."""
        if version is None or [version] == list(self.client_groups):
            return f"personal/{metric}"
        return f"personal/{metric}/{self.client_groups.get(version, '')}"


def trial_of(group: Group) -> Trial | None:
    """The trial of a group; None for other algorithms or if its client groups are unknown."""
    run = group.runs[0]
    strategy = STRATEGIES.get(run.algorithm)
    stated = run.environment.get("groups")
    counts = {n: whole_number(c) for n, c in stated.items()} if isinstance(stated, dict) else {}
    if strategy is None or not counts or not all(counts.values()):
        return None
    models = [run.settings.get(f"{CLIENT.format(i)}.class_path", "") for i in range(len(counts))]
    if not all(models):
        return None
    versions = _versions(run.settings, list(counts))
    clients = {version: counts[client_group] or 0 for version, client_group in versions.items()}
    found = options(run.settings, but=STATED, unspoken=UNSPOKEN)
    return Trial(
        group=group,
        options=_federation(clients) | {k.replace("max_epochs", "rounds"): found[k] for k in found},
        strategy=strategy,
        family=" + ".join(dict.fromkeys(model.rsplit(".", 1)[-1] for model in models)),
        client_groups=versions,
    )


def _versions(settings: Mapping[str, str], client_groups: list[str]) -> dict[str, str]:
    """The group of each version; named by the group if no setting names the version."""
    names = []
    for place, client_group in enumerate(client_groups):
        keys = [f"{CLIENT.format(place)}.init_args.{name}" for name in VERSION_SETTINGS]
        names.append(next((settings[key] for key in keys if key in settings), client_group))
    if len(set(names)) < len(names):
        names = client_groups
    paired = zip(names, client_groups, strict=True)
    return dict(sorted(paired, key=lambda pair: natural_order(pair[0])))


def _federation(clients: Mapping[str, int]) -> dict[str, str]:
    counts = list(clients.values())
    even = max(counts) - min(counts) <= 1  # as evenly as they can be divided
    shares = [str(count // math.gcd(*counts)) for count in counts]
    return {
        VERSIONS: " ".join(clients),
        CLIENTS: str(sum(counts)),
        SHARES: "even" if even else ":".join(shares),
    }
