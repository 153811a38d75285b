"""Clouds of servers: their metric against rounds, virtual time and bytes, and the time to a target.

The figures are those of Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global
and Personalized Models", AAAI 2021, arXiv:2012.13900. Figure 3 has sync clouds of all methods
against rounds, figure 4 clouds that wait for B of N servers against virtual time. A third figure
shows bytes between servers and coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from lightfed.drawing.marks import Axis, Figure
from lightfed.results.groups import (
    Group,
    gathered,
    grouped,
    mean_and_std,
    reached_by_all,
    runs_of,
    t_half_width,
    usual_metric,
    when_reached,
)
from lightfed.results.run import Run
from lightfed.results.text import readable
from lightfed.studies.shared import ROUNDS, course_charts, figures_of

TIME, BYTES = "virtual_time", "server_bytes"
INIT = "model.algorithm.init_args"
SECONDS = Axis("at", "virtual seconds", zero=True)
SENT = Axis("at", "bytes between servers and coordinator so far", format="~s", zero=True)
CAPTION = (
    "Personal: devices' own models on their own test samples. Global: servers' models on the whole "
    "test set; bands are 95 % t intervals over seeds."
)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Those of runs that measured virtual time; against rounds of sync clouds alone."""
    groups = [group for group in grouped(runs) if all(map(timed, group.runs))]
    for name, clouds in gathered(groups, lambda group: group.condition).items():
        sync = [group for group in clouds if _share(group) == 1]
        sending = [g for g in clouds if all(run.series(BYTES).sum() > 0 for run in g.runs)]
        metric, methods = usual_metric(clouds), [*map(_method, clouds)]
        names = {
            group: f"{method} ({group.label})" if methods.count(method) > 1 else method
            for group, method in zip(clouds, methods, strict=True)
        }
        for kind, title, shown, x, along in (
            ("rounds", "of sync clouds", sync, ROUNDS, None),
            ("times", "against virtual time", clouds, SECONDS, lambda run: run.series(TIME)),
            ("traffic", "against bytes between servers", sending, SENT, _sent),
        ):
            columns = (f"personal/{metric}", f"global/{metric}")
            panels = {readable(column): dict.fromkeys(shown, column) for column in columns}
            charts = course_charts(panels, names, metric, x, along)
            text = f"{readable(metric)} {title}"
            yield from figures_of(kind, name, text, charts, CAPTION, clouds)


def _method(group: Group) -> str:
    """The paper's name, with the share of servers that FedBCD waits for."""
    settings = group.runs[0].settings
    if group.algorithm == "CloudFedAvg":
        return "FedProx" if float(settings.get(f"{INIT}.mu", 0)) > 0 else "FedAvg"
    if settings.get(f"{INIT}.gamma") in ("0", "0.0"):
        return "Standalone"  # the same devices, and nothing is sent
    waits = f", B/N = {_share(group):g}" if f"{INIT}.servers" in settings else ""
    return group.algorithm + waits


def _share(group: Group) -> float:
    """B/N, the share of servers that the coordinator waits for."""
    settings = group.runs[0].settings
    wait = settings.get(f"{INIT}.wait", "null")
    return 1.0 if wait == "null" else int(wait) / int(settings[f"{INIT}.servers"])


def _sent(run: Run) -> pd.Series[float]:
    return run.series(BYTES).fillna(0.0).cumsum()


def timed(run: Run) -> bool:
    """Whether a run measured virtual time."""
    return bool(run.series(TIME).notna().any())


def common_target(rows: Sequence[Group], column: str) -> float:
    """The value that all rows with virtual time reached: the worst of their best."""
    return reached_by_all(filter(timed, runs_of(rows)), column)


def time_to(row: Group, column: str, target: float) -> tuple[float, float]:
    """Virtual seconds until all seeds reached a target: mean, half its 95 % t interval; or NaN."""
    times = [when_reached(target, r.series(column), r.series(TIME), column) for r in row.runs]
    mean, std = mean_and_std(times)
    whole = all(map(math.isfinite, times))
    return (mean, t_half_width(std, len(times))) if whole else (math.nan, math.nan)
