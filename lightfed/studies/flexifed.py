"""FlexiFed's strategies: a table by version, their courses, and what else changes accuracy.

In Wang et al., WWW 2023, clients have up to four versions of one family of models, a client group
each. Experiments on one data set and family are a study; those with the same options are a setting,
a row of Table 1. All metrics are of the clients' own models on their own test samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from lightfed.drawing import marks, tidy
from lightfed.drawing.charts import Axis, Chart, Figure, Series
from lightfed.results.columns import natural_order
from lightfed.results.groups import Group, grouped, usual_metric
from lightfed.results.intervals import resolution
from lightfed.results.outcome import when_reached
from lightfed.results.run import Run
from lightfed.results.settings import difference, gathered, options, usual
from lightfed.results.tables import readable
from lightfed.results.units import NOTHING, direction, is_share, metric_text, spread_text
from lightfed.studies.shared import figures_of

BASELINE = "Clustered-FL"
STRATEGIES = {  # in the order of the paper's tables
    "Standalone": "Standalone",
    "ClusteredFL": BASELINE,
    "BasicCommon": "Basic-Common",
    "ClusteredCommon": "Clustered-Common",
    "MaxCommon": "Max-Common",
}
LIMIT, NO_LIMIT = "max_common_layers", "null"
# options of one strategy only, and what all others do
PLAIN = {LIMIT: NO_LIMIT, "share_classifier": "false", "weights": "uniform"}
FACTORS = {
    "versions": "number of versions, N",
    "clients": "number of clients, K",
    LIMIT: "most layers in common, L",
}
VERSION_SETTINGS = ("depth", "layers", "variant")
# settings that are no options: strategy, start, data, client groups and their versions
STATED = re.compile(
    r"model\.clients\.(?!0\.model\.init_args\.)|(model\.algorithm|data\.dataset)\.class_path$"
    r"|model\.clients\.0\.model\.init_args\.(input_shape\b|(depth|layers|variant)$)"
    r"|model\.algorithm\.init_args\.initial$"
)
UNSPOKEN = re.compile(r"^model\.clients\.0\.model\.")
ALL = "mean"  # over the clients of all versions


@dataclass(frozen=True, eq=False)
class Trial:
    """One experiment of a study.

    Attributes:
        group: its runs.
        family: class of the models.
        metric: that of the study.
        columns: of metrics.csv, by version in natural order, and that of ALL.
        options: all settings except the strategy, in the paper's words.
        setting: in which options it differs from most of the study.
        baseline: Clustered-FL with the same options, except those of a single strategy.
    """

    group: Group
    family: str
    metric: str
    columns: Mapping[str, str]
    options: Mapping[str, str]
    setting: str
    baseline: Group | None

    @property
    def strategy(self) -> str:
        return STRATEGIES[self.group.algorithm]

    @property
    def name(self) -> str:
        return "; ".join(filter(None, (f"{self.group.data}, {self.family}", self.setting)))

    def target(self, asked: float | None) -> float:
        """The target asked for, else the final value of the baseline; NaN without it."""
        if asked is not None or self.baseline is None:
            return math.nan if asked is None else asked
        reached = self.baseline.course(self.columns[ALL])["mean"]
        return float(reached.iloc[-1]) if len(reached) else math.nan

    def speed(self, target: float) -> tuple[float, float]:
        """The round in which the mean over the seeds reached a target, and the baseline's over it.

        NaN where it did not.
        """

        def reached(group: Group) -> float:
            course = group.course(self.columns[ALL])["mean"]
            return when_reached(target, course, course.index.to_series(), self.metric)

        rounds = reached(self.group)
        return rounds, reached(self.baseline) / rounds if self.baseline else math.nan


def studies(runs: Sequence[Run]) -> list[list[Trial]]:
    """The trials of each study, the most usual setting first; Standalone alone is no study."""
    groups = [group for group in grouped(runs) if _versions(group.runs[0])]
    every = gathered(groups, lambda group: (group.data, _family(group.runs[0]))).values()
    return [_study(own) for own in every if {group.algorithm for group in own} != {"Standalone"}]


def strategy_table(runs: Sequence[Run], target: float | None = None) -> pd.DataFrame:
    """A row per setting, strategy and version, and one for the mean over all clients.

    Args:
        runs: of any algorithms.
        target: of the speed; by default what Clustered-FL reached in the end.

    Returns:
        Columns: `data`, `family`, `setting`, `strategy`, `version` (V1 and so on, or `mean`),
        `model`, `seeds`, `metric`, its final `mean` and `std` over the seeds, and `half` of its
        95 % t interval. Rows of all clients also have the `target`, the first of the `rounds` that
        reached it, the `speed` (rounds of Clustered-FL over these) and the `resolution` in rounds.
    """
    trials = [trial for study in studies(runs) for trial in study]
    models = {
        family: sorted({v for t in own for v in t.columns if v != ALL}, key=natural_order)
        for family, own in gathered(trials, lambda trial: trial.family).items()
    }
    rows: list[dict[str, object]] = []
    for trial in trials:
        goal = trial.target(target)
        rounds, speed = trial.speed(goal)
        pace = {
            "target": goal,
            "rounds": rounds,
            "speed": speed,
            "resolution": max(resolution(run, trial.columns[ALL]) for run in trial.group.runs),
        }
        for model, column in trial.columns.items():
            mean, std = trial.group.score(column)
            row = {
                "data": trial.group.data,
                "family": trial.family,
                "setting": trial.setting,
                "strategy": trial.strategy,
                "version": ALL if model == ALL else f"V{models[trial.family].index(model) + 1}",
                "model": "" if model == ALL else model,
                "seeds": len(trial.group.runs),
                "metric": trial.metric,
                "mean": mean,
                "std": std,
                "half": mean - trial.group.interval(column)[1],
            }
            rows.append(row | (pace if model == ALL else {}))
    return pd.DataFrame(rows)


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The strategies as text, a column a version; the best of a setting and version has a star."""
    topic = table["data"] + ", " + table["family"]
    names = topic + ("; " + table["setting"]).where(table["setting"] != "", "")
    signed = table["mean"] * table["metric"].map(direction)
    rivals = signed.groupby([names, table["version"]])
    stars = ((signed == rivals.transform("max")) & (rivals.transform("count") > 1)).map(
        {True: "*", False: ""}
    )

    def text(row: pd.Series, of: str, half: float = math.nan) -> str:
        return spread_text(row["metric"], row[of], half).removesuffix(" %")

    cells = table.assign(
        setting=names,
        score=stars + table.apply(lambda row: text(row, "mean", row["half"]), axis=1),
        target=table.apply(lambda row: text(row, "target"), axis=1),
        rounds=table["rounds"].map("{:.0f}".format).replace("nan", NOTHING),
        speed=table["speed"].map("{:.2f}".format).replace("nan", NOTHING),
    )
    keys = ["setting", "strategy"]
    means = cells[cells["version"] == ALL].set_index(keys)
    wide = cells.pivot(index=keys, columns="version", values="score").fillna(NOTHING)
    wide = wide.loc[means.index].drop(columns=ALL).assign(mean=means["score"])
    return wide.join(means[["target", "rounds", "speed"]]).reset_index()


