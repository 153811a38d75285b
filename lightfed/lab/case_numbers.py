"""Contests of several methods for a program: what `study` and `compare` print as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pandas import DataFrame

from lightfed.lab.contest import Held
from lightfed.lab.results import holm
from lightfed.lab.results.groups import Group
from lightfed.lab.results.paired import mean_and_std, t_half_width
from lightfed.lab.results.run import ENERGY, TIME, Run
from lightfed.lab.results.verdicts import Target, costs_of, finals_of

HOLM = "Holm (1979)"


def study_numbers(
    *,
    name: str,
    title: str,
    digest: str,
    claims: int,
    cases: Sequence[Mapping[str, Any]],
    runs: Sequence[Run],
    correction: str = HOLM,
) -> dict[str, Any]:
    """Return contests whose claims are corrected together, as values for JSON.

    Args:
        name: How the study was named.
        title: What is compared.
        digest: A digest of what it compares.
        claims: How many claims it makes.
        cases: What `case_numbers` returns of each contest.
        runs: The compared runs.
        correction: The procedure that corrects the claims together.
    """
    return {
        "study": name,
        "title": title,
        "digest": digest,
        "correction": correction,
        "number": claims,
        "error": holm.ERROR,
        "cases": list(cases),
        "commits": commits_of(runs),
    }


def case_numbers(
    held: Held,
    *,
    name: str,
    seeds: Sequence[int],
    columns: Sequence[str],
    target: Target | None,
    claims: Sequence[Mapping[str, Any]],
    theirs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a contest as values for JSON.

    Args:
        held: Its runs.
        name: Its name.
        seeds: The seeds of the compared runs.
        columns: The columns of metrics.csv to return.
        target: The column and the value until which costs are compared.
        claims: Its claims, as values for JSON.
        theirs: A paper's own figures, by method and column.
    """
    return {
        "name": name,
        "metric": held.metric,
        "seeds": list(seeds),
        "target": None if target is None else {"metric": target[0], "value": target[1]},
        "methods": [_method(group, columns, target, theirs or {}) for group in held.groups],
        "claims": list(claims),
        "differ": held.differ,
        "search": held.search.to_dict("records"),
        "trials": held.trials,
    }


def _method(
    group: Group, columns: Sequence[str], target: Target | None, theirs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the final values and the costs of a method."""
    values = {}
    for column in columns:
        finals = list(finals_of(group, column, target).values())
        finite = [value for value in finals if math.isfinite(value)]
        mean, std = mean_and_std(finite)
        # A mean over the seeds that reached a target, or did not diverge, is not that of all.
        is_whole = len(finite) == len(group.runs)
        values[column] = {
            "mean": mean if is_whole else None,
            "half_width": t_half_width(std, len(finite)) if is_whole else None,
            "seeds": len(finite),
            "theirs": theirs.get(group.label, {}).get(column),
        }

    spent = DataFrame([costs_of(run) for run in group.runs]).mean()
    costs = {
        "bytes": float(spent["bytes"]),
        "flops": float(spent["FLOPs"]),
        "seconds": float(spent["seconds"]),
        "virtual_seconds": float(spent[TIME]),
        "joules": float(spent[ENERGY]),
    }
    return {"name": group.name, "values": values, "costs": costs}


def common_columns(groups: Sequence[Group]) -> list[str]:
    """Return the metrics that all runs have, with those of their worst clients."""
    runs = [run for group in groups for run in group.runs]
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    columns = []
    for name in [*names, "train_loss"]:
        for column in (name, f"{name}_worst10"):
            if all(run.has(column) for run in runs):
                columns.append(column)
    return list(dict.fromkeys(columns))


def commits_of(runs: Sequence[Run]) -> list[str]:
    """Return the commits of lightfed that made these runs."""
    return sorted({str(run.environment.get("commit", "unknown")) for run in runs})
