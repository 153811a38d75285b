"""Clouds of servers: accuracy against rounds, virtual time and bytes, and the time to a target.

The pictures are those of Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global
and Personalized Models", AAAI 2021, arXiv:2012.13900. Figure 3 has sync clouds of all methods
against rounds, figure 4 clouds that wait for B of N servers against virtual time. A third picture
shows bytes between servers and coordinator. All need runs that measured virtual time; settings are
read from config.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Chart, Figure, Series
from lightfed.drawing.tidy import Along, common_axis, course_table, file_name, stacked
from lightfed.results.groups import Experiment, Group, Study, grouped, runs_of, studied
from lightfed.results.outcome import mean_and_std, reached_by_all, t_half_width, when_reached
from lightfed.results.run import Run
from lightfed.results.tables import readable
from lightfed.results.units import unit_of

TIME = "virtual_time"
BYTES = "server_bytes"
KINDS = ("personal", "global")
NAMES = {"FedBCD": "FedBCD", "FedBCDI": "FedBCD-I", "CloudFedAvg": "FedAvg"}
PROXIMAL = "FedProx"  # CloudFedAvg with mu > 0
ALONE = "Standalone"  # FedBCD or FedBCD-I with gamma = 0: the same devices, and nothing is sent
ORDER = (*NAMES.values(), PROXIMAL, ALONE)  # in a legend
CAPTION = (
    "Personal: each device's own model on its own test samples, mean over the devices. Global: the "
    "servers' models on the whole test set, mean over the servers. Bands: 95 % t intervals over "
    "seeds."
)
WAITING = (
    " Servers wait for their slowest active device, the coordinator for the first B of N servers. "
    "Methods with one model for all wait for every server."
)
SENDING = (
    " Each server that the coordinator waits for sends one model up and receives one down. "
    "Bytes sent by devices are not included."
)
_INIT = "model.algorithm.init_args"


@dataclass(frozen=True, eq=False)
class Cloud(Experiment):
    """One experiment with all its settings, the paper's name of its method, and its N and B."""

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


Clouds = Study[Cloud]


def timed(run: Run) -> bool:
    """Whether a run measured virtual time."""
    return bool(run.series(TIME).notna().any())


def clouds(runs: Sequence[Run]) -> list[Clouds]:
    """The studies of all runs with virtual time, in the order of their first runs.

    Runs with the same data, partition and number of active devices share a picture.
    """
    groups = [group for group in grouped(runs) if all(map(timed, group.runs))]
    found = studied((cloud for group in groups if (cloud := _cloud(group))), _setting)
    # in the order of the methods, then of B
    order = [sorted(one.members, key=lambda m: (ORDER.index(m.method), m.share)) for one in found]
    return [replace(one, members=tuple(own)) for one, own in zip(found, order, strict=True)]


def rounds_figure(found: Clouds) -> Figure | None:
    """Figure 3: sync clouds of all methods against rounds; None unless two have two rounds."""
    members = [member for member in found.members if member.sync]
    names = _told_apart(members, [member.method for member in members])
    own = {kind: _table(members, names, f"{kind}/{found.metric}") for kind in KINDS}
    tables = {kind: table for kind, table in own.items() if table is not None}
    if max((table["series"].nunique() for table in tables.values()), default=0) < 2:
        return None
    by = _series(members, names)
    y = common_axis(found.metric, tables.values(), "mean", readable(found.metric))
    charts = [
        marks.lines(table, Axis("round"), y, by, title=f"{kind.capitalize()}, sync clouds")
        for kind, table in tables.items()
    ]
    caption = f"{CAPTION} In a round all servers take part."
    return _figure("rounds", found, "of sync clouds", charts, caption)


def times_figure(found: Clouds) -> Figure | None:
    """Figure 4: the metric against virtual time; None without an async cloud."""
    x = Axis("at", "virtual seconds", zero=True)
    charts = _waiting_charts(found, found.members, lambda run: run.series(TIME), x)
    return _figure("times", found, "against virtual time", charts, CAPTION + WAITING)


