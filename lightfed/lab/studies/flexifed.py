"""FlexiFed's strategies: their courses, by version. `lightfed study flexifed` has the table.

In Wang et al., WWW 2023, clients have up to four versions of one family of models, a client group
each. All metrics are of the clients' own models on their own test samples.
"""

from collections.abc import Iterator, Sequence

from lightfed.lab.drawing.marks import Figure
from lightfed.lab.results.groups import Group, usual_metric
from lightfed.lab.results.run import Run
from lightfed.lab.studies import shared

BASELINE = "ClusteredFL"
STRATEGIES = ("Standalone", BASELINE, "BasicCommon", "ClusteredCommon", "MaxCommon")
ALL = "all clients"


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
