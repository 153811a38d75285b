"""`lightfed compare A B C ...`: each of several methods against the first.

The claims are corrected together, as those of a study are: this is a study without a file. With
`--until decided` every claim has looks of its own, at its part of the error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pandas import DataFrame

from lightfed.lab.case_numbers import HOLM, case_numbers, common_columns, study_numbers
from lightfed.lab.contest import Held
from lightfed.lab.report.comparison import Files, show
from lightfed.lab.report.tables import comparison_table
from lightfed.lab.results import holm
from lightfed.lab.results.claims import Claim, Question, answered
from lightfed.lab.results.groups import Group
from lightfed.lab.results.verdicts import Target, gain_text, goal_of, p_text, verdict
from lightfed.lab.until import Ended, described

BONFERRONI = "Bonferroni"


def claims_of(held: Held, ended: Sequence[Ended]) -> list[Claim]:
    """Return the claim of each method but the first: that it is better than the first one.

    Args:
        held: The runs of all methods.
        ended: How each comparison has ended, if seeds were run until it was decided.
    """
    if not ended:
        first, *others = held.groups
        return answered([Question(group, first, held.metric) for group in others])

    claims = []
    for one in ended:
        than, better = one.held.groups
        # The looks have their part of the error already. The p value of the whole comparison is
        # corrected in the same way.
        corrected = min(1.0, len(ended) * one.overall_p)
        alone = one.verdict
        if alone == "not shown" and one.overall_p <= holm.ERROR:
            alone = one.look.difference.verdict(one.direction)
        claims.append(
            Claim(
                better=better.name,
                than=than.name,
                metric=held.metric,
                difference=one.look.difference,
                verdict=one.verdict,
                alone=alone,
                p=corrected,
            )
        )
    return claims


def together(ended: Sequence[Ended]) -> Held:
    """Return the runs of all methods whose comparisons have ended, each with its own seeds.

    The first method has those of the longest comparison.
    """
    longest = max(ended, key=lambda one: len(one.look.difference.seeds))
    groups: list[Group] = [longest.held.groups[0]]
    groups += [one.held.groups[1] for one in ended]
    placed = [replace(group, place=place) for place, group in enumerate(groups)]
    return longest.held._replace(groups=placed)


def show_several(
    held: Held,
    place: Path,
    notes: Sequence[str],
    files: Files,
    target: Target | None,
    ended: Sequence[Ended] = (),
) -> None:
    """Print the table of several methods and what is shown of each, and write them to a page.

    Args:
        held: Their runs. The first method is the one that others are compared with.
        place: The folder to write to.
        notes: Notes on how they are compared.
        files: Which files to write besides the page.
        target: The column and the value until which the table has costs.
        ended: How each comparison has ended, if seeds were run until it was decided.
    """
    first, *others = held.groups
    claims = claims_of(held, ended)
    answers = [one.line for one in ended]
    if not ended:
        for group, claim in zip(others, claims, strict=True):
            answers.append(verdict(first, group, held.metric, p=claim.p))

    correction = holm.said(len(claims))
    if ended:
        correction = described(ended[0].design, claims=len(ended))
    all_notes = [*notes, *held.differ, *correction]
    if target is not None:
        all_notes.append(f"target: {goal_of(target)}")
    of_target, value = ("", None) if target is None else target

    rows = []
    for position, claim in enumerate(claims):
        half = ended[position].look.half if ended else None
        gain = gain_text(claim.difference, held.metric, half=half)
        rows.append((claim.better, claim.verdict, gain, p_text(claim.p)))
    heads = ["method", f"against {first.name}", "difference", "corrected p"]
    show(
        place,
        "compare",
        held.groups,
        held.metric,
        comparison_table(held.groups, held.metric, target=value, of_target=of_target),
        all_notes,
        answers,
        target=target,
        search=held.search,
        files=files,
        claims=DataFrame(rows, columns=heads, dtype="str"),
    )


def several_numbers(
    held: Held, commands: Sequence[str], target: Target | None, ended: Sequence[Ended] = ()
) -> dict[str, Any]:
    """Return the comparison of several methods for a program, as a study of one case.

    Args:
        held: Their runs.
        commands: The command of each.
        target: The column and the value until which costs are compared.
        ended: How each comparison has ended, if seeds were run until it was decided.
    """
    first, *others = held.groups
    claims = [claim.values for claim in claims_of(held, ended)]
    for values, one in zip(claims, ended, strict=False):
        values["sequential"] = one.numbers["sequential"]

    seeds = [run.seed for run in first.runs if run.seed is not None]
    case = case_numbers(
        held,
        name="",
        seeds=seeds,
        columns=common_columns(held.groups),
        target=target,
        claims=claims,
    )
    return study_numbers(
        name="compare",
        title=f"{', '.join(group.name for group in others)} against {first.name}",
        digest=hashlib.sha256(json.dumps(list(commands)).encode()).hexdigest()[:12],
        claims=len(claims),
        cases=[case],
        runs=[run for group in held.groups for run in group.runs],
        correction=BONFERRONI if ended else HOLM,
    )
