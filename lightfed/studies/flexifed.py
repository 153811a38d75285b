"""FlexiFed's strategies: a table by version as in the paper's Table 1, and their courses.

In Wang et al., WWW 2023, clients have up to four versions of one family of models, a client group
each. All metrics are of the clients' own models on their own test samples.
"""

import math
from collections.abc import Iterator, Sequence

from lightfed.drawing.charts import Figure
from lightfed.results.groups import Group, runs_of, usual_metric
from lightfed.results.outcome import costs_to, reached_by_all
from lightfed.results.run import Run
from lightfed.results.units import metric_text
from lightfed.studies import shared

BASELINE = "ClusteredFL"
STRATEGIES = ("Standalone", BASELINE, "BasicCommon", "ClusteredCommon", "MaxCommon")
ALL = "all clients"
SPEED = (
    f"Speed: rounds of {BASELINE} to the target over those of the strategy. By default the target "
    f"is what all seeds of {BASELINE} reached."
)


def tables(runs: Sequence[Run], *, target: float | None = None) -> Iterator[shared.StudyTable]:
    """The strategies of each protocol by version, and what the target cost them."""
    for name, groups in _protocols(runs):
        columns, baseline = _columns(groups), [g for g in groups if g.algorithm == BASELINE]
        mean = columns[ALL]
        goal = reached_by_all(runs_of(baseline), mean) if target is None else target
        pace = costs_to(goal, baseline[0].runs, mean)[0] if baseline else math.nan
        costs = [costs_to(goal, group.runs, mean)[0] for group in groups]
        further = {"speed": [metric_text("", pace / rounds) for rounds in costs]}
        yield shared.table_of("strategies by version", name, groups, columns, goal, further, SPEED)


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """The courses of the strategies of each protocol, over all clients and by version."""
    for name, groups in _protocols(runs):
        columns, caption = _columns(groups), "Bands: 95 % t intervals over seeds."
        panels = {version: dict.fromkeys(groups, column) for version, column in columns.items()}
        yield from shared.course_figures("strategies", name, "by strategy", panels, caption)


def _protocols(runs: Sequence[Run]) -> Iterator[tuple[str, list[Group]]]:
    """Those with named client groups and another strategy than Standalone."""
    for name, groups in shared.protocols(runs, STRATEGIES).items():
        if groups[-1].algorithm != "Standalone" and groups[0].runs[0].client_groups:
            yield name, groups


def _columns(groups: Sequence[Group]) -> dict[str, str]:
    """Of metrics.csv, by version; a single version has none of its own."""
    column, versions = f"personal/{usual_metric(groups)}", groups[0].runs[0].client_groups
    return {ALL: column} | {name: f"{column}/{name}" for name in versions if len(versions) > 1}
