"""Metrics over clients, all with equal weight."""

from collections.abc import Sequence

import numpy as np

from lightfed.local.session import Report

WORST = 0.1  # share of the clients in the "worst" metric


def client_figures(
    reports: Sequence[Report],
    kind: str,
    *,
    cohorts: Sequence[str] = (),
    cohort_of: Sequence[int] = (),
) -> dict[str, float]:
    """Mean, standard deviation, mean of the worst tenth, and mean by cohort, as `kind/name`.

    Args:
        reports: one per client.
        kind: what was tested.
        cohorts: their names; metrics by cohort if there are several.
        cohort_of: the cohort of every report.
    """
    figures: dict[str, float] = {}
    names = sorted({name for report in reports for name in report.metrics})
    for name in names:
        having = [i for i, report in enumerate(reports) if name in report.metrics]
        values = np.array([reports[i].metrics[name] for i in having])
        figures[f"{kind}/{name}"] = float(values.mean())
        if name.endswith("loss") or name.startswith("perplexity"):
            continue  # the worst values are the largest, and a few would dominate the deviation
        worst = np.sort(values)[: max(1, int(np.ceil(WORST * len(values))))]
        figures[f"{kind}/{name}_std"] = float(values.std())
        figures[f"{kind}/{name}_worst10"] = float(worst.mean())
        if len(cohorts) > 1:
            of = np.array([cohort_of[i] for i in having])
            figures |= {
                f"{kind}/{name}/{cohort}": float(values[of == position].mean())
                for position, cohort in enumerate(cohorts)
                if (of == position).any()
            }
    return figures