def notes(table: pd.DataFrame, target: float | None = None) -> list[str]:
    """How to read the table."""
    models = table[table["model"] != ""].groupby("family", sort=False)["model"].unique()
    versions = "; ".join(
        f"{family} {', '.join(sorted(own, key=natural_order))}" for family, own in models.items()
    )
    goal = f"what {BASELINE} reached in the end" if target is None else f"{target:g}"
    steps = int(table["resolution"].max())
    metrics = (readable(m) + " in %" * is_share(m) for m in table["metric"].unique())
    return [
        f"Final personal {' and '.join(metrics)}: mean over the clients, with the 95 % t interval "
        "over the seeds. The best strategy of a setting and version has a star.",
        f"V1 and so on: {versions}.",
        f"Speed: rounds of {BASELINE} to the target over those of the strategy, in the mean over "
        f"all clients (resolution: {steps} round{'s' * (steps != 1)}). Target: {goal}.",
    ]


def figures(runs: Sequence[Run], *, target: float | None = None) -> list[Figure]:
    """The courses of each setting, then the factors of each study."""
    found: list[Figure] = []
    for study in studies(runs):
        for setting in gathered(study, lambda trial: trial.name).values():
            found += _courses(setting, target)
        found += _factors(study)
    return found


def _courses(trials: Sequence[Trial], asked: float | None) -> list[Figure]:
    """Mean over all clients and per version; none unless two strategies have two rounds."""
    shown = [t for t in trials if len(t.group.course(t.columns[ALL])) > 1]
    if len(shown) < 2:
        return []
    first, metric = shown[0], shown[0].metric
    tables: dict[str, pd.DataFrame] = {}
    versions = [version for version in first.columns if version != ALL]
    for version in (ALL, *(versions if len(versions) > 1 else ())):
        parts = [tidy.course_table(t.group, t.columns[version], t.strategy) for t in shown]
        title = "all clients" if version == ALL else f"{first.family} {version}"
        tables[title] = tidy.stacked([part for part in parts if len(part)], metric)
    y = tidy.common_axis(metric, tables.values(), "mean", f"{readable(metric)} on own test samples")
    by = Series("series", {t.strategy: t.group.method_place for t in shown}, "strategy")
    charts = [marks.lines(own, Axis("round"), y, by, title=name) for name, own in tables.items()]
    target = first.target(asked)
    goal = f" Target of the speed: {metric_text(metric, target)}." if math.isfinite(target) else ""
    caption = (
        "Each client's model on its own test samples, mean over the clients; bands are 95 % t "
        f"intervals over seeds.{goal}"
    )
    title, groups = f"{readable(metric)} by strategy", [trial.group for trial in shown]
    return figures_of("strategies", first.name, title, charts, caption, groups)


