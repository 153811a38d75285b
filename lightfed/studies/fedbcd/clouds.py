"""Clouds of servers: accuracy against rounds, virtual time and bytes, and the time to a target.

The pictures are those of Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global
and Personalized Models", AAAI 2021, arXiv:2012.13900. Figure 3 has sync clouds of all methods
against rounds, figure 4 clouds that wait for B of N servers against virtual time. A third picture
shows bytes between servers and coordinator. All need runs that measured virtual time; settings are
read from config.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from lightfed.drawing.axes import metric_axis
from lightfed.drawing.style import (
    Theme,
    colour_of,
    dress,
    label_of,
    legend_of_all,
    new_figure,
    whole_ticks,
)
from lightfed.drawing.versus import draw_course
from lightfed.results.groups import Experiment, Group, Study, grouped, runs_of, studied
from lightfed.results.outcome import mean_and_std, reached_by_all, when_reached
from lightfed.results.run import Run
from lightfed.results.tables import readable
from lightfed.results.units import unit_of
from lightfed.studies.heterofl.panels import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIME = "virtual_time"
BYTES = "server_bytes"
NAMES = {"FedBCD": "FedBCD", "FedBCDI": "FedBCD-I", "CloudFedAvg": "FedAvg"}
PROXIMAL = "FedProx"  # CloudFedAvg with mu > 0
ALONE = "Standalone"  # FedBCD or FedBCD-I with gamma = 0: the same devices, and nothing is sent
PLACES = {name: i for i, name in enumerate((*NAMES.values(), PROXIMAL, ALONE))}  # of their colours
SHARE_PLACES = {0.3: 0, 0.5: 1, 0.7: 2, 1.0: 3}  # of B/N in the paper, their colours
DASHES = ("-", "--", ":", "-.")
QUIET = (colour_of(8), colour_of(5))  # of what does not wait for B
_INIT = "model.algorithm.init_args"
Along = Callable[[Run], Any]  # (R,) what a run's rounds stand at


@dataclass(frozen=True, eq=False)
class Cloud(Experiment):
    """One experiment; its options are all settings.

    Attributes:
        method: its name in the paper.
        servers: N.
        wait: B, servers that the coordinator waits for.
    """

    method: str
    servers: int
    wait: int

    @property
    def sync(self) -> bool:
        return self.wait == self.servers

    @property
    def share(self) -> float:
        """B/N."""
        return self.wait / self.servers

    @property
    def waits(self) -> bool:
        """Whether the method can wait for B < N; those with one model or no model cannot."""
        return self.method in ("FedBCD", "FedBCD-I")

    def course(self, column: str, along: Along) -> tuple[Any, Any]:
        """(M,) a metric and the positions of its rounds, means over the runs."""
        course = self.group.course(column)
        places = [along(run)[course.index] for run in self.group.runs]
        return course, np.stack(places).mean(axis=0)


Clouds = Study[Cloud]


@dataclass(frozen=True)
class Line:
    """How an experiment is drawn in all panels of a picture."""

    member: Cloud
    colour: str
    dashes: str
    label: str


def timed(run: Run) -> bool:
    """Whether a run measured virtual time."""
    return bool(np.isfinite(run.series(TIME)).any())


def clouds(runs: Sequence[Run]) -> list[Clouds]:
    """The studies of all runs with virtual time, in the order of their first runs.

    Runs with the same data, partition and number of active devices share a picture.
    """
    groups = grouped([run for run in runs if timed(run)])
    found = studied((cloud for group in groups if (cloud := _cloud(group))), _setting)
    # in the order of the methods, then of B
    order = [sorted(one.members, key=lambda m: (PLACES[m.method], m.share)) for one in found]
    return [replace(one, members=tuple(own)) for one, own in zip(found, order, strict=True)]


def rounds_figure(found: Clouds, theme: Theme) -> Figure | None:
    """Figure 3: sync clouds of all methods against rounds; None unless two have two rounds."""
    members, columns = _measured(found, [m for m in found.members if m.sync])
    lines = _lines(members, by_share=False)
    if len(lines) < 2:
        return None
    row = [(f"{readable(c)}, sync clouds", c, lines) for c in columns[::-1]]  # personal to the left
    figure = new_figure(6.2 * len(columns), 5.0, theme, pad=0.1)
    grid = figure.subplots(1, len(columns), sharey=True, squeeze=False)
    for axes in _panels(figure, grid, found, row, theme, along=_rounds, x_label="round"):
        whole_ticks(axes)
    return figure


def times_figure(found: Clouds, theme: Theme) -> Figure | None:
    """Figure 4: the metric against virtual time; None without an async cloud."""
    along, label = (lambda run: run.series(TIME)), "virtual seconds"
    return _waiting_figure(found, found.members, theme, along, label)


def traffic_figure(found: Clouds, theme: Theme) -> Figure | None:
    """The same against bytes between servers, for clouds whose servers send any."""
    members = [m for m in found.members if all(_sent(run).iloc[-1] > 0 for run in m.group.runs)]
    most = max((_sent(run).iloc[-1] for run in runs_of(members)), default=0.0)
    factor, unit = unit_of(most, "B")
    label = f"between servers and coordinator so far ({unit})"
    return _waiting_figure(found, members, theme, lambda run: _sent(run) / factor, label)


def _rounds(run: Run) -> Any:
    return run.rounds.index.to_series()


def _sent(run: Run) -> Any:
    """(R,) bytes between servers since the start."""
    return run.series(BYTES).fillna(0.0).cumsum()


def _waiting_figure(
    found: Clouds, of: Sequence[Cloud], theme: Theme, along: Along, x_label: str
) -> Figure | None:
    """A column of panels for each method that waits for B servers, a colour for B/N.

    The other methods, which are sync, are in every column. None without an async cloud.
    """
    members, columns = _measured(found, of)
    lines = _lines(members, by_share=True)
    methods = list(dict.fromkeys(line.member.method for line in lines if line.member.waits))
    quiet = [line for line in lines if not line.member.waits]
    if all(line.member.sync for line in lines):
        return None
    panels = [
        (f"{method}: {readable(column)}", column, own)
        for column, method in product(columns, methods)
        if (own := [line for line in lines if line.member.method == method or line in quiet])
    ]
    figure = new_figure(max(8.0, 6.2 * len(methods)), 0.8 + 4.0 * len(columns), theme, pad=0.1)
    grid = figure.subplots(len(columns), len(methods), sharex=True, sharey="row", squeeze=False)
    for axes in _panels(figure, grid, found, panels, theme, along=along, x_label=x_label):
        axes.set_xlim(left=0)
    return figure


def common_target(rows: Sequence[Group], column: str) -> float:
    """The value that all rows with virtual time reached: the worst of their best."""
    return reached_by_all(filter(timed, runs_of(rows)), column)


def time_to(row: Group, column: str, target: float) -> tuple[float, float]:
    """Virtual seconds until an evaluation in which a metric first reached a target.

    Returns:
        Mean and sample deviation over the seeds; NaN unless all of them reached it.
    """
    times = [when_reached(target, r.series(column), r.series(TIME), column) for r in row.runs]
    return mean_and_std(times) if all(map(math.isfinite, times)) else (math.nan, math.nan)


def _cloud(group: Group) -> Cloud | None:
    """The experiment of a group; None for other algorithms or without a setting of servers."""
    method = NAMES.get(group.runs[0].algorithm)
    if method is None:
        return None
    settings = group.runs[0].settings
    servers = _number(settings.get(f"{_INIT}.servers"))
    if not servers:
        return None
    if method == "FedAvg" and float(settings.get(f"{_INIT}.mu", 0)) > 0:
        method = PROXIMAL
    if settings.get(f"{_INIT}.gamma") in ("0", "0.0"):
        method = ALONE
    return Cloud(
        group, settings, method, servers, _number(settings.get(f"{_INIT}.wait")) or servers
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _setting(member: Cloud) -> str:
    """The name of a study, such as `MNIST, diversity 3, |Q_n| = 3`."""
    settings, parts = member.options, [member.data]
    if settings.get("data.partition.class_path", "").endswith("Diversity"):
        parts.append(f"diversity {settings.get('data.partition.init_args.classes')}")
    return ", ".join([*parts, f"|Q_n| = {settings.get(f'{_INIT}.active')}"])


def _measured(found: Clouds, members: Sequence[Cloud]) -> tuple[list[Cloud], list[str]]:
    """The members that measured the metric in two rounds, and their columns."""
    by_column = {
        column: [m for m in members if len(m.group.course(column)) > 1]
        for column in (f"{kind}/{found.metric}" for kind in KINDS)
    }
    having = [m for m in members if any(m in own for own in by_column.values())]
    return having, [column for column, own in by_column.items() if own]


def _lines(members: Sequence[Cloud], *, by_share: bool) -> list[Line]:
    """A colour for the method or for B/N; duplicates also get the name of their runs."""
    colours = _share_colours([member.share for member in members if member.waits])
    quiet = [member for member in members if by_share and not member.waits]
    found = []
    for member in members:
        twins = [m for m in members if (m.method, m.share) == (member.method, member.share)]
        dashes, label = DASHES[twins.index(member) % len(DASHES)], member.method
        colour = colour_of(PLACES[member.method])
        if member in quiet:
            place = quiet.index(member)
            colour, dashes = QUIET[place % len(QUIET)], DASHES[1 + place % 3]
        elif by_share:
            colour, label = colours[member.share], f"B/N = {member.share:g}"
        if len(twins) > 1:
            label = f"{label} ({member.group.name})"
        found.append(Line(member, colour, dashes, label))
    return found


def _share_colours(shares: Sequence[float]) -> dict[float, str]:
    """Fixed colours for the paper's values of B/N, the next ones for others."""
    places = {share: place for share, place in SHARE_PLACES.items() if share in shares}
    further = sorted({share for share in shares if share not in places})
    places |= {share: len(SHARE_PLACES) + i for i, share in enumerate(further)}
    return {share: colour_of(place) for share, place in places.items()}


def _panels(
    figure: Figure,
    grid: np.ndarray,
    found: Clouds,
    panels: Sequence[tuple[str, str, Sequence[Line]]],
    theme: Theme,
    *,
    along: Along,
    x_label: str,
) -> list[Axes]:
    """Draw panels of title, column and lines, and a legend without repeated labels."""
    for axes, (title, column, own) in zip(grid.ravel(), panels, strict=True):
        title = f"{found.name}{found.note}\n{title}"
        dress(axes, theme, title=title, x_label=x_label, y_label=readable(found.metric))
        for line in own:
            course, x = line.member.course(column, along)
            draw_course(axes, x, course, colour=line.colour, line=line.dashes, label="_")
    for axes in grid.ravel():  # which may share their limits
        drawn = [np.asarray(line.get_ydata()) for line in axes.get_lines()]
        metric_axis(axes, found.metric, np.concatenate(drawn))
    lines = {line.label: line for *_, own in panels for line in own}
    for label, line in lines.items():
        grid[0, 0].plot([], [], line.dashes, color=line.colour, label=label_of(label))
    legend_of_all(figure, grid[0, 0], theme)
    return list(grid.ravel())
