"""Clouds of servers: their metric against rounds, virtual time and bytes.

The figures are those of Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global
and Personalized Models", AAAI 2021, arXiv:2012.13900: figure 3 is against rounds, figure 4 against
virtual time. A third figure shows bytes between servers and coordinator.
"""

from collections.abc import Iterator, Sequence

from lightfed.drawing.marks import Axis, Figure
from lightfed.results.groups import gathered, grouped, usual_metric
from lightfed.results.run import TIME, Run
from lightfed.results.text import readable
from lightfed.studies.shared import Scale, course_figures

METHODS = ("FedBCD", "FedBCDI", "CloudFedAvg")
BYTES = "server_bytes"
SECONDS: Scale = Axis("at", "virtual seconds"), lambda run: run.series(TIME)
SENT: Scale = (
    Axis("at", "bytes between servers and coordinator so far", format="~s"),
    lambda run: run.series(BYTES).fillna(0.0).cumsum(),
)
CAPTION = (
    "Personal: devices' own models on their own test samples. Global: servers' models on the whole "
    "test set; bands are 95 % t intervals over seeds."
)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Those of runs of clouds, which all measure virtual time."""
    clouds_only = [run for run in runs if run.algorithm in METHODS]
    timed = [group for group in grouped(clouds_only) if all(run.has(TIME) for run in group.runs)]
    for name, clouds in gathered(timed, lambda group: group.condition).items():
        metric = usual_metric(clouds)
        sending = [g for g in clouds if all(run.series(BYTES).sum() > 0 for run in g.runs)]
        for kind, title, shown, scale in (
            ("rounds", "rounds", clouds, None),
            ("times", "virtual time", clouds, SECONDS),
            ("traffic", "bytes between servers", sending, SENT),
        ):
            columns = (f"personal/{metric}", f"global/{metric}")
            panels = {readable(column): dict.fromkeys(shown, column) for column in columns}
            yield from course_figures(kind, name, f"against {title}", panels, CAPTION, scale)
