"""The picture of the latency analysis: how much shorter a round is when it waits for some servers.

After Wu et al., AAAI 2021, arXiv:2012.13900, eq. (7) and (8).
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lightfed.drawing import marks
from lightfed.drawing.charts import Axis, Figure, Series
from lightfed.studies.fedbcd.latency import Latency

KINDS = ("exact", "asymptotic (8)", "simulated", "in a run: late servers continue")


def latency_figure(title: str, servers: int, found: Sequence[Latency]) -> Figure:
    """Four curves over the share of servers waited for; bands are two standard errors."""
    rows = [
        (one.wait / servers, kind, value, value - 2 * error, value + 2 * error)
        for one in sorted(found, key=lambda one: one.wait)
        for kind, value, error in (
            (KINDS[0], one.ratio, 0.0),
            (KINDS[1], one.asymptotic, 0.0),
            (KINDS[2], one.simulated.value, one.simulated.error),
            (KINDS[3], one.in_a_run.value, one.in_a_run.error),
        )
    ]
    table = pd.DataFrame(rows, columns=pd.Index(["share", "kind", "duration", "low", "high"]))
    x = Axis("share", "servers waited for, B / N")
    y = Axis("duration", "duration of a round relative to waiting for all", format="%", zero=True)
    by = Series.of("kind", KINDS)
    chart = marks.lines(table, x, y, by, title=f"Duration of a round: {title}")
    return Figure("latency", title, (chart,))