def _factors(study: Sequence[Trial]) -> list[Figure]:
    """The in-depth experiments: a chart for each factor with two values for some strategy."""
    charts = [chart for factor in FACTORS if (chart := _factor_chart(study, factor)) is not None]
    name, groups = f"{study[0].group.data}, {study[0].family}", [trial.group for trial in study]
    title = f"{readable(study[0].metric)} by versions, clients and common layers"
    caption = "Along a line only the quantity on the x-axis differs; its values are equally spaced."
    return figures_of("factors", name, title, charts, caption, groups)


def _factor_chart(study: Sequence[Trial], factor: str) -> Chart | None:
    """A line for trials of one strategy that differ only in a factor, with at least two values."""

    def value(trial: Trial) -> float:
        text = str(len(trial.columns) - 1) if factor == "versions" else trial.options[factor]
        return math.inf if text == NO_LIMIT else float(text)

    def rest(options: Mapping[str, str]) -> dict[str, str]:
        return {name: text for name, text in options.items() if name != factor}

    metric = study[0].metric
    most = rest(usual([trial.options for trial in study]) | PLAIN)
    scored = [t for t in study if math.isfinite(t.group.score(t.columns[ALL])[0])]
    scored.sort(key=lambda trial: ([*STRATEGIES].index(trial.group.algorithm), value(trial)))
    members = gathered(scored, lambda t: (t.strategy, frozenset(rest(t.options).items())))
    lines = [own for own in members.values() if len({*map(value, own)}) > 1]
    if not lines:
        return None
    values = sorted({value(trial) for own in lines for trial in own})
    texts = {x: "no limit" if math.isinf(x) else f"{x:g}" for x in values}
    rows, places = [], {}
    for own in lines:
        label = ", ".join(filter(None, (own[0].strategy, difference(own[0].options, most))))
        places[label] = min(trial.group.place for trial in own)
        rows += [
            tidy.score_row(t.group, t.columns[ALL], series=label, at=texts[value(t)]) for t in own
        ]
    table = tidy.stacked([pd.DataFrame(rows)], metric)
    x = Axis("at", FACTORS[factor], names=tuple(texts.values()))
    y = tidy.metric_axis_of(f"personal/{metric}", table)
    by = Series("series", places, "strategy")
    return marks.points(table, x, y, by, connected=True, title=x.title)


def _family(run: Run) -> str:
    """Classes of the clients' models."""
    keys = [f"model.clients.{place}.model.class_path" for place in range(len(run.group_sizes))]
    return " + ".join(dict.fromkeys(run.settings[key].rsplit(".", 1)[-1] for key in keys))


def _study(groups: Sequence[Group]) -> list[Trial]:
    """The trials of one data set and family, setting by setting."""
    metric = usual_metric(groups)
    known = {group: _options(group.runs[0]) for group in groups}
    most = usual([*known.values()]) | PLAIN
    rows: dict[str, dict[str, Trial]] = {}
    for group in sorted(groups, key=lambda group: [*STRATEGIES].index(group.algorithm)):
        versions, own = _versions(group.runs[0]), known[group]
        alone = len(versions) == 1  # then no column is of the group
        columns = {v: f"personal/{metric}{'' if alone else f'/{versions[v]}'}" for v in versions}
        columns[ALL] = f"personal/{metric}"
        same = [g for g in groups if g.algorithm == "ClusteredFL" and known[g] == own | PLAIN]
        setting = difference(own, most)
        if group.algorithm in rows.get(setting, {}):  # it differs in what has no name
            setting = group.name
        baseline = same[0] if same else None
        rows.setdefault(setting, {})[group.algorithm] = Trial(
            group, _family(group.runs[0]), metric, columns, own, setting, baseline
        )
    return [trial for setting in sorted(rows, key=bool) for trial in rows[setting].values()]


def _versions(run: Run) -> dict[str, str]:
    """The client group of each version; none for other algorithms or without distinct versions."""
    sizes = run.group_sizes
    names = [
        run.settings.get(f"model.clients.{place}.model.init_args.{name}")
        for place in range(len(sizes))
        for name in VERSION_SETTINGS
    ]
    versions = [name for name in names if name is not None]
    if run.algorithm not in STRATEGIES or {*map(versions.count, versions)} != {1}:
        return {}
    if len(versions) != len(sizes):
        return {}
    pairs = zip(versions, sizes, strict=True)
    return dict(sorted(pairs, key=lambda pair: natural_order(pair[0])))


def _options(run: Run) -> dict[str, str]:
    """All settings except the strategy, in the paper's words."""
    versions = _versions(run)
    counts = [run.group_sizes[group] for group in versions.values()]
    even = max(counts) - min(counts) <= 1  # as evenly as they can be divided
    shares = ":".join(str(count // math.gcd(*counts)) for count in counts)
    own = {
        "versions": " ".join(versions),
        "clients": str(sum(counts)),
        "shares": "even" if even else shares,
    }
    found = options(run.settings, but=STATED, unspoken=UNSPOKEN)
    own |= {name.replace("max_epochs", "rounds"): text for name, text in found.items()}
    return own | PLAIN | own
