"""Clouds of servers: their metric against rounds, virtual time and bytes.

The figures are those of Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global
and Personalized Models", AAAI 2021, arXiv:2012.13900: figure 3 is against rounds, figure 4 against
virtual time. A third figure shows bytes between servers and coordinator. The page of a run has two
measures that theorem 1 bounds, and which servers mix their models. The theorem's first measure
takes the whole gradient of every device, and is not computed.
"""

from collections.abc import Iterator, Sequence

import pandas as pd

from lightfed.lab.drawing import marks
from lightfed.lab.drawing.marks import Axis, Chart, Figure
from lightfed.lab.results.groups import gathered, grouped, usual_metric
from lightfed.lab.results.run import TIME, Run
from lightfed.lab.results.text import readable
from lightfed.lab.studies.shared import Scale, course_figures

METHODS = ("FedBCD", "FedBCDI", "CloudFedAvg")
BYTES = "server_bytes"
SECONDS: Scale = Axis("at", "virtual seconds"), lambda run: run.series(TIME)
SENT: Scale = (
    Axis("at", "bytes between servers and coordinator so far", format="~s"),
    lambda run: run.series(BYTES).fillna(0.0).cumsum(),
)
MEASURES = {  # columns of metrics.csv that the theorem bounds, in its words
    "server_gradient": "Squared norm of the sum over devices of gamma (w - x)",
    "consensus": "Largest distance of a server's model from the mean of all",
}
LAST = marks.MOST_CELLS  # rounds
CAPTION = (
    "Personal: devices' own models on their own test samples. Global: servers' models on the whole "
    "test set; bands are 95 % t intervals over seeds."
)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Draw the courses of runs of clouds that have virtual time, three figures for each data set.

    The third one, against bytes, has only experiments whose servers send something.
    """
    timed = []
    for group in grouped([run for run in runs if run.algorithm in METHODS]):
        if all(run.has(TIME) for run in group.runs):
            timed.append(group)

    for name, clouds in gathered(timed, lambda group: group.condition).items():
        sending = []
        for group in clouds:
            if all(run.series(BYTES).sum() > 0 for run in group.runs):
                sending.append(group)

        metric = usual_metric(clouds)
        for kind, against, shown, scale in (
            ("rounds", "rounds", clouds, None),
            ("times", "virtual time", clouds, SECONDS),
            ("traffic", "bytes between servers", sending, SENT),
        ):
            panels = {}
            for column in (f"personal/{metric}", f"global/{metric}"):
                panels[readable(column)] = dict.fromkeys(shown, column)
            yield from course_figures(kind, name, f"against {against}", panels, CAPTION, scale)


def servers_figure(run: Run) -> Figure | None:
    """Draw what theorem 1 bounds by round, and V(t), the servers that mix their models in it.

    Returns:
        The figure; None if the run has none of these columns.
    """
    charts = []
    for column, title in MEASURES.items():
        values = run.series(column).dropna()
        if len(values) > 1:
            charts.append(_measure_chart(values, column, title))

    mixed = run.rounds.filter(regex=r"^mixed/").rename(columns=lambda name: name.partition("/")[2])
    if mixed.shape[1]:
        cells = mixed.tail(LAST).T.rename_axis("server")
        title = f"Servers that mix their models, the last {len(cells.T)} rounds"
        charts.append(marks.heat(cells, "round", Axis("mixes", ends=(0.0, 1.0)), title=title))

    if not charts:
        return None
    return Figure("servers", "Servers, and their graph", tuple(charts))


def _measure_chart(values: "pd.Series[float]", column: str, title: str) -> Chart:
    """A measure by round, and its mean over all rounds so far, which is what the theorem bounds."""
    series = {"of the round": values, "mean so far": values.expanding().mean()}
    parts = [pd.DataFrame({"value": line, "series": name}) for name, line in series.items()]
    table = pd.concat(parts).reset_index(names="round")
    y = Axis("value", column, log=bool((values > 0).all()))
    places = {name: place for place, name in enumerate(series)}
    return marks.lines(table, Axis("round"), y, places, title=title)
