"""Clouds of servers: their metric against rounds, virtual time and bytes, and the time to a target.

The figures are those of Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global
and Personalized Models", AAAI 2021, arXiv:2012.13900. Figure 3 has sync clouds of all methods
against rounds, figure 4 clouds that wait for B of N servers against virtual time. A third figure
shows bytes between servers and coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Chart, Figure, Series, metric_axis
from lightfed.drawing.tidy import Along, course_table, stacked
from lightfed.results import outcome
from lightfed.results.groups import Group, grouped, runs_of, usual_metric
from lightfed.results.run import Run
from lightfed.results.settings import gathered
from lightfed.results.tables import readable
from lightfed.studies.heterofl import partition_of
from lightfed.studies.shared import figures_of

TIME, BYTES = "virtual_time", "server_bytes"
NAMES = {"FedBCD": "FedBCD", "FedBCDI": "FedBCD-I", "CloudFedAvg": "FedAvg"}
WAITING = ("FedBCD", "FedBCD-I")  # the others have one model or none, and wait for every server
ORDER = (*NAMES.values(), "FedProx", "Standalone")
CAPTION = (
    "Personal: devices' own models on their own test samples. Global: servers' models on the whole "
    "test set; bands are 95 % t intervals over seeds."
)
_INIT = "model.algorithm.init_args"


@dataclass(frozen=True)
class Cloud:
    """One experiment, and the share B/N of servers that it waits for."""

    group: Group
    method: str
    share: float
    name: str


def figures(runs: Sequence[Run], *, target: float | None = None) -> list[Figure]:
    """Those of runs that measured virtual time, by data, partition and number of active devices."""
    groups = [group for group in grouped(runs) if all(map(timed, group.runs))]
    found: list[Figure] = []
    for name, members in gathered(groups, _study).items():
        clouds = [cloud for group in members if (cloud := _cloud(group))]
        found += _figures(name, _told_apart(clouds)) if clouds else []
    return found


def _figures(name: str, clouds: Sequence[Cloud]) -> list[Figure]:
    groups = [cloud.group for cloud in clouds]
    metric = usual_metric(groups)
    sending = [c for c in clouds if all(r.series(BYTES).sum() > 0 for r in c.group.runs)]
    seconds = Axis("at", "virtual seconds", zero=True)
    sent = Axis("at", "bytes between servers and coordinator so far", format="~s", zero=True)
    sync = [c for c in clouds if c.share == 1]
    charts = {
        ("rounds", "of sync clouds"): (
            _charts(sync, metric, Axis("round"), None) if len(sync) > 1 else []
        ),
        ("times", "against virtual time"): _by_method(
            clouds, metric, seconds, lambda run: run.series(TIME)
        ),
        ("traffic", "against bytes between servers"): _by_method(
            sending, metric, sent, lambda run: run.series(BYTES).fillna(0.0).cumsum()
        ),
    }
    found: list[Figure] = []
    for (kind, title), drawn in charts.items():
        found += figures_of(kind, name, f"{readable(metric)} {title}", drawn, CAPTION, groups)
    return found


def _by_method(clouds: Sequence[Cloud], metric: str, x: Axis, along: Along) -> list[Chart]:
    """Charts for each method that can wait, with all that cannot; none without an async cloud."""
    charts: list[Chart] = []
    for method in WAITING if any(cloud.share < 1 for cloud in clouds) else ():
        shown = [c for c in clouds if c.method == method or c.method not in WAITING]
        if any(cloud.method == method for cloud in shown):
            charts += _charts(shown, metric, x, along, f"{method}: ")
    return charts


def _charts(
    clouds: Sequence[Cloud], metric: str, x: Axis, along: Along | None, title: str = ""
) -> list[Chart]:
    """Courses of the personal and the global metric, with two measured rounds."""
    by = Series("series", {cloud.name: cloud.group.place for cloud in clouds}, "method")
    charts = []
    for column in (f"personal/{metric}", f"global/{metric}"):
        every = [course_table(cloud.group, column, cloud.name, along) for cloud in clouds]
        courses = [course for course in every if len(course) > 1]
        if courses:
            table, text = stacked(courses, column), readable(column)
            y = metric_axis("mean", metric, table["mean"], text)
            charts.append(marks.lines(table, x, y, by, title=f"{title}{text}"))
    return charts


def _cloud(group: Group) -> Cloud | None:
    """The experiment of a group; None for other algorithms or without a setting of servers."""
    settings, method = group.runs[0].settings, NAMES.get(group.algorithm)
    servers, wait = (settings.get(f"{_INIT}.{key}", "") for key in ("servers", "wait"))
    if method is None or not servers.isdecimal():
        return None
    if method == "FedAvg" and float(settings.get(f"{_INIT}.mu", 0)) > 0:
        method = "FedProx"
    if settings.get(f"{_INIT}.gamma") in ("0", "0.0"):
        method = "Standalone"  # the same devices, and nothing is sent
    share = int(wait) / int(servers) if wait.isdecimal() else 1.0
    return Cloud(group, method, share, method + f", B/N = {share:g}" * (method in WAITING))


def _told_apart(clouds: Sequence[Cloud]) -> list[Cloud]:
    """In the order of methods and B; those of one name with the label of their group."""
    names = [cloud.name for cloud in clouds]
    return [
        replace(c, name=f"{c.name} ({c.group.label})") if names.count(c.name) > 1 else c
        for c in sorted(clouds, key=lambda cloud: (ORDER.index(cloud.method), cloud.share))
    ]


def _study(group: Group) -> str:
    """`MNIST, Diversity(3), |Q_n| = 3`."""
    active = group.runs[0].settings.get(f"{_INIT}.active")
    return f"{group.data}, {partition_of(group.runs[0])}, |Q_n| = {active}"


def timed(run: Run) -> bool:
    """Whether a run measured virtual time."""
    return bool(run.series(TIME).notna().any())


def common_target(rows: Sequence[Group], column: str) -> float:
    """The value that all rows with virtual time reached: the worst of their best."""
    return outcome.reached_by_all(filter(timed, runs_of(rows)), column)


def time_to(row: Group, column: str, target: float) -> tuple[float, float]:
    """Virtual seconds until all seeds reached a target: mean, half its 95 % t interval; or NaN."""
    times = [
        outcome.when_reached(target, r.series(column), r.series(TIME), column) for r in row.runs
    ]
    mean, std = outcome.mean_and_std(times)
    whole = all(map(math.isfinite, times))
    return (mean, outcome.t_half_width(std, len(times))) if whole else (math.nan, math.nan)
