"""Metrics of a round from the reports of its clients."""

from collections.abc import Callable, Sequence

import numpy as np

from lightfed.local.session import Report

WORST = 0.1  # share of the clients in the "worst" metric


def client_metrics(
    reports: Sequence[Report],
    kind: str,
    lower_is_better: Callable[[str], bool],
    *,
    groups: Sequence[str] = (),
    group_of: Sequence[int] = (),
) -> dict[str, float]:
    """Mean, standard deviation, mean of the worst tenth, and mean by group, as `kind/name`.

    All clients have equal weight. The worst values of a metric are the largest if
    `lower_is_better`(its name). `groups` names the groups, and `group_of` gives that of every
    report; there are metrics by group if there are several.
    """
    metrics: dict[str, float] = {}
    names = sorted({name for report in reports for name in report.metrics})
    for name in names:
        having = [i for i, report in enumerate(reports) if name in report.metrics]
        values = np.array([reports[i].metrics[name] for i in having])
        metrics[f"{kind}/{name}"] = float(values.mean())
        if name.endswith("loss") or name.startswith("perplexity"):
            continue  # a few values would dominate the deviation
        order = np.sort(values)[:: -1 if lower_is_better(name) else 1]
        worst = order[: max(1, int(np.ceil(WORST * len(values))))]
        worst = values if np.isnan(values).any() else worst  # sorted last, NaN would not count
        metrics[f"{kind}/{name}_std"] = float(values.std())
        metrics[f"{kind}/{name}_worst10"] = float(worst.mean())
        if len(groups) > 1:
            of = np.array([group_of[i] for i in having])
            metrics |= {
                f"{kind}/{name}/{group}": float(values[of == position].mean())
                for position, group in enumerate(groups)
                if (of == position).any()
            }
    return metrics
