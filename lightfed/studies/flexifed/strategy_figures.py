"""Pictures of FlexiFed's strategies: curves of one setting, and the effect of its parameters.

The second kind has up to three charts: the final metric against the number of versions (N), of
clients (K) and of layers that may be common (L), as in the in-depth experiments of Wang et al.,
WWW 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pandas as pd

from lightfed.drawing import marks, tidy
from lightfed.drawing.charts import Axis, Chart, Figure, Series
from lightfed.results.groups import synthetic_note
from lightfed.results.settings import difference, gathered
from lightfed.results.tables import readable
from lightfed.results.units import metric_text
from lightfed.studies.flexifed.strategies import LIMIT, NO_LIMIT, Setting, Study
from lightfed.studies.flexifed.trials import CLIENTS, PLACES, VERSIONS, Trial


def _limit(trial: Trial) -> float:
    text = trial.options[LIMIT]
    return math.inf if text == NO_LIMIT else float(text)


# what is along the x-axis of a chart: the only option in which the trials of a line differ, the
# label of the axis, and where a trial stands, infinite for no limit
FACTORS: dict[str, tuple[str, Callable[[Trial], float]]] = {
    VERSIONS: ("number of versions, N", lambda trial: len(trial.client_groups)),
    CLIENTS: ("number of clients, K", lambda trial: float(trial.options[CLIENTS])),
    LIMIT: ("most layers in common, L", _limit),
}


def courses_figure(setting: Setting, asked: float | None) -> Figure | None:
    """Mean over all clients and per version; None unless two strategies have two rounds."""
    metric = setting.topic.metric
    shown = {n: t for n, t in setting.trials.items() if len(t.course(metric)) > 1}
    if len(shown) < 2:
        return None
    versions = setting.versions if len(setting.versions) > 1 else ()
    tables: dict[str, pd.DataFrame] = {}
    for version in (None, *versions):
        title = "all clients" if version is None else f"{setting.topic.family} {version}"
        courses = [
            tidy.course_table(t.group, t.column(metric, version), n) for n, t in shown.items()
        ]
        tables[title] = tidy.stacked([course for course in courses if len(course)], metric)
    y = tidy.common_axis(metric, tables.values(), "mean", f"{readable(metric)} on own test samples")
    places = {name: trial.group.method_place for name, trial in shown.items()}
    by, x = Series("series", places, "strategy"), Axis("round")
    charts = (marks.lines(table, x, y, by, title=title) for title, table in tables.items())
    target = setting.target(asked)
    goal = f" Target of the speed: {metric_text(metric, target)}." if math.isfinite(target) else ""
    caption = (
        "Each client's model on its own test samples, mean over the clients: all of them, then "
        f"those of each version. Bands: 95 % t intervals over seeds.{goal}"
    )
    name = f"{setting.name}: {readable(metric)} by strategy{synthetic_note(shown.values())}"
    return Figure(tidy.file_name("strategies", setting.name), name, tuple(charts), caption)


def factors_figure(study: Study) -> Figure | None:
    """A chart for each factor with two values for some strategy; None without any."""
    charts = [_factor_chart(study, factor) for factor in FACTORS]
    drawn = tuple(chart for chart in charts if chart is not None)
    if not drawn:
        return None
    topic = study.topic
    title = f"{topic.name}: {readable(topic.metric)} by versions, clients and common layers"
    caption = "Along a line only the quantity on the x-axis differs; its values are equally spaced."
    note = synthetic_note(study.trials)
    return Figure(tidy.file_name("factors", topic.name), title + note, drawn, caption)


def _factor_chart(study: Study, factor: str) -> Chart | None:
    title, value = FACTORS[factor]
    lines = _lines(study, factor)
    if not lines:
        return None
    values = sorted({value(trial) for trials in lines.values() for trial in trials})
    texts = {x: "no limit" if math.isinf(x) else f"{x:g}" for x in values}
    metric = study.topic.metric
    table = pd.DataFrame(
        tidy.score_row(trial.group, trial.column(metric), series=label, at=texts[value(trial)])
        for label, trials in lines.items()
        for trial in sorted(trials, key=value)
    )
    y = tidy.metric_axis_of(f"personal/{metric}", table)
    places = {label: min(one.group.place for one in trials) for label, trials in lines.items()}
    by = Series("series", places, "strategy")
    x = Axis("at", title, names=tuple(texts.values()))
    return marks.points(tidy.stacked([table], metric), x, y, by, connected=True, title=title)


def _lines(study: Study, factor: str) -> dict[str, list[Trial]]:
    """By label: trials of one strategy that differ only in a factor, with at least two values."""

    def rest(options: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in options.items() if name != factor}

    scored = [t for t in study.trials if math.isfinite(t.score(study.topic.metric)[0])]
    members = gathered(scored, lambda t: (t.strategy, frozenset(rest(t.options).items())))
    found = {}
    for (strategy, _), trials in sorted(members.items(), key=lambda item: PLACES[item[0][0]]):
        if len(set(map(FACTORS[factor][1], trials))) > 1:
            other = difference(trials[0].options, rest(study.usual))
            found[f"{strategy}, {other}" if other else strategy] = trials
    return found
