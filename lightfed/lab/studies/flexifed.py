"""FlexiFed's figure: the courses of its strategies, by version.

In Wang et al., WWW 2023, clients have up to four versions of one family of models, a client group
each. All metrics are of the clients' own models on their own test samples. `lightfed study
flexifed` has the table.
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
    """Draw the courses of the strategies of each protocol, over all clients and by version."""
    for name, groups in protocols(runs):
        panels = {}
        for version, column in _columns(groups).items():
            panels[version] = dict.fromkeys(groups, column)
        caption = "Bands: 95 % t intervals over seeds."
        yield from shared.course_figures("strategies", name, "by strategy", panels, caption)


def protocols(runs: Sequence[Run]) -> Iterator[tuple[str, list[Group]]]:
    """The protocols with named client groups and another strategy than Standalone, by name."""
    for name, groups in shared.protocols(runs, STRATEGIES).items():
        # They are in the order of STRATEGIES: the last one is Standalone only if all are.
        has_another = groups[-1].algorithm != "Standalone"
        has_versions = bool(groups[0].runs[0].client_groups)
        if has_another and has_versions:
            yield name, groups


def _columns(groups: Sequence[Group]) -> dict[str, str]:
    """The columns of metrics.csv to draw, by version; a single version has none of its own."""
    over_all = f"personal/{usual_metric(groups)}"
    columns = {ALL: over_all}
    versions = groups[0].runs[0].client_groups
    if len(versions) > 1:
        for version in versions:
            columns[version] = f"{over_all}/{version}"
    return columns