def traffic_figure(found: Clouds) -> Figure | None:
    """The same against bytes between servers, for clouds whose servers send any."""
    members = [m for m in found.members if all(_sent(run).iloc[-1] > 0 for run in m.group.runs)]
    most = max((float(_sent(run).iloc[-1]) for run in runs_of(members)), default=0.0)
    factor, unit = unit_of(most, "B")
    x = Axis("at", f"between servers and coordinator so far ({unit})", zero=True)
    charts = _waiting_charts(found, members, lambda run: _sent(run) / factor, x)
    return _figure("traffic", found, "against bytes between servers", charts, CAPTION + SENDING)


def _figure(
    kind: str, found: Clouds, end: str, charts: Sequence[Chart], caption: str
) -> Figure | None:
    title = f"{found.name}: {readable(found.metric)} {end}{found.note}"
    return Figure(file_name(kind, found.name), title, tuple(charts), caption) if charts else None


def _sent(run: Run) -> pd.Series[float]:
    """Bytes between servers since the start, by round."""
    return run.series(BYTES).fillna(0.0).cumsum()


def _waiting_charts(found: Clouds, members: Sequence[Cloud], along: Along, x: Axis) -> list[Chart]:
    """A chart for each metric and method that waits for B servers, a series for B/N.

    The other methods, which are sync, are in every chart. None without an async cloud.
    """
    if all(member.sync for member in members):
        return []
    names = _told_apart(members, [m.method + f", B/N = {m.share:g}" * m.waits for m in members])
    by = _series(members, names)
    shown = {
        method: [i for i, m in enumerate(members) if m.method == method or not m.waits]
        for method in dict.fromkeys(m.method for m in members if m.waits)
    }
    charts = []
    for kind in KINDS[::-1]:
        column = f"{kind}/{found.metric}"
        own = {
            method: _table([members[i] for i in at], [names[i] for i in at], column, along)
            for method, at in shown.items()
        }
        tables = {method: table for method, table in own.items() if table is not None}
        if tables:
            y = common_axis(found.metric, tables.values(), "mean", readable(found.metric))
            charts += [
                marks.lines(table, x, y, by, title=f"{method}: {kind} {readable(found.metric)}")
                for method, table in tables.items()
            ]
    return charts


def _table(
    members: Sequence[Cloud], names: Sequence[str], column: str, along: Along | None = None
) -> pd.DataFrame | None:
    """The courses of those with two rounds of the metric; None without any."""
    own = [course_table(m.group, column, n, along) for m, n in zip(members, names, strict=True)]
    drawn = [table for table in own if len(table) > 1]
    return stacked(drawn, column) if drawn else None


def _told_apart(members: Sequence[Cloud], names: Sequence[str]) -> list[str]:
    """Equal names of one method with those of their runs."""
    pairs = [(member.method, name) for member, name in zip(members, names, strict=True)]
    return [
        f"{name} ({member.group.label})" if pairs.count((member.method, name)) > 1 else name
        for member, name in zip(members, names, strict=True)
    ]


def _series(members: Sequence[Cloud], names: Sequence[str]) -> Series:
    places = {name: member.group.place for member, name in zip(members, names, strict=True)}
    return Series("series", places, "method")


def common_target(rows: Sequence[Group], column: str) -> float:
    """The value that all rows with virtual time reached: the worst of their best."""
    return reached_by_all(filter(timed, runs_of(rows)), column)


def time_to(row: Group, column: str, target: float) -> tuple[float, float]:
    """Virtual seconds until all seeds reached a target: mean, half its 95 % t interval; or NaN."""
    times = [when_reached(target, r.series(column), r.series(TIME), column) for r in row.runs]
    if not all(map(math.isfinite, times)):
        return math.nan, math.nan
    mean, std = mean_and_std(times)
    return mean, t_half_width(std, len(times))


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
