"""Pictures of FlexiFed's strategies: curves of one setting, and the effect of its parameters.

The second kind has up to three panels: the final metric against the number of versions (N), of
clients (K) and of layers that may be common (L), as in the in-depth experiments of Wang et al.,
WWW 2023.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from lightfed.drawing.axes import metric_axis
from lightfed.drawing.style import (
    LINES,
    Theme,
    colour_of,
    dress,
    label_of,
    legend_below,
    legend_of_all,
    new_figure,
    title_over_all,
    whole_ticks,
)
from lightfed.drawing.versus import draw_course
from lightfed.results.groups import synthetic_note
from lightfed.results.settings import difference, gathered
from lightfed.results.tables import readable
from lightfed.studies.flexifed.strategies import LIMIT, NO_LIMIT, Setting, Study
from lightfed.studies.flexifed.trials import CLIENTS, PLACES, VERSIONS, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3
# of the palette: the quiet grey for the floor, the strongest for the paper's best
COLOURS = {name: colour_of(place) for name, place in zip(PLACES, (4, 0, 1, 3, 2), strict=True)}
ENDLESS = "no limit"


def _limit(trial: Trial) -> float:
    text = trial.options[LIMIT]
    return math.inf if text == NO_LIMIT else float(text)


# what is along the x-axis of a panel: the only option in which the trials of a line differ, the
# label of the axis, and where a trial stands, infinite for no limit
FACTORS: dict[str, tuple[str, Callable[[Trial], float]]] = {
    VERSIONS: ("number of versions, N", lambda trial: len(trial.client_groups)),
    CLIENTS: ("number of clients, K", lambda trial: float(trial.options[CLIENTS])),
    LIMIT: ("most layers in common, L", _limit),
}


def courses_figure(setting: Setting, asked: float | None, theme: Theme) -> Figure | None:
    """Mean over all clients and per version; None unless two strategies have two rounds."""
    metric = setting.topic.metric
    shown = {n: t for n, t in setting.trials.items() if len(t.course(metric)) > 1}
    if len(shown) < 2:
        return None
    panels: list[str | None] = [None, *(setting.versions if len(setting.versions) > 1 else ())]
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(max(8.0, 4.3 * columns), 0.8 + 3.4 * rows, theme, pad=0.1)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    note = synthetic_note(shown.values())
    for place, (axes, version) in enumerate(zip(grid, panels, strict=False)):
        title = "all clients" if version is None else f"{setting.topic.family} {version}"
        label = "" if place % columns else f"{readable(metric)} on own test samples"
        dress(axes, theme, title=title, x_label="round", y_label=label)
        for name, trial in shown.items():
            course = trial.course(metric, version)
            colour = COLOURS[name]
            draw_course(axes, course.index.to_numpy(), course, colour=colour, line="-", label=name)
        whole_ticks(axes)
    _target(grid[0], setting.target(asked), theme)
    metric_axis(grid[0], metric, np.concatenate([t.course(metric)["mean"] for t in shown.values()]))
    for axes in grid[len(panels) :]:
        axes.remove()
    title_over_all(figure, f"{setting.name}: personal {readable(metric)}{note}", theme)
    legend_of_all(figure, grid[0], theme)
    return figure


def factors_figure(study: Study, theme: Theme) -> Figure | None:
    """A panel for each factor with two values for some strategy; None without any."""
    metric = study.topic.metric
    panels = {factor: own for factor in FACTORS if (own := _lines(study, factor))}
    if not panels:
        return None
    figure = new_figure(max(6.4, 4.6 * len(panels)), 4.4, theme, pad=0.1)
    grid = figure.subplots(1, len(panels), squeeze=False).ravel()
    for axes, (factor, own) in zip(grid, panels.items(), strict=True):
        y_label = "" if axes is not grid[0] else f"final {readable(metric)}, mean over clients"
        x_label, value = FACTORS[factor]
        dress(axes, theme, title="", x_label=x_label, y_label=y_label)
        _draw_lines(axes, value, own, metric)
        every = [trial.score(metric)[0] for trials in own.values() for trial in trials]
        metric_axis(axes, metric, np.array(every))
        legend_below(axes, theme)
    note = synthetic_note(study.trials)
    title_over_all(figure, f"{study.topic.name}: personal {readable(metric)}{note}", theme)
    return figure


def _lines(study: Study, factor: str) -> dict[str, list[Trial]]:
    """By label: trials of one strategy that differ only in a factor, with at least two values."""

    def rest(options: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in options.items() if name != factor}

    scored = [t for t in study.trials if np.isfinite(t.score(study.topic.metric)[0])]
    members = gathered(scored, lambda t: (t.strategy, frozenset(rest(t.options).items())))
    found = {}
    for (strategy, _), trials in sorted(members.items(), key=lambda item: PLACES[item[0][0]]):
        if len(set(map(FACTORS[factor][1], trials))) > 1:
            other = difference(trials[0].options, rest(study.usual))
            found[f"{strategy}, {other}" if other else strategy] = trials
    return found


def _draw_lines(
    axes: Axes, value: Callable[[Trial], float], lines: Mapping[str, list[Trial]], metric: str
) -> None:
    """A mark with its deviation for each trial, a line through the means; values evenly spaced."""
    values = sorted({value(trial) for trials in lines.values() for trial in trials})
    drawn = Counter[str]()
    for label, trials in lines.items():
        at = np.array([values.index(value(trial)) for trial in trials])
        scores = np.array([trial.score(metric) for trial in trials])  # (T, 2): mean, std
        x = np.unique(at)
        means = [scores[at == place, 0].mean() for place in x]
        strategy = trials[0].strategy
        colour, dashes = COLOURS[strategy], LINES[drawn[strategy] % len(LINES)]
        drawn[strategy] += 1
        axes.plot(x, means, dashes, color=colour, linewidth=1.6, label=label_of(label))
        axes.errorbar(at, scores[:, 0], yerr=np.nan_to_num(scores[:, 1]), fmt="o", color=colour)
    texts = [ENDLESS if np.isinf(value) else f"{value:g}" for value in values]
    axes.set_xticks(range(len(values)), texts)
    axes.margins(x=0.12)


def _target(axes: Axes, target: float, theme: Theme) -> None:
    if np.isfinite(target):
        axes.axhline(target, color=theme.muted, linestyle=":", linewidth=1.0, label="target")
